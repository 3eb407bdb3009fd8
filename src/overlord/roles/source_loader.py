"""A Source Loader: owns one source, or a share of it, and keeps a byte-bounded buffer of its chunks.

What it promises: `describe(k)` and `give(k, ...)` may be asked in any order, any number of times, from any thread, and
always answer the same, because a chunk is a function of its number. So the buffer may drop any chunk at any time and make
it again when it is asked for; it never holds more than its bytes. A chunk that one ask is making is made once.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor, Future
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from overlord.errors import BufferTooSmallError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy as np
    from numpy.typing import NDArray

    from overlord.chunks.chunk import Chunk
    from overlord.stream.facts import ChunkFacts


@dataclass(slots=True)
class _Making:
    """A chunk that is being made, or waits for a thread."""

    future: Future[Opened]
    since: float


@dataclass(slots=True)
class Opened:
    """A chunk whose rows are being handed out: row r is `values[begin[r]:...]`, of a document up to `document_end[r]`, which
    are the chunk's own, seen so that one entry costs little to read."""

    chunk: Chunk
    values: NDArray[np.integer] | None
    begin: memoryview
    document_end: memoryview
    left: int
    """Tokens (or rows, for a source without text) and images that were not handed out yet. Counted down without a lock: a
    note lost to another thread only keeps the chunk until it is released."""
    tokens: int
    num_bytes: int
    mask: NDArray[np.generic] | None

    @staticmethod
    def of(chunk: Chunk) -> Opened:
        tokens, images = int(chunk.facts.tokens.sum()), chunk.facts.images
        # Images are counted too, because others may ask for them than for the text.
        left = (tokens or chunk.facts.num_rows) + (0 if images is None else int(images.count.sum()))
        rows = chunk.begin.data, chunk.document_end.data
        return Opened(chunk, chunk.values, *rows, left, tokens, chunk.num_bytes, chunk.mask)


@dataclass(frozen=True, slots=True)
class Work:
    """What a loader has done so far, in all."""

    num_chunks: int = 0
    cpu_s: float = 0.0
    """Of processor time in the threads that made chunks."""
    wait_s: float = 0.0
    """The rest of the time that making them took."""
    rows: int = 0
    tokens: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0
    """How long asks had to wait for a chunk."""

    def plus(self, other: Work) -> Work:
        return Work(
            self.num_chunks + other.num_chunks,
            self.cpu_s + other.cpu_s,
            self.wait_s + other.wait_s,
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.num_bytes + other.num_bytes,
            self.waited_s + other.waited_s,
        )

    def minus(self, other: Work) -> Work:
        return self.plus(Work(*(-value for value in astuple(other))))


@dataclass(frozen=True, slots=True)
class BufferUse:
    """How a loader's buffer stands."""

    num_chunks: int
    num_bytes: int
    peak_bytes: int
    limit_bytes: int
    chunks_made: int

    def plus(self, other: BufferUse) -> BufferUse:
        return BufferUse(
            self.num_chunks + other.num_chunks,
            self.num_bytes + other.num_bytes,
            self.peak_bytes + other.peak_bytes,
            self.limit_bytes + other.limit_bytes,
            self.chunks_made + other.chunks_made,
        )


_QUICK_S = 0.01  # to make a chunk: several ahead of time are hardly felt


class SourceLoader:
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        make: Callable[[int], Chunk],
        expected_bytes: Callable[[int], int],
        buffer_bytes: int,
        threads: Executor,
        clock: Callable[[], float] = time.monotonic,
        at_close: Callable[[], None] | None = None,
        makes_ahead: bool = True,
    ) -> None:
        """`makes_ahead`: whether `made_ahead` may make chunks, because none of them can keep one waiting for long."""
        self._makes_ahead = makes_ahead
        self._at_close = at_close
        self._name = name
        self._make = make
        self._expected_bytes = expected_bytes
        self._limit = buffer_bytes
        self._threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._chunks: dict[int, Opened] = {}
        self.find = self._chunks.get
        """The chunk of a number if it is in the buffer, without asking for it."""
        self._facts: dict[int, ChunkFacts] = {}
        self._making: dict[int, _Making] = {}
        self._failed: set[int] = set()  # chunks that could not be made ahead
        self._keep_from = 0
        self._bytes = 0
        self._peak = 0
        self._made = Work()
        self._seen_ratio = 1.0  # decoded bytes per byte that the unit list promised
        self._closed = False

    def describe(self, chunk: int, keep_from: int = 0) -> ChunkFacts:
        """The facts of a chunk. Chunks before `keep_from` will not be asked for again, if all goes well."""
        with self._lock:
            self._release_before(keep_from)
            facts = self._facts.get(chunk)
        return self._obtain(chunk, needed=False).chunk.facts if facts is None else facts

    def known(self, chunk: int, keep_from: int = 0) -> ChunkFacts | None:
        """The facts of a chunk if it is in the buffer."""
        with self._lock:
            self._release_before(keep_from)
            return self._facts.get(chunk) if chunk in self._chunks else None

    def made_ahead(self, number: int) -> ChunkFacts | None:
        """Make a chunk now that will be asked for soon; None if there is no room for it, if that would hold up whoever asks,
        or if it cannot be made: why is said when it is asked for."""
        with self._lock:
            is_quick = self._makes_ahead and self._made.cpu_s + self._made.wait_s <= _QUICK_S * self._made.num_chunks
            has_room = self._bytes + self._expected(number) <= self._limit
            is_known = number in self._facts or number in self._failed
            if self._closed or is_known or not (is_quick and has_room):
                return None
        try:
            return self._obtain(number, needed=False).chunk.facts
        except Exception:  # noqa: BLE001 - and raised again when somebody needs the chunk
            with self._lock:
                self._failed.add(number)
            return None

    def opened(self, number: int) -> Opened:
        """The chunk itself, for handing out its rows."""
        found = self._chunks.get(number)
        if found is not None:
            return found
        return self._obtain(number, needed=True)

    def let_go(self, number: int) -> None:
        """Drop a chunk if all of it was handed out."""
        with self._lock:
            found = self._chunks.get(number)
            if found is not None and found.left <= 0:
                self._drop(number)

    def prefetch(self, number: int) -> None:
        """Begin to make a chunk, if the buffer has room for it beside what it holds."""
        with self._lock:
            if self._closed or number in self._chunks or number in self._making or number in self._facts:
                return
            reserved = sum(self._expected(other) for other in self._making)
            if self._bytes + reserved + self._expected(number) > self._limit:
                return
            self._making[number] = _Making(self._threads.submit(self._made_here, number), self._clock())

    def status_lines(self) -> list[str]:
        """What this loader is busy with, for whoever waits for it."""
        now = self._clock()
        with self._lock:
            making = sorted(self._making.items())
        return [
            f"source {self._name!r} is {'making' if m.future.running() else 'waiting for a thread to make'} chunk {k} "
            f"for {now - m.since:.1f} s"
            for k, m in making
        ]

    def buffer_use(self) -> BufferUse:
        with self._lock:
            return BufferUse(len(self._chunks), self._bytes, self._peak, self._limit, self._made.num_chunks)

    def work(self) -> Work:
        with self._lock:
            return self._made

    def holding(self) -> list[int]:
        """The chunks that are in the buffer or being made for it."""
        with self._lock:
            return sorted({*self._chunks, *self._making})

    def mirror(self, numbers: Collection[int]) -> None:
        """Hold these chunks, as far as they fit, lowest first, and of others only later ones."""
        newest = max(numbers, default=-1)
        with self._lock:
            for number in [k for k in self._chunks if k not in numbers and k < newest]:
                self._drop(number)
            for number in [k for k in self._facts if k not in self._chunks]:
                del self._facts[number]  # else a chunk that was dropped for room would not be made again
        for number in sorted(numbers):
            self.prefetch(number)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            making, self._making = list(self._making.values()), {}
            self._chunks.clear()
            self._bytes = 0
        for entry in making:
            entry.future.cancel()
        self._let_go_of_source()

    def _let_go_of_source(self) -> None:
        if self._at_close is not None:
            self._at_close()

    def _obtain(self, number: int, needed: bool) -> Opened:
        began = self._clock()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the loader of source {self._name!r} is closed")
            found = self._chunks.get(number)
            if found is not None:
                return found
            entry = self._making.get(number)
            # No thread has begun it: make it here rather than wait, so that asks never wait in a circle.
            is_mine = entry is None or entry.future.cancel()
            if entry is None or is_mine:
                entry = self._making[number] = _Making(Future(), began)
                entry.future.set_running_or_notify_cancel()
        opened = self._made_for_all(number, entry.future) if is_mine else entry.future.result()
        with self._lock:
            self._made = self._made.plus(Work(waited_s=self._clock() - began))
            return self._admit(number, opened, needed=True) if needed else opened

    def _made_for_all(self, number: int, future: Future[Opened]) -> Opened:
        """Make a chunk in this thread, for whoever else waits for it too."""
        try:
            opened = self._made_here(number)
        except BaseException as error:
            future.set_exception(error)
            raise
        future.set_result(opened)
        return opened

    def _made_here(self, number: int) -> Opened:
        began, began_cpu = self._clock(), time.thread_time()
        try:
            opened = Opened.of(self._make(number))
        except BaseException:
            with self._lock:
                self._making.pop(number, None)
            raise
        with self._lock:
            self._making.pop(number, None)
            self._made = self._made.plus(_work_on(opened, self._clock() - began, time.thread_time() - began_cpu))
            self._facts[number] = opened.chunk.facts
            opened = self._admit(number, opened, needed=False)
        if self._closed:
            self._let_go_of_source()  # once more: this read may have been under way then
        return opened

    def _admit(self, number: int, opened: Opened, needed: bool) -> Opened:
        """Keep the chunk if there is room; when it is needed now, make room by dropping others, lowest first. Gives the one
        that is kept, where there was one already."""
        if self._closed or number in self._chunks:
            return self._chunks.get(number, opened)
        size = opened.num_bytes
        expected = self._expected_bytes(number)
        if expected:
            self._seen_ratio = max(self._seen_ratio, size / expected)
        if size > self._limit:
            raise BufferTooSmallError(
                f"source {self._name!r}: chunk {number} takes {size:,} bytes decoded, but buffer_bytes is {self._limit:,}; "
                "raise buffer_bytes, lower window, or write the data with smaller row groups"
            )
        for other in sorted(self._chunks) if needed else [k for k in self._chunks if k < self._keep_from]:
            if self._bytes + size <= self._limit:
                break
            self._drop(other)
        if self._bytes + size <= self._limit:
            self._chunks[number] = opened
            self._bytes += size
            self._peak = max(self._peak, self._bytes)
        return opened

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

    def _expected(self, number: int) -> int:
        return int(self._expected_bytes(number) * self._seen_ratio)


def _work_on(made: Opened, seconds: float, cpu_s: float) -> Work:
    return Work(1, cpu_s, max(seconds - cpu_s, 0.0), made.chunk.facts.num_rows, made.tokens, made.num_bytes)
