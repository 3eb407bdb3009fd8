"""Who holds which chunk of which source: the one place that knows how sources are spread over loader hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from overlord.data.payload import Payload
from overlord.engine import Handle
from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.planning.facts import ChunkFacts, Ints, Samples
from overlord.planning.scaling import Partition
from overlord.roles.loader_host import LoaderHost

_TOGETHER_BYTES = 16 << 20  # about as much as is asked for at once
_DOING_WAIT_S = 1.0  # what somebody is busy with is asked when time is short already


class Routes:
    """Asks the right loader host. Chunk k of a source in n shares is in share k mod n."""

    def __init__(self, hosts: Sequence[Handle[LoaderHost]], partition: Partition, sources: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._names = tuple(sources)
        self._of_source = [partition.hosts_of(name) for name in sources]

    def describe(self, source: int, chunk: int, keep_from: int = 0) -> ChunkFacts:
        return self._host(source, chunk).ask(LoaderHost.describe, self._names[source], chunk, keep_from).result()

    def prefetch(self, source: int, chunk: int) -> None:
        self._host(source, chunk).ask(LoaderHost.prefetch, self._names[source], chunk).result()

    def count_loss(self, source: int, chunk: int, row: int, start: int, stop: int) -> int:
        ask = self._host(source, chunk).ask
        return ask(LoaderHost.count_loss, self._names[source], chunk, row, start, stop).result()

    def give(self, samples: Samples) -> Payload:
        """The payload of samples from any sources, in their order."""
        return self._giving(samples)()

    def give_each(self, parts: Sequence[Samples]) -> Iterator[Payload]:
        """The payloads of several microbatches, in their order. All are asked for before any is waited for, and small ones
        together: on a cluster an ask costs as much as moving half a megabyte."""
        together = _batches(parts)
        giving = [self._giving(Samples.concatenated(batch)) for batch in together]
        return (payload for batch, given in zip(together, giving, strict=True) for payload in given().parts(map(len, batch)))

    def _giving(self, samples: Samples) -> Callable[[], Payload]:
        """Asks for the payload of samples; the call that is returned waits for it."""
        host_of = self._host_of(samples)
        used = np.unique(host_of).tolist() or [0]
        if len(used) == 1:
            return self._hosts[used[0]].ask(LoaderHost.give, samples).result
        places = [np.flatnonzero(host_of == host) for host in used]
        answers = [
            self._hosts[host].ask(LoaderHost.give, samples.take(where)) for host, where in zip(used, places, strict=True)
        ]
        return lambda: Payload.merged([answer.result() for answer in answers], places)

    def doing(self) -> list[str]:
        """What the loaders are busy with. One that does not answer is named, not waited for."""
        answers = [host.ask(LoaderHost.doing) for host in self._hosts]
        found: list[str] = []
        for host, answer in zip(self._hosts, answers, strict=True):
            try:
                found += answer.result(_DOING_WAIT_S)
            except (WaitTimeoutError, WorkerDiedError, ClosedError):
                found.append(f"{host.name} does not answer")
        return found

    def _host_of(self, samples: Samples) -> Ints:
        if len(self._hosts) == 1:
            return np.zeros(len(samples), np.int64)
        found = np.empty(len(samples), np.int64)
        for source in np.unique(samples.source).tolist():
            hosts = np.array(self._of_source[source])
            where = samples.source == source
            found[where] = hosts[samples.chunk[where] % len(hosts)]
        return found

    def _host(self, source: int, chunk: int) -> Handle[LoaderHost]:
        hosts = self._of_source[source]
        return self._hosts[hosts[chunk % len(hosts)]]


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
