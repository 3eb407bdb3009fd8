"""A chunk in memory: decoded rows, their order, and the facts that planning uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SpecError
from overlord.sources.reading import table_bytes
from overlord.stream.facts import (
    WEIGHT_BITS,
    ChunkFacts,
    Ints,
    Losses,
    RowOrigins,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    unit_numbers: tuple[int, ...] = ()
    """The numbers of the units among those of the source."""

    def of_unit(self, index: int) -> Lineage:
        """That of the rows of one unit. Files that rows point into are those of the first."""
        one = slice(index, index + 1)
        mapped = self.mapped if index == 0 else ()
        return Lineage(self.units[one], np.zeros(1, np.int64), self.row_numbers[one], mapped, self.unit_numbers[one])

    def where(self, number: int) -> tuple[str, int]:
        """(file or unit, row in it); row -1 where a transform lost the lineage."""
        if number < 0:
            names = ", ".join(str(unit) for unit in self.units[:3])
            return (names, -1)
        index = int(np.searchsorted(self.first, number, side="right")) - 1
        row = number - int(self.first[index])
        numbers = self.row_numbers[index]
        return str(self.units[index]), row if numbers is None else int(numbers[row])

    def origins(self, number: Ints, token: Ints | None = None) -> RowOrigins:
        """Where the rows with these numbers were read, as columns. `token`: the first token of each within its document."""
        place = None
        row = number
        if len(self.units) > 1:
            place = np.searchsorted(self.first, number, side="right") - 1
            row = number - self.first[place]
        if any(numbers is not None for numbers in self.row_numbers):
            row = row.copy()
            for index, numbers in enumerate(self.row_numbers):
                if numbers is not None:
                    of_unit = (number >= 0) if place is None else (place == index)
                    row[of_unit] = numbers[row[of_unit]]
        if place is not None and len(number) and int(number.min()) < 0:  # the lineage of these is lost
            place, row = np.maximum(place, 0), np.where(number < 0, -1, row)
        small = [None if column is None else column.astype(np.int32) for column in (place, token)]
        return RowOrigins(self.unit_numbers, row.astype(np.int32), *small)


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
    file_bytes: int | None = None
    """The bytes of the saved file that all of its arrays are views of; None for a chunk that was made."""

    @property
    def end(self) -> Ints:
        return self.begin + self.facts.tokens

    @property
    def num_bytes(self) -> int:
        if self.shared is not None:
            return self.shared.num_bytes + self.origin.nbytes + self._facts_bytes
        if self.file_bytes is not None:
            return self.file_bytes
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

    def origins_of(self, source: str, number: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        """As `where`, for rows of this chunk, which is chunk `number` of `source`."""
        wrong = [row for row in rows if not 0 <= row < len(self.table_row)]
        if wrong:
            raise SpecError(
                f"chunk {number} of source {source!r} has {len(self.table_row):,} rows; there is no row {wrong[0]:,}: it "
                "was logged by another job, or its data has changed since"
            )
        return [self.where(int(self.table_row[row])) for row in rows]

    def count_losses(self, rows: Ints, starts: Ints, stops: Ints) -> Losses:
        """The loss of the tokens [start, stop) of rows."""
        begin = self.begin[rows] + starts
        end = np.minimum(self.begin[rows] + stops + 1, self.document_end[rows])
        lengths = np.maximum(end - begin - 1, 0)  # the tokens that are predicted: those after the first
        if self.mask is None:
            return Losses(lengths, np.zeros_like(lengths))
        ends = np.cumsum(lengths)
        predicted = self.mask[np.arange(int(lengths.sum())) + np.repeat(begin + 1 - (ends - lengths), lengths)]
        tokens = _sums(predicted != 0, ends, lengths)
        return Losses(tokens, _sums(_extra(predicted), ends, lengths) if is_weights(predicted) else np.zeros_like(tokens))


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


def _sums(values: NDArray[np.generic], ends: Ints, lengths: Ints) -> Ints:
    """The sum of each of some ranges that lie one after the other."""
    summed = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])  # may wrap around; the differences are still right
    return summed[ends] - summed[ends - lengths]


def _extra(weights: NDArray[np.generic]) -> Ints:
    """Each weight less 1 (0 for a weight of 0), in units of 2**-WEIGHT_BITS."""
    return np.rint(np.ldexp(weights.astype(np.float64) - (weights != 0), WEIGHT_BITS)).astype(np.int64)
