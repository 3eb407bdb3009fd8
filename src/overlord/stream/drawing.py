"""Draws samples by weight. The order of draws is a function of the weights and the facts, wherever a run is cut.

All sources share one virtual time: a sample of size s (1, or its tokens) of a source with weight w takes s / w of it, and
the sample whose middle comes first is drawn next. So at any moment a source is within half a sample of its share of the
virtual time, and sources do not influence each other's order. Draws are made in blocks: the known rows of all sources are
merged up to the first moment for which some source's rows are not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from overlord.errors import DataError
from overlord.records import record
from overlord.stream.facts import (
    ChunkFacts,
    Floats,
    ImageSizes,
    Ints,
    Losses,
    Samples,
    TokenSpans,
)
from overlord.stream.packing import padded_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.declare.mixture import Stop
    from overlord.stream.progress import Progress
    from overlord.stream.skips import SkipSet


class FactSource(Protocol):
    """Where drawing gets facts from. Sources are named by their index."""

    def find(self, source: int, chunk: int) -> ChunkFacts | None:
        """The facts of a chunk if they are known. Where they are not, drawing raises `FactsMissing`: whoever draws fetches
        them and draws again."""
        ...

    def peek(self, source: int, chunk: int) -> ChunkFacts | None:
        """The facts of a chunk if it takes no waiting to get them."""
        ...

    @property
    def num_expected(self) -> int:
        """How many sources to announce the next chunk of, soonest first."""
        ...

    def expect(self, source: int, chunk: int) -> None:
        """Advice: this chunk will be described soon."""
        ...

    def count_losses(self, spans: TokenSpans) -> Losses:
        """The loss of tokens `start` to `stop` of rows, where only their loss masks tell. Raises `FactsMissing` where it is
        not known."""
        ...


class FactsMissing(Exception):
    """A step cannot be drawn before these facts are known. Nothing was drawn: the next try starts from the same place."""

    def __init__(self, chunks: Sequence[tuple[int, int]] = (), spans: TokenSpans | None = None) -> None:
        super().__init__("facts of chunks are not known yet")
        self.chunks = tuple(chunks)
        """(source, chunk) of each chunk whose facts are missing."""
        self.spans = spans
        """Parts of rows whose loss is missing."""


@record
class ComputedFacts:
    """Facts that functions of (source, chunk) compute: nothing is prefetched, and there are no loss masks."""

    compute: Callable[[int, int], ChunkFacts]
    at_hand: Callable[[int, int], ChunkFacts | None] | None = None

    def find(self, source: int, chunk: int) -> ChunkFacts | None:
        return self.compute(source, chunk)

    def peek(self, source: int, chunk: int) -> ChunkFacts | None:
        return None if self.at_hand is None else self.at_hand(source, chunk)

    @property
    def num_expected(self) -> int:
        return 0

    def expect(self, source: int, chunk: int) -> None:
        """Nothing is prepared."""

    def count_losses(self, spans: TokenSpans) -> Losses:
        raise NotImplementedError(f"computed facts have no loss masks, so no loss for {len(spans)} parts of rows")


_MOST_ROWS_OF_A_SOURCE = 8192  # per block: keeps the first step quick when chunks are huge
_ROWS_POOLED = 2048  # about: enough to visit each source rarely, few enough to merge quickly
_FEWEST_CHUNKS_TRIED = 16  # before a source counts as one without rows
_CHUNKS_EXTENDED = 8  # at most, in a block: about as many as are prefetched


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a source is: chunks in an epoch, and epochs until it ends (None: never)."""

    chunks_per_epoch: int
    num_epochs: int | None

    @property
    def end(self) -> int | None:
        return None if self.num_epochs is None else self.chunks_per_epoch * self.num_epochs

    def seconds_left(self, first: int, now: int, seconds: float) -> float | None:
        """The time until the source has been read to its end, an endless one to the end of its epoch, by how long it took to
        get from chunk `first` to chunk `now`. None where that is the same chunk."""
        if now <= first:
            return None
        end = -(-(now + 1) // self.chunks_per_epoch) * self.chunks_per_epoch if self.end is None else self.end
        return max(end - now, 0) * seconds / (now - first)

    @property
    def most_chunks_without_rows(self) -> int:
        """This many consecutive chunks without a usable row prove that the source has none.

        An epoch of n chunks has every unit once. So if some unit has a usable row, every whole epoch has one, and any 2 n
        consecutive chunks contain a whole epoch. The limit is higher where n is small, because a random filter may leave
        nothing of a few rows several times in a row.
        """
        return max(2 * self.chunks_per_epoch, _FEWEST_CHUNKS_TRIED)


@record
class _Block:
    """Draws that are known, in their order, and what the progress after some of them is computed from."""

    at: Progress
    """Where the block begins."""
    samples: Samples
    ends: Ints
    """The tokens of each sample and of those before it."""
    first_rows: Ints
    """For each source, the rows of the chunk where it begins the block."""
    lane_chunk: Ints
    lane_rows: Ints
    """For each source, the last chunk in the block, and its rows."""

    def __len__(self) -> int:
        return len(self.ends)

    def progress_after(self, num_draws: int, by_tokens: bool) -> Progress:
        return _advance(
            self.at,
            self.samples,
            num_draws,
            by_tokens=by_tokens,
            first_rows=self.first_rows,
            lane_chunk=self.lane_chunk,
            lane_rows=self.lane_rows,
        )


_Due = tuple["Span", Floats]
"""Rows for the pool, and their times."""


@dataclass(slots=True)
class _Lane:
    """One source inside a queue: a range of rows of one chunk, their virtual times, and how many of them are in the pool.
    `since` is the source's progress of that name after the range."""

    chunk: int
    facts: ChunkFacts
    first: int
    times: Floats
    since: int
    pooled: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.times)


class DrawQueue:
    """The endless sequence of draws under fixed weights, from a progress on.

    Draws are taken from blocks. Where the next block cannot be made because facts are missing, `FactsMissing` is raised, and
    the caller goes `back` to its `mark`: no draw is lost, and blocks that were made are not made again.
    """

    def __init__(
        self,
        progress: Progress,
        unit: str,
        stop: Stop,
        extents: Sequence[Extent],
        facts: FactSource,
        *,
        skips: SkipSet | None = None,
    ) -> None:
        self._maker = BlockMaker(progress, unit, stop, extents, facts, skips=skips)
        self._names = progress.names
        self._by_tokens = unit == "tokens"
        self._blocks = [self._maker.last]  # from that of the mark on
        self._number = 0  # of the current one among them
        self._position = self._marked = 0

    def mark(self) -> None:
        """Note this place in the sequence, for `back`."""
        if self._number:
            del self._blocks[: self._number]
            self._number = 0
        self._marked = self._position

    def back(self) -> None:
        """Return to the mark: what was drawn since is drawn again."""
        self._number, self._position = 0, self._marked

    def next_samples(self, count: int) -> Samples:
        """Draw the next `count` samples; fewer when the run ends."""
        parts: list[Samples] = []
        while count > 0 and self._has_more():
            block = self._blocks[self._number]
            parts.append(self._take_to(min(self._position + count, len(block))))
            count -= len(parts[-1])
        return Samples.concatenate(parts) if parts else Samples.none(self._names)

    def next_tokens(self, tokens: int, multiple: int = 1) -> Samples:
        """Draw until the samples hold at least `tokens` (documents padded to `multiple`), or the run ends."""
        parts: list[Samples] = []
        while tokens > 0 and self._has_more():
            block = self._blocks[self._number]
            sizes, before = block.ends, block.ends[self._position - 1] if self._position else 0
            if multiple > 1:
                padded = padded_lengths(block.samples.tokens[self._position :], multiple)
                sizes, before = np.concatenate([np.zeros(self._position, np.int64), np.cumsum(padded)]), 0
            end = min(int(sizes.searchsorted(before + tokens)) + 1, len(block))
            tokens -= int(sizes[end - 1] - before)
            parts.append(self._take_to(end))
        return Samples.concatenate(parts) if parts else Samples.none(self._names)

    @property
    def has_ended(self) -> bool:
        """True when there is nothing left to draw, now and later."""
        is_last = self._number == len(self._blocks) - 1
        return is_last and self._maker.has_ended and self._position == len(self._blocks[-1])

    @property
    def samples_at_hand(self) -> int:
        """Samples that can be drawn from known facts, up to the end of the block."""
        return len(self._blocks[self._number]) - self._position

    @property
    def tokens_at_hand(self) -> int:
        """The tokens of those samples."""
        block = self._blocks[self._number]
        if self._position == len(block):
            return 0
        return int(block.ends[-1] - (block.ends[self._position - 1] if self._position else 0))

    def bookmark(self, draws_ago: int = 0) -> Callable[[], Progress]:
        """A function that computes the progress at this moment, or some draws ago (not before the start of the block)."""
        return partial(self._blocks[self._number].progress_after, self._position - draws_ago, self._by_tokens)

    def _take_to(self, end: int) -> Samples:
        part = self._blocks[self._number].samples.take(slice(self._position, end))
        self._position = end
        return part

    def _has_more(self) -> bool:
        """Go to the next block if this one is all drawn. False when the run has ended."""
        while self._position == len(self._blocks[self._number]):
            if self._number == len(self._blocks) - 1:
                following = self._maker.make_next()
                if following is None:
                    return False
                self._blocks.append(following)
            self._number, self._position = self._number + 1, 0
        return True


class BlockMaker:
    """Makes the blocks of a queue, one after the other.

    Every source with weight has a lane. The pool holds the rows of all lanes up to the virtual time `_until`, in the order
    of their times. The block is the part of the pool up to the earliest last row of any lane: draws beyond that row depend
    on rows that are not known yet. A lane whose rows are all in the pool may be extended: replaced by a lane of the source's
    next rows, at most one chunk beyond that of the source's first row in the block. Pool, block and extensions bound the
    work; they never decide the order.
    """

    def __init__(
        self,
        progress: Progress,
        unit: str,
        stop: Stop,
        extents: Sequence[Extent],
        facts: FactSource,
        *,
        skips: SkipSet | None = None,
    ) -> None:
        self._skips = skips
        self._left_out: dict[int, tuple[int, Ints]] = {}  # source to a chunk and its rows that are left out
        self._at = progress  # where the last block begins
        self._by_tokens = unit == "tokens"
        self._stop = stop
        self._extents = extents
        self._facts = facts
        self.has_ended = False
        """True when no block comes after the last one."""
        self._read_once = progress.read_once.copy()
        self._lanes: dict[int, _Lane] = {}
        self._last_times = np.full(len(progress.names), np.inf)  # of each lane's last row
        self._run_out: list[int] = np.flatnonzero(progress.weights > 0).tolist()  # sources whose lane is all drawn
        self._pool = Pool.empty(progress.names)
        self._until = -np.inf
        self._first_rows = np.zeros(len(progress.names), np.int64)  # of all of the chunk where the source begins the block
        self._lane_chunk = np.full(len(progress.names), -1)
        self._lane_rows = np.zeros(len(progress.names), np.int64)  # of all of the lane's chunk
        self.last = self._block_of(Samples.none(progress.names))
        """The block that was made last; at first one without draws."""

    def _block_of(self, samples: Samples) -> _Block:
        return _Block(self._at, samples, samples.tokens.cumsum(), self._first_rows, self._lane_chunk, self._lane_rows)

    def make_next(self) -> _Block | None:
        """The block after the last one; None when the run has ended. Raises `FactsMissing` before anything changes."""
        if self.has_ended:
            return None
        at = self.last.progress_after(len(self.last), self._by_tokens)
        found = self._find_facts(at)
        self._at = at
        # Blocks refer to the old arrays, so these are copied rather than changed.
        self._first_rows = np.where(self._at.chunk == self._lane_chunk, self._lane_rows, self._first_rows)
        self._lane_chunk, self._lane_rows = self._lane_chunk.copy(), self._lane_rows.copy()
        is_first = not self._lanes
        entered = [source for source in self._run_out if self._enter(source, found)]
        self._run_out = []
        self._at.read_once[:] = self._read_once
        if self.has_ended or not self._lanes:
            self.has_ended = True
            self.last = self._block_of(Samples.none(self._at.names))
            return self.last
        due = self._rows_due(entered)
        while not due and len(self._pool.times) == 0:
            self._raise_until()
            due = self._rows_due(self._lanes)
        if not is_first:  # the first block should be there soon
            due += self._extend()
        if due:
            self._pool = self._pool.with_rows(samples_of(self._at.names, [span for span, _ in due]), [at for _, at in due])
        self.last = self._block_of(self._take_known())
        self._look_ahead()
        return self.last

    def _find_facts(self, at: Progress) -> dict[tuple[int, int], ChunkFacts]:
        """The facts of the next rows of every source whose lane is all drawn, as `_enter` will need them. Raises
        `FactsMissing` with all that are missing, so that one request gets them."""
        found: dict[tuple[int, int], ChunkFacts] = {}
        missing: list[tuple[int, int]] = []
        read_once = self._read_once.copy()
        for source in self._run_out:
            extent, first, row = self._extents[source], int(at.chunk[source]), int(at.row[source])
            for chunk in range(first, first + extent.most_chunks_without_rows):
                if extent.end is not None and chunk >= extent.end:
                    read_once[source] = True
                    if self._stop != "all_exhausted" or self._are_all_read(at, read_once):
                        break  # the source ends
                facts = self._facts.find(source, chunk)
                if facts is None:
                    missing.append((source, chunk))
                    break
                found[source, chunk] = facts
                if self._next_row(source, chunk, facts, row) < facts.num_rows:
                    break
                row = 0
        if missing:
            raise FactsMissing(missing)
        return found

    def _look_ahead(self) -> None:
        """Announce which chunks come next: those of the sources whose known rows run out first."""
        soonest: list[int] = self._last_times.argsort(kind="stable")[: self._facts.num_expected].tolist()
        for source in soonest:
            if source in self._lanes:
                chunk, end = self._lanes[source].chunk + 1, self._extents[source].end
                if end is None or chunk < end or self._stop == "all_exhausted":
                    self._facts.expect(source, chunk)

    def _enter(self, source: int, found: Mapping[tuple[int, int], ChunkFacts]) -> bool:
        """Give the source a lane of its next rows, from facts that were found; False when the source has ended."""
        at, extent = self._at, self._extents[source]
        chunk, row = int(at.chunk[source]), int(at.row[source])
        first_chunk, has_passed = chunk, False
        while True:
            has_none = chunk - first_chunk >= extent.most_chunks_without_rows
            if extent.end is not None and chunk >= extent.end:
                has_none = has_none or at.samples[source] == 0
            if has_none:
                raise DataError(
                    f"source {at.names[source]!r} gave no usable row in a whole epoch ({extent.chunks_per_epoch} chunks): "
                    "look at its filters, its bad-row policy, long_documents and what is skipped, or give it weight 0"
                )
            if extent.end is not None and chunk >= extent.end and self._end_source(source):
                self._lanes.pop(source, None)
                self._last_times[source], self._lane_chunk[source] = np.inf, -1
                return False
            facts = found[source, chunk]
            begin = self._next_row(source, chunk, facts, row)
            has_passed = has_passed or begin > row
            if begin < facts.num_rows:
                break
            chunk, row = chunk + 1, 0
        if not has_passed:  # a cursor stays before rows that are left out, wherever a run is cut
            at.chunk[source], at.row[source] = chunk, row  # `at` is this queue's own copy
        row = begin
        self._first_rows[source] = facts.num_rows
        self._begin_lane(source, chunk, facts, row, int(at.since[source]))
        return True

    def _begin_lane(self, source: int, chunk: int, facts: ChunkFacts, row: int, since: int) -> None:
        end = min(row + _MOST_ROWS_OF_A_SOURCE, self._next_left_out(source, chunk, facts, row))
        sizes = facts.tokens[row:end] if self._by_tokens else np.ones(end - row, np.int64)
        # From exact integers, so that a time does not depend on where a run was cut.
        ends = since + sizes.cumsum()
        times = self._at.lead[source] + (ends - sizes / 2) / self._at.weights[source]
        self._lanes[source] = _Lane(chunk, facts, row, times, ends.item(-1))
        self._last_times[source], self._lane_chunk[source], self._lane_rows[source] = times[-1], chunk, facts.num_rows

    def _extend(self) -> list[_Due]:
        """Extend the lanes that bound the block, as far as the facts of their next rows are at hand: one large block costs
        less than several small ones. Returns the rows for the pool."""
        extended: list[int] = []
        for source in self._last_times.argsort(kind="stable")[:_CHUNKS_EXTENDED].tolist():
            if self._last_times[source] > self._until or not self._extend_lane(source):
                break  # this one bounds the block
            extended.append(source)
        return self._rows_due(extended)

    def _extend_lane(self, source: int) -> bool:
        lane = self._lanes[source]
        row = self._next_row(source, lane.chunk, lane.facts, lane.end)
        if row < lane.facts.num_rows:
            self._begin_lane(source, lane.chunk, lane.facts, row, lane.since)
            return True
        chunk, end = lane.chunk + 1, self._extents[source].end
        # A source ends when its end is reached, not before.
        if chunk == end or lane.chunk != self._at.chunk[source]:
            return False
        facts = self._facts.peek(source, chunk)
        if facts is None or (row := self._next_row(source, chunk, facts, 0)) >= facts.num_rows:
            return False
        self._begin_lane(source, chunk, facts, row, lane.since)
        return True

    def _rows_left_out(self, source: int, chunk: int, facts: ChunkFacts) -> Ints | None:
        if self._skips is None or source not in self._skips.rows:
            return None
        known, rows = self._left_out.get(source, (-1, None))
        if rows is None or known != chunk:
            rows = self._skips.rows_of(source, facts)
            self._left_out[source] = chunk, rows
        return rows if len(rows) else None

    def _next_row(self, source: int, chunk: int, facts: ChunkFacts, row: int) -> int:
        """The first row from `row` on that is not left out; that after the last where there is none."""
        left_out = self._rows_left_out(source, chunk, facts)
        if left_out is None:
            return row
        at = int(left_out.searchsorted(row))
        while at < len(left_out) and left_out[at] == row:
            at, row = at + 1, row + 1
        return row

    def _next_left_out(self, source: int, chunk: int, facts: ChunkFacts, row: int) -> int:
        """The first row from `row` on that is left out; that after the last where there is none."""
        left_out = self._rows_left_out(source, chunk, facts)
        if left_out is None:
            return facts.num_rows
        at = int(left_out.searchsorted(row))
        return int(left_out[at]) if at < len(left_out) else facts.num_rows

    def _end_source(self, source: int) -> bool:
        """Note that a finite source came to its end. True when that ends it; False when it starts again."""
        if self._stop == "all_exhausted":
            self._read_once[source] = True
            self.has_ended = self._are_all_read(self._at, self._read_once)
            return self.has_ended
        self.has_ended = self.has_ended or self._stop == "first_exhausted"
        return True

    def _are_all_read(self, at: Progress, read_once: NDArray[np.bool_]) -> bool:
        """True if every finite source with weight was read once."""
        active = [i for i in np.flatnonzero(at.weights > 0).tolist() if self._extents[i].end is not None]
        return bool(read_once[active].all())

    def _raise_until(self) -> None:
        """Raise `_until`, so that the pool gets rows of all lanes."""
        lanes = self._lanes.values()
        soonest = min(lane.times[lane.pooled] for lane in lanes if lane.pooled < len(lane.times))
        ahead = sum((lane.times[-1] - lane.times[0]) / len(lane.times) for lane in lanes) / len(lanes)
        # Each source draws one row per mean distance between its rows, so this gives about _ROWS_POOLED rows.
        self._until = soonest + ahead * max(1, _ROWS_POOLED // len(lanes))

    def _rows_due(self, sources: Iterable[int]) -> list[_Due]:
        """The rows of these lanes that lie before `_until` and are not in the pool yet, which they enter now."""
        due: list[_Due] = []
        for source in sources:
            lane = self._lanes[source]
            end = int(lane.times.searchsorted(self._until, "right"))
            if end > lane.pooled:
                span = Span(source, lane.chunk, lane.facts, lane.first + lane.pooled, lane.first + end)
                due.append((span, lane.times[lane.pooled : end]))
                lane.pooled = end
        return due

    def _take_known(self) -> Samples:
        """Take the rows out of the pool whose turn comes before any row that is not known yet."""
        bounding = int(self._last_times.argmin())  # of equal times the first source's, which is drawn first
        horizon = self._last_times[bounding]
        if horizon > self._until:
            block, self._pool = self._pool.first(len(self._pool.times)), Pool.empty(self._at.names)
            return block
        end = self._pool.num_before(horizon, bounding)
        block, self._pool = self._pool.first(end), self._pool.without_first(end)
        self._run_out.append(bounding)
        return block


def _advance(
    at: Progress,
    block: Samples,
    position: int,
    *,
    by_tokens: bool,
    first_rows: Ints,
    lane_chunk: Ints,
    lane_rows: Ints,
) -> Progress:
    """The progress after the first `position` draws of a block that begins at `at`. A source whose chunk is all drawn stands
    at the start of the next one; a chunk has `lane_rows` rows if it is the lane's, else `first_rows`."""
    if position == 0:
        return replace(at, chunk=at.chunk.copy(), row=at.row.copy(), read_once=at.read_once.copy())
    n, source = len(at.names), block.source[:position]
    drawn = np.bincount(source, minlength=n)
    tokens = np.bincount(source, weights=block.tokens[:position], minlength=n).astype(np.int64)
    last = np.zeros(n, np.int64)
    last[source] = np.arange(position)  # the last assignment to a source wins
    has_drawn = drawn > 0
    chunk = np.where(has_drawn, block.chunk[last], at.chunk)
    row = np.where(has_drawn, block.row[last] + 1, at.row)
    all_drawn = has_drawn & (row >= np.where(chunk == lane_chunk, lane_rows, first_rows))
    row[all_drawn] = 0
    return replace(
        at,
        chunk=chunk + all_drawn,
        row=row,
        samples=at.samples + drawn,
        tokens=at.tokens + tokens,
        since=at.since + (tokens if by_tokens else drawn),
        read_once=at.read_once.copy(),
    )


def with_weights(progress: Progress, weights: Floats, ended: Ints | np.ndarray) -> Progress:
    """The same progress under new weights: the lead of each source over the others, in samples or tokens, is kept.

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


@record
class Pool:
    """Rows waiting for their turn: row `order[i]` of `rows`, which are in the order they came, has the time `times[i]`.

    Rows that were taken stay in `rows` until all are, so most rows are copied only twice, in and out.
    """

    rows: Samples
    order: Ints
    times: Floats

    @staticmethod
    def empty(names: tuple[str, ...]) -> Pool:
        return Pool(Samples.none(names), np.zeros(0, np.int64), np.zeros(0))

    def with_rows(self, new: Samples, times: Sequence[Floats]) -> Pool:
        rows = Samples.concatenate([self.rows, new]) if len(self.times) else new
        first = len(rows) - len(new)
        order = np.concatenate([self.order, np.arange(first, len(rows))])
        all_times = np.concatenate([self.times, *times])
        by_time = all_times.argsort(kind="stable")  # fast: the input is a few sorted runs
        in_order = all_times[by_time]
        if (in_order[1:] == in_order[:-1]).any():
            by_time = np.lexsort((rows.source[order], all_times))
            in_order = all_times[by_time]
        return Pool(rows, order[by_time], in_order)

    def num_before(self, time: float, source: int) -> int:
        """How many rows come before that time, or at that time from that source or an earlier one."""
        first, last = self.times.searchsorted(time, "left"), self.times.searchsorted(time, "right")
        return int(first + np.count_nonzero(self.rows.source[self.order[first:last]] <= source))

    def first(self, count: int) -> Samples:
        return self.rows.take(self.order[:count])

    def without_first(self, count: int) -> Pool:
        return Pool(self.rows, self.order[count:], self.times[count:])


@record
class Span:
    """Rows `begin` to `end` of a chunk."""

    source: int
    chunk: int
    facts: ChunkFacts
    begin: int
    end: int


def samples_of(names: tuple[str, ...], spans: Sequence[Span]) -> Samples:
    """The rows of each span, one span after the other."""
    counts = [span.end - span.begin for span in spans]
    rows = [(span.facts, span.begin, span.end) for span in spans]
    tokens = np.concatenate([facts.tokens[begin:end] for facts, begin, end in rows])
    size_names = dict.fromkeys(name for facts, _, _ in rows for name in facts.sizes)
    return Samples.of_columns(
        names,
        np.repeat(np.array([span.source for span in spans], np.int64), counts),
        np.repeat(np.array([span.chunk for span in spans], np.int64), counts),
        np.concatenate([np.arange(begin, end) for _, begin, end in rows]),
        np.zeros(len(tokens), np.int64),
        tokens,
        tokens,
        np.concatenate([facts.loss_tokens[begin:end] for facts, begin, end in rows]),
        sizes={
            name: np.concatenate(
                [
                    facts.sizes[name][begin:end] if name in facts.sizes else np.zeros(end - begin, np.int64)
                    for facts, begin, end in rows
                ]
            )
            for name in size_names
        },
        images=ImageSizes.concatenate(
            [None if facts.images is None else facts.images.take(slice(begin, end)) for facts, begin, end in rows], counts
        ),
    )
