"""From JSON lines to Arrow columns: types inferred once, no value changed to fit one, bad lines reported one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from overlord.data.read_result import BadRow, ReadResult, kept_rows
from overlord.data.readers.schemas import spelled_type
from overlord.data.widening import wider
from overlord.errors import BufferTooSmallError, SchemaError, SourceError

Column = pa.Array | pa.ChunkedArray

# What pa.array raises for a Python value that does not fit a type.
_UNFIT = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)
_REPORT_BYTES = 512  # about what a bad row takes until it is handed to its policy
_PARSER_INTS = 2**63  # beyond this (and its double, without a sign) orjson makes a float of a whole number
_LONG_NUMBER = re.compile(rb"\d{19}")


def inferred_schema(path: str, text: bytes, columns: Sequence[str] | None) -> pa.Schema:
    """The types of the fields, from the rows of one unit. Bad lines tell nothing and are left to the reading."""
    rows = [row for row in map(_value, _split(text)) if type(row) is dict]
    if not rows:
        raise SourceError(f"{path} has no JSON object on any of its first lines: is it JSON Lines?")
    found = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns or ():
        if name not in found:
            raise SchemaError(f"no row at the start of {path} has the field {name!r}; they have {found}")
    fields = []
    for name in columns or found:
        try:
            fields.append((name, pa.array([row.get(name) for row in rows]).type))
        except _UNFIT as error:
            kinds = sorted({type(row[name]).__name__ for row in rows if row.get(name) is not None})
            raise SchemaError(
                f"the type of the field {name!r} cannot be inferred from {path}, where it is {' and '.join(kinds)}: {error}"
                f"; give its type with those of the fields to read, columns={{{name!r}: pa.json_(), ...}} (pa.json_() keeps "
                "values of any kind as JSON text), or leave the field out of columns"
            ) from error
    return pa.schema(fields)


class JsonRows:
    """The rows of one unit, collected from its text piece by piece: the outcome does not depend on how the text is cut.

    Rows with a value that does not fit its type are bad. When not one value of a field fits, it is the type that is wrong,
    not the rows. Each field of `must_have` must be in some row. The columns may take `most_bytes`.
    """

    def __init__(self, path: str, schema: pa.Schema, must_have: Sequence[str], most_bytes: int) -> None:
        self._path = path
        self._fields = list(schema)
        self._schema = pa.schema([(field.name, _stored_type(field.type)) for field in schema])
        self._missing = dict.fromkeys(must_have)
        self._most_bytes = most_bytes
        self._tables: list[pa.Table] = []
        self._bad: list[BadRow] = []
        self._num_rows = 0
        self._num_objects = 0
        self._num_bytes = 0
        self._num_values = dict.fromkeys(schema.names, 0)
        self._unfit: dict[str, list[str]] = {name: [] for name in schema.names}  # the kinds of values that do not fit

    def add(self, offset: int, text: bytes) -> None:
        """Add the lines of `text`, which begins at byte `offset` of the (decompressed) file."""
        lines = _split(text)
        bad: dict[int, str] = {}
        try:
            rows: list[Any] = [orjson.loads(line) for line in lines]
        except orjson.JSONDecodeError:
            rows = [_value(line) for line in lines]
        for i, row in enumerate(rows):
            if type(row) is not dict:
                bad[i] = f"not a JSON object: {_fault(lines[i])}"
                rows[i] = {}
        self._num_objects += len(rows) - len(bad)
        for name in [name for name in self._missing if any(name in row for row in rows)]:
            del self._missing[name]
        table = pa.table([self._column(field, lines, rows, bad) for field in self._fields], schema=self._schema)
        if bad:
            starts = _starts(text)
            reports = [BadRow(i, bad[i], f"{self._path} at byte {offset + starts[i]}") for i in sorted(bad)]
            table = table.take(kept_rows(len(rows), reports))
            self._bad += [BadRow(self._num_rows + report.row, report.error, report.where) for report in reports]
        self._num_rows += len(rows)
        self._num_bytes += table.nbytes + len(bad) * _REPORT_BYTES
        if self._num_bytes > self._most_bytes:
            raise BufferTooSmallError(
                f"{self._path}: the rows of one unit take more than {self._most_bytes:,} bytes in memory; raise "
                "buffer_bytes, read fewer fields with columns=, or write the file as several smaller ones"
            )
        self._tables.append(table)

    def result(self) -> ReadResult:
        for name in self._missing:
            if self._num_objects:
                raise SchemaError(
                    f"{self._path} has no row with the field {name!r}, which the first file has; leave it out of columns, "
                    f"or declare it with its type to have it null: columns={{{name!r}: pa.string(), ...}}"
                )
        for field in self._fields:
            self._check_type(field)
        tables = self._tables or [self._schema.empty_table()]
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()
        if not self._bad:
            return ReadResult(table)
        return ReadResult(table, kept_rows(self._num_rows, self._bad), tuple(self._bad))

    def _check_type(self, field: pa.Field) -> None:
        unfit = self._unfit[field.name]
        if not unfit:
            return
        if _has_null(field.type):
            raise SchemaError(
                f"{self._path} has the field {field.name!r} as {unfit[0]}, but its type is not known: it is {field.type} in "
                f"the first unit of the source, from which types are inferred; give it, columns={{{field.name!r}: "
                "pa.string(), ...}, or leave the field out of columns"
            )
        if 1 < len(unfit) == self._num_values[field.name]:
            raise SchemaError(
                f"{self._path} has the field {field.name!r} as {unfit[0]}, but the source has it as {field.type}; give a "
                f"type that holds both, columns={{{field.name!r}: ...}} (pa.json_() holds any, as text), or make them two "
                "sources"
            )

    def _column(self, field: pa.Field, lines: list[bytes], rows: list[dict[str, Any]], bad: dict[int, str]) -> Column:
        name, type_ = field.name, field.type
        values = [row.get(name) for row in rows]
        self._num_values[name] += len(values) - values.count(None)
        if _is_json(type_):
            column, unfit = _as_text(lines, values, name)
        else:
            column, unfit = _fitted(values, type_)
            unfit |= _rounded(column, lines, name, type_)
        if not unfit:
            return column
        for i, error in unfit.items():
            bad.setdefault(i, f"the field {name!r} does not fit its type {type_}: {error}{_offer(name, type_, values[i])}")
            self._unfit[name].append(type(values[i]).__name__)
            values[i] = None
        return _as_text(lines, values, name)[0] if _is_json(type_) else _fitted(values, type_)[0]


def _fitted(values: list[Any], type_: pa.DataType) -> tuple[Column, dict[int, str]]:
    """The values as they are under a type, and why some of them are not: given a type, Arrow would cut 0.97 to 0 and text
    into letters without a word. What it infers by itself is true to the values."""
    try:
        column = pa.array(values)
        if column.type.equals(type_):
            return column, {}
        if pa.types.is_null(column.type):
            return pa.array(values, type_), {}
        if _are_numbers(column.type, type_):
            column = column.cast(type_)
            if np.isfinite(_largest(column)):
                return column, {}
    except _UNFIT:
        pass
    try:
        column = pa.array(values, type_)
    except _UNFIT:
        unfit = {i: error for i, value in enumerate(values) if (error := _misfit(value, type_))}
        column = pa.array([None if i in unfit else value for i, value in enumerate(values)], type_)
        return column, unfit
    return column, {i: error for i, value in enumerate(values) if (error := _changed(value, type_))}


def _misfit(value: Any, type_: pa.DataType) -> str:
    try:
        pa.array([value], type_)
    except _UNFIT as error:
        return str(error)
    return _changed(value, type_)


def _changed(value: Any, type_: Any) -> str:
    """How a JSON value would be changed by Arrow's conversion to a type; empty where it stays what it is."""
    if value is None:
        return ""
    if pa.types.is_dictionary(type_):
        return _changed(value, type_.value_type)
    if _is_list(type_):
        if type(value) is not list:
            return f"{type(value).__name__} is not a list"
        return next((error for entry in value if (error := _changed(entry, type_.value_type))), "")
    if (pa.types.is_struct(type_) or pa.types.is_map(type_)) and type(value) is not dict:
        return f"{type(value).__name__} is not an object"
    if pa.types.is_struct(type_):
        return next((error for field in type_ if (error := _changed(value.get(field.name), field.type))), "")
    if pa.types.is_map(type_):
        return next((error for entry in value.values() if (error := _changed(entry, type_.item_type))), "")
    if pa.types.is_floating(type_):
        if type(value) is bool:
            return f"{json.dumps(value)} is not a number"
        return "" if np.isfinite(pa.scalar(value, type_).as_py()) else f"{value!r} is too large"
    if type(value) is float and not value.is_integer():
        return f"{value!r} is not a whole number"
    return ""


def _rounded(column: Column, lines: list[bytes], name: str, type_: pa.DataType) -> dict[int, str]:
    """Whole numbers so large that the parser made floats of them, which are other numbers."""
    if _largest(column) < _PARSER_INTS:
        return {}
    found = {}
    for i, line in enumerate(lines):
        if _LONG_NUMBER.search(line):
            for number in _ints(_exact_value(line, name)):
                if float(number) != number:
                    found[i] = f"{number} is not exactly a {type_}"
    return found


def _as_text(lines: list[bytes], values: list[Any], name: str) -> tuple[pa.Array, dict[int, str]]:
    """The values as JSON text, by a parser that keeps numbers of any length."""
    texts = [None if value is None else _json_text(line, name) for line, value in zip(lines, values, strict=True)]
    unfit = {i: "it is nested too deeply" for i, text in enumerate(texts) if text is None and values[i] is not None}
    return pa.array(texts, pa.string()), unfit


def _json_text(line: bytes, name: str) -> str | None:
    try:
        return json.dumps(_exact_value(line, name), ensure_ascii=False)
    except RecursionError:
        return None


def _exact_value(line: bytes, name: str) -> Any:
    value = json.loads(line)
    return value.get(name) if type(value) is dict else None


def _ints(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif type(value) in (list, dict):
        for entry in value.values() if type(value) is dict else value:
            yield from _ints(entry)


def _largest(column: Column) -> float:
    """The largest absolute value of all floats in a column, 0 where there are none; inf where one overflowed."""
    if isinstance(column, pa.ChunkedArray):
        return max(map(_largest, column.chunks), default=0.0)
    type_ = column.type
    if pa.types.is_floating(type_):
        values = column.drop_null().to_numpy(zero_copy_only=False)
        return float(np.abs(values).max(initial=0))
    if _is_list(type_):
        return _largest(column.flatten())  # pyright: ignore[reportAttributeAccessIssue]
    if pa.types.is_struct(type_):
        return max(map(_largest, column.flatten()), default=0.0)  # pyright: ignore[reportAttributeAccessIssue]
    return 0.0


def _are_numbers(found: Any, wanted: Any) -> bool:
    """Whether both are numbers, or lists of them: then a checked cast is all that one needs to become the other."""
    if _is_list(found) and _is_list(wanted) and not pa.types.is_fixed_size_list(wanted):
        return _are_numbers(found.value_type, wanted.value_type)
    return all(pa.types.is_integer(type_) or pa.types.is_floating(type_) for type_ in (found, wanted))


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)


def _is_json(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.JsonType)


def _stored_type(type_: pa.DataType) -> pa.DataType:
    return pa.string() if _is_json(type_) else type_


def _has_null(type_: Any) -> bool:
    """Whether a part of the type is not known: there were only nulls, or empty lists."""
    if pa.types.is_struct(type_):
        return any(_has_null(field.type) for field in type_)
    return pa.types.is_null(type_) or (_is_list(type_) and _has_null(type_.value_type))


def _offer(name: str, type_: pa.DataType, value: Any) -> str:
    """A type that would hold the value too, as it is declared."""
    try:
        both = pa.uint64() if type(value) is int and 2**63 <= value < 2**64 else wider(type_, pa.array([value]).type)
    except _UNFIT:
        both = None
    if both is None or both.equals(type_):
        return ""
    return f"; a type that holds every value can be declared: columns={{{name!r}: {spelled_type(both)}, ...}}"


def _split(text: bytes) -> list[bytes]:
    """The lines that are rows: blank ones are not."""
    return [line for line in text.split(b"\n") if line and not line.isspace()]


def _value(line: bytes) -> Any:
    """What a line says; None when it says nothing that can be understood."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _fault(line: bytes) -> str:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return str(error)
    return f"the line holds {type(value).__name__}"


def _starts(text: bytes) -> list[int]:
    """Where each row begins in the text."""
    starts, position = [], 0
    for line in text.split(b"\n"):
        if line and not line.isspace():
            starts.append(position)
        position += len(line) + 1
    return starts
