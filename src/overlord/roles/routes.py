"""Asks the right loader host for a chunk, by a table that may change at any time.

What it promises: an answer, whatever table it knows. The newest table is looked up now and then, and at once when a host is
gone. A host that is silent for a moment (it died, it hangs, or it is only slow) is not waited for alone if it has a shadow:
the shadow is asked too, and the first answer counts, because both are the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.batches.payload import Payload
from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.roles.loader_host import LoaderHost
from overlord.runtime import liveness
from overlord.runtime.engine import Answer, Engine, Handle
from overlord.stream.facts import (
    ChunkFacts,
    Ints,
    LossCount,
    Samples,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlord.loaders.routing import RoutingTable

TABLE = "routing"
"""What the table is published as."""

_TOGETHER_BYTES = 16 << 20  # about as much as is asked for at once
_DOING_WAIT_S = liveness.ROLE_BUSY.after_s
_LOOK_S = 0.25  # on a cluster a look costs a millisecond
_SILENT_S = liveness.HOST_SLOW.after_s
_TURN_S = 0.02
_SUSPECT_S = liveness.HOST_SUSPECT.after_s
_TRIES = liveness.REROUTES


class Routes:
    """See the module's docstring. Pickles without what it knows."""

    def __init__(self, engine: Engine, sources: Sequence[str], are_here: bool = False) -> None:
        """`are_here` says that the loaders stand in this process: what they hold can be told at once."""
        self._engine = engine
        self._names = tuple(sources)
        self._are_here = are_here
        self._known: tuple[float, _Lookup] | None = None
        self._suspects: dict[str, float] = {}  # host to when it was silent last

    def __reduce__(self) -> tuple[object, ...]:
        return Routes, (self._engine, self._names)

    def describe(self, source: int, chunk: int, keep_from: int = 0) -> ChunkFacts:
        return self._answered(source, chunk, LoaderHost.describe, self._names[source], chunk, keep_from)

    def peek(self, source: int, chunk: int, keep_from: int = 0) -> ChunkFacts | None:
        """The facts of a chunk if they can be had without waiting for anybody."""
        if not self._are_here:
            return None
        return self._answered(source, chunk, LoaderHost.peek, self._names[source], chunk, keep_from)

    def count_loss(self, source: int, chunk: int, row: int, start: int, stop: int) -> LossCount:
        return self._answered(source, chunk, LoaderHost.count_loss, self._names[source], chunk, row, start, stop)

    def origins(self, source: int, chunk: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        return self._answered(source, chunk, LoaderHost.origins, self._names[source], chunk, rows)

    def prefetch(self, source: int, chunk: int, end: int | None = None) -> None:
        """Let a chunk and some after it, before `end`, be prepared. It is advice: nobody waits for it, and what is lost of
        it is made when it is asked for."""
        name, lookup = self._names[source], self._lookup()
        last = chunk + lookup.table.num_ahead(name)
        chunks: dict[str, list[int]] = {}
        for number in range(chunk, last if end is None else min(last, max(end, chunk + 1))):
            chunks.setdefault(lookup.table.host_of(name, number), []).append(number)
        for host, numbers in chunks.items():
            # A shadow too: it would learn from its host what to prepare, but not any more when that is lost.
            for told in filter(None, (host, lookup.table.shadows.get(host))):
                _sent(Handle(self._engine, told), LoaderHost.prefetch, name, numbers)

    def give(self, samples: Samples) -> Payload:
        """The payload of samples from any sources, in their order."""
        return self._giving(samples)()

    def give_each(self, parts: Sequence[Samples]) -> Iterator[Payload]:
        """The payloads of several microbatches, in their order. All are asked for before any is waited for, and small ones
        together: on a cluster an ask costs as much as moving half a megabyte."""
        if len(parts) == 1:
            return iter([self._giving(parts[0])()])
        together = _batches(parts)
        giving = [self._giving(Samples.concatenated(batch)) for batch in together]
        return (payload for batch, given in zip(together, giving, strict=True) for payload in given().split(map(len, batch)))

    def status_lines(self) -> list[str]:
        """What the loaders are busy with. One that does not answer is named, not waited for."""
        hosts = [Handle[LoaderHost](self._engine, name) for name in self._lookup().hosts]
        found: list[str] = []
        for host, answer in [(host, _sent(host, LoaderHost.status_lines)) for host in hosts]:
            try:
                found += answer.result(_DOING_WAIT_S)
            except (WaitTimeoutError, WorkerDiedError, ClosedError):
                found.append(f"{host.name} does not answer")
        return found

    def _giving(self, samples: Samples, tries: int = 0) -> Callable[[], Payload]:
        """Asks for the payload of samples; the call that is returned waits for it."""
        lookup = self._lookup()
        if len(lookup.hosts) == 1:
            wait = self._asked(lookup, lookup.hosts[0], LoaderHost.give, samples)
            return lambda: self._given(wait, samples, tries)
        host_of = lookup.host_of(samples)
        used = np.unique(host_of).tolist() or [0]
        places = [np.flatnonzero(host_of == host) for host in used] if len(used) > 1 else []
        parts = [samples.take(where) for where in places] or [samples]
        hosts = [lookup.hosts[host] for host in used]
        asked = [self._asked(lookup, host, LoaderHost.give, part) for host, part in zip(hosts, parts, strict=True)]

        def given() -> Payload:
            payloads = [self._given(wait, part, tries) for wait, part in zip(asked, parts, strict=True)]
            return Payload.merge(payloads, places, list(map(_named_sources, parts))) if places else payloads[0]

        return given

    def _given(self, wait: Callable[[], Payload], samples: Samples, tries: int) -> Payload:
        try:
            return wait()
        except ClosedError:
            if not self._look_again(tries):
                raise
            return self._giving(samples, tries + 1)()

    def _answered(self, source: int, chunk: int, method: Callable[..., Any], *args: Any) -> Any:
        for tries in range(_TRIES + 1):
            lookup = self._lookup()
            try:
                return self._asked(lookup, lookup.table.host_of(self._names[source], chunk), method, *args)()
            except ClosedError:
                if not self._look_again(tries):
                    raise
        raise AssertionError("unreachable: the last try raises")

    def _asked(self, lookup: _Lookup, host: str, method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Asks a host; the call that is returned waits for its answer, or for that of its shadow."""
        shadow = lookup.table.shadows.get(host)
        if shadow is None:
            return _sent(Handle(self._engine, host), method, *args).result
        first, second = (shadow, host) if self._is_suspect(host) else (host, shadow)
        asked = _sent(Handle(self._engine, first), method, *args)
        return lambda: self._first_answer(host, asked, first, second, method, *args)

    def _first_answer(
        self, host: str, asked: Answer, first: str, second: str, method: Callable[..., Any], *args: Any
    ) -> Any:
        try:
            return asked.result(_SILENT_S)
        except WaitTimeoutError:
            answers = {second: _sent(Handle(self._engine, second), method, *args), first: asked}
        except ClosedError:  # the shadow took over the name, or is gone: there is only one left
            return _sent(Handle(self._engine, second), method, *args).result()
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

    def _is_suspect(self, host: str) -> bool:
        return time.monotonic() - self._suspects.get(host, -_SUSPECT_S) < _SUSPECT_S

    def _lookup(self) -> _Lookup:
        known = self._known
        if known is None or time.monotonic() - known[0] > _LOOK_S:
            return self._look()
        return known[1]

    def _look(self) -> _Lookup:
        """The newest table; ClosedError when the run is closed."""
        table: RoutingTable = self._engine.published(TABLE)
        known = self._known
        lookup = known[1] if known is not None and known[1].table.version == table.version else _Lookup(table, self._names)
        self._known = time.monotonic(), lookup
        return lookup

    def _look_again(self, tries: int) -> bool:
        """After a host was gone: whether to ask again. Its loader was closed, or its name is about to mean another."""
        self._look()
        return tries < _TRIES


class _Lookup:
    """A table, ready for looking many chunks up at once."""

    def __init__(self, table: RoutingTable, sources: Sequence[str]) -> None:
        self.table = table
        self.hosts = table.hosts
        at = {name: index for index, name in enumerate(self.hosts)}
        self._of_source = [
            [(stretch.first, np.array([at[host] for host in stretch.hosts])) for stretch in table.stretches[name]]
            for name in sources
        ]

    def host_of(self, samples: Samples) -> Ints:
        """The place in `hosts` of each sample's host."""
        found = np.zeros(len(samples), np.int64)
        for source in np.unique(samples.source).tolist():
            where = np.flatnonzero(samples.source == source)
            chunks = samples.chunk[where]
            for first, hosts in self._of_source[source]:  # later stretches overwrite what is theirs
                found[where] = np.where(chunks >= first, hosts[chunks % len(hosts)], found[where])
        return found


class _Gone:
    """The answer of a role that could not even be asked."""

    def __init__(self, error: ClosedError) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> Any:
        raise self._error


def _sent(host: Handle[Any], method: Callable[..., Any], *args: Any) -> Answer[Any]:
    try:
        return host.ask(method, *args)
    except ClosedError as error:
        return _Gone(error)


def _named_sources(samples: Samples) -> str:
    return ", ".join(f"source {samples.source_names[source]!r}" for source in np.unique(samples.source).tolist())


def _batches(parts: Sequence[Samples]) -> list[list[Samples]]:
    """Neighbours together, up to about `_TOGETHER_BYTES`."""
    batches: list[list[Samples]] = []
    room = 0
    for part in parts:
        pixels = part.sizes.get("image_pixels")
        num_bytes = 4 * int(part.tokens.sum()) + (0 if pixels is None else 3 * int(pixels.sum()))
        if not batches or num_bytes > room:
            batches.append([])
            room = _TOGETHER_BYTES
        batches[-1].append(part)
        room -= num_bytes
    return batches
