"""From JSON lines to Arrow columns: types inferred once, bad lines reported one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa

from overlord.data.read_result import BadRow, ReadResult, kept_rows
from overlord.errors import SchemaError, SourceError

# What pa.array raises for a Python value that does not fit a type.
_UNFIT = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)


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
            raise SchemaError(
                f"the type of the field {name!r} cannot be inferred from {path}: {error}; give it: columns={{{name!r}: "
                "pa.string(), ...}}"
            ) from error
    return pa.schema(fields)


def parsed(path: str, offset: int, text: bytes, schema: pa.Schema, must_have: Sequence[str]) -> ReadResult:
    """The rows of `text`, which begins at byte `offset` of the file. Each field of `must_have` must be in some row."""
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
    for name in must_have:
        if len(rows) > len(bad) and not any(name in row for row in rows):
            raise SchemaError(
                f"{path} has no row with the field {name!r}, which the first file has; leave it out of columns, or "
                f"declare it with its type to have it null: columns={{{name!r}: pa.string(), ...}}"
            )
    columns = [_column(path, field, rows, bad) for field in schema]
    table = pa.table(columns, schema=schema)
    if not bad:
        return ReadResult(table)
    starts = _starts(text)
    reports = tuple(BadRow(i, bad[i], f"{path} at byte {offset + starts[i]}") for i in sorted(bad))
    kept = kept_rows(len(rows), reports)
    return ReadResult(table.take(kept), kept, reports)


def _column(path: str, field: pa.Field, rows: list[dict[str, Any]], bad: dict[int, str]) -> pa.Array | pa.ChunkedArray:
    """Rows whose value does not fit become bad. When not one value fits, it is the type that is wrong, not the rows."""
    name, type_ = field.name, field.type
    values = [row.get(name) for row in rows]
    try:
        return pa.array(values, type_)
    except _UNFIT:
        unfit = {i: error for i, value in enumerate(values) if value is not None and (error := _misfit(value, type_))}
    if len(unfit) > 1 and len(unfit) == sum(value is not None for value in values):
        raise SchemaError(
            f"{path} has the field {name!r} as {type(values[min(unfit)]).__name__}, but the source has it as {type_}; "
            f"give a type that holds both, columns={{{name!r}: ...}}, or make them two sources"
        )
    for i, error in unfit.items():
        bad.setdefault(i, f"the field {name!r} does not fit its type {type_}: {error}")
        values[i] = None
    return pa.array(values, type_)


def _misfit(value: Any, type_: pa.DataType) -> str:
    try:
        pa.array([value], type_)
    except _UNFIT as error:
        return str(error)
    return ""


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
