"""The hidden column that says which row of the chunk each row of a table came from.

Every transform sees it as `__origin__` (int64) beside the source's columns. A function that filters,
repeats or reorders rows and keeps the column keeps exact lineage. A function that leaves it out and returns
as many rows as it was given is taken to have kept their order. Otherwise lineage ends there: the rows count
as coming from nowhere (-1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from overlord.errors import SchemaError
from overlord.planning.facts import Ints

ORIGIN = "__origin__"


def with_origin(table: pa.Table, origin: Ints) -> pa.Table:
    if ORIGIN in table.column_names:
        raise SchemaError(f"the column name {ORIGIN!r} is reserved; rename that column of the source")
    return table.append_column(ORIGIN, pa.array(origin, pa.int64()))


def without_origin(table: pa.Table) -> tuple[pa.Table, Ints | None]:
    """The table less its hidden column, and that column, or None when it is not there."""
    if ORIGIN not in table.column_names:
        return table, None
    column = table.column(ORIGIN)
    if column.type != pa.int64() or column.null_count:
        raise SchemaError(f"a transform changed the column {ORIGIN!r} to {column.type}; keep it or leave it out")
    return table.drop_columns([ORIGIN]), column.to_numpy().astype(np.int64, copy=False)


def joined_origins(origins: Sequence[Ints | None]) -> Ints | None:
    """None as soon as one part lost track, so that the answer does not depend on where the parts were cut."""
    if any(origin is None for origin in origins):
        return None
    return np.concatenate([origin for origin in origins if origin is not None] or [np.zeros(0, np.int64)])


def lost_origin(num_rows: int) -> Ints:
    """Distinct negative numbers: rows without lineage still need a generator of their own."""
    return -1 - np.arange(num_rows, dtype=np.int64)
