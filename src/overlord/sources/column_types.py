"""Exact conversion of values to Arrow types, and the narrowest type that holds two others.

Arrow's own conversions lose data silently: 0.97 becomes the int64 0, "abc" the list ["a", "b", "c"], true becomes 1.0. Here
a value is either converted exactly or reported as unfit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.errors import SchemaError

ArrowArray = pa.Array | pa.ChunkedArray

UNFIT = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError, ValueError)
"""The exceptions of pa.array for a Python value that does not fit a type."""


def fit_values(values: Sequence[Any], type_: pa.DataType) -> tuple[ArrowArray, dict[int, str]]:
    """The values as a column of a type, with null for those that do not fit, and the errors of these."""
    column = _convert_exactly(values, type_)
    if column is not None:
        return column, {}
    try:
        column = pa.array(values, type_)
    except UNFIT:
        unfit = {i: error for i, value in enumerate(values) if (error := _misfit(value, type_))}
    else:
        unfit = {i: error for i, value in enumerate(values) if (error := _change(value, type_))}
        if not unfit:
            return column, {}
    return pa.array([None if i in unfit else value for i, value in enumerate(values)], type_), unfit


def wider_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds both, also inside lists and structs; None where there is none. Any type holds null."""
    if left.equals(right):
        return left
    schemas = [pa.schema([("", type_)]) for type_ in (left, right)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def wider_schema(left: pa.Schema, right: pa.Schema) -> pa.Schema | None:
    """The columns of both, each with the type that holds both; None where there is none."""
    fields = dict(zip(left.names, left.types, strict=True))
    for name, type_ in zip(right.names, right.types, strict=True):
        both = wider_type(fields.get(name, pa.null()), type_)
        if both is None:
            return None
        fields[name] = both
    return pa.schema(list(fields.items()))


def cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table cast to a wider schema, with nulls for missing columns. Raises ArrowInvalid for a number that the wider type
    does not hold exactly: not all integers beyond 2**53 are doubles."""
    columns = [
        table.column(field.name).cast(field.type) if field.name in table.column_names else _nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def merge_tables(tables: Sequence[pa.Table]) -> pa.Table | None:
    """The tables concatenated, each column with the type that holds all of its parts; None where there is none."""
    schema = tables[0].schema
    for table in tables[1:]:
        merged = wider_schema(schema, table.schema)
        if merged is None:
            return None
        schema = merged
    try:
        return pa.concat_tables([cast_table(table, schema) for table in tables])
    except pa.ArrowInvalid:
        return None


def merge_arrays(name: str, arrays: Sequence[pa.Array[Any]], owners: Sequence[str]) -> pa.Array[Any]:
    """The parts of one column concatenated, with the type that holds them all. `owners` names the source of each part."""
    first = 0  # the last part that widened the type
    found = arrays[0].type
    for i, array in enumerate(arrays):
        both = wider_type(found, array.type)
        if both is None:
            raise SchemaError(
                f"the column {name!r} is {found} in {owners[first]} and {array.type} in {owners[i]}, and no type holds both"
                "; give it one type in a transform (ol.per_row takes types=), rename it in one of them with ol.Pick, or "
                "leave it out of Batch(columns=...)"
            )
        if not both.equals(found):
            first, found = i, both
    try:
        return pa.concat_arrays([array if array.type.equals(found) else array.cast(found) for array in arrays])
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"the column {name!r} has different types in {', '.join(dict.fromkeys(owners))}, and not all values are exactly "
            f"{found}: {error}; give it one type in a transform (ol.per_row takes types=)"
        ) from error


def has_null_type(type_: Any) -> bool:
    """Whether a part of the type is unknown, because there were only nulls or empty lists."""
    if pa.types.is_struct(type_):
        return any(has_null_type(field.type) for field in type_)
    return pa.types.is_null(type_) or (_is_list(type_) and has_null_type(type_.value_type))


def largest_float(column: ArrowArray) -> float:
    """The largest absolute value of all floats in a column, 0 where there are none; inf where one overflowed. The least
    int64 counts too: a whole number below it that was rounded to a float is cast to it."""
    if isinstance(column, pa.ChunkedArray):
        return max(map(largest_float, column.chunks), default=0.0)
    array: Any = column
    if pa.types.is_floating(array.type):
        return float(np.fmax.reduce(np.abs(array.drop_null().to_numpy(zero_copy_only=False)), initial=0))
    if pa.types.is_int64(array.type):
        least = np.min(array.drop_null().to_numpy(zero_copy_only=False), initial=0)
        return 2.0**63 if least == -(2**63) else 0.0
    if _is_list(array.type):
        return largest_float(array.flatten())
    if pa.types.is_struct(array.type):
        return max(map(largest_float, array.flatten()), default=0.0)
    return 0.0


def _convert_exactly(values: Sequence[Any], type_: pa.DataType) -> ArrowArray | None:
    """The values as a column of the type, if that is known to be exact without checking each value; otherwise None. Types
    that Arrow infers are exact, except for booleans among floats, and so are checked casts between numbers."""
    try:
        column = pa.array(values)
        if _has_zero_or_one(column) and _has_bool_as_float(values, column.type):
            return None
        if column.type.equals(type_):
            return column
        if pa.types.is_null(column.type):
            return _nulls(len(values), type_)
        if _are_numbers(column.type, type_):
            cast = column.cast(type_)
            # Only the cast to a shorter float is not checked: too large a number becomes infinite.
            return cast if largest_float(cast) < np.inf else None
    except UNFIT:
        pass
    return None


def _has_zero_or_one(column: Any) -> bool:
    """Whether a float of the column could have been a boolean before Arrow converted it."""
    if isinstance(column, pa.ChunkedArray):
        return any(map(_has_zero_or_one, column.chunks))
    if pa.types.is_floating(column.type):
        floats = column.to_numpy(zero_copy_only=False)
        return bool(((floats == 0) | (floats == 1)).any())
    if _is_list(column.type):
        return _has_zero_or_one(column.flatten())
    return pa.types.is_struct(column.type) and any(map(_has_zero_or_one, column.flatten()))


def _has_bool_as_float(values: Iterable[Any], type_: Any) -> bool:
    """Whether a value is a boolean where the type has floats."""
    if pa.types.is_floating(type_):
        return not {bool, np.bool_}.isdisjoint(map(type, values))
    present = (value for value in values if value is not None)
    if _is_list(type_):
        return _has_bool_as_float(chain.from_iterable(present), type_.value_type)
    if pa.types.is_struct(type_):
        rows = list(present)
        return any(_has_bool_as_float((row.get(field.name) for row in rows), field.type) for field in type_)
    return False


def _misfit(value: Any, type_: pa.DataType) -> str:
    if _convert_exactly([value], type_) is not None:
        return ""
    try:
        pa.array([value], type_)
    except UNFIT as error:
        return str(error)
    return _change(value, type_)


def _change(value: Any, type_: Any) -> str:
    """How Arrow's conversion to a type would change a value; empty where it is exact."""
    if value is None:
        return ""
    if pa.types.is_dictionary(type_):
        return _change(value, type_.value_type)
    if _is_list(type_):
        if isinstance(value, (str, bytes)):
            return f"{type(value).__name__} is not a list"
        return next((error for entry in value if (error := _change(entry, type_.value_type))), "")
    if pa.types.is_struct(type_) or pa.types.is_map(type_):
        if not isinstance(value, Mapping):
            return f"{type(value).__name__} is not an object"
        if pa.types.is_struct(type_):
            return next((error for field in type_ if (error := _change(value.get(field.name), field.type))), "")
        return next((error for entry in value.values() if (error := _change(entry, type_.item_type))), "")
    if pa.types.is_floating(type_):
        if isinstance(value, (bool, np.bool_)):
            return f"{value!r} is not a number"
        is_lost = np.isfinite(value) and not np.isfinite(pa.scalar(value, type_).as_py())
        return f"{value!r} is too large" if is_lost else ""
    if isinstance(value, (float, np.floating)) and not float(value).is_integer():
        return f"{value!r} is not a whole number"
    return ""


def _nulls(count: int, type_: pa.DataType) -> pa.Array:
    return pa.array([None] * count, type_)


def _are_numbers(found: Any, wanted: Any) -> bool:
    """Whether both are numbers, or lists of them."""
    if _is_list(found) and _is_list(wanted) and not pa.types.is_fixed_size_list(wanted):
        return _are_numbers(found.value_type, wanted.value_type)
    return all(pa.types.is_integer(type_) or pa.types.is_floating(type_) for type_ in (found, wanted))


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
