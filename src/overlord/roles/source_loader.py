"""A Source Loader: owns one source, or a share of it, and keeps a byte-bounded buffer of its chunks.

What it promises: `describe(k)` and `get(k)` may be called in any order, any number of times, from any thread, and always
return the same, because a chunk is a function of its number. So the buffer may drop any chunk at any time and make it again
on the next request; it never holds more than its bytes. Concurrent requests for a chunk make it once.

`prefetch` tells a loader which chunks will be requested. It makes the first of them, and as many more as the pace of
requests asks for (`roles/reading_ahead.py`), side by side, while there are idle threads and room in the buffer. It goes on
by itself whenever a chunk was made, requested or released. Chunks that take little time may be left to whoever requests
them: inside one process, a thread that makes them ahead costs more by its share of the GIL than it saves.

The loader of a shadow holds what `mirror` says. Where it copies chunks from the loader that made them, it does not read
ahead, until `stand_in` says that the other loader is silent.
"""

from __future__ import annotations

import threading
import time
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from overlord.errors import BufferTooSmallError, ClosedError
from overlord.loaders.model import CHUNKS_AT_HAND
from overlord.roles.reading_ahead import ChunkPace
from overlord.runtime.recorder import current_recorder
from overlord.runtime.threads import StealingFuture, cpu_time
from overlord.status import BufferUse, LoadedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from overlord.chunks.chunk import Chunk
    from overlord.runtime.threads import Executor
    from overlord.stream.facts import ChunkFacts, Ints


@dataclass(slots=True)
class _Pending:
    """A chunk that is being made, or waits for a thread."""

    future: StealingFuture[HotChunk]
    since: float


@dataclass(slots=True)
class HotChunk:
    """A chunk whose rows are being delivered. Row r is `values[begin[r]:...]`, of a document that ends at `document_end[r]`;
    both are memoryviews of the chunk's own arrays, because reading one entry of an array costs more."""

    chunk: Chunk
    values: NDArray[np.integer] | None
    begin: memoryview
    document_end: memoryview
    left: int
    """Tokens (or rows, for a source without text) and images that were not delivered yet. Counted down without a lock: an
    update lost to another thread only keeps the chunk until it is released."""
    tokens: int
    num_bytes: int
    mask: NDArray[np.generic] | None

    @property
    def table(self) -> pa.Table:
        return self.chunk.table

    @property
    def table_row(self) -> Ints:
        return self.chunk.table_row

    @staticmethod
    def of(chunk: Chunk) -> HotChunk:
        tokens, images = int(chunk.facts.tokens.sum()), chunk.facts.images
        # Images count too, because their text may be delivered to other ranks at another time.
        left = (tokens or chunk.facts.num_rows) + (0 if images is None else int(images.count.sum()))
        rows = chunk.begin.data, chunk.document_end.data
        return HotChunk(chunk, chunk.values, *rows, left, tokens, chunk.num_bytes, chunk.mask)


@dataclass(frozen=True, slots=True)
class Work:
    """What a loader has done since it was made."""

    num_chunks: int = 0
    cpu_s: float = 0.0
    """CPU time of the threads while they made chunks."""
    wait_s: float = 0.0
    """The rest of the elapsed time: waiting for storage, or for the GIL."""
    rows: int = 0
    tokens: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0
    """How long requests waited for a chunk."""
    num_copied: int = 0
    """Chunks that were copied from another loader: none of the above counts them."""
    copied_bytes: int = 0
    copy_cpu_s: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(
            self.num_chunks + other.num_chunks,
            self.cpu_s + other.cpu_s,
            self.wait_s + other.wait_s,
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.num_bytes + other.num_bytes,
            self.waited_s + other.waited_s,
            self.num_copied + other.num_copied,
            self.copied_bytes + other.copied_bytes,
            self.copy_cpu_s + other.copy_cpu_s,
        )

    def loaded(self, num_pending: int = 0, buffer: BufferUse = BufferUse(0, 0, 0, 0, 0)) -> LoadedSource:  # noqa: B008 - frozen
        """The same for the metrics of a run."""
        return LoadedSource(
            num_chunks=self.num_chunks,
            rows=self.rows,
            tokens=self.tokens,
            num_bytes=self.num_bytes,
            make_s=self.cpu_s + self.wait_s,
            waited_s=self.waited_s,
            num_pending=num_pending,
            buffer=buffer,
        )

    def minus(self, other: Work) -> Work:
        return self.plus(Work(*(-value for value in astuple(other))))


class LoaderLostError(Exception):
    """A loader is gone or silent while a chunk was to be copied from it. Never leaves a loader host."""


_QUICK_S = 0.01  # to make a chunk: making one inline is hardly noticed
_COPIED_LATELY_S = 5.0


class SourceLoader:
    """Makes the chunks of one source and buffers them, within `buffer_bytes`. The module's docstring has the promises."""

    def __init__(  # noqa: PLR0913 - all but three by name
        self,
        name: str,
        make: Callable[[int], Chunk],
        expected_bytes: Callable[[int], int],
        *,
        buffer_bytes: int,
        ahead_bytes: int | None = None,
        threads: Executor,
        inline_s: float = 0.0,
        makes_inline: bool = False,
        on_made: Callable[[int, ChunkFacts], None] | None = None,
        at_close: Callable[[], None] | None = None,
        held_bytes: Callable[[], int] = int,
        last_of_run: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ahead_bytes`: prefetch beyond two chunks only within these bytes, by default all of the buffer; for a source that
        is spread over many loaders, each of which must have room for its largest chunks. `inline_s`: chunks that take no
        longer are left to the thread that requests them; for loaders whose threads contend for the GIL with that thread.
        `makes_inline`: `peek` makes a chunk in the caller's thread when that is quick, for loaders without threads. Both
        only where no read can block for long. `on_made` is called with the number and the facts of each chunk made.
        `held_bytes`: what the reader keeps in memory for the next chunks, which leaves less for reading ahead.
        `last_of_run`: the last of the chunks that this loader makes before others have their turn: while it waits for its
        turn it makes all of them."""
        self._name = name
        self._make = make
        self._expected_bytes = expected_bytes
        self._limit = buffer_bytes
        self._ahead_limit = buffer_bytes if ahead_bytes is None else ahead_bytes
        self._threads = threads
        self._inline_s = inline_s
        self._makes_inline = makes_inline
        self._on_made = on_made
        self._at_close = at_close
        self._held_bytes = held_bytes
        self._last_of_run = last_of_run
        self._clock = clock
        self._lock = threading.Lock()
        self._chunks: dict[int, HotChunk] = {}
        self.find = self._chunks.get
        """Returns a chunk if it is in the buffer, without a lock."""
        self._facts: dict[int, ChunkFacts] = {}
        self._pending: dict[int, _Pending] = {}
        self._copying: set[int] = set()  # nobody waits for these: a request makes the chunk
        self._is_mirror = False
        self._copied_at = -_COPIED_LATELY_S
        self._failed: set[int] = set()  # chunks that could not be made: not tried again before they are requested
        self._keep_from = 0
        self._bytes = 0
        self._peak = 0
        self._work = Work()
        self._pace = ChunkPace()
        self._coming: Sequence[int] = ()  # chunks that were announced and not requested yet, in the order of requests
        self._due = -1  # the chunk that is announced to be requested next
        self._last_requested = -1
        self._spans = current_recorder().spans
        self._seen_ratio = 1.0  # decoded bytes per byte that the list of units promised
        self._closed = False

    def describe(self, number: int, keep_from: int = 0) -> ChunkFacts:
        """Return the facts of a chunk. Chunks before `keep_from` are released: normally nobody requests them again."""
        with self._lock:
            self._note_request(number)
            self._release_before(keep_from)
            facts = self._facts.get(number)
        return self._obtain(number).chunk.facts if facts is None else facts

    def note_described(self, number: int, keep_from: int) -> None:
        """Note a request for facts that `on_made` has sent already."""
        with self._lock:
            self._note_request(number)
            self._release_before(keep_from)

    def peek(self, number: int, keep_from: int = 0, may_make: bool = True) -> ChunkFacts | None:
        """Return the facts of a chunk if that takes no waiting: it is buffered, or it may and can be made inline."""
        with self._lock:
            self._release_before(keep_from)
            if number in self._chunks:
                self._note_request(number)
                return self._facts.get(number)
        return self._make_if_quick(number) if may_make and self._makes_inline else None

    def get(self, number: int) -> HotChunk:
        """Return a chunk, for delivering its rows."""
        found = self._chunks.get(number)
        if found is not None:
            return found
        with self._lock:
            self._note_request(number)
        hot = self._obtain(number)
        with self._lock:
            return self._admit(number, hot, is_needed=True)

    def release_if_empty(self, number: int) -> None:
        """Drop a chunk if all of it was delivered."""
        with self._lock:
            found = self._chunks.get(number)
            if found is not None and found.left <= 0:
                self._drop(number)
                self._read_ahead()

    def release_before(self, number: int) -> None:
        """Drop the chunks before this one: normally nobody requests them again."""
        with self._lock:
            self._release_before(number)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Note which chunks will be requested, soonest first, in place of those noted before."""
        with self._lock:
            self._coming, self._due = numbers, numbers[0] if numbers else -1
            self._read_ahead()

    def status_lines(self) -> list[str]:
        """What this loader is busy with, one line a chunk."""
        now = self._clock()
        with self._lock:
            pending = sorted(self._pending.items())
        return [
            f"source {self._name!r} is {'making' if one.future.running() else 'waiting for a thread to make'} "
            f"chunk {number} for {now - one.since:.1f} s"
            for number, one in pending
        ]

    def buffer_use(self) -> BufferUse:
        with self._lock:
            num_bytes = self._bytes + self._held_bytes()
            peak = max(self._peak, num_bytes)
            return BufferUse(len(self._chunks), num_bytes, peak, self._limit, self._work.num_chunks)

    def work(self) -> Work:
        with self._lock:
            return self._work

    def counters(self, before: Work) -> LoadedSource:
        """What it has done, with what loaders of the source have done here `before` it."""
        with self._lock:
            work, num_pending = self._work.plus(before), len(self._pending)
        return work.loaded(num_pending, self.buffer_use())

    def chunks_held(self) -> list[int]:
        """The chunks that are in the buffer or on their way into it."""
        with self._lock:
            return sorted({*self._chunks, *self._pending, *self._copying})

    def chunks_copyable(self) -> list[int] | None:
        """The chunks in the buffer; None if some are not in shared memory, so that others cannot copy them."""
        with self._lock:
            are_shared = all(hot.chunk.shared is not None for hot in self._chunks.values())
            return sorted(self._chunks) if are_shared else None

    def chunks_to_save(self) -> tuple[dict[int, Chunk], int]:
        """The chunks in the buffer, and the first chunk that may still be needed."""
        with self._lock:
            return {number: hot.chunk for number, hot in self._chunks.items()}, self._keep_from

    def note_copied(self) -> None:
        """Note that a shadow copies chunks from here. What is being made is lost with this loader, so it is made earlier, by
        as much time as making it again takes."""
        self._copied_at = self._clock()

    def mirror(self, numbers: Collection[int], copy: Callable[[int], Chunk | None] | None = None) -> None:
        """Hold these chunks, lowest first, as far as they fit; of other chunks keep only later ones. They are made, or taken
        from `copy`. That returns None for a chunk which the other loader has dropped, and raises LoaderLostError if that
        loader is gone or silent: then the chunk is made."""
        newest = max(numbers, default=-1)
        with self._lock:
            self._is_mirror = copy is not None
            for number in [k for k in self._chunks if k not in numbers and k < newest]:
                self._drop(number)
            for number in [k for k in self._facts if k not in self._chunks]:
                del self._facts[number]  # else a chunk that was dropped for room would not be made again
            for number in sorted(numbers):
                if number in self._chunks or number in self._pending or number in self._copying:
                    continue
                if copy is None:
                    self._start(number, self._expected(number))
                elif self._has_room(self._expected(number)) and self._threads.submit_ahead(self._copy_now, number, copy):
                    self._copying.add(number)

    def stand_in(self) -> None:
        """Read ahead again: this loader has mirrored another one, which is silent."""
        if self._is_mirror:
            with self._lock:
                self._is_mirror = False
                self._read_ahead()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pending, self._pending = list(self._pending.values()), {}
            self._chunks.clear()
            self._bytes = 0
        for one in pending:
            one.future.cancel()
        self._close_source()

    def _note_request(self, number: int) -> None:
        if number <= self._last_requested:
            return
        self._last_requested = number
        self._pace = self._pace.with_request(self._clock())
        self._coming = [k for k in self._coming if k > number]
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Start making the chunks that should be in the making by now."""
        if self._is_mirror:
            return
        wanted = self._pace.num_ahead(self._threads.num_threads)
        if self._clock() - self._copied_at < _COPIED_LATELY_S:
            wanted *= 2
        last_of_run = -1 if self._last_of_run is None or not self._coming else self._last_of_run(self._coming[0])
        for place, number in enumerate(self._coming):
            is_due = number == self._due
            if place >= wanted and not is_due and number > last_of_run:
                break
            if any(number in known for known in (self._chunks, self._pending, self._facts, self._failed)):
                continue
            # A chunk that is made before it is due leaves room for one that is, and threads to other sources.
            room = self._expected(number) * (1 if is_due else 2)
            if not (is_due or self._threads.has_idle) or not self._start(number, room):
                break

    def _start(self, number: int, room: int) -> bool:
        """Start making a chunk. False if so many bytes are not free, or nobody would make it before it is requested."""
        if not self._has_room(room):
            return False
        if self._pace.waits and self._pace.make_s <= self._inline_s:
            return False
        future = self._threads.submit_ahead(self._make_now, number)
        if future is not None:
            self._pending[number] = _Pending(future, self._clock())
        return future is not None

    def _has_room(self, num_bytes: int) -> bool:
        """True if so many bytes are free beside the chunks that are on their way."""
        coming = {*self._pending, *self._copying}
        reserved = sum(self._expected(other) for other in coming)
        has_some = len(self._chunks) + len(coming) >= CHUNKS_AT_HAND and self._last_of_run is None
        limit = self._ahead_limit if has_some else self._limit
        return not self._closed and self._held_bytes() + self._bytes + reserved + num_bytes <= limit

    def _close_source(self) -> None:
        if self._at_close is not None:
            self._at_close()

    def _make_if_quick(self, number: int) -> ChunkFacts | None:
        """Make a chunk that will be requested soon. None if there is no room, if chunks of this source take long, or if it
        cannot be made: the request for the chunk reports why."""
        with self._lock:
            is_quick = self._work.cpu_s + self._work.wait_s <= _QUICK_S * self._work.num_chunks
            has_room = self._bytes + self._expected(number) <= self._limit
            is_known = number in self._facts or number in self._failed
            if self._closed or is_known or not (is_quick and has_room):
                return None
        try:
            return self._obtain(number).chunk.facts
        except Exception:  # noqa: BLE001 - raised again by the request that needs the chunk
            return None

    def _obtain(self, number: int) -> HotChunk:
        """Return a chunk: from the buffer, from the thread that is making it, or made here."""
        began = self._clock()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the loader of source {self._name!r} is closed")
            found = self._chunks.get(number)
            if found is not None:
                return found
            pending = self._pending.get(number)
            if pending is None or pending.future.cancelled():  # by the end of its threads
                pending = self._pending[number] = _Pending(StealingFuture(partial(self._make_now, number)), began)
            is_made = pending.future.running()  # by another thread
        began_at = time.perf_counter()
        hot = self._threads.wait_for(pending.future)
        if is_made and self._spans.is_on:
            self._spans.add(f"wait for chunk {number} of {self._name}", began_at)
        with self._lock:
            self._work = self._work.plus(Work(waited_s=self._clock() - began))
        return hot

    def _make_now(self, number: int) -> HotChunk:
        began, began_cpu, began_at = self._clock(), cpu_time(), time.perf_counter()
        try:
            hot = HotChunk.of(self._make(number))
        except BaseException:
            with self._lock:
                self._pending.pop(number, None)
                self._failed.add(number)
            raise
        seconds, cpu_s = self._clock() - began, cpu_time() - began_cpu
        work = _work_on(hot, seconds, cpu_s)
        if self._spans.is_on:
            facts: dict[str, Any] = {"rows": work.rows, "tokens": work.tokens, "bytes": work.num_bytes}
            self._spans.add(f"make chunk {number} of {self._name}", began_at, **facts, cpu_s=round(cpu_s, 6))
        with self._lock:
            self._pending.pop(number, None)
            self._work = self._work.plus(work)
            self._pace = self._pace.with_chunk(work.cpu_s, work.wait_s)
            self._facts[number] = hot.chunk.facts
            hot = self._admit(number, hot, is_needed=False)
            self._read_ahead()
        if self._on_made is not None:
            self._on_made(number, hot.chunk.facts)
        if self._closed:
            self._close_source()  # once more: this read may have reopened files after the first time
        return hot

    def _copy_now(self, number: int, copy: Callable[[int], Chunk | None]) -> None:
        began_cpu = cpu_time()
        is_lost, hot = False, None
        try:
            chunk = copy(number)
            hot = None if chunk is None else HotChunk.of(chunk)
        except LoaderLostError:
            is_lost = True
        finally:
            with self._lock:
                self._copying.discard(number)
                if hot is not None:
                    copied = Work(num_copied=1, copied_bytes=hot.num_bytes, copy_cpu_s=cpu_time() - began_cpu)
                    self._work = self._work.plus(copied)
                    self._facts[number] = hot.chunk.facts
                    self._admit(number, hot, is_needed=False)
                if is_lost:
                    self._is_mirror = False
                    if number not in self._chunks and number not in self._pending:
                        self._start(number, self._expected(number))
                    self._read_ahead()

    def _admit(self, number: int, hot: HotChunk, is_needed: bool) -> HotChunk:
        """Buffer a chunk if there is room; one that is needed now makes room by dropping others, lowest first. Returns the
        chunk that was buffered under this number already, if there is one."""
        if self._closed or number in self._chunks:
            return self._chunks.get(number, hot)
        size = hot.num_bytes
        expected = self._expected_bytes(number)
        if expected:
            self._seen_ratio = max(self._seen_ratio, size / expected)
        if size > self._limit:
            raise BufferTooSmallError(
                f"source {self._name!r}: chunk {number} takes {size:,} bytes decoded, but buffer_bytes is {self._limit:,}; "
                "raise buffer_bytes, lower window, or write the data with smaller row groups"
            )
        # A source that is spread over several loaders has its bytes over all of them, but each keeps a few chunks at hand.
        limit = max(self._limit if self._last_of_run else self._ahead_limit, CHUNKS_AT_HAND * size)
        held = self._held_bytes()
        limit = min(max(limit - held, CHUNKS_AT_HAND * size), self._limit)
        for other in sorted(self._chunks) if is_needed else [k for k in self._chunks if k < self._keep_from]:
            if self._bytes + size <= limit:
                break
            self._drop(other)
        if self._bytes + size <= limit:
            self._chunks[number] = hot
            self._bytes += size
            self._peak = max(self._peak, self._bytes + held)
        return hot

    def _drop(self, number: int) -> None:
        dropped = self._chunks.pop(number, None)
        if dropped is not None:
            self._bytes -= dropped.num_bytes

    def _release_before(self, keep_from: int) -> None:
        if keep_from <= self._keep_from:
            return
        self._keep_from = keep_from
        for number in [k for k in self._chunks if k < keep_from]:
            self._drop(number)
        for number in [k for k in self._facts if k < keep_from]:
            del self._facts[number]
        self._failed = {k for k in self._failed if k >= keep_from}
        self._read_ahead()

    def _expected(self, number: int) -> int:
        return int(self._expected_bytes(number) * self._seen_ratio)


def _work_on(hot: HotChunk, seconds: float, cpu_s: float) -> Work:
    return Work(1, cpu_s, max(seconds - cpu_s, 0.0), hot.chunk.facts.num_rows, hot.tokens, hot.num_bytes)
