"""Arrow tables as plain values that can be compared, without trusting a byte of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tests.fuzz.targets import Answer


def answer_of(table: pa.Table) -> Answer:
    """Raises pa.ArrowException for a table that would make its reader touch memory that is not its own."""
    table.validate()
    columns = [_plain_column(column) for column in table.columns]
    about = [(field.name, str(field.type)) for field in table.schema]
    return Answer([repr(row) for row in zip(*columns, strict=True)] or [None] * table.num_rows, about=about)


def _plain_column(column: pa.ChunkedArray) -> list[Any]:
    return [value for chunk in column.chunks for value in _plain(chunk)]


def _plain(array: pa.Array) -> list[Any]:
    """Text and times are compared as the bytes and numbers that they are kept as: damaged ones need not be either."""
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if isinstance(array, pa.DictionaryArray):
        array.validate(full=True)
        values = _plain(array.dictionary)
        return [None if i is None else values[i] for i in array.indices.to_pylist()]
    array = array.view(_plain_type(array.type))
    array.validate(full=True)
    return array.to_pylist()


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.binary_view()
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_struct(kind):
        # By number: two fields may have one name, and then Arrow finds neither.
        return pa.struct([pa.field(str(i), _plain_type(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _plain_type(field.type), field.nullable)
