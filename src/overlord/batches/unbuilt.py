"""Microbatches that are left to the trainer to build.

A trainer that has a data-parallel group to itself, on the machine of its loader hosts, maps the chunks that they share, and
builds its microbatches from them. So a batch is written by the process that reads it, and no other has to build or hold it.
What travels is the plan of each microbatch and where the rows of its chunks lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from overlord.batches.buffers import segment_of
from overlord.batches.text_fields import TokenRows, num_places, text_fields, token_views
from overlord.records import record
from overlord.runtime.shared_memory import address_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.batches.text_fields import BatchTerms
    from overlord.messages import Fields
    from overlord.runtime.shared_memory import SharedSegment
    from overlord.stream.facts import Ints, Samples


class NumbersAt(NamedTuple):
    """An array of numbers in a segment."""

    dtype: str
    offset: int
    """Of its first byte."""
    num_entries: int


@record
class ChunkPlace:
    """Where the tokens of a chunk lie in shared memory; `begin` and `document_end` (see `TokenRows`) are arrays of int64."""

    memory: NDArray[np.uint8]
    """An array in the segment. While it lives, the memory stays as it is."""
    values: NumbersAt
    begin: NumbersAt
    document_end: NumbersAt
    mask: NumbersAt | None

    @staticmethod
    def of(
        memory: NDArray[np.uint8],
        values: NDArray[np.integer] | None,
        begin: Ints,
        document_end: Ints,
        mask: NDArray[np.generic] | None,
    ) -> ChunkPlace | None:
        """The place of a chunk whose arrays lie in `memory`; None where that cannot be passed on to another process, or the
        chunk has no tokens."""
        segment = segment_of(memory)
        if segment is None or values is None:
            return None
        return ChunkPlace(
            memory,
            _at(segment, values),
            _at(segment, begin),
            _at(segment, document_end),
            None if mask is None else _at(segment, mask),
        )


def _at(segment: SharedSegment, array: NDArray[np.generic]) -> NumbersAt:
    return NumbersAt(array.dtype.str, address_of(array) - segment.address, len(array))


class PlacedChunk(TokenRows, Protocol):
    """A chunk of which is known where it lies."""

    @property
    def place(self) -> ChunkPlace | None:
        """None where it cannot be lent to another process."""
        ...


@record
class UnbuiltMicrobatch:
    """A microbatch of text, and the chunks that its samples are in. The first fields are those of `MicroPlan`."""

    samples: Samples
    row: Ints
    num_rows: int
    row_tokens: int
    chunks: Mapping[tuple[int, int], TokenRows]
    """By source and number. Where the microbatch is to be sent, they are `PlacedChunk`."""
    terms: BatchTerms
    weighted: bool

    @property
    def num_tokens(self) -> int:
        """As the field of this name will be."""
        return num_places(self, self.terms)

    def build(self, arenas: Arenas | None = None) -> Fields:
        """The fields, as `collate` would make them."""
        samples, chunks = self.samples, self.chunks
        found = [chunks[key] for key in zip(*samples.table[:2].tolist(), strict=True)]
        return text_fields(self, token_views(found, samples), self.terms, arenas, self.weighted)
