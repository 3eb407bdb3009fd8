"""Drawing samples by weight. The order of draws is a function of the weights and the facts, wherever a run is cut.

Every source moves along one virtual time: a sample of size s (1, or its tokens) of a source with weight w takes s / w of
it, and the sample whose middle comes first is drawn next. So at any moment a source is within half a sample of its share
of the virtual time, and sources do not influence each other's order. Draws are made in blocks: what is known of all
sources is merged up to the first moment at which something is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlord.errors import DataError
from overlord.planning.facts import ChunkFacts, Floats, Ints, Samples
from overlord.planning.progress import Progress
from overlord.spec import Stop

Describe = Callable[[int, int], ChunkFacts]
"""(source index, chunk) to facts."""

_MOST_ROWS_OF_A_SOURCE = 8192  # per block: keeps the first step quick when chunks are huge


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a source is: chunks in an epoch, and epochs until it ends (None: never)."""

    chunks_per_epoch: int
    num_epochs: int | None

    @property
    def end(self) -> int | None:
        return None if self.num_epochs is None else self.chunks_per_epoch * self.num_epochs


@dataclass(slots=True)
class _Lane:
    """One source inside a queue: the chunk it is in, and the virtual times of that chunk's rows from `first` on."""

    source: int
    chunk: int
    first: int
    facts: ChunkFacts
    times: Floats
    row: int

    @property
    def left(self) -> int:
        return self.facts.num_rows - self.row


class DrawQueue:
    """The endless sequence of draws under fixed weights, from a progress on."""

    def __init__(
        self,
        progress: Progress,
        unit: str,
        stop: Stop,
        extents: Sequence[Extent],
        describe: Describe,
    ) -> None:
        self._at = progress  # where the current block begins
        self._by_tokens = unit == "tokens"
        self._stop = stop
        self._extents = extents
        self._describe = describe
        self._ended = False
        self._block = progress.carried.take(np.zeros(0, np.int64))
        self._block_tokens = np.zeros(0, np.int64)
        self._position = 0
        self._lanes: dict[int, _Lane] = {}
        self._rows_of_chunk: dict[int, tuple[int, int]] = {}
        self._dropped: set[int] = set()
        self._read_once = progress.read_once.copy()

    def next_samples(self, count: int) -> Samples:
        """The next `count` draws; fewer when the run ends before."""
        parts = []
        while count > 0 and (self._position < len(self._block) or self._refill()):
            end = min(self._position + count, len(self._block))
            parts.append(self._take_to(end))
            count -= len(parts[-1])
        return Samples.concatenated(parts) if parts else self._nothing()

    def next_tokens(self, tokens: int, multiple: int = 1) -> Samples:
        """The fewest next draws that hold at least `tokens` (documents padded to `multiple`); fewer at the run's end."""
        parts = []
        while tokens > 0 and (self._position < len(self._block) or self._refill()):
            before = self._block_tokens[self._position - 1] if self._position else 0
            sizes = self._block_tokens
            if multiple > 1:
                padded = -(-self._block.tokens[self._position :] // multiple) * multiple
                sizes, before = np.concatenate([np.zeros(self._position, np.int64), np.cumsum(padded)]), 0
            end = min(int(sizes.searchsorted(before + tokens)) + 1, len(self._block))
            tokens -= int(sizes[end - 1] - before)
            parts.append(self._take_to(end))
        return Samples.concatenated(parts) if parts else self._nothing()

    def bookmark(self) -> Callable[[], Progress]:
        """A function that gives the progress at this moment, computed when it is called."""
        at, block, position, rows_of_chunk = self._at, self._block, self._position, self._rows_of_chunk
        return lambda: _advance(at, block, position, self._by_tokens, rows_of_chunk)

    def _take_to(self, end: int) -> Samples:
        part = self._block.take(slice(self._position, end))
        self._position = end
        return part

    def _nothing(self) -> Samples:
        return Samples.none(self._at.names)

    def _refill(self) -> bool:
        """Replace the block, all drawn, by the next one. False when the run has ended."""
        if self._ended:
            return False
        self._at = self.bookmark()()
        for source in np.flatnonzero(self._at.weights > 0).tolist():
            if source not in self._dropped:
                self._enter(source)
        self._at = replace(self._at, read_once=self._read_once.copy())
        lanes = list(self._lanes.values())
        if self._ended or not lanes:
            self._ended = True
            self._block, self._block_tokens, self._position = self._nothing(), np.zeros(0, np.int64), 0
            return False
        self._rows_of_chunk = {lane.source: (lane.chunk, lane.facts.num_rows) for lane in lanes}
        self._block = self._merged(lanes)
        self._block_tokens = np.cumsum(self._block.tokens)
        self._position = 0
        return True

    def _enter(self, source: int) -> None:
        """See that the source's lane has rows to draw, or that the source has ended."""
        lane = self._lanes.get(source)
        if lane is not None and lane.left > 0:
            return
        at, extent = self._at, self._extents[source]
        chunk, row = int(at.chunk[source]), int(at.row[source])
        first_chunk = chunk
        while True:
            if extent.end is not None and chunk >= extent.end and self._has_ended(source):
                self._lanes.pop(source, None)
                return
            facts = self._describe(source, chunk)
            if row < facts.num_rows:
                break
            chunk, row = chunk + 1, 0
            if chunk - first_chunk > extent.chunks_per_epoch:
                raise DataError(
                    f"source {at.names[source]!r} gave no usable row in a whole epoch ({extent.chunks_per_epoch} chunks): "
                    "look at its filters, its bad-row policy and long_documents, or give it weight 0"
                )
        if (chunk, row) != (at.chunk[source], at.row[source]):
            at.chunk[source], at.row[source] = chunk, row  # at is this queue's own copy
        sizes = facts.tokens[row:] if self._by_tokens else np.ones(facts.num_rows - row, np.int64)
        middle = int(at.since[source]) + np.cumsum(sizes) - sizes / 2
        times = at.lead[source] + middle / at.weights[source]
        self._lanes[source] = _Lane(source, chunk, row, facts, times, row)

    def _has_ended(self, source: int) -> bool:
        """What the end of a finite source means; False when the source starts again."""
        if self._stop == "all_exhausted":
            self._read_once[source] = True
            active = [i for i in np.flatnonzero(self._at.weights > 0).tolist() if self._extents[i].end is not None]
            self._ended = bool(self._read_once[active].all())
            return self._ended
        self._dropped.add(source)
        self._ended = self._ended or self._stop == "first_exhausted"
        return True

    def _merged(self, lanes: list[_Lane]) -> Samples:
        horizon, bounding = min(
            (
                lane.times[min(lane.row - lane.first + _MOST_ROWS_OF_A_SOURCE, len(lane.times)) - 1],
                lane.source,
            )
            for lane in lanes
        )
        lanes = sorted(lanes, key=lambda lane: lane.source)
        times, spans = [], []
        for lane in lanes:  # over sources, not samples
            begin = lane.row - lane.first
            end = int(lane.times.searchsorted(horizon, "right" if lane.source <= bounding else "left"))
            if end > begin:
                times.append(lane.times[begin:end])
                spans.append((lane, lane.row, lane.first + end))
                lane.row = lane.first + end
        # Lanes come in the order of their sources, so a stable sort settles ties by source.
        order = np.argsort(np.concatenate(times), kind="stable")
        return _samples_of(self._at.names, spans).take(order)


def _samples_of(names: tuple[str, ...], spans: list[tuple[_Lane, int, int]]) -> Samples:
    counts = [end - begin for _, begin, end in spans]
    tokens = np.concatenate([lane.facts.tokens[begin:end] for lane, begin, end in spans])
    size_names = dict.fromkeys(name for lane, _, _ in spans for name in lane.facts.sizes)
    return Samples(
        source_names=names,
        source=np.repeat(np.array([lane.source for lane, _, _ in spans], np.int64), counts),
        chunk=np.repeat(np.array([lane.chunk for lane, _, _ in spans], np.int64), counts),
        row=np.concatenate([np.arange(begin, end) for _, begin, end in spans]),
        start=np.zeros(len(tokens), np.int64),
        stop=tokens,
        tokens=tokens,
        loss_tokens=np.concatenate([lane.facts.loss_tokens[begin:end] for lane, begin, end in spans]),
        sizes={
            name: np.concatenate(
                [
                    lane.facts.sizes[name][begin:end] if name in lane.facts.sizes else np.zeros(end - begin, np.int64)
                    for lane, begin, end in spans
                ]
            )
            for name in size_names
        },
    )


def _advance(
    at: Progress, block: Samples, position: int, by_tokens: bool, rows_of_chunk: dict[int, tuple[int, int]]
) -> Progress:
    """The progress after the first `position` draws of a block that begins at `at`."""
    n = len(at.names)
    drawn = np.bincount(block.source[:position], minlength=n)
    tokens = np.bincount(block.source[:position], weights=block.tokens[:position], minlength=n).astype(np.int64)
    chunk, row = at.chunk.copy(), at.row + drawn
    for source, (lane_chunk, num_rows) in rows_of_chunk.items():
        if lane_chunk == chunk[source] and row[source] >= num_rows:
            chunk[source], row[source] = lane_chunk + 1, 0
    return replace(
        at,
        chunk=chunk,
        row=row,
        samples=at.samples + drawn,
        tokens=at.tokens + tokens,
        since=at.since + (tokens if by_tokens else drawn),
        read_once=at.read_once.copy(),
    )


def reweighted(progress: Progress, weights: Floats, ended: Ints | np.ndarray) -> Progress:
    """The same progress under new weights: what each source is ahead of the others, in samples or tokens, is kept.

    A source that had no weight, or has none now, starts level with the one that is furthest behind.
    """
    if np.array_equal(weights, progress.weights):
        return progress
    stays = (progress.weights > 0) & (weights > 0) & ~ended
    lead = np.zeros(len(weights))
    if stays.any():
        position = progress.lead[stays] + progress.since[stays] / progress.weights[stays]
        ahead = (position - position.min()) * progress.weights[stays]
        lead[stays] = ahead / weights[stays]
    return replace(progress, weights=weights, lead=lead, since=np.zeros_like(progress.since))
