"""The chunks that a process has borrowed from the loader hosts of its machine, and the rows that its Data Constructors take
out of them.

What it promises: `fetch_each` returns the payload that loader hosts would return for the same samples, whatever happens to
hosts meanwhile. A chunk is requested once for all constructors of the process, with others of its host, and before it is
needed if the plan is known early enough. It is returned when the planner says that no step needs it any more, and trainers
that build steps from it have returned it. A chunk that is needed after that is requested again. Chunks that are not in
shared memory, or whose host is on another machine, gone or silent, are read through `Routes`, which waits for the host or
takes its shadow; rows on other machines for several steps at a time (`rows_ahead.py`).
"""

from __future__ import annotations

import os
import threading
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.batches.lending import Borrower
from overlord.batches.payload import Payload
from overlord.batches.unbuilt import ChunkPlace
from overlord.chunks.shared_rows import ChunkArenas, RowsInMemory
from overlord.errors import ClosedError, WaitTimeoutError
from overlord.roles.chunk_loans import MOST_TOGETHER, LentChunk, LoanAnswer, LoanRequest
from overlord.roles.chunk_rows import RowTaker
from overlord.roles.loader_host import LoaderHost
from overlord.roles.routes import group_parts, names_of_sources
from overlord.runtime.shared_memory import may_share_more
from overlord.stream.facts import Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from overlord.arrange.plan import GroupPlan
    from overlord.batches.buffers import Arenas
    from overlord.declare.source import Source
    from overlord.roles.chunk_rows import ChunkRows, Find
    from overlord.roles.routes import Routes
    from overlord.roles.rows_ahead import RowsAhead
    from overlord.runtime.engine import Reply
    from overlord.runtime.threads import Executor
    from overlord.runtime.transport import ErrorEnvelope
    from overlord.sources.storage import MappedFile
    from overlord.stream.facts import Ints

Key = tuple[int, int]
"""A source's number, and a chunk's."""

_NEVER = 1 << 62  # tokens left: a borrowed chunk is not counted down
_MOST_LOCATED = 500
"""Chunks of a step that a trainer builds: a message tells at most four times as many."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class BorrowedChunk:
    """The rows of a chunk in memory of its loader host."""

    values: NDArray[np.integer] | None
    begin: memoryview
    document_end: memoryview
    mask: NDArray[np.generic] | None
    table: pa.Table
    table_row: Ints
    mapped: tuple[MappedFile, ...]
    """The files that the table points into."""
    place: ChunkPlace | None
    """For a trainer that builds its steps itself; None where it cannot."""
    left: int = _NEVER

    @staticmethod
    def of(rows: RowsInMemory) -> BorrowedChunk:
        opened = rows.open()
        table, mapped = opened.columns.open()
        values, begin, end, mask = opened.values, opened.begin, opened.document_end, opened.mask
        place = ChunkPlace.of(rows.memory, values, begin, end, mask)
        return BorrowedChunk(values, begin.data, end.data, mask, table, opened.table_row, mapped, place)


class BorrowedChunks:
    """The borrowed chunks of this process. The module's docstring has the promises. Thread-safe."""

    counts_down = False

    def __init__(
        self, routes: Routes, sources: Mapping[str, Source], columns: Sequence[str] = (), ahead: RowsAhead | None = None
    ) -> None:
        """`columns`: of rows, beside tokens and images. `ahead`: requests rows on other machines for several steps at a
        time."""
        self._routes = routes
        self.columns = tuple(columns)
        self.ahead = ahead
        self._names = tuple(sources)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._decoders: dict[str, Any] = {name: source.decode for name, source in sources.items()}
        self._chunks: list[dict[int, BorrowedChunk]] = [{} for _ in self._names]
        self._finders: list[Find] = [chunks.get for chunks in self._chunks]
        self._unshared: set[Key] = set()
        self._lock = threading.Lock()
        self._links: dict[str, LoanLink] = {}
        self._first: Ints | None = None
        self.has_decoders = any(decoder is not None for decoder in self._decoders.values())

    def note_plans(self, plans: Sequence[GroupPlan], first_chunks: Ints) -> None:
        """Return the chunks that no step needs any more, and request those of the next steps."""
        self.release_before(first_chunks)
        of_plans = [plan.all_samples() for plan in plans]
        self.expect([samples for parts in of_plans for samples in parts])
        if self.ahead is not None:
            self.ahead.release_before(first_chunks)
            self.ahead.expect([Samples.concatenate(batch) for parts in of_plans for batch in self.taken_together(parts)])

    def taken_together(self, parts: Sequence[Samples]) -> list[list[Samples]]:
        """Group the microbatches of a step by which are taken together. Images of small ones are decoded together, to keep
        all threads busy, and the type of a column is that of all of them, as in `Routes.fetch_each`."""
        return group_parts(parts) if self.has_decoders or self.columns else [[part] for part in parts]

    def expect(self, parts: Sequence[Samples]) -> None:
        """Request the chunks of samples that will be needed soon. Waits for nothing, and raises nothing."""
        missing = self._missing(parts)
        if not missing or not may_share_more(ChunkArenas.most_descriptors):
            return
        try:
            by_host = self._routes.hosts_of(missing)
        except ClosedError:
            return
        for host, keys in by_host.items():
            if not self._routes.is_near(host):
                continue
            link = self._link(host)
            if link.lock.acquire(blocking=False):
                try:
                    if not link.is_waiting:
                        link.send(keys[:MOST_TOGETHER], self._first)
                except ClosedError:
                    pass  # the host is gone: whoever needs the chunk finds the next one
                finally:
                    link.lock.release()

    def require(self, parts: Sequence[Samples]) -> set[Key]:
        """Wait until the chunks of samples are borrowed. Returns those that cannot be: they are not in shared memory, or
        their host is on another machine, gone, or silent while its shadow can answer, or this process has many files
        open."""
        missing = self._missing(parts)
        absent: set[Key] = set()
        while missing:
            if not may_share_more(ChunkArenas.most_descriptors):
                absent.update(missing)
                break
            by_host = self._routes.hosts_of(missing)
            near = {host: keys for host, keys in by_host.items() if self._routes.is_near(host)}
            absent.update(key for host, keys in by_host.items() if host not in near for key in keys)
            absent |= self._borrow(near)
            missing = [key for key in self._not_here(missing) if key not in absent]
        return absent.union(*(self._unshared & _keys_of(part) for part in parts)) if self._unshared else absent

    def release_before(self, first: Ints) -> None:
        """Return the chunks of each source before its `first`: no step needs them any more."""
        known = self._first
        if known is not None and (known is first or np.array_equal(known, first)):
            return
        self._first = first
        limits: list[int] = first.tolist()
        for chunks, limit in zip(self._chunks, limits, strict=True):
            for number in list(chunks):
                if number < limit:
                    chunks.pop(number, None)
        with self._lock:
            if self._unshared:
                self._unshared = {(source, number) for source, number in self._unshared if number >= limits[source]}

    @property
    def num_chunks(self) -> int:
        return sum(map(len, self._chunks))

    def find(self, key: Key) -> BorrowedChunk | None:
        return self._chunks[key[0]].get(key[1])

    # The shelf that rows are taken from

    def finders(self, names: tuple[str, ...]) -> Sequence[Find]:
        return self._finders if names == self._names else [self._finders[self._numbers[name]] for name in names]

    def obtain(self, source: str, number: int) -> ChunkRows:
        """Not waited for here: whoever takes rows requires all of their chunks together."""
        raise _NotBorrowed(source, number)

    def decoder(self, source: str) -> Any:
        return self._decoders[source]

    def note_bad_decode(self, source: str, number: int, chunk: ChunkRows, table_row: int, error: str) -> None:  # noqa: ARG002
        self._routes.note_bad_decode(self._numbers[source], number, table_row, error)

    def note_delivered(self, source: str, number: int) -> None:
        """Not called: borrowed chunks are not counted down."""

    def _missing(self, parts: Iterable[Samples]) -> list[Key]:
        """The chunks of samples that are yet to be borrowed, those of the first samples first."""
        chunks = self._chunks
        # Chunks are looked up for every sample: usually all are here, and to sort out which chunks these are costs more.
        missing = [
            (source, number)
            for part in parts
            for source, number in zip(*part.table[:2].tolist(), strict=True)
            if number not in chunks[source]
        ]
        return self._not_here(dict.fromkeys(missing)) if missing else missing

    def _not_here(self, keys: Iterable[Key]) -> list[Key]:
        """Those of some chunks that are yet to be borrowed."""
        chunks, unshared = self._chunks, self._unshared
        return [key for key in keys if key[1] not in chunks[key[0]] and key not in unshared]

    def _link(self, host: str) -> LoanLink:
        with self._lock:
            link = self._links.get(host)
            if link is None:
                link = self._links[host] = LoanLink(
                    self._names, lambda *args: self._routes.call_near(host, *args), self._keep
                )
            return link

    def _borrow(self, by_host: Mapping[str, Sequence[Key]]) -> set[Key]:
        """Borrow chunks of several hosts, all requested before any is waited for. Returns the chunks of hosts that are gone
        or silent. Raises the error of one that cannot be made."""
        out_of_reach: set[Key] = set()
        errors: list[ErrorEnvelope] = []
        with ExitStack() as locks:
            links = [(host, self._link(host), keys) for host, keys in sorted(by_host.items())]  # one order, so no deadlock
            for _, link, _ in links:
                locks.enter_context(link.lock)
            waiting: list[tuple[str, LoanLink, Sequence[Key]]] = []
            for host, link, keys in links:
                try:
                    link.receive(self._routes.patience_with(host))  # of a request that was sent ahead
                    missing = self._not_here(keys)
                    if missing:
                        link.send(missing[:MOST_TOGETHER], self._first)
                        waiting.append((host, link, keys))
                except (ClosedError, WaitTimeoutError):
                    out_of_reach.update(keys)
            for host, link, keys in waiting:
                try:
                    errors += link.receive(self._routes.patience_with(host))
                except (ClosedError, WaitTimeoutError):
                    out_of_reach.update(keys)
        if errors:
            raise errors[0].open()
        return out_of_reach

    def _keep(self, key: Key, rows: RowsInMemory | None) -> None:
        if rows is not None:
            self._chunks[key[0]][key[1]] = BorrowedChunk.of(rows)
        else:
            with self._lock:
                self._unshared = self._unshared | {key}


class LoanLink:
    """The loans of one loader host. Requests follow one another; callers hold `lock`."""

    def __init__(
        self,
        names: Sequence[str],
        call: Callable[..., Reply[LoanAnswer]],
        keep: Callable[[Key, RowsInMemory | None], None],
    ) -> None:
        """`keep` is called with the rows of each chunk that is lent; None for one that is not in shared memory."""
        self.lock = threading.Lock()
        self._names = names
        self._call = call
        self._keep = keep
        self._name = uuid.uuid4().hex
        self._was: list[str] = []
        self._lender: str = ""
        self._borrower = Borrower(lends_on=True)
        self._sent: tuple[Sequence[Key], Reply[LoanAnswer]] | None = None
        self._is_silent = False
        self._told: dict[int, int] = {}  # of each source that the host has lent chunks of, the first that may be needed

    @property
    def is_waiting(self) -> bool:
        return self._sent is not None

    def send(self, keys: Sequence[Key], first: Ints | None) -> None:
        """Request chunks. `first`: of each source, the first chunk that may still be needed."""
        returned, kept = self._borrower.take_returned()
        wanted = [(self._names[source], number) for source, number in keys]
        needed_from = {} if first is None else self._news(keys, first)
        request = LoanRequest(self._name, os.getpid(), wanted, self._lender, returned, kept, tuple(self._was), needed_from)
        try:
            self._sent = keys, self._call(LoaderHost.lend, request)
        except BaseException:
            self._start_again()
            raise

    def receive(self, timeout_s: float | None = None) -> list[ErrorEnvelope]:
        """Take the answer of the request that is under way, if one is; returns why chunks could not be made. After
        `timeout_s` WaitTimeoutError; once that was raised, there is no waiting until the answer has come."""
        if self._sent is None:
            return []
        keys, reply = self._sent
        try:
            answer = reply.result(0.0 if self._is_silent else timeout_s)
        except WaitTimeoutError:
            self._is_silent = True
            raise
        except BaseException:
            self._sent, self._is_silent = None, False
            self._start_again()
            raise
        self._sent, self._is_silent = None, False
        self._was.clear()
        if answer.lender != self._lender:  # the first answer, or the host was made again
            self._lender, self._borrower = answer.lender, Borrower(lends_on=True)
            self._told = dict.fromkeys(self._told, 0)
        for number, segment in answer.segments:
            self._borrower.map(number, segment)
        try:
            return self._take(keys, answer)
        except KeyError:  # memory that came with an answer that was lost
            self._start_again()
            return []

    def _news(self, keys: Sequence[Key], first: Ints) -> dict[str, int]:
        """The first chunk that may still be needed of each source for which the host does not know it yet. Of all its
        sources: chunks of this source are requested long before those that came before them are used up."""
        told = self._told
        for source, _ in keys:
            told.setdefault(source, 0)
        known = np.fromiter(told, np.int64, len(told))
        limits = first[known]
        changed = limits > np.fromiter(told.values(), np.int64, len(told))
        news: dict[int, int] = dict(zip(known[changed].tolist(), limits[changed].tolist(), strict=True))
        told.update(news)
        return {self._names[source]: limit for source, limit in news.items()}

    def _take(self, keys: Sequence[Key], answer: LoanAnswer) -> list[ErrorEnvelope]:
        errors: list[ErrorEnvelope] = []
        for key, lent in zip(keys, answer.chunks, strict=True):
            if isinstance(lent, LentChunk):
                memory = self._borrower.borrow(lent.loan)[lent.first : lent.first + lent.num_bytes]
                self._keep(key, RowsInMemory(memory, lent.places))
            elif lent is None:
                self._keep(key, None)
            else:
                errors.append(lent)
        self._borrower.unmap(answer.gone)
        return errors

    def _start_again(self) -> None:
        """After an answer was lost: the host lends everything again, to another name."""
        self._was.append(self._name)
        self._name = uuid.uuid4().hex
        self._lender, self._borrower = "", Borrower(lends_on=True)
        self._told = dict.fromkeys(self._told, 0)


class _NotBorrowed(Exception):
    """A chunk is not here, although it was a moment ago. Never leaves this module."""


class BorrowedRows:
    """Takes the rows of plans out of borrowed chunks, for one Data Constructor."""

    def __init__(self, chunks: BorrowedChunks, routes: Routes, threads: Executor, arenas: Arenas) -> None:
        """Images are decoded on `threads`, into memory of `arenas`."""
        self._chunks = chunks
        self._routes = routes
        self._rows = RowTaker(chunks, chunks.columns, threads, arenas)

    def fetch_each(self, parts: Sequence[Samples]) -> Iterator[Payload]:
        """Yield the payloads of several microbatches, in their order."""
        absent = self._chunks.require(parts)
        for batch in self._chunks.taken_together(parts):
            together = self._take(Samples.concatenate(batch), absent)
            yield from [together] if len(batch) == 1 else together.split(map(len, batch))

    def locate(self, parts: Sequence[Samples], *, waits: bool) -> dict[Key, BorrowedChunk] | None:
        """The chunks in shared memory that the tokens of several microbatches lie in; None where some are to be fetched, or
        where more than tokens is delivered, or where one is not here yet, unless it is waited for."""
        chunks = self._chunks
        if chunks.has_decoders or chunks.columns or (waits and chunks.require(parts)):
            return None
        keys = set[Key]().union(*map(_keys_of, parts))
        if len(keys) > _MOST_LOCATED:
            return None
        located: dict[Key, BorrowedChunk] = {}
        for key in keys:
            found = chunks.find(key)
            if found is None or found.place is None:
                return None
            located[key] = found
        return located

    def _take(self, samples: Samples, absent: Collection[Key]) -> Payload:
        """The payload of samples whose chunks are here, but for those that are `absent`."""
        while True:
            if absent and not _keys_of(samples).isdisjoint(absent):
                return self._take_mixed(samples, absent)
            try:
                return self._rows.take(samples)
            except _NotBorrowed:  # it was returned meanwhile, because other constructors do not need it any more
                absent = self._chunks.require([samples])

    def _take_mixed(self, samples: Samples, absent: Collection[Key]) -> Payload:
        """The payload of samples of which some are in chunks that cannot be borrowed."""
        pairs = zip(samples.source.tolist(), samples.chunk.tolist(), strict=True)
        is_shared = np.array([key not in absent for key in pairs], bool)
        places = [np.flatnonzero(is_shared), np.flatnonzero(~is_shared)]
        if not len(places[0]):
            return self._fetch(samples)
        parts = [samples.take(where) for where in places]
        payloads = [self._take(parts[0], ()), self._fetch(parts[1])]
        return Payload.merge(payloads, places, list(map(names_of_sources, parts)))

    def _fetch(self, samples: Samples) -> Payload:
        """The payload of samples that cannot be borrowed."""
        ahead = None if self._chunks.ahead is None else self._chunks.ahead.take(samples)
        return self._routes.fetch(samples) if ahead is None else ahead


def _keys_of(samples: Samples) -> set[Key]:
    return set(zip(samples.source.tolist(), samples.chunk.tolist(), strict=True))
