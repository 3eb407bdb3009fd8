"""How a shadow takes finished chunks from the loader host that it mirrors, instead of making them a second time.

On one node the host lends the chunk, and the shadow copies the rows out of shared memory, so that it has its own when the
host's memory is used again. Between nodes the rows travel as the answer of a call. The cost of both is measured, and
compared with the cost of making a chunk (`loaders/shadowing.py`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.chunks.shared_rows import copy_chunk
from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.loaders.shadowing import FAR, NEAR
from overlord.roles.borrowed_chunks import LoanLink
from overlord.roles.loader_host import FinishedChunk, LoaderHost
from overlord.roles.source_loader import LoaderLostError
from overlord.runtime import liveness
from overlord.runtime.threads import cpu_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.batches.buffers import Arenas
    from overlord.chunks.chunk import Chunk
    from overlord.chunks.shared_rows import RowsInMemory
    from overlord.loaders.shadowing import CopyCost
    from overlord.roles.borrowed_chunks import Key
    from overlord.runtime.engine import Engine

_ANSWER_S = liveness.HOST_COPIED.after_s
_LOST = (ClosedError, WaitTimeoutError, WorkerDiedError)


@dataclass(frozen=True, slots=True)
class CopiedChunk:
    """A chunk of another host, in memory of this process."""

    chunk: Chunk
    finished: FinishedChunk


class ChunkCopies:
    """Copies the finished chunks of other loader hosts into memory of `arenas`. Thread-safe."""

    def __init__(self, engine: Engine, sources: Sequence[str], arenas: Arenas) -> None:
        self._engine = engine
        self._names = list(sources)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._arenas = arenas
        self._lock = threading.Lock()
        self._links: dict[str, _Lending] = {}
        self._costs = {True: NEAR, False: FAR}

    def cost_of(self, host: str) -> CopyCost:
        """What a copy from a host costs, as far as it was measured."""
        return self._costs[self._engine.shares_memory_with(host)]

    def take(self, host: str, source: str, number: int) -> CopiedChunk | None:
        """Copy a chunk. None if the host does not have it any more; LoaderLostError if the host is gone or silent."""
        is_near = self._engine.shares_memory_with(host)
        began = cpu_time()
        try:
            found = self._take_near(host, source, number) if is_near else self._take_far(host, source, number)
        except _LOST as error:
            raise LoaderLostError(f"loader host {host!r} is lost: {error}") from error
        if found is not None:
            # The other end of a copy between nodes takes as long: it writes the rows, this one reads them.
            cpu_s = (cpu_time() - began) * (1 if is_near else 2)
            with self._lock:
                self._costs[is_near] = self._costs[is_near].with_measured(cpu_s, found.chunk.num_bytes)
        return found

    def _take_near(self, host: str, source: str, number: int) -> CopiedChunk | None:
        reply = self._engine.call_near(host, LoaderHost.finished, source, number, with_rows=False)
        finished: FinishedChunk | None = reply.result(_ANSWER_S)
        if finished is None:
            return None
        with self._lock:
            if source not in self._numbers:  # it was added to the run
                self._numbers[source] = len(self._names)
                self._names.append(source)
            link = self._links.setdefault(host, _Lending(self._engine, host, self._names))
        rows = link.borrow((self._numbers[source], number))
        return None if rows is None else CopiedChunk(copy_chunk(finished.head, rows, self._arenas), finished)

    def _take_far(self, host: str, source: str, number: int) -> CopiedChunk | None:
        reply = self._engine.call(host, LoaderHost.finished, source, number, with_rows=True)
        finished: FinishedChunk | None = reply.result(_ANSWER_S)
        if finished is None or finished.rows is None:
            return None
        return CopiedChunk(copy_chunk(finished.head, finished.rows, self._arenas), finished)


class _Lending:
    """The chunks that one host lends to be copied, one at a time."""

    def __init__(self, engine: Engine, host: str, names: Sequence[str]) -> None:
        self._found: dict[Key, RowsInMemory | None] = {}
        self._link = LoanLink(names, lambda *args: engine.call_near(host, *args), self._found.__setitem__)

    def borrow(self, key: Key) -> RowsInMemory | None:
        """The rows of a chunk; the loan ends with them. None if they are not to be had."""
        with self._link.lock:
            self._link.receive(_ANSWER_S)  # of a request that was not answered in time
            self._found.clear()
            self._link.send([key], None)
            self._link.receive(_ANSWER_S)
            return self._found.pop(key, None)
