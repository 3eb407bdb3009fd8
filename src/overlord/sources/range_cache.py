"""Bytes of remote storage on a local disk: kept for later epochs and runs, and fetched ahead of the chunks that need them.

A range of a file is an entry under the file's path, size and version, so an object that changes is another entry. Threads of
one process that need the same range fetch it once.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

from overlord.caches.folder import digest_key, shared_folder
from overlord.errors import OverlordError
from overlord.runtime.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from overlord.caches.folder import CacheFolder
    from overlord.declare.cache import Cache
    from overlord.sources.storage import Storage, StoredFile

KIND = "files"
RangeOfFile: TypeAlias = "tuple[StoredFile, int, int]"
"""A file, and the first and the last byte but one to read of it."""

_LISTED_S = 3600.0
"""What listing reads, such as footers, is needed when the next run starts."""
_NUM_FETCHING = 8
_MOST_AHEAD_BYTES = 512 << 20
_CHUNK_S = 10.0

_needed_in_s: ContextVar[float | None] = ContextVar("needed_in_s", default=None)


@contextmanager
def needed_again(in_s: float) -> Iterator[None]:
    """What this thread reads in the block is needed again in so many seconds. Outside of such a block files are listed."""
    token = _needed_in_s.set(in_s)
    try:
        yield
    finally:
        _needed_in_s.reset(token)


class RangeCache:
    """Ranges of remote files in a folder. Thread-safe."""

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._fetching: dict[str, Future[pa.Buffer]] = {}

    def read(self, wanted: RangeOfFile, fetch: Callable[[], pa.Buffer], keeps_data: bool) -> pa.Buffer:
        """A range from the folder, or fetched and kept. Without `keeps_data` only what listing reads is kept."""
        needed_in_s = _needed_in_s.get()
        if not wanted[0].version or (needed_in_s is not None and not keeps_data):
            return fetch()
        return self.fetch(wanted, fetch, _LISTED_S if needed_in_s is None else needed_in_s)

    def fetch(self, wanted: RangeOfFile, fetch: Callable[[], pa.Buffer], needed_in_s: float) -> pa.Buffer:
        key = _key(wanted)
        with self._lock:
            other = self._fetching.get(key)
            mine: Future[pa.Buffer] = Future()
            if other is None:
                self._fetching[key] = mine
        if other is not None:
            with suppress(OverlordError):  # its error is for whoever began; this thread tries by itself
                return other.result()
            return fetch()
        try:
            found = self._folder.get(key, needed_in_s)
            if found is None:
                found = fetch()
                self._folder.put(key, [memoryview(found)], needed_in_s)
            mine.set_result(found)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            return found
        finally:
            with self._lock:
                del self._fetching[key]

    def has(self, wanted: RangeOfFile) -> bool:
        return self._folder.has(_key(wanted))


_range_caches: dict[CacheFolder, RangeCache] = {}
_range_caches_lock = threading.Lock()


def shared_range_cache(cache: Cache) -> RangeCache:
    """The ranges in a folder: one per process, so that its threads know what the others fetch."""
    folder = shared_folder(str(cache.location), cache.max_bytes)
    with _range_caches_lock:
        return _range_caches.setdefault(folder, RangeCache(folder))


def _key(wanted: RangeOfFile) -> str:
    file, start, stop = wanted
    return digest_key(KIND, file.path, file.version, str(file.num_bytes), str(start), str(stop))


class FetchAhead:
    """Fetches the ranges of the next chunks into the cache, in their order, on threads of its own. Thread-safe."""

    def __init__(self, storage: Storage, ranges_of: Callable[[int], Sequence[RangeOfFile] | None], max_bytes: int) -> None:
        """`ranges_of` returns what a chunk is read from, and None where there is nothing more to fetch. At most a quarter of
        the cache's `max_bytes` is fetched ahead."""
        self._storage = storage
        self._ranges_of = ranges_of
        self._most_bytes = min(max_bytes // 4, _MOST_AHEAD_BYTES)
        self._lock = threading.Lock()
        self._threads: Threads | None = None
        self._seen: list[int] = []
        self._next = 0
        self._waiting: list[tuple[int, RangeOfFile]] = []
        self._ahead: dict[int, int] = {}  # chunk to the bytes that were fetched, or are on their way
        self._num_running = 0
        self._is_closed = False

    def note(self, number: int) -> None:
        """Note that a chunk is being made: those after it come next."""
        with self._lock:
            if self._is_closed or (self._seen and number <= self._seen[-1]):
                return
            self._seen = [*self._seen[-3:], number]
            stride = self._stride
            self._next = number + stride * max(-(-(self._next - number) // stride), 1)  # one of this loader's own
            self._ahead = {chunk: size for chunk, size in self._ahead.items() if chunk > number}
            self._waiting = [each for each in self._waiting if each[0] > number]
            self._threads = self._threads or Threads(_NUM_FETCHING, "overlord-fetch")
            while self._num_running < _NUM_FETCHING and self._threads.submit_ahead(self._run) is not None:
                self._num_running += 1

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    @property
    def _stride(self) -> int:
        """A loader that shares a source with others makes every n-th chunk."""
        gaps = [after - before for before, after in zip(self._seen, self._seen[1:], strict=False)]
        return min(gaps, default=1)

    def _run(self) -> None:
        try:
            while (found := self._take()) is not None:
                chunk, (file, start, stop) = found
                with suppress(OverlordError):  # whoever needs the range is told
                    self._storage.fetch_ahead((file, start, stop), _CHUNK_S * max(chunk - self._seen[-1], 1))
        except BaseException:
            with self._lock:
                self._num_running -= 1  # as `_take` does when there is nothing more to do
            raise

    def _take(self) -> tuple[int, RangeOfFile] | None:
        """The next range to fetch; None if there are enough."""
        with self._lock:
            while not self._is_closed:
                if self._waiting:
                    return self._waiting.pop(0)
                if sum(self._ahead.values()) >= self._most_bytes:
                    break
                chunk, self._next = self._next, self._next + self._stride
                ranges = self._ranges_of(chunk)
                if ranges is None:
                    break
                self._ahead[chunk] = sum(stop - start for _, start, stop in ranges)
                self._waiting = [(chunk, each) for each in ranges]
            self._num_running -= 1
            return None
