"""The outcome of a transform over some rows, its lineage, and how outcomes of consecutive slices are joined.

A hidden column `__origin__` (int64) holds, for each row of a table, the row of the chunk that it was made from. Every
transform gets it beside the source's columns. A function that filters, repeats or reorders rows and keeps the column keeps
exact lineage. A function that drops the column and returns as many rows as it was given is taken to have kept their order.
Otherwise lineage ends there: the origin of the rows is -1.

`Context` tells a transform its source and chunk, and has a random generator for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.errors import SchemaError
from overlord.sources.column_types import merge_tables, wider_schema
from overlord.sources.numbers import array_of, numbers_of

if TYPE_CHECKING:
    from overlord.stream.facts import Ints

OnBadRow = Callable[[int, str], None]
"""Called with the origin of a bad row and its error. May raise, to stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`table` is without the hidden column; None when no row came out and so no schema is known."""

    table: pa.Table | None
    origin: Ints | None
    """None: the transform lost the lineage of its rows."""


class RowError(Exception):
    """The exception of a user's function (its cause), with the row that it belongs to. Never leaves this package."""

    def __init__(self, origin: int, cause: Exception) -> None:
        super().__init__(origin, cause)
        self.origin = origin
        self.cause = cause


def row_error(table: pa.Table, row: int, cause: Exception) -> Exception:
    """The error for a transform over a table to raise when one of its rows is bad."""
    if ORIGIN in table.column_names:
        return RowError(table.column(ORIGIN)[row].as_py(), cause)
    cause.add_note(f"in row {row} of the table")  # called by the user, not by a run
    return cause


def join_outcomes(outcomes: Sequence[Outcome], name: str, is_per_row: bool = False) -> Outcome:
    """The outcomes of consecutive slices as one. For a `per_row` function the result does not depend on where slices were
    cut: a slice may lack a column that none of its rows has, or have integers where others have floats."""
    tables = [outcome.table for outcome in outcomes if outcome.table is not None]
    # An empty slice may have other types than one with rows, and adds nothing.
    tables = [table for table in tables if table.num_rows] or tables[:1]
    origin = join_origins([outcome.origin for outcome in outcomes])
    if len(tables) <= 1:
        return Outcome(tables[0] if tables else None, origin)
    if is_per_row:
        whole = merge_tables(tables)
        if whole is None:
            odd = next((t for t in tables if wider_schema(tables[0].schema, t.schema) is None), tables[-1])
            raise SchemaError(_different(name, tables[0].schema, odd.schema))
        return Outcome(whole, origin)
    for table in tables[1:]:
        if set(table.column_names) != set(tables[0].column_names):
            raise SchemaError(_different(name, tables[0].schema, table.schema))
    try:
        # "default" only lets a column that is all null in one slice take its type from another.
        return Outcome(pa.concat_tables(tables, promote_options="default"), origin)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        odd = next(table.schema for table in tables if not table.schema.equals(tables[0].schema))
        raise SchemaError(_different(name, tables[0].schema, odd)) from None


def _different(name: str, first: pa.Schema, second: pa.Schema) -> str:
    return (
        f"transform {name} returned {schema_text(first)} for some rows and {schema_text(second)} for others; "
        "it must return the same columns and types for every row"
    )


def schema_text(schema: pa.Schema) -> str:
    return "(" + ", ".join(f"{field.name}: {field.type}" for field in schema) + ")"


def one_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


ORIGIN = "__origin__"


def with_origin(table: pa.Table, origin: Ints) -> pa.Table:
    if ORIGIN in table.column_names:
        raise SchemaError(f"the column name {ORIGIN!r} is reserved; rename that column of the source")
    return table.append_column(ORIGIN, array_of(origin.astype(np.int64, copy=False)))


def without_origin(table: pa.Table) -> tuple[pa.Table, Ints | None]:
    """The table without its hidden column, and that column; None where it is missing."""
    if ORIGIN not in table.column_names:
        return table, None
    column = table.column(ORIGIN)
    if column.type != pa.int64() or column.null_count:
        raise SchemaError(f"a transform changed the column {ORIGIN!r} to {column.type}; keep it or leave it out")
    return table.drop_columns([ORIGIN]), numbers_of(column).astype(np.int64, copy=False)


def join_origins(origins: Sequence[Ints | None]) -> Ints | None:
    """None if any part lost its lineage, so that the result does not depend on where parts were cut."""
    if any(origin is None for origin in origins):
        return None
    return np.concatenate([origin for origin in origins if origin is not None] or [np.zeros(0, np.int64)])


def unknown_origin(num_rows: int) -> Ints:
    """Distinct negative numbers: rows without lineage still need a generator of their own."""
    return -1 - np.arange(num_rows, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Context:
    """The second argument of transforms that take one.

    `stage` is the position of the transform among those of its source, so that two of them draw different random numbers.
    """

    source: str
    chunk: int
    seed: int
    stage: int = 0

    def rng(self, row: int) -> np.random.Generator:
        """The random generator of one row: a function of (seed, source, chunk, stage, row) alone.

        `row` is the number in the `__origin__` column of the table. Rows that an earlier transform made out
        of one row share its number, and with it their generator.
        """
        key = f"{self.seed}/{self.chunk}/{self.stage}/{row}/{self.source}".encode()
        digest = blake2b(key, digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
