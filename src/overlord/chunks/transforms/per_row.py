"""A function over one row as a transform: drop, change or multiply rows, with errors attributed to single rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from overlord.chunks.transforms.outcome import (
    Context,
    OnBadRow,
    Outcome,
    RowError,
    one_line,
    with_origin,
    without_origin,
)
from overlord.errors import DataError, SpecError
from overlord.sources.column_types import (
    UNFIT,
    ArrowArray,
    fit_values,
    wider_type,
)

if TYPE_CHECKING:
    from overlord.stream.facts import Ints

Row = Mapping[str, Any]
RowFunction = Callable[..., "Row | Iterable[Row] | None"]


@dataclass(frozen=True, slots=True)
class PerRow:
    """A transform made by `per_row`. Called directly it raises the error of the first row that fails."""

    fn: RowFunction
    types: Mapping[str, pa.DataType] = field(default_factory=dict, hash=False)
    wants_rng: bool = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SpecError(f"per_row needs a function, got {type(self.fn).__name__}")
        if not isinstance(self.types, Mapping):
            raise SpecError(f"types is a dict of columns and their types, got {type(self.types).__name__}")
        for name, type_ in self.types.items():
            if not isinstance(type_, pa.DataType):
                raise SpecError(
                    f"types gives the column {name!r} the type {type_!r}; a type is a pyarrow one, as pa.string()"
                )
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
        """Run the function over all rows. Without `on_bad` the first error is raised as RowError."""
        rows: list[Row] = []
        sources: list[int] = []
        # A Python loop over rows is the purpose of this wrapper; functions over whole tables are the fast way.
        for number, row in zip(origin.tolist(), _rows(table), strict=True):
            try:
                made = list(self._call(row, number, context))
                if not self.types and not all(made):  # whether it has columns would depend on its neighbours
                    raise DataError(
                        "a per_row function returned {}, a row without columns; return None to drop a row, or declare "
                        "columns, which are then null: per_row(..., types={...})"
                    )
            except Exception as error:
                if on_bad is None:
                    raise RowError(number, error) from error
                on_bad(number, one_line(error))
                continue
            rows.extend(made)
            sources.extend([number] * len(made))
        columns, bad = _columns(rows, self.types)
        for index, error in sorted(bad.items()):
            if on_bad is None:
                raise RowError(sources[index], error)
            on_bad(sources[index], one_line(error))
        kept = np.array([s for i, s in enumerate(sources) if i not in bad], np.int64)
        return Outcome(pa.table(columns) if columns else None, kept)

    def _call(self, row: Row, number: int, context: Context) -> Iterator[Mapping[Any, Any]]:
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


@overload
def per_row(fn: RowFunction, *, types: Mapping[str, pa.DataType] | None = None) -> PerRow: ...
@overload
def per_row(*, types: Mapping[str, pa.DataType]) -> Callable[[RowFunction], PerRow]: ...
def per_row(
    fn: RowFunction | None = None, *, types: Mapping[str, pa.DataType] | None = None
) -> PerRow | Callable[[RowFunction], PerRow]:
    """Make a transform of `fn(row)` or `fn(row, rng)`, which returns a dict, None (drop the row) or dicts (one to many).

    `row` is a dict of Python values; `rng` is the row's own `numpy.random.Generator`, the same whenever and
    wherever the row is computed. An error is one bad row, not a bad batch. Values may be numpy arrays, and tensors of any
    library that turn into them.

    `types` declares the types of columns, {"tokens": pa.list_(pa.int32())}: they are then the same in every chunk, and a row
    with a value that its type does not hold exactly is a bad row. The type of any other column is the narrowest that holds
    the values of its chunk. Also a decorator: `@per_row` or `@per_row(types=...)`.
    """
    if fn is None:
        return partial(PerRow, types=types or {})
    return PerRow(fn, types or {})


def num_positional(fn: Callable[..., Any]) -> int:
    """The number of positional arguments of `fn` without a default."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some C functions have no signature
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=1024):  # so that not all rows are Python objects at once
        yield from batch.to_pylist()


def _columns(rows: list[Row], types: Mapping[str, pa.DataType]) -> tuple[dict[str, ArrowArray], dict[int, Exception]]:
    """Rows as columns, and errors of rows that do not fit the declared type of a column, or that of the rows before them."""
    names = dict.fromkeys([*types, *(name for row in rows for name in row)]) if rows else {}
    columns: dict[str, ArrowArray] = {}
    bad: dict[int, Exception] = {}
    for name in names:
        columns[name], unfit = _column([row.get(name) for row in rows], types.get(name))
        for index, error in unfit.items():
            bad.setdefault(index, DataError(f"column {name!r} cannot hold {type(rows[index][name]).__name__}{error}"))
    if not bad:
        return columns, {}
    kept = [row for index, row in enumerate(rows) if index not in bad]
    # Once more, without the bad rows: a type that is not declared must not depend on them.
    return _columns(kept, types)[0], bad


def _column(values: list[Any], type_: pa.DataType | None) -> tuple[ArrowArray, dict[int, str]]:
    if type_ is None:
        try:
            return pa.array(values), {}
        except UNFIT:
            pass
    unfit: dict[int, str] = {}
    plain: list[Any] = [None] * len(values)
    for index, value in enumerate(values):
        try:
            plain[index] = _plain(value)
        except Exception as error:  # noqa: BLE001 - a tensor's own conversion may raise anything
            unfit[index] = f", which does not turn into an array: {one_line(error)}"
    if type_ is None:
        type_, others = _common_type(plain)
        unfit |= others
    column, others = fit_values([None if index in unfit else value for index, value in enumerate(plain)], type_)
    return column, unfit | {index: f", its type is {type_}: {error}" for index, error in others.items()}


def _common_type(values: list[Any]) -> tuple[pa.DataType, dict[int, str]]:
    """The narrowest type that holds the values, and errors of those that are incompatible with the ones before them."""
    found: pa.DataType = pa.null()
    unfit: dict[int, str] = {}
    for index, value in enumerate(values):
        try:
            kind = pa.array([value]).type
        except UNFIT as error:
            unfit[index] = f": {one_line(error)}"
            continue
        both = wider_type(found, kind)
        if both is None:
            unfit[index] = f", as in the rows before it ({found}); per_row(..., types=) declares the type"
        else:
            found = both
    return found, unfit


def _plain(value: Any) -> Any:
    """A value with all tensors in it as arrays that Arrow takes: of one dimension, or lists of such."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return value if all(isinstance(entry, (int, float, str)) for entry in value) else [_plain(entry) for entry in value]
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()  # a torch tensor, which may be on a device or part of a graph
    if not isinstance(value, np.generic) and hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.ndim == 0:
            return array[()]
        return array if array.ndim == 1 else [_plain(part) for part in array]
    return value
