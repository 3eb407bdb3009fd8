"""JSON Lines, plain or compressed. `line_source` cuts the files into units.

Lines are parsed one at a time: a bad line is one bad row with its place, and does not affect its neighbours. (Arrow's own
JSON reader is nearly twice as fast, but accepts an object over several lines, and crashes the process on a line that is
`null`.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from overlord.declare.source import MIB, Unit
from overlord.errors import BufferTooSmallError, SchemaError, SourceError, SpecError
from overlord.sources.column_types import (
    UNFIT,
    ArrowArray,
    fit_values,
    has_null_type,
    largest_float,
    wider_type,
)
from overlord.sources.files import check_columns, type_text
from overlord.sources.line_source import LineRange, LineSource, PackedPart
from overlord.sources.reading import BadRow, ReadResult, good_rows

if TYPE_CHECKING:
    from overlord.sources.storage import StoredFile


@dataclass(frozen=True)
class Jsonl(LineSource):
    """JSON Lines: .jsonl, and .gz or .zst of it. Blank lines are no rows; fields that are not read are ignored.

    `columns` names the fields to read, with their types inferred from the first unit, or gives the types as
    {"text": pa.string(), ...}. All fields of the first unit are read unless given. Missing fields are null, and keys
    of nested objects are like fields. A value is never changed to fit its type: a row with an unfit value is a bad row. The
    type `pa.json_()` takes values of any kind, as a column of their JSON text.
    """

    columns: Sequence[str] | Mapping[str, pa.DataType] | None = None
    unit_bytes: int = 8 * MIB
    kind = "JSON Lines"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))
        if self.unit_bytes < 1:
            raise SpecError(f"unit_bytes must be positive, got {self.unit_bytes}")

    @property
    def range_bytes(self) -> int:
        return self.unit_bytes

    def units(self) -> list[Unit]:
        files = [file for file in self.list_files() if file.num_bytes]
        return self.line_units(files, self._find_schema(files), declared=isinstance(self.columns, Mapping))

    def collect_rows(self, unit: Unit) -> JsonRows:
        detail: LineRange | PackedPart = unit.detail
        must_have = () if detail.declared or unit.index else tuple(detail.schema.names)
        return JsonRows(unit.path, detail.schema, must_have, self.most_unit_bytes)

    def identity(self) -> str:
        columns = self.columns
        if isinstance(columns, Mapping):
            columns = {name: str(type_) for name, type_ in columns.items()}
        return f"Jsonl({list(self.patterns)!r}, columns={columns!r}, unit_bytes={self.unit_bytes})"

    def _find_schema(self, files: Sequence[StoredFile]) -> pa.Schema:
        if isinstance(self.columns, Mapping):
            return pa.schema(list(self.columns.items()))
        for file in files:
            text = self.read_first_text(file)
            if text.strip():
                return infer_schema(file.path, text, self.columns)
        raise SourceError(f"{self.identity()} has files but not a single row in them: check what wrote them")


_REPORT_BYTES = 512  # about the memory of a bad row until it is reported
_PARSER_INTS = 2**63  # orjson parses larger integers (from twice as many on, unsigned) as floats
_LONG_NUMBER = re.compile(rb"\d{19}")


def infer_schema(path: str, text: bytes, columns: Sequence[str] | None) -> pa.Schema:
    """The types of the fields, inferred from the rows of one unit. Bad lines are skipped: reading reports them."""
    rows = [row for row in map(_parse_line, _split_lines(text)) if type(row) is dict]
    if not rows:
        raise SourceError(f"{path} has no JSON object on any of its first lines: is it JSON Lines?")
    found = list(dict.fromkeys(name for row in rows for name in row))
    if not found:
        raise SourceError(
            f"{path} has nothing but {{}} on its first lines, from which the fields are taken: give the fields to read with "
            "their types, columns={'text': pa.string(), ...}"
        )
    for name in columns or ():
        if name not in found:
            raise SchemaError(f"no row at the start of {path} has the field {name!r}; they have {found}")
    fields = []
    for name in columns or found:
        try:
            fields.append((name, pa.array([row.get(name) for row in rows]).type))
        except UNFIT as error:
            kinds = sorted({type(row[name]).__name__ for row in rows if row.get(name) is not None})
            raise SchemaError(
                f"the type of the field {name!r} cannot be inferred from {path}, where it is {' and '.join(kinds)}: {error}"
                f"; give its type with those of the fields to read, columns={{{name!r}: pa.json_(), ...}} (pa.json_() keeps "
                "values of any kind as JSON text), or leave the field out of columns"
            ) from error
    return pa.schema(fields)


class JsonRows:
    """Collects the rows of one unit from pieces of its text. The result does not depend on where the text was cut.

    A row with a value that does not fit its type is bad. If no value of a field fits, the type is wrong, and SchemaError is
    raised. Each field of `must_have` must be in some row. The columns may take `most_bytes`.
    """

    def __init__(self, path: str, schema: pa.Schema, must_have: Sequence[str], most_bytes: int) -> None:
        self._path = path
        self._fields = list(schema)
        self._find_schema = pa.schema([(field.name, _stored_type(field.type)) for field in schema])
        self._missing = dict.fromkeys(must_have)
        self._most_bytes = most_bytes
        self._tables: list[pa.Table] = []
        self._bad: list[BadRow] = []
        self._num_rows = 0
        self._num_objects = 0
        self._num_bytes = 0
        self._num_values = dict.fromkeys(schema.names, 0)
        self._unfit: dict[str, list[str]] = {name: [] for name in schema.names}  # the types of values that do not fit

    def add(self, offset: int, text: bytes) -> None:
        """Add the lines of `text`, which begins at byte `offset` of the (decompressed) file."""
        lines = _split_lines(text)
        bad: dict[int, str] = {}
        try:
            rows: list[Any] = [orjson.loads(line) for line in lines]
        except orjson.JSONDecodeError:
            rows = [_parse_line(line) for line in lines]
        for i, row in enumerate(rows):
            if type(row) is not dict:
                bad[i] = f"not a JSON object: {_line_error(lines[i])}"
                rows[i] = {}
        self._num_objects += len(rows) - len(bad)
        for name in [name for name in self._missing if any(name in row for row in rows)]:
            del self._missing[name]
        table = pa.table([self._column(field, lines, rows, bad) for field in self._fields], schema=self._find_schema)
        if bad:
            starts = _line_starts(text)
            reports = [BadRow(i, bad[i], f"{self._path} at byte {offset + starts[i]}") for i in sorted(bad)]
            table = table.take(good_rows(len(rows), reports))
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
        tables = self._tables or [self._find_schema.empty_table()]
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()
        if not self._bad:
            return ReadResult(table)
        return ReadResult(table, good_rows(self._num_rows, self._bad), tuple(self._bad))

    def _check_type(self, field: pa.Field) -> None:
        unfit = self._unfit[field.name]
        if not unfit:
            return
        if has_null_type(field.type):
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

    def _column(self, field: pa.Field, lines: list[bytes], rows: list[dict[str, Any]], bad: dict[int, str]) -> ArrowArray:
        name, type_ = field.name, field.type
        values = [row.get(name) for row in rows]
        self._num_values[name] += len(values) - values.count(None)
        if _is_json(type_):
            column, unfit = _to_json_text(lines, values, name)
        else:
            column, unfit = fit_values(values, type_)
            unfit |= _find_rounded(column, lines, name, type_, bad)
        if not unfit:
            return column
        for i, error in unfit.items():
            bad.setdefault(
                i, f"the field {name!r} does not fit its type {type_}: {error}{_type_hint(name, type_, values[i])}"
            )
            self._unfit[name].append(type(values[i]).__name__)
            values[i] = None
        return _to_json_text(lines, values, name)[0] if _is_json(type_) else fit_values(values, type_)[0]


def _find_rounded(
    column: ArrowArray, lines: list[bytes], name: str, type_: pa.DataType, bad: Container[int]
) -> dict[int, str]:
    """Errors of integers that the parser rounded to floats because they are too large. Lines in `bad` are skipped."""
    if largest_float(column) < _PARSER_INTS:
        return {}
    found = {}
    for i, line in enumerate(lines):
        if i in bad or not _LONG_NUMBER.search(line):
            continue
        try:
            for number in _ints(_exact_value(line, name)):
                if float(number) != number:
                    found[i] = f"{number} is not exactly a {type_}"
        except RecursionError:
            found[i] = "it is nested too deeply"
    return found


def _to_json_text(lines: list[bytes], values: list[Any], name: str) -> tuple[pa.Array, dict[int, str]]:
    """The values as JSON text, from a parser that keeps numbers of any length."""
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


def _is_json(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.JsonType)


def _stored_type(type_: pa.DataType) -> pa.DataType:
    return pa.string() if _is_json(type_) else type_


def _type_hint(name: str, type_: pa.DataType, value: Any) -> str:
    """The end of a message that suggests a type that holds the value too; empty where there is none."""
    try:
        both = pa.uint64() if type(value) is int and 2**63 <= value < 2**64 else wider_type(type_, pa.array([value]).type)
    except UNFIT:
        both = None
    if both is None or both.equals(type_):
        return ""
    return f"; a type that holds every value can be declared: columns={{{name!r}: {type_text(both)}, ...}}"


def _split_lines(text: bytes) -> list[bytes]:
    """The lines that are not blank."""
    return [line for line in text.split(b"\n") if line and not line.isspace()]


def _parse_line(line: bytes) -> Any:
    """The value of a line; None where it is not JSON."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _line_error(line: bytes) -> str:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return str(error)
    return f"the line holds {type(value).__name__}"


def _line_starts(text: bytes) -> list[int]:
    """The offset of each line in the text that is not blank."""
    starts, position = [], 0
    for line in text.split(b"\n"):
        if line and not line.isspace():
            starts.append(position)
        position += len(line) + 1
    return starts
