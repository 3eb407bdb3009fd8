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


class DrawQueue:
    """The endless sequence of draws under fixed weights, from a progress on.

    The pool holds the rows that are known, in the order of their virtual times. Every source with weight has rows in it, of
    one chunk each. The block is the part of the pool up to the first source's last known row: what comes after that row
    is not settled before more of that source is known.
    """

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
        self._read_once = progress.read_once.copy()
        self._lanes: dict[int, tuple[int, int]] = {}  # source to the chunk it is in and that chunk's rows
        self._last_times = np.full(len(progress.names), np.inf)  # of each source's last row in the pool
        self._run_out: list[int] = np.flatnonzero(progress.weights > 0).tolist()  # sources with no row in the pool
        self._pool, self._pool_times = Samples.none(progress.names), np.zeros(0)
        self._rows_of_chunk: dict[int, tuple[int, int]] = {}
        self._start_block(Samples.none(progress.names))

    def next_samples(self, count: int) -> Samples:
        """The next `count` draws; fewer when the run ends before."""
        parts = []
        while count > 0 and (self._position < len(self._block) or self._refill()):
            end = min(self._position + count, len(self._block))
            parts.append(self._take_to(end))
            count -= len(parts[-1])
        return Samples.concatenated(parts) if parts else Samples.none(self._at.names)

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
        return Samples.concatenated(parts) if parts else Samples.none(self._at.names)

    def bookmark(self) -> Callable[[], Progress]:
        """A function that gives the progress at this moment, computed when it is called."""
        at, block, position, rows_of_chunk = self._at, self._block, self._position, self._rows_of_chunk
        return lambda: _advance(at, block, position, self._by_tokens, rows_of_chunk)

    def _take_to(self, end: int) -> Samples:
        part = self._block.take(slice(self._position, end))
        self._position = end
        return part

    def _start_block(self, block: Samples) -> None:
        self._block = block
        self._block_tokens = np.cumsum(block.tokens)
        self._position = 0

    def _refill(self) -> bool:
        """Replace the block, all drawn, by the next one. False when the run has ended."""
        if self._ended:
            return False
        self._at = self.bookmark()()
        entered = [rows for source in self._run_out if (rows := self._enter(source)) is not None]
        self._run_out = []
        self._at = replace(self._at, read_once=self._read_once.copy())
        self._rows_of_chunk = dict(self._lanes)
        if self._ended or not self._lanes:
            self._ended = True
            self._start_block(Samples.none(self._at.names))
            return False
        if entered:
            self._merge(entered)
        self._start_block(self._settled())
        return True

    def _enter(self, source: int) -> tuple[Samples, Floats] | None:
        """The source's next rows and their virtual times; None when the source has ended."""
        at, extent = self._at, self._extents[source]
        chunk, row = int(at.chunk[source]), int(at.row[source])
        first_chunk = chunk
        while True:
            if extent.end is not None and chunk >= extent.end and self._has_ended(source):
                self._lanes.pop(source, None)
                self._last_times[source] = np.inf
                return None
            facts = self._describe(source, chunk)
            if row < facts.num_rows:
                break
            chunk, row = chunk + 1, 0
            if chunk - first_chunk > extent.chunks_per_epoch:
                raise DataError(
                    f"source {at.names[source]!r} gave no usable row in a whole epoch ({extent.chunks_per_epoch} chunks): "
                    "look at its filters, its bad-row policy and long_documents, or give it weight 0"
                )
        at.chunk[source], at.row[source] = chunk, row  # `at` is this queue's own copy
        end = min(row + _MOST_ROWS_OF_A_SOURCE, facts.num_rows)
        self._lanes[source] = (chunk, facts.num_rows)
        sizes = facts.tokens[row:end] if self._by_tokens else np.ones(end - row, np.int64)
        # From exact integers, so that a time does not depend on where a run was cut.
        middle = int(at.since[source]) + np.cumsum(sizes) - sizes / 2
        times = at.lead[source] + middle / at.weights[source]
        self._last_times[source] = times[-1]
        return _rows(at.names, source, chunk, facts, row, end), times

    def _has_ended(self, source: int) -> bool:
        """What the end of a finite source means; False when the source starts again."""
        if self._stop == "all_exhausted":
            self._read_once[source] = True
            active = [i for i in np.flatnonzero(self._at.weights > 0).tolist() if self._extents[i].end is not None]
            self._ended = bool(self._read_once[active].all())
            return self._ended
        self._ended = self._ended or self._stop == "first_exhausted"
        return True

    def _merge(self, entered: list[tuple[Samples, Floats]]) -> None:
        """Put new rows into the pool, by time and, where times are equal, by source."""
        samples = Samples.concatenated([self._pool, *(rows for rows, _ in entered)])
        times = np.concatenate([self._pool_times, *(times for _, times in entered)])
        order = np.argsort(times, kind="stable")  # quick on what is a few sorted runs
        in_order = times[order]
        if (in_order[1:] == in_order[:-1]).any():
            order = np.lexsort((samples.source, times))
            in_order = times[order]
        self._pool, self._pool_times = samples.take(order), in_order

    def _settled(self) -> Samples:
        """Take the rows out of the pool that come before anything that is not known yet."""
        bounding = int(self._last_times.argmin())  # of equal times the first source's, which is the one drawn first
        horizon = self._last_times[bounding]
        first, last = self._pool_times.searchsorted(horizon, "left"), self._pool_times.searchsorted(horizon, "right")
        end = int(first + np.count_nonzero(self._pool.source[first:last] <= bounding))
        block = self._pool.take(slice(0, end))
        self._pool, self._pool_times = self._pool.take(slice(end, None)), self._pool_times[end:]
        self._run_out.append(bounding)
        return block


def _rows(names: tuple[str, ...], source: int, chunk: int, facts: ChunkFacts, begin: int, end: int) -> Samples:
    tokens = facts.tokens[begin:end]
    return Samples(
        source_names=names,
        source=np.full(end - begin, source, np.int64),
        chunk=np.full(end - begin, chunk, np.int64),
        row=np.arange(begin, end),
        start=np.zeros(end - begin, np.int64),
        stop=tokens,
        tokens=tokens,
        loss_tokens=facts.loss_tokens[begin:end],
        sizes={name: column[begin:end] for name, column in facts.sizes.items()},
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
