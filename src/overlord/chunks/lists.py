"""Columns of lists of numbers: token ids, loss masks and loss weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.sources.numbers import is_present, numbers_of
from overlord.sources.views import combine_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.stream.facts import Ints

MOST_ID = 2**31 - 1
MOST_WEIGHT = 1024
"""The largest loss weight: the sum over a row is counted in units of 2**-32 and must fit int64."""


@dataclass(frozen=True, slots=True)
class NumberLists:
    """A column of lists: list i is `values[offsets[i]:offsets[i] + lengths[i]]`. Other values belong to no list."""

    name: str
    values: NDArray[Any]
    offsets: Ints
    lengths: Ints
    is_null: NDArray[np.bool_] | None = None
    """Which values are null (and 0 in `values`); None where none is."""

    @property
    def smallest(self) -> float:
        return self._used.min(initial=0)

    @property
    def largest(self) -> float:
        return self._used.max(initial=0)

    @property
    def _used(self) -> NDArray[Any]:
        if not len(self.offsets):
            return self.values[:0]
        return self.values[self.offsets[0] : self.offsets[-1] + self.lengths[-1]]

    def null_rows(self) -> dict[int, str]:
        if self.is_null is None:
            return {}
        return {row: f"{self.name!r} has a null inside its list" for row in self.rows_where(self.is_null)}

    def rows_where(self, is_wrong: NDArray[np.bool_]) -> dict[int, Any]:
        """The lists with a wrong value, in order, with the first such value of each."""
        places = np.flatnonzero(is_wrong)
        row = self.offsets.searchsorted(places, side="right") - 1
        inside = (row >= 0) & (places < self.offsets[row] + self.lengths[row]) if len(self.offsets) else row >= 0
        rows, first = np.unique(row[inside], return_index=True)
        return dict(zip(rows.tolist(), self.values[places[inside][first]].tolist(), strict=True))

    def with_values(self, values: NDArray[Any]) -> NumberLists:
        return self if values is self.values else replace(self, values=values)

    def align_with(self, other: NumberLists) -> NDArray[Any]:
        """The values rearranged to the offsets of another column of lists of the same lengths."""
        if np.array_equal(self.offsets, other.offsets):
            return self.values
        aligned = np.zeros(len(other.values), self.values.dtype)  # only when the two columns were sliced differently
        within = np.arange(self.lengths.sum()) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        places, own = (np.repeat(lists.offsets, self.lengths) + within for lists in (other, self))
        aligned[places] = self.values[own]
        return aligned


def list_parts(array: Any, name: str) -> NumberLists:
    offsets = numbers_of(array.offsets).astype(np.int64, copy=False)
    lengths = offsets[1:] - offsets[:-1]
    if array.null_count:
        lengths[~is_present(array)] = 0
    values, is_null = array.values, None
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    if values.null_count:
        is_null = ~is_present(values)
        values = values.fill_null(0)
    return NumberLists(name, numbers_of(values), offsets[:-1], lengths, is_null)


def note_bad_ids(tokens: NumberLists, special_ids: Sequence[int], bad: dict[int, str]) -> None:
    values = tokens.values
    if not np.can_cast(values.dtype, np.int32) and tokens.largest > MOST_ID:
        for row, value in tokens.rows_where(values > MOST_ID).items():
            bad[row] = f"token id {value} is not an id from 0 to {MOST_ID}, which int32 can hold"
    if values.dtype.kind == "i" and tokens.smallest < 0:
        for row, value in tokens.rows_where((values < 0) & ~np.isin(values, special_ids)).items():
            bad[row] = (
                f"token id {value} is below 0; Batch(special_ids=({value},)) allows it, as an input that no loss is taken on"
                if value >= -(2**31)
                else f"token id {value} is not an id that int32 can hold"
            )


def note_bad_weights(weights: NumberLists, bad: dict[int, str]) -> None:
    if weights.smallest >= 0 and weights.largest <= MOST_WEIGHT:  # both are false where there is a NaN
        return
    for row, value in weights.rows_where(~((weights.values >= 0) & (weights.values <= MOST_WEIGHT))).items():
        bad[row] = f"a loss weight is a number from 0 to {MOST_WEIGHT}, {weights.name!r} has {value}"


def combine_lists(column: pa.ChunkedArray[Any], arenas: Arenas) -> pa.Array[Any]:
    """A column of lists as one array. Plain numbers are copied into memory of `arenas`: a chunk takes megabytes, and fresh
    ones cost more than the copy."""
    chunks: list[Any] = column.chunks
    kind = column.type
    is_plain = pa.types.is_list(kind) and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))
    if len(chunks) < 2 or not is_plain or any(chunk.null_count or chunk.values.null_count for chunk in chunks):
        return combine_chunks(column)
    offsets = [numbers_of(chunk.offsets) for chunk in chunks]
    pieces = [numbers_of(chunk.values)[own[0] : own[-1]] for chunk, own in zip(chunks, offsets, strict=True)]
    total = sum(map(len, pieces))
    if total > MOST_ID:  # more than such offsets can say
        return combine_chunks(column)
    values = arenas.lease(total * pieces[0].itemsize).view(pieces[0].dtype)
    np.concatenate(pieces, out=values)
    numbers = pa.Array.from_buffers(kind.value_type, total, [None, pa.py_buffer(values.data)])
    lengths = np.concatenate([np.diff(own) for own in offsets])
    joined = np.zeros(len(lengths) + 1, np.int32)
    lengths.cumsum(out=joined[1:])
    buffers = [None, pa.py_buffer(joined.data)]
    return pa.Array.from_buffers(kind, len(lengths), buffers, children=[numbers])
