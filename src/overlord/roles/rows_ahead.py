"""Rows on other machines, requested before they are needed: those of several steps, and of all groups of a process, in one
request to each of their hosts.

Between machines a request costs 1 to 3 ms, whatever it fetches, and small steps would pay that once each. A row is a
function of its chunk, so rows that were requested ahead are never wrong: they are kept by what was requested, and dropped,
the oldest first, where they would take more than `most_bytes`. A request that fails is repeated by whoever needs the rows.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import ClosedError, OverlordError
from overlord.roles.routes import group_parts
from overlord.runtime.threads import Threads
from overlord.stream.facts import Samples

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from overlord.batches.payload import Payload
    from overlord.roles.routes import Routes
    from overlord.runtime.threads import StealingFuture

_NUM_THREADS = 2  # one request may wait for a chunk that is being made
_MOST_BYTES = 32 << 20
_TOKEN_BYTES = 4


class RowsAhead:
    """The rows that a process has requested ahead. Thread-safe."""

    def __init__(self, routes: Routes, most_bytes: int = _MOST_BYTES) -> None:
        self._routes = routes
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._threads: Threads | None = None  # started where rows are on another machine
        self._kept: dict[bytes, tuple[StealingFuture[list[Payload]], int, int]] = {}  # with the place and the bytes
        self._num_bytes = 0

    def expect(self, parts: Iterable[Samples]) -> None:
        """Request the rows of samples that are on other machines. Waits for nothing, and raises nothing."""
        try:
            far_hosts = self._routes.far_hosts()
            far = [self._far_part(part, far_hosts) for part in parts] if far_hosts else []
        except ClosedError:
            return
        far = [part for part in far if len(part)]
        with self._lock:
            new = [part for part in far if _key_of(part) not in self._kept]
            if not new:
                return
            if self._threads is None:
                self._threads = Threads(_NUM_THREADS, "overlord-rows")
            for batch in group_parts(new):
                future = self._threads.submit(self._fetch, batch)
                for place, part in enumerate(batch):
                    num_bytes = _TOKEN_BYTES * int(part.tokens.sum())
                    self._kept[_key_of(part)] = future, place, num_bytes
                    self._num_bytes += num_bytes
            while self._num_bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def take(self, samples: Samples) -> Payload | None:
        """The rows of samples that were requested ahead, once they are there; None if they were not, or in vain."""
        with self._lock:
            kept = self._drop(_key_of(samples))
        if kept is None:
            return None
        future, place, _ = kept
        try:
            return future.result()[place]
        except OverlordError:
            return None

    def _drop(self, key: bytes) -> tuple[StealingFuture[list[Payload]], int, int] | None:
        kept = self._kept.pop(key, None)
        self._num_bytes -= 0 if kept is None else kept[2]
        return kept

    def _fetch(self, batch: Sequence[Samples]) -> list[Payload]:
        return list(self._routes.fetch(Samples.concatenate(batch)).split(map(len, batch)))

    def _far_part(self, samples: Samples, far_hosts: Collection[str]) -> Samples:
        pairs = list(zip(samples.source.tolist(), samples.chunk.tolist(), strict=True))
        by_host = self._routes.hosts_of(set(pairs))
        far = {key for host, keys in by_host.items() if host in far_hosts for key in keys}
        return samples.take(np.flatnonzero(np.array([pair in far for pair in pairs], bool)))


def _key_of(samples: Samples) -> bytes:
    """What rows depend on: source, chunk, row, and the tokens of it."""
    return np.ascontiguousarray(samples.table).tobytes()
