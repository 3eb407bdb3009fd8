"""Sends requests for chunks to the right loader host, by a routing table that may change at any time.

What it promises: a result, whichever table it knows. The newest table is looked up now and then, and at once when a host is
gone. Requests to a host with a shadow are hedged: when the host is silent for a moment (it hangs, or it is slow), the shadow
gets the request too, and the first result wins; both are the same. When the host's process has ended, the shadow gets the
request at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.batches.payload import Payload
from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.roles.loader_host import LoaderHost
from overlord.runtime import liveness
from overlord.stream.facts import (
    ChunkFacts,
    Ints,
    Losses,
    Samples,
    TokenSpans,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.loaders.routing import RoutingTable
    from overlord.runtime.engine import Engine, Reply

TABLE = "routing"
"""The key under which the table is published."""

_ANNOUNCED = 64  # chunks of a source, to each of its hosts: more than any host makes at once
_TOGETHER_BYTES = 16 << 20  # about as much as one request fetches
_STATUS_WAIT_S = liveness.ROLE_BUSY.after_s
_LOOK_S = 0.25  # on a cluster a lookup costs a millisecond
_SILENT_S = liveness.HOST_SLOW.after_s
_TURN_S = 0.02
_SUSPECT_S = liveness.HOST_SUSPECT.after_s
_TRIES = liveness.REROUTES


class Routes:
    """Where the chunks of every source are. Pickles without the table it knows. The module's docstring has the promises."""

    def __init__(self, engine: Engine, sources: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(sources)
        self._known: tuple[float, _Lookup] | None = None
        self._suspects: dict[str, float] = {}  # host to the last time that its shadow was faster

    def __reduce__(self) -> tuple[object, ...]:
        return Routes, (self._engine, self._names)

    def describe_all(self, chunks: Sequence[tuple[int, int, int]]) -> list[ChunkFacts]:
        """The facts of chunks, each given as (source, chunk, first chunk of the source that is needed), in their order, by
        one request to each host."""
        keys = [(source, chunk) for source, chunk, _ in chunks]
        asked = {key: (self._names[key[0]], key[1], keep_from) for key, (_, _, keep_from) in zip(keys, chunks, strict=True)}
        found = self._call_hosts(LoaderHost.describe_all, asked)
        return [found[key] for key in keys]

    def peek(self, source: int, chunk: int, keep_from: int = 0, may_make: bool = True) -> ChunkFacts | None:
        """The facts of a chunk if that takes no waiting: only a loader in this process can be peeked at. If it `may_make`
        one, it makes a chunk that takes little time."""
        if not self._engine.is_in_process:
            return None
        lookup = self._lookup()
        host = lookup.host(source, chunk)
        asked = self._names[source], chunk, keep_from, may_make
        if host in lookup.table.shadows:
            return self._call(source, chunk, LoaderHost.peek, *asked)
        try:
            return self._engine.call(host, LoaderHost.peek, *asked).result()
        except ClosedError:
            return None

    def count_losses(self, spans: TokenSpans) -> Losses:
        """The losses of parts of rows. Takes one request to each host."""
        source, chunk, *columns = spans.table
        order = np.lexsort((chunk, source))
        is_first = np.diff(source[order], prepend=-1).astype(bool) | np.diff(chunk[order], prepend=-1).astype(bool)
        of_chunk = np.split(order, np.flatnonzero(is_first)[1:])
        keys = [(int(source[at[0]]), int(chunk[at[0]])) for at in of_chunk]
        asked = {
            key: (self._names[key[0]], key[1], np.array([column[at] for column in columns]))
            for key, at in zip(keys, of_chunk, strict=True)
        }
        found: dict[tuple[int, int], Losses] = self._call_hosts(LoaderHost.count_losses, asked)
        tokens, extra = np.zeros(len(spans), np.int64), np.zeros(len(spans), np.int64)
        for key, at in zip(keys, of_chunk, strict=True):
            tokens[at], extra[at] = found[key]
        return Losses(tokens, extra)

    def origins(self, source: int, chunk: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        return self._call(source, chunk, LoaderHost.origins, self._names[source], chunk, rows)

    def prefetch(self, source: int, chunk: int, end: int | None = None) -> None:
        """Announce a chunk and those after it, before `end`: each host makes the first of its own, and as many more as it
        finds necessary. Advice only: nobody waits for it, and a request that is lost costs nothing but time."""
        name, lookup = self._names[source], self._lookup()
        last = chunk + _ANNOUNCED * lookup.num_hosts[source]
        # To every host of the source: one that has none of these chunks any more must know.
        chunks: dict[str, list[int]] = {host: [] for host in lookup.hosts_of(source)}
        for number in range(chunk, last if end is None else min(last, max(end, chunk + 1))):
            chunks[lookup.host(source, number)].append(number)
        for host, numbers in chunks.items():
            # A shadow too: it mirrors its host, but can no longer do so once the host is lost.
            for target in filter(None, (host, lookup.table.shadows.get(host))):
                self._engine.tell(target, LoaderHost.prefetch, name, numbers)

    def prefetch_firsts(self, chunks: Mapping[int, int]) -> None:
        """Announce one chunk of each source to its host, which begins with it. Nothing to do where sources have one host."""
        lookup = self._lookup()
        if any(lookup.num_hosts[source] > 1 for source in chunks):
            for source, chunk in chunks.items():
                self._engine.tell(lookup.host(source, chunk), LoaderHost.prefetch, self._names[source], [chunk])

    def note_described(self, source: int, chunk: int, keep_from: int) -> None:
        """Tell the host of a chunk that its facts are in use, as `describe` does. Nobody waits for it."""
        host = self._lookup().host(source, chunk)
        self._engine.tell(host, LoaderHost.note_described, self._names[source], chunk, keep_from)

    def fetch(self, samples: Samples) -> Payload:
        """Return the payload of samples of any sources, in their order."""
        return self._request(samples)()

    def fetch_each(self, parts: Sequence[Samples]) -> Iterator[Payload]:
        """Yield the payloads of several microbatches, in their order. All are requested before any is waited for, and small
        ones in one request: on a cluster a request costs as much as moving half a megabyte."""
        if len(parts) == 1:
            return iter([self._request(parts[0])()])
        together = group_parts(parts)
        requested = [self._request(Samples.concatenate(batch)) for batch in together]
        return (
            payload for batch, wait in zip(together, requested, strict=True) for payload in wait().split(map(len, batch))
        )

    def locate(self, parts: Sequence[Samples], *, waits: bool) -> None:
        """Nothing is in shared memory, as far as is known here."""

    def fetch_apart(self, parts: Sequence[Samples], tries: int = 0) -> list[Payload]:
        """The payloads of several requests, as `fetch` returns each, by one request to each host: a column has the type that
        the rows of its own part need."""
        lookup = self._lookup()
        of_host: dict[str, list[tuple[int, NDArray[np.intp]]]] = {}  # parts, and the places in them
        for number, part in enumerate(parts):
            host_of = lookup.host_of(part)
            used: list[int] = np.unique(host_of).tolist()
            for host in used:
                of_host.setdefault(lookup.hosts[host], []).append((number, np.flatnonzero(host_of == host)))
        wanted = {host: [parts[number].take(where) for number, where in held] for host, held in of_host.items()}
        requests = {host: self._send(lookup, host, LoaderHost.fetch_apart, asked) for host, asked in wanted.items()}
        found: list[list[tuple[Payload, NDArray[np.intp], Samples]]] = [[] for _ in parts]
        for host, wait in requests.items():
            try:
                payloads: list[Payload] = wait()
            except ClosedError:
                if not self.look_again(tries):
                    raise
                payloads = self.fetch_apart(wanted[host], tries + 1)
            for (number, where), payload, asked in zip(of_host[host], payloads, wanted[host], strict=True):
                found[number].append((payload, where, asked))
        return [_merge_hosts(of_part) for of_part in found]

    def hosts_of(self, chunks: Iterable[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
        """Group chunks, given as (source, number), by the host that has them."""
        lookup = self._lookup()
        found: dict[str, list[tuple[int, int]]] = {}
        for source, number in chunks:
            found.setdefault(lookup.host(source, number), []).append((source, number))
        return found

    def call_near(self, host: str, method: Callable[..., Any], *args: Any) -> Reply[Any]:
        """Call one host of this machine, without its shadow. Raises ClosedError, now or with the result, if it is gone."""
        return self._engine.call_near(host, method, *args)

    def is_near(self, host: str) -> bool:
        """True if a host is on this machine, and can lend its chunks."""
        return self._engine.shares_memory_with(host)

    def far_hosts(self) -> set[str]:
        """The hosts that are on other machines."""
        return {host for host in self._lookup().hosts if not self.is_near(host)}

    def patience_with(self, host: str) -> float | None:
        """How long to wait for one host alone: not for ever where its shadow can answer instead."""
        return _SILENT_S if host in self._lookup().table.shadows else None

    def note_bad_decode(self, source: int, chunk: int, table_row: int, error: str) -> None:
        """Report a row whose images cannot be decoded. Raises where the source's policy does not allow it."""
        self._call(source, chunk, LoaderHost.report_bad_decode, self._names[source], chunk, table_row, error)

    def status_lines(self) -> list[str]:
        """What the loaders are busy with. One that does not answer is named, not waited for."""
        hosts = self._lookup().hosts
        found: list[str] = []
        for host, answer in [(host, self._send_to(host, LoaderHost.status_lines)) for host in hosts]:
            try:
                found += answer.result(_STATUS_WAIT_S)
            except (WaitTimeoutError, WorkerDiedError, ClosedError):
                found.append(f"{host} does not answer")
        return found

    def _request(self, samples: Samples, tries: int = 0) -> Callable[[], Payload]:
        """Request the payload of samples; the function that is returned waits for it."""
        lookup = self._lookup()
        if len(lookup.hosts) == 1:
            wait = self._send(lookup, lookup.hosts[0], LoaderHost.fetch, samples)
            return lambda: self._wait(wait, samples, tries)
        host_of = lookup.host_of(samples)
        used = np.unique(host_of).tolist() or [0]
        places = [np.flatnonzero(host_of == host) for host in used] if len(used) > 1 else []
        parts = [samples.take(where) for where in places] or [samples]
        hosts = [lookup.hosts[host] for host in used]
        requests = [self._send(lookup, host, LoaderHost.fetch, part) for host, part in zip(hosts, parts, strict=True)]

        def wait_for_all() -> Payload:
            payloads = [self._wait(wait, part, tries) for wait, part in zip(requests, parts, strict=True)]
            return Payload.merge(payloads, places, list(map(names_of_sources, parts))) if places else payloads[0]

        return wait_for_all

    def _wait(self, wait: Callable[[], Payload], samples: Samples, tries: int) -> Payload:
        try:
            return wait()
        except ClosedError:
            if not self.look_again(tries):
                raise
            return self._request(samples, tries + 1)()

    def _call(self, source: int, chunk: int, method: Callable[..., Any], *args: Any) -> Any:
        for tries in range(_TRIES + 1):
            lookup = self._lookup()
            try:
                return self._send(lookup, lookup.host(source, chunk), method, *args)()
            except ClosedError:
                if not self.look_again(tries):
                    raise
        raise AssertionError("unreachable: the last try raises")

    def _call_hosts(
        self, method: Callable[..., Any], asked: Mapping[tuple[int, int], Any], tries: int = 0
    ) -> dict[tuple[int, int], Any]:
        """Call the host of each (source, chunk) with a list of what is asked about its chunks; returns the answers. All
        hosts are called before any is waited for."""
        lookup = self._lookup()
        calls = [
            (keys, self._send(lookup, host, method, [asked[key] for key in keys]))
            for host, keys in self.hosts_of(asked).items()
        ]
        found: dict[tuple[int, int], Any] = {}
        for keys, wait in calls:
            try:
                found.update(zip(keys, wait(), strict=True))
            except ClosedError:
                if not self.look_again(tries):
                    raise
                found.update(self._call_hosts(method, {key: asked[key] for key in keys}, tries + 1))
        return found

    def _send(self, lookup: _Lookup, host: str, method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Call a host; the function that is returned waits for the result of the host, or of its shadow."""
        shadow = lookup.table.shadows.get(host)
        if shadow is None:
            try:
                return self._engine.call(host, method, *args).result
            except ClosedError as error:
                return _Gone(error).result
        first, second = (shadow, host) if self._is_suspect(host) else (host, shadow)
        sent = self._send_once_to(first, method, *args)
        return lambda: self._first_result(host, sent, first, second, method, *args)

    def _first_result(
        self, host: str, sent: Reply[Any], first: str, second: str, method: Callable[..., Any], *args: Any
    ) -> Any:
        try:
            return sent.result(_SILENT_S)
        except WaitTimeoutError:
            answers = {second: self._send_to(second, method, *args), first: sent}
        except ClosedError:  # it is lost, or the shadow took over the name: one host is left, and nothing to wait for
            if first == host:
                self._suspects[host] = time.monotonic()
            return self._send_to(second, method, *args).result()
        while True:
            for name, answer in list(answers.items()):
                try:
                    result = answer.result(_TURN_S)
                except WaitTimeoutError:
                    continue
                except ClosedError:
                    del answers[name]
                    if not answers:
                        raise
                    continue
                if name != host:
                    self._suspects[host] = time.monotonic()
                return result

    def _send_to(self, host: str, method: Callable[..., Any], *args: Any) -> Reply[Any]:
        try:
            return self._engine.call(host, method, *args)
        except ClosedError as error:
            return _Gone(error)

    def _send_once_to(self, host: str, method: Callable[..., Any], *args: Any) -> Reply[Any]:
        try:
            return self._engine.call_once(host, method, *args)
        except ClosedError as error:
            return _Gone(error)

    def _is_suspect(self, host: str) -> bool:
        return time.monotonic() - self._suspects.get(host, -_SUSPECT_S) < _SUSPECT_S

    def _lookup(self) -> _Lookup:
        known = self._known
        if known is None or time.monotonic() - known[0] > _LOOK_S:
            return self._look()
        return known[1]

    def _look(self) -> _Lookup:
        """The newest table; ClosedError when the run is closed."""
        table: RoutingTable = self._engine.look_up(TABLE)
        known = self._known
        lookup = known[1] if known is not None and known[1].table.version == table.version else _Lookup(table, self._names)
        self._known = time.monotonic(), lookup
        return lookup

    def look_again(self, tries: int) -> bool:
        """Look the table up after a host was gone; returns whether to try again. The loader may have moved elsewhere."""
        self._look()
        return tries < _TRIES


class _Lookup:
    """A routing table in a form that looks many chunks up at once."""

    def __init__(self, table: RoutingTable, sources: Sequence[str]) -> None:
        self.table = table
        self.hosts = table.hosts
        self.num_hosts = [len(table.stretches[name][-1].hosts) for name in sources]
        at = {name: index for index, name in enumerate(self.hosts)}
        self._stretches = [table.stretches[name] for name in sources]
        self._turns = [table.turns.get(name) for name in sources]
        self._of_source: list[list[tuple[int, Ints]]] = [
            [(stretch.first, np.array([at[host] for host in stretch.hosts])) for stretch in table.stretches[name]]
            for name in sources
        ]

    def host(self, source: int, chunk: int) -> str:
        """The host of one chunk."""
        stretches = self._stretches[source]
        of_chunk = stretches[0]
        for stretch in stretches[1:]:
            if stretch.first <= chunk:
                of_chunk = stretch
        if len(of_chunk.hosts) == 1:
            return of_chunk.hosts[0]
        turns = self._turns[source]
        return of_chunk.hosts[(chunk if turns is None else turns.turn(chunk)) % len(of_chunk.hosts)]

    def hosts_of(self, source: int) -> list[str]:
        """Every host that has chunks of a source."""
        return list(dict.fromkeys(host for stretch in self._stretches[source] for host in stretch.hosts))

    def host_of(self, samples: Samples) -> Ints:
        """The place in `hosts` of each sample's host."""
        found = np.zeros(len(samples), np.int64)
        sources: list[int] = np.unique(samples.source).tolist()
        for source in sources:
            where = np.flatnonzero(samples.source == source)
            chunks, turns = samples.chunk[where], self._turns[source]
            places = chunks if turns is None or self.num_hosts[source] == 1 else turns.turns(chunks)
            for first, hosts in self._of_source[source]:  # later stretches overwrite earlier ones
                found[where] = np.where(chunks >= first, hosts[places % len(hosts)], found[where])
        return found


class _Gone:
    """The result of a call to a role that is gone."""

    def __init__(self, error: ClosedError) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002 - of the protocol
        raise self._error


def names_of_sources(samples: Samples) -> str:
    return ", ".join(f"source {samples.source_names[source]!r}" for source in np.unique(samples.source).tolist())


def _merge_hosts(found: Sequence[tuple[Payload, NDArray[np.intp], Samples]]) -> Payload:
    """One payload from those of several hosts, each with its places and its samples."""
    payloads, places, samples = zip(*found, strict=True)
    return payloads[0] if len(payloads) == 1 else Payload.merge(payloads, places, list(map(names_of_sources, samples)))


def row_bytes(samples: Samples) -> int:
    """About what the tokens and images of samples take."""
    pixels = samples.sizes.get("image_pixels")
    return 4 * int(samples.tokens.sum()) + (0 if pixels is None else 3 * int(pixels.sum()))


def group_parts(parts: Sequence[Samples]) -> list[list[Samples]]:
    """Group neighbours, up to about `_TOGETHER_BYTES` a group."""
    batches: list[list[Samples]] = []
    room = 0
    for part in parts:
        num_bytes = row_bytes(part)
        if not batches or num_bytes > room:
            batches.append([])
            room = _TOGETHER_BYTES
        batches[-1].append(part)
        room -= num_bytes
    return batches
