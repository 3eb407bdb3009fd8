"""Which Arrow types go together: the narrowest type that holds the values of two, and columns joined under it.

Only widening that changes no value: int64 and double are double as long as every whole number is exactly one. What no type
holds (text and numbers) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pyarrow as pa


def wider(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds both, also inside lists and structs; None where there is none. Null goes with all."""
    if left.equals(right):
        return left
    schemas = [pa.schema([("", type_)]) for type_ in (left, right)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def wider_schema(left: pa.Schema, right: pa.Schema) -> pa.Schema | None:
    """All columns of both, each under the type that holds both; None where there is none."""
    fields = dict(zip(left.names, left.types, strict=True))
    for name, type_ in zip(right.names, right.types, strict=True):
        both = wider(fields.get(name, pa.null()), type_)
        if both is None:
            return None
        fields[name] = both
    return pa.schema(list(fields.items()))


def widest(types: Sequence[pa.DataType]) -> pa.DataType | None:
    """The type that holds all of them; None where there is none."""
    return reduce(lambda found, type_: None if found is None else wider(found, type_), types, pa.null())


def under_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of a wider schema: those that it has not are null. Raises ArrowInvalid where a value has no
    exact counterpart in the wider type."""
    columns = [
        table.column(field.name).cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
