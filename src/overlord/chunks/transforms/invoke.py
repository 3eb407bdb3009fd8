"""Calls a user's transform on a table: with or without context, keeping lineage, and finding the rows that fail.

A function over a table that raises is run again on halves of the table until the rows that fail stand
alone; so it must treat rows independently of each other. Errors that Overlord raises on purpose (a missing
column) are never pinned on rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.chunks.transforms.outcome import (
    Context,
    OnBadRow,
    Outcome,
    RowError,
    join_outcomes,
    one_line,
    with_origin,
    without_origin,
)
from overlord.chunks.transforms.per_row import PerRow, num_positional
from overlord.errors import OverlordError, SchemaError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.stream.facts import Ints


class TransformCall:
    """A transform with its calling convention resolved."""

    def __init__(self, fn: Callable[..., pa.Table]) -> None:
        if not callable(fn):
            raise SpecError(f"a transform is a function over a pyarrow.Table, got {type(fn).__name__}")
        self.fn = fn
        self.name = name_of(fn)
        self._wants_context = num_positional(fn) >= 2

    def call(self, table: pa.Table, context: Context) -> pa.Table:
        result = self.fn(table, context) if self._wants_context else self.fn(table)
        if not isinstance(result, pa.Table):
            raise SchemaError(f"transform {self.name} must return a pyarrow.Table, it returned {type(result).__name__}")
        return result

    def run(self, table: pa.Table, origin: Ints, context: Context, on_bad: OnBadRow | None) -> Outcome:
        """Run the transform. Without `on_bad` the function's own exception is raised, as RowError where the row is known."""
        if isinstance(self.fn, PerRow):
            return self.fn.run(table, origin, context, on_bad)
        try:
            result, kept = without_origin(self.call(with_origin(table, origin), context))
        except OverlordError:
            raise
        except Exception as error:
            if on_bad is None:
                raise
            return self._run_halves(table, origin, context, on_bad, error)
        if kept is None and result.num_rows == table.num_rows:
            kept = origin
        return Outcome(result, kept)

    def _run_halves(self, table: pa.Table, origin: Ints, context: Context, on_bad: OnBadRow, error: Exception) -> Outcome:
        if table.num_rows <= 1:
            if table.num_rows == 0:
                raise error  # no row to blame: the function fails on an empty table
            on_bad(int(origin[0]), one_line(error.cause if isinstance(error, RowError) else error))
            return Outcome(None, origin[:0])
        middle = table.num_rows // 2
        halves = ((table.slice(0, middle), origin[:middle]), (table.slice(middle), origin[middle:]))
        return join_outcomes([self.run(half, part, context, on_bad) for half, part in halves], self.name)


@dataclass(frozen=True, slots=True)
class InProcesses:
    """Run `fn` on worker processes, `batch_rows` rows at a time: for functions that hold the GIL.

    `fn` must pickle, and must treat rows independently of each other, because it gets slices. A worker that dies is
    replaced and its slice retried; a row that kills workers twice is a bad row. A slice that takes
    longer than `timeout_s` counts as a death. Columns of views arrive as plain binary or text.
    """

    fn: Callable[..., pa.Table]
    batch_rows: int = 256
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fn, InProcesses):
            raise SpecError("InProcesses is already around this function; wrap it once")
        if not callable(self.fn):
            raise SpecError(f"InProcesses needs a function, got {type(self.fn).__name__}")
        if self.batch_rows < 1:
            raise SpecError(f"batch_rows must be at least 1, got {self.batch_rows}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise SpecError(f"timeout_s must be positive, got {self.timeout_s}")

    def __call__(self, table: pa.Table, context: Context) -> pa.Table:
        """Run the function in this process."""
        return TransformCall(self.fn).call(table, context)

    def __repr__(self) -> str:
        return f"InProcesses({name_of(self.fn)})"


def name_of(fn: Any) -> str:
    """The name of a user's function in messages."""
    if isinstance(fn, PerRow):
        return f"per_row({name_of(fn.fn)})"
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else f"{type(fn).__qualname__}"
