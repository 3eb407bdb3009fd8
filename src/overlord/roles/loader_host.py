"""A process-wide host of Source Loaders, so that many small sources cost one process and one request.

It serves any source. One that it does not hold yet is opened on request, because the caller may still use an older routing
table.

It may be the shadow of another host, whose chunks it copies or makes as well.
"""

from __future__ import annotations

import os
import threading
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from overlord.batches.buffers import Arenas
from overlord.caches.bucket import cache_use
from overlord.chunks.bad_rows import BadRowKey, BadRowLog
from overlord.chunks.shared_rows import ChunkHead
from overlord.errors import ClosedError
from overlord.loaders.shadowing import FILE, is_copied
from overlord.roles.chunk_loans import ChunkLoans, LoanAnswer, LoanRequest
from overlord.roles.chunk_rows import ChunkRows, Find, RowTaker
from overlord.roles.source_loader import HotChunk, SourceLoader, Work
from overlord.runtime.recorder import SpanBatch, current_recorder
from overlord.runtime.transport import ErrorEnvelope
from overlord.sources.storage import storage_use
from overlord.status import BufferUse, HostCounters, process_use

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from overlord.batches.payload import Payload
    from overlord.chunks.chunk import Chunk
    from overlord.chunks.shared_rows import RowsInMemory
    from overlord.roles.chunk_copies import ChunkCopies
    from overlord.roles.chunk_snapshots import ChunkSnapshots
    from overlord.runtime.threads import Executor
    from overlord.stream.facts import (
        ChunkFacts,
        Ints,
        Losses,
        Samples,
    )


ChunkAsked: TypeAlias = tuple[str, int, int]
"""A source, the number of a chunk, and the first chunk of the source that is still needed."""


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A Source Loader, and how its rows are decoded when they are delivered."""

    loader: SourceLoader
    bad_rows: BadRowLog
    decode: Any = None
    bad_decode: Callable[[Chunk, int, str], None] | None = None
    """Called with (chunk, table row, error) when a deferred decode fails."""
    snapshots: ChunkSnapshots | None = None


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What a host holds and has done."""

    instance: str
    """Changes when the host is made again."""
    process: int
    holding: dict[str, list[int]]
    """The chunks of each source that it has or is making."""
    work: dict[str, Work]
    copyable: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The finished chunks of each source whose chunks a shadow can copy."""


@dataclass(frozen=True, slots=True)
class FinishedChunk:
    """A chunk for a shadow that holds it too."""

    head: ChunkHead
    rows: RowsInMemory | None
    """None where they are lent."""
    bad_rows: frozenset[BadRowKey]
    """Rows of its source that the host has dropped."""


class LoaderHost:
    """Serves chunks of the sources (or shares of sources) that it holds, and opens others on request."""

    def __init__(
        self,
        open_source: Callable[[str], OpenSource],
        sources: Collection[str],
        columns: Sequence[str],
        threads: Executor,
        *,
        arenas: Arenas | None = None,
        owns_threads: bool = False,
        copies: ChunkCopies | None = None,
    ) -> None:
        """Images are decoded into memory of `arenas`. `owns_threads`: shut `threads` down at `close`. `copies`: how chunks
        are copied while this host is a shadow; None if it makes them."""
        self._open_source = open_source
        self._threads = threads
        self._owns_threads = owns_threads
        self._copies = copies
        self._is_shadow = False
        self._saving = threading.Lock()
        arenas = arenas or Arenas()
        arenas.keep_more(_MOST_IDLE_ARENAS)
        self._rows = RowTaker(self, columns, threads, arenas)
        self._loans = ChunkLoans()
        self._instance = uuid.uuid4().hex
        self._recorder = current_recorder()
        self._lock = threading.Lock()
        self._closed = False
        self._sources: dict[str, OpenSource] = {}
        self._some_decode = False
        self._past: dict[str, tuple[Work, frozenset[BadRowKey]]] = {}  # of sources that were closed
        self._found_by: tuple[tuple[str, ...], Sequence[Find]] = (), ()
        for name in sources:
            self._open(name)

    def describe(self, source: str, chunk: int, keep_from: int = 0) -> ChunkFacts:
        self._stand_in()
        return self._open(source).loader.describe(chunk, keep_from)

    def describe_all(self, chunks: Sequence[ChunkAsked]) -> list[ChunkFacts]:
        """The facts of chunks of any sources, in their order. Those that were announced are being made on other threads."""
        return [self.describe(source, number, keep_from) for source, number, keep_from in chunks]

    def note_described(self, source: str, chunk: int, keep_from: int) -> None:
        """Note that the facts of a chunk, which were sent when it was made, are in use."""
        self._open(source).loader.note_described(chunk, keep_from)

    def peek(self, source: str, chunk: int, keep_from: int = 0, may_make: bool = True) -> ChunkFacts | None:
        """The facts of a chunk if that takes no waiting."""
        return self._open(source).loader.peek(chunk, keep_from, may_make)

    def prefetch(self, source: str, chunks: Sequence[int]) -> None:
        """Note which chunks of a source will be requested here, soonest first."""
        self._open(source).loader.prefetch(chunks)

    def count_losses(self, asked: Sequence[tuple[str, int, Ints]]) -> list[Losses]:
        """The losses of parts of rows: for each (source, chunk) the columns row, start and stop."""
        return [self._open(source).loader.get(chunk).chunk.count_losses(*columns) for source, chunk, columns in asked]

    def origins(self, source: str, chunk: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        """The unit, and the row in it, that each of these rows was read from; row -1 where a transform lost track."""
        return self._open(source).loader.get(chunk).chunk.origins_of(source, chunk, rows)

    def fetch(self, samples: Samples) -> Payload:
        """Return the payload of planned samples, in their order."""
        self._stand_in()
        return self._rows.take(samples)

    def fetch_apart(self, parts: Sequence[Samples]) -> list[Payload]:
        """Return the payloads of several requests, each as `fetch` returns it."""
        return [self.fetch(part) for part in parts]

    def lend(self, request: LoanRequest) -> LoanAnswer:
        """Lend chunks to another process of this machine, which reads their rows itself."""
        held = self._now()
        for source, first in request.needed_from.items():
            if source in held:  # else it has moved to another host since
                held[source].loader.release_before(first)
        return self._loans.lend(request, [self._find_shared(source, number) for source, number in request.wanted])

    def report_bad_decode(self, source: str, number: int, table_row: int, error: str) -> None:
        """Report a row of a lent chunk whose images cannot be decoded. Raises where the source's policy forbids it."""
        self.note_bad_decode(source, number, self.obtain(source, number), table_row, error)

    def take_spans(self) -> SpanBatch:
        """As `Planner.take_spans`."""
        return self._recorder.spans.take()

    def status_lines(self) -> list[str]:
        return [line for held in self._now().values() for line in held.loader.status_lines()]

    def buffer_use(self, sources: Sequence[str]) -> dict[str, BufferUse]:
        return {name: self._open(name).loader.buffer_use() for name in sources}

    def bad_rows(self) -> dict[str, frozenset[BadRowKey]]:
        """The rows of each source that were dropped as bad."""
        now = {name: held.bad_rows.dropped for name, held in self._now().items()}
        past = {name: rows for name, (_, rows) in self._past.items()}
        return {name: now.get(name, frozenset()) | past.get(name, frozenset()) for name in {**now, **past}}

    def status(self) -> HostStatus:
        now = self._now()
        work = {name: held.loader.work() for name, held in now.items()}
        for name, (before, _) in self._past.items():
            work[name] = work.get(name, Work()).plus(before)
        holding = {name: held.loader.chunks_held() for name, held in now.items()}
        copyable = {name: numbers for name, held in now.items() if (numbers := held.loader.chunks_copyable()) is not None}
        return HostStatus(self._instance, os.getpid(), holding, work, copyable)

    def counters(self) -> HostCounters:
        """What it has done for each source. Returns at once."""
        past = {name: work for name, (work, _) in list(self._past.items())}
        sources = {name: work.loaded() for name, work in past.items()}
        sources |= {name: held.loader.counters(past.get(name, Work())) for name, held in self._now().items()}
        return HostCounters(self._instance, process_use(self._recorder.events, storage_use(), cache_use()), sources)

    def mirror(self, host: str, status: HostStatus) -> None:
        """Hold the chunks that another host holds, as far as there is room: this one is its shadow."""
        self.keep(tuple(status.holding))
        self._is_shadow = True
        for name, numbers in status.holding.items():
            held = self._open(name)
            if self._is_copied(host, name, status):
                held.loader.mirror(frozenset(status.copyable[name]), partial(self._copy, held, host, name))
            else:
                held.loader.mirror(frozenset(numbers))

    def finished(self, source: str, number: int, *, with_rows: bool) -> FinishedChunk | None:
        """A chunk for the shadow of this host, with its rows or without; None if it is not in shared memory."""
        held = self._open(source)
        held.loader.note_copied()
        found = held.loader.find(number)
        if found is None or found.chunk.shared is None:
            return None
        rows = found.chunk.shared if with_rows else None
        return FinishedChunk(ChunkHead.of(found.chunk), rows, held.bad_rows.dropped)

    def keep(self, sources: Collection[str]) -> None:
        """Close every other source, which frees its memory."""
        with self._lock:
            gone = {name: self._sources.pop(name) for name in list(self._sources) if name not in sources}
            self._found_by = (), ()
            for name, held in gone.items():
                work, rows = self._past.get(name, (Work(), frozenset[BadRowKey]()))
                self._past[name] = work.plus(held.loader.work()), rows | held.bad_rows.dropped
        for held in gone.values():
            held.loader.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.keep(())
        self._loans.close()
        if self._owns_threads:
            self._threads.shutdown(wait=False)

    def save_chunks(self) -> None:
        """Save the chunks in the buffers that are expensive to make again. Returns at once; a host that still saves does not
        begin again."""
        self._threads.submit_ahead(self._save_chunks)

    def _save_chunks(self) -> None:
        if not self._saving.acquire(blocking=False):
            return
        try:
            for held in self._now().values():
                work = held.loader.work()
                n = work.num_chunks
                if held.snapshots and n and is_copied(work.cpu_s / n, work.wait_s / n, work.num_bytes / n, FILE):
                    held.snapshots.save(*held.loader.chunks_to_save())
        finally:
            self._saving.release()

    def _is_copied(self, host: str, source: str, status: HostStatus) -> bool:
        """True if copying the chunks of a source costs less than making them."""
        if self._copies is None or source not in status.copyable:
            return False
        work = status.work.get(source, Work()).plus(self._open(source).loader.work())
        n = work.num_chunks
        # A host that has copied all of its chunks so far knows no better.
        return not n or is_copied(work.cpu_s / n, work.wait_s / n, work.num_bytes / n, self._copies.cost_of(host))

    def _copy(self, held: OpenSource, host: str, source: str, number: int) -> Chunk | None:
        assert self._copies is not None  # else nothing is copied
        copied = self._copies.take(host, source, number)
        if copied is None:
            return None
        held.bad_rows.note_dropped(copied.finished.bad_rows)
        return copied.chunk

    def _stand_in(self) -> None:
        """Read ahead if this host is a shadow: it gets requests when the host that it mirrors is silent."""
        if self._is_shadow:
            self._is_shadow = False
            for held in self._now().values():
                held.loader.stand_in()

    def _find_shared(self, source: str, number: int) -> RowsInMemory | ErrorEnvelope | None:
        """A chunk in shared memory; None if it is not there. An error is only for whoever needs this chunk."""
        try:
            return self._open(source).loader.get(number).chunk.shared
        except ClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again by the borrower
            return ErrorEnvelope.pickling(error, "raised in a loader host")

    def _open(self, source: str) -> OpenSource:
        held = self._sources.get(source)
        if held is not None:
            return held
        with self._lock:
            if self._closed:
                raise ClosedError(f"the loader of source {source!r} is closed")
            if source not in self._sources:
                self._sources[source] = self._open_source(source)
                self._found_by = (), ()
                self._some_decode = self._some_decode or self._sources[source].decode is not None
            return self._sources[source]

    # The shelf that rows are taken from

    @property
    def has_decoders(self) -> bool:
        return self._some_decode

    @property
    def counts_down(self) -> bool:
        return True

    def finders(self, names: tuple[str, ...]) -> Sequence[Find]:
        """For each of these sources, the function that finds a chunk in its buffer."""
        known, finders = self._found_by
        if known is not names and known != names:
            with self._lock:
                finders = [self._sources[name].loader.find if name in self._sources else _find_nothing for name in names]
                self._found_by = names, finders
        return finders

    def obtain(self, source: str, number: int) -> HotChunk:
        return self._open(source).loader.get(number)

    def decoder(self, source: str) -> Any:
        return self._open(source).decode

    def note_bad_decode(self, source: str, number: int, chunk: ChunkRows, table_row: int, error: str) -> None:  # noqa: ARG002 - of the protocol
        report = self._open(source).bad_decode
        if report is not None:
            assert isinstance(chunk, HotChunk)  # the chunks of this shelf
            report(chunk.chunk, table_row, error)

    def note_delivered(self, source: str, number: int) -> None:
        self._open(source).loader.release_if_empty(number)

    def _now(self) -> dict[str, OpenSource]:
        return dict(self._sources)


def _find_nothing(_number: int) -> None:
    return None


_MOST_IDLE_ARENAS = 2
