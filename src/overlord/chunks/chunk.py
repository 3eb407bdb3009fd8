"""A chunk in memory: decoded rows, their order, and the facts that planning uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from overlord.sources.reading import table_bytes
from overlord.stream.facts import (
    WEIGHT_BITS,
    ChunkFacts,
    Ints,
    LossCount,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from numpy.typing import NDArray

    from overlord.chunks.shared_rows import RowsInMemory
    from overlord.declare.source import Unit
    from overlord.sources.storage import MappedFile


@dataclass(frozen=True, slots=True)
class Lineage:
    """The origin of the rows of a chunk, by their number in reading order."""

    units: tuple[Unit, ...]
    first: Ints
    """The number of each unit's first row."""
    row_numbers: tuple[NDArray[np.int64] | None, ...]
    mapped: tuple[MappedFile, ...] = ()
    """Files that the rows point into: they do not count as memory of the chunk."""

    def where(self, number: int) -> tuple[str, int]:
        """(file or unit, row in it); row -1 where a transform lost the lineage."""
        if number < 0:
            names = ", ".join(str(unit) for unit in self.units[:3])
            return (names, -1)
        index = int(np.searchsorted(self.first, number, side="right")) - 1
        row = number - int(self.first[index])
        numbers = self.row_numbers[index]
        return str(self.units[index]), row if numbers is None else int(numbers[row])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Row r of the chunk is the tokens `values[begin[r]:end[r]]`, part of the document that ends at `document_end[r]`.

    `table_row[r]` is its row of `table`. `origin` is the number of each row of the table among the rows that were
    read (-1 where a transform lost its lineage).
    """

    facts: ChunkFacts
    table: pa.Table
    table_row: Ints
    origin: Ints
    lineage: Lineage
    values: NDArray[np.integer] | None = None
    begin: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    document_end: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    mask: NDArray[np.generic] | None = None
    """One entry per token of `values`, 0 where predicting it has no loss: integers, or loss weights as float32."""
    shared: RowsInMemory | None = None
    """The shared memory that the rows lie in; None for a chunk of this process alone."""

    @property
    def end(self) -> Ints:
        return self.begin + self.facts.tokens

    @property
    def num_bytes(self) -> int:
        if self.shared is not None:
            return self.shared.num_bytes + self.origin.nbytes + self._facts_bytes
        own_mask = (
            self.mask.nbytes if self.mask is not None and self.mask.flags.owndata else 0
        )  # a mask that is a view is counted with the table
        per_row = self.table_row.nbytes + self.origin.nbytes + self.begin.nbytes + self.document_end.nbytes
        return table_bytes(self.table, self.lineage.mapped) + per_row + self._facts_bytes + own_mask

    @property
    def _facts_bytes(self) -> int:
        return self.facts.tokens.nbytes * 2 + sum(column.nbytes for column in self.facts.sizes.values())

    def where(self, table_row: int) -> tuple[str, int]:
        """The unit and the row in it that a row of the table was read from."""
        return self.lineage.where(int(self.origin[table_row]))

    def count_loss(self, row: int, start: int, stop: int) -> LossCount:
        """The loss of the tokens [start, stop) of a row."""
        begin = int(self.begin[row]) + start
        end = min(int(self.begin[row]) + stop + 1, int(self.document_end[row]))
        if self.mask is None:
            return LossCount(max(end - begin - 1, 0))
        predicted = self.mask[begin + 1 : end]
        return LossCount(int(np.count_nonzero(predicted)), int(_extra(predicted).sum()) if is_weights(predicted) else 0)


@dataclass(frozen=True, slots=True)
class Documents:
    """The token column of a table: document i is `values[offsets[i]:offsets[i] + lengths[i]]`."""

    values: NDArray[np.integer]
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that the long-document policy makes of documents, in reading order. Row r is the tokens from `begin` to `end`
    of the document that ends at `document_end`: at its real end, or at the cut where it was truncated."""

    document: Ints
    begin: Ints
    end: Ints
    document_end: Ints
    counts: Mapping[str, int]
    are_documents: bool = False
    """Whether each document is one row."""


def rows_of(documents: Documents, policy: str, most: int) -> Rows:
    """Documents as rows of at most `most` tokens. Empty documents are dropped and counted. The caller checks the
    policy `fail`."""
    offsets, lengths = documents.offsets, documents.lengths
    num_long = int(np.count_nonzero(lengths > most))
    if num_long == 0 and lengths.all():
        ends = offsets + lengths
        return Rows(np.arange(len(lengths)), offsets, ends, ends, {}, are_documents=True)
    index = np.flatnonzero(lengths > 0)
    counts = {"empty": len(lengths) - len(index)}
    if num_long == 0:
        return _whole_documents(documents, index, counts)
    if policy == "split":
        counts["split"] = num_long
        pieces = -(-lengths[index] // most)
        document = np.repeat(index, pieces)
        first = np.cumsum(pieces) - pieces
        start = (np.arange(len(document)) - np.repeat(first, pieces)) * most
        base, length = offsets[document], lengths[document]
        return Rows(document, base + start, base + np.minimum(start + most, length), base + length, counts)
    if policy == "truncate":
        counts["truncated"] = num_long
        ends = offsets[index] + np.minimum(lengths[index], most)
        return Rows(index, offsets[index], ends, ends, counts)
    counts["dropped"] = num_long
    return _whole_documents(documents, index[lengths[index] <= most], counts)


def _whole_documents(documents: Documents, index: Ints, counts: Mapping[str, int]) -> Rows:
    ends = documents.offsets[index] + documents.lengths[index]
    return Rows(index, documents.offsets[index], ends, ends, counts)


def is_weights(mask: NDArray[np.generic]) -> bool:
    """Whether a mask has loss weights."""
    return mask.dtype.kind == "f"


def loss_tokens(begin: Ints, end: Ints, document_end: Ints, mask: NDArray[np.generic] | None) -> Ints:
    """Loss tokens of each row: tokens that have a successor in their document, less those whose successor is masked."""
    if mask is None and end is document_end:
        return np.maximum(end - begin - 1, 0)
    if mask is None:
        return np.maximum(np.minimum(end + 1, document_end) - begin - 1, 0)
    return _sum_over_labels(begin, end, document_end, mask != 0)


def loss_extra(begin: Ints, end: Ints, document_end: Ints, weights: NDArray[np.generic]) -> Ints:
    """The LOSS_EXTRA of each row."""
    return _sum_over_labels(begin, end, document_end, _extra(weights))


def _sum_over_labels(begin: Ints, end: Ints, document_end: Ints, per_token: NDArray[np.generic]) -> Ints:
    """The sum over the tokens that each row predicts: those after its first, and the one after its last."""
    last = np.minimum(end + 1, document_end)
    # Sums over a whole chunk may wrap around; differences of wrapped sums are still right.
    summed = np.concatenate([[0], np.cumsum(per_token, dtype=np.int64)])
    return summed[last] - summed[np.minimum(begin + 1, last)]


def _extra(weights: NDArray[np.generic]) -> Ints:
    """Each weight less 1 (0 for a weight of 0), in units of 2**-WEIGHT_BITS."""
    return np.rint(np.ldexp(weights.astype(np.float64) - (weights != 0), WEIGHT_BITS)).astype(np.int64)
