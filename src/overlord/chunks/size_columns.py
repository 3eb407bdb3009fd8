"""The columns of `Source(size_columns=...)`: whole numbers, one per row, that cost functions go by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.errors import SchemaError
from overlord.sources.numbers import numbers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.stream.facts import Ints

_MOST = 2**53
"""Larger sizes are mistakes, and could not be told apart as floats in costs."""


def declared_sizes(source: str, table: pa.Table, names: Sequence[str]) -> dict[str, Ints]:
    """The size columns of a table, one entry per row.

    SchemaError where a column is missing, is not of whole numbers, or holds one below 0. Such a row is not skipped as a bad
    row is: sizes say where samples go, and must not say which samples there are.
    """
    return {name: _sizes(source, table, name) for name in names}


def _sizes(source: str, table: pa.Table, name: str) -> Ints:
    if name not in table.column_names:
        raise SchemaError(
            f"source {source!r} has no column {name!r}, which its size_columns name; after its transforms it has "
            f"{table.column_names}. Correct the name, or keep the column in the transforms (as ol.Tokenize(keep=...) does)"
        )
    kind = table.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise SchemaError(
            f"source {source!r}: the size column {name!r} is of type {kind}; sizes are whole numbers, so convert it in a "
            "transform"
        )
    values = _numbers(table.column(name))
    wrong = values[(values < 0) | (values > _MOST)]
    if len(wrong):
        raise SchemaError(
            f"source {source!r}: the size column {name!r} holds {wrong[0]}; sizes are whole numbers from 0 to 2**53, so "
            "replace it in a transform, by 0 or null for nothing"
        )
    return values.astype(np.int64)


def _numbers(column: Any) -> Any:
    """The values, 0 where null, in the type of the column, so that no uint64 overflows."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return numbers_of(column, default=0)
