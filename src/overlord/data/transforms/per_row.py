"""A function over one row as a transform: drop, change or multiply rows, and blame errors on a single row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.data.transforms.context import Context
from overlord.data.transforms.origin import with_origin, without_origin
from overlord.data.transforms.outcome import OnBadRow, Outcome, RowError, one_line
from overlord.errors import DataError, SpecError
from overlord.planning.facts import Ints

Row = Mapping[str, Any]
RowFunction = Callable[..., "Row | Iterable[Row] | None"]


@dataclass(frozen=True, slots=True)
class PerRow:
    """A transform made by `per_row`. Called directly it raises the error of the first row that fails."""

    fn: RowFunction
    wants_rng: bool = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SpecError(f"per_row needs a function, got {type(self.fn).__name__}")
        object.__setattr__(self, "wants_rng", num_positional(self.fn) >= 2)

    def __call__(self, table: pa.Table, context: Context) -> pa.Table:
        bare, origin = without_origin(table)
        had_origin = origin is not None
        origin = np.arange(table.num_rows, dtype=np.int64) if origin is None else origin
        try:
            outcome = self.run(bare, origin, context, None)
        except RowError as error:
            error.cause.add_note(f"in row {error.origin} of the table")
            raise error.cause from None
        made = bare.slice(0, 0) if outcome.table is None else outcome.table
        return with_origin(made, outcome.origin) if had_origin and outcome.origin is not None else made

    def run(self, table: pa.Table, origin: Ints, context: Context, on_bad: OnBadRow | None) -> Outcome:
        """`on_bad` None: the first error is raised as RowError."""
        rows: list[Row] = []
        sources: list[int] = []
        # A Python loop over rows is what this wrapper is: functions over whole tables are the fast way.
        for number, row in zip(origin.tolist(), _rows(table), strict=True):
            try:
                made = list(self._made(row, number, context))
            except Exception as error:
                if on_bad is None:
                    raise RowError(number, error) from error
                on_bad(number, one_line(error))
                continue
            rows.extend(made)
            sources.extend([number] * len(made))
        columns, bad = _columns(rows)
        for index, error in sorted(bad.items()):
            if on_bad is None:
                raise RowError(sources[index], error)
            on_bad(sources[index], one_line(error))
        kept = np.array([s for i, s in enumerate(sources) if i not in bad], np.int64)
        return Outcome(pa.table(columns) if columns else None, kept)

    def _made(self, row: Row, number: int, context: Context) -> Iterator[Mapping[Any, Any]]:
        result = self.fn(row, context.rng(number)) if self.wants_rng else self.fn(row)
        if result is None:
            return
        if isinstance(result, Mapping):
            yield result
            return
        if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
            raise TypeError(f"a per_row function returns a dict, None or dicts, not {type(result).__name__}")
        for made in result:
            if not isinstance(made, Mapping):
                raise TypeError(f"a per_row function returns a dict, None or dicts, not {type(made).__name__}s")
            yield made


def per_row(fn: RowFunction) -> PerRow:
    """Make a transform of `fn(row)` or `fn(row, rng)`, which returns a dict, None (drop the row) or dicts (one to many).

    `row` is a dict of Python values; `rng` is the row's own `numpy.random.Generator`, the same whenever and
    wherever the row is computed. An error is one bad row, not a bad batch.
    """
    return PerRow(fn)


def num_positional(fn: Callable[..., Any]) -> int:
    """How many positional arguments `fn` must or may be given; defaults do not count."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some functions written in C do not tell
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=1024):  # so that not all rows are Python objects at once
        yield from batch.to_pylist()


def _columns(rows: list[Row]) -> tuple[dict[str, pa.Array], dict[int, Exception]]:
    """Rows as columns, and which rows do not fit the type that their column has in the first row."""
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return {name: pa.array([row.get(name) for row in rows]) for name in names}, {}
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    bad: dict[int, Exception] = {}
    for name in names:
        _note_misfits(name, [row.get(name) for row in rows], bad)
    kept = [row for index, row in enumerate(rows) if index not in bad]
    return {name: pa.array([row.get(name) for row in kept]) for name in names}, bad


def _note_misfits(name: str, values: list[Any], bad: dict[int, Exception]) -> None:
    kind: pa.DataType | None = None
    for index, value in enumerate(values):
        if value is None or index in bad:
            continue
        try:
            array = pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            expected = "" if kind is None else f", as in the rows before it ({kind})"
            bad[index] = DataError(f"column {name!r} cannot hold {type(value).__name__}{expected}: {one_line(error)}")
        else:
            kind = kind or (None if pa.types.is_null(array.type) else array.type)
