"""Rows on other machines, requested before they are needed: those of several steps, and of all groups of a process, in one
request to each of their hosts.

Between machines a request costs 1 to 3 ms, whatever it fetches, and small steps would pay that once each. A row is a
function of its chunk, so rows that were requested ahead are never wrong. They are kept by what was requested: tokens,
images, and columns with the types that a request for these samples alone would have returned. A request that fails is
repeated by whoever needs the rows.

Rows that are requested or kept take at most `most_bytes`. What has no room waits in the order of its steps, and is requested
when half of the room is free again, so that requests stay few. Rows that no step needs any more are dropped.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import ClosedError, OverlordError
from overlord.roles.routes import group_parts, row_bytes
from overlord.runtime.threads import Threads
from overlord.stream.facts import ONLY_IMAGE, Samples

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from overlord.batches.payload import Payload
    from overlord.roles.routes import Routes
    from overlord.runtime.threads import StealingFuture
    from overlord.stream.facts import Ints

_NUM_THREADS = 2  # one request may wait for a chunk that is being made
_MOST_BYTES = 32 << 20
_COLUMN_BYTES = 1 << 10
"""Of a row's columns, until some have come."""

_Key = tuple[bytes, ...]


@dataclass(slots=True)
class _Requested:
    """Samples whose rows were requested, with others."""

    samples: Samples
    payloads: StealingFuture[list[Payload]]
    place: int
    """Of these rows in `payloads`."""
    num_bytes: int


class RowsAhead:
    """The rows that a process has requested ahead. Thread-safe."""

    def __init__(self, routes: Routes, *, has_columns: bool = False, most_bytes: int = _MOST_BYTES) -> None:
        """`has_columns`: rows have columns beside tokens and images."""
        self._routes = routes
        self._has_columns = has_columns
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._threads: Threads | None = None  # started where rows are on another machine
        self._waiting: dict[_Key, Samples] = {}
        self._requested: dict[_Key, _Requested] = {}
        self._num_bytes = 0  # of what is requested
        self._column_bytes = _COLUMN_BYTES if has_columns else 0
        self._first: Ints | None = None

    def expect(self, parts: Iterable[Samples]) -> None:
        """Request the rows of samples that are on other machines. Waits for nothing, and raises nothing. What is together in
        a part must be taken together."""
        try:
            far_hosts = self._routes.far_hosts()
            far = [self._far_part(part, far_hosts) for part in parts] if far_hosts else []
        except ClosedError:
            return
        with self._lock:
            for part in far:
                if len(part) and (key := _key_of(part)) not in self._requested:
                    self._waiting[key] = part
            self._request_waiting()

    def take(self, samples: Samples) -> Payload | None:
        """The rows of samples that were requested ahead, once they are there; None if they were not, or in vain."""
        key = _key_of(samples)
        with self._lock:
            self._waiting.pop(key, None)
            found = self._drop(key)
            if self._waiting and 2 * self._num_bytes <= self._most_bytes:
                self._request_waiting()
        if found is None:
            return None
        try:
            return found.payloads.result()[found.place]
        except OverlordError:
            return None

    def release_before(self, first: Ints) -> None:
        """Drop the rows of chunks before the `first` of each source: no step needs them any more."""
        with self._lock:
            if self._first is not None and np.array_equal(self._first, first):
                return
            self._first = first
            for key in [key for key, part in self._waiting.items() if _is_past(part, first)]:
                del self._waiting[key]
            for key in [key for key, found in self._requested.items() if _is_past(found.samples, first)]:
                self._drop(key)

    @property
    def num_bytes(self) -> int:
        """About what the rows take that were requested and not taken."""
        return self._num_bytes

    def _request_waiting(self) -> None:
        """Request what waits, as far as there is room. Callers hold the lock."""
        room = self._most_bytes - self._num_bytes
        chosen: dict[_Key, Samples] = {}
        for key, part in self._waiting.items():
            room -= self._bytes_of(part)
            if room < 0:
                break
            chosen[key] = part
        if not chosen:
            return
        if self._threads is None:
            self._threads = Threads(_NUM_THREADS, "overlord-rows")
        for batch in group_parts(list(chosen.values())):
            future = self._threads.submit(self._fetch, batch)
            for place, part in enumerate(batch):
                key, num_bytes = _key_of(part), self._bytes_of(part)
                del self._waiting[key]
                self._requested[key] = _Requested(part, future, place, num_bytes)
                self._num_bytes += num_bytes

    def _drop(self, key: _Key) -> _Requested | None:
        found = self._requested.pop(key, None)
        self._num_bytes -= 0 if found is None else found.num_bytes
        return found

    def _fetch(self, batch: Sequence[Samples]) -> list[Payload]:
        if not self._has_columns:
            return list(self._routes.fetch(Samples.concatenate(batch)).split(map(len, batch)))
        payloads = self._routes.fetch_apart(batch)
        self._note_columns(batch, payloads)
        return payloads

    def _note_columns(self, batch: Sequence[Samples], payloads: Sequence[Payload]) -> None:
        """Count the columns of rows by what they take, now that this is known; the rows that are needed last make room."""
        sizes = [payload.column_bytes for payload in payloads]
        with self._lock:
            self._column_bytes = -(-sum(sizes) // max(1, sum(map(len, batch))))
            for part, size in zip(batch, sizes, strict=True):
                found = self._requested.get(_key_of(part))
                if found is not None:
                    num_bytes = row_bytes(part) + size
                    self._num_bytes += num_bytes - found.num_bytes
                    found.num_bytes = num_bytes
            while self._num_bytes > self._most_bytes:
                self._drop(next(reversed(self._requested)))

    def _bytes_of(self, part: Samples) -> int:
        return row_bytes(part) + self._column_bytes * len(part)

    def _far_part(self, samples: Samples, far_hosts: Collection[str]) -> Samples:
        pairs = list(zip(samples.source.tolist(), samples.chunk.tolist(), strict=True))
        by_host = self._routes.hosts_of(set(pairs))
        far = {key for host, keys in by_host.items() if host in far_hosts for key in keys}
        return samples.take(np.flatnonzero(np.array([pair in far for pair in pairs], bool)))


def _is_past(samples: Samples, first: Ints) -> bool:
    return bool((samples.chunk < first[samples.source]).any())


def _key_of(samples: Samples) -> _Key:
    """What rows depend on: source, chunk, row, the tokens of it, and which of its images are wanted."""
    only = samples.sizes.get(ONLY_IMAGE)
    table = np.ascontiguousarray(samples.table).tobytes()
    return (table,) if only is None else (table, np.ascontiguousarray(only).tobytes())
