"""One schema for all files of a source: files that differ in a column are refused when they are listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from overlord.errors import SchemaError, SpecError

Columns = Sequence[str] | None
TypedColumns = Sequence[str] | Mapping[str, pa.DataType] | None


def checked_columns(columns: TypedColumns) -> tuple[str, ...] | dict[str, pa.DataType] | None:
    if columns is None:
        return None
    if isinstance(columns, str):
        raise SpecError(f"columns is a sequence of names: write columns=({columns!r},)")
    if not columns:
        raise SpecError("columns must name at least one column; leave it out to read all of them")
    if isinstance(columns, Mapping):
        for name, type_ in columns.items():
            if not isinstance(type_, pa.DataType):
                raise SpecError(
                    f"columns gives the column {name!r} the type {type_!r}; a type is a pyarrow one, as pa.string()"
                )
        return dict(columns)
    if len(set(columns)) < len(columns):
        raise SpecError(f"columns names a column twice: {list(columns)}")
    return tuple(columns)


def common_schema(schemas: Iterable[tuple[str, pa.Schema]], columns: Columns) -> pa.Schema:
    """The schema of the columns to read, checked in every file. `schemas` gives (file, its schema)."""
    first: tuple[str, pa.Schema] | None = None
    for path, schema in schemas:
        if first is None:
            first = path, _selected(path, schema, columns)
        elif columns is None and (extra := [n for n in schema.names if n not in first[1].names]):
            raise SchemaError(
                f"{path} has the column {extra[0]!r}, which {first[0]} has not; say which columns to read: "
                f"columns={_written(first[1].names)}"
            )
        else:
            _check_same(path, schema, *first)
    assert first is not None  # listing fails before this when there are no files
    return first[1]


def missing_column(path: str, name: str, names: Sequence[str]) -> SchemaError:
    return SchemaError(f"{path} has no column {name!r}; it has {_written(names)}")


def _selected(path: str, schema: pa.Schema, columns: Columns) -> pa.Schema:
    names = schema.names if columns is None else columns
    for name in names:
        if name not in schema.names:
            raise missing_column(path, name, schema.names)
        if schema.names.count(name) > 1:
            raise SchemaError(f"{path} has the column {name!r} {schema.names.count(name)} times; columns need one name each")
    return pa.schema([schema.field(name) for name in names])


def _check_same(path: str, schema: pa.Schema, first_path: str, expected: pa.Schema) -> None:
    for name in expected.names:
        if name not in schema.names:
            raise SchemaError(
                f"{missing_column(path, name, schema.names)}, while {first_path} has that column; leave it out if it is not "
                f"needed, {_without(expected.names, name)}, or rewrite one of the files"
            )
    found = _selected(path, schema, expected.names)
    for have, want in zip(found, expected, strict=True):
        if have.type != want.type:
            raise SchemaError(
                f"{path} has the column {want.name!r} as {have.type}, but {first_path} has it as {want.type}; leave it out "
                f"if it is not needed, {_without(expected.names, want.name)}, rewrite one of the files, or make them two "
                "sources"
            )


def _written(names: Sequence[str]) -> str:
    return "(" + ", ".join(repr(name) for name in names) + (",)" if len(names) == 1 else ")")


def _without(names: Sequence[str], unwanted: str) -> str:
    return f"columns={_written([name for name in names if name != unwanted])}"


def spelled_type(type_: Any) -> str:
    """A type as it is written in Python."""
    if pa.types.is_list(type_):
        return f"pa.list_({spelled_type(type_.value_type)})"
    if pa.types.is_struct(type_):
        return "pa.struct({" + ", ".join(f"{field.name!r}: {spelled_type(field.type)}" for field in type_) + "})"
    return {"double": "pa.float64()", "float": "pa.float32()", "bool": "pa.bool_()"}.get(str(type_), f"pa.{type_}()")
