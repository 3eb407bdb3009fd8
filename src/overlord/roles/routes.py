"""Who holds which chunk of which source: the one place that knows how sources are spread over loader hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from overlord.data.payload import Payload
from overlord.engine import Handle
from overlord.planning.facts import ChunkFacts, Samples
from overlord.roles.loader_host import LoaderHost


class Routes:
    """Asks the right loader host. Chunk k of a source with n hosts is at the (k mod n)-th of them."""

    def __init__(self, hosts: Sequence[Handle[LoaderHost]], hosts_of_source: Mapping[str, Sequence[int]]) -> None:
        self._hosts = hosts
        self._names = tuple(hosts_of_source)
        self._of_source = [tuple(indexes) for indexes in hosts_of_source.values()]

    def describe(self, source: int, chunk: int, keep_from: int = 0) -> ChunkFacts:
        return self._host(source, chunk).ask(LoaderHost.describe, self._names[source], chunk, keep_from).result()

    def prefetch(self, source: int, chunk: int) -> None:
        self._host(source, chunk).ask(LoaderHost.prefetch, self._names[source], chunk).result()

    def count_loss(self, source: int, chunk: int, row: int, start: int, stop: int) -> int:
        ask = self._host(source, chunk).ask
        return ask(LoaderHost.count_loss, self._names[source], chunk, row, start, stop).result()

    def give(self, samples: Samples) -> Payload:
        """The payload of samples from any sources, in their order."""
        if len(self._hosts) == 1:
            return self._hosts[0].ask(LoaderHost.give, samples).result()
        host_of = np.array([self._index(s, c) for s, c in zip(samples.source.tolist(), samples.chunk.tolist(), strict=True)])
        used = np.unique(host_of)
        places = [np.flatnonzero(host_of == host) for host in used]
        answers = [
            self._hosts[host].ask(LoaderHost.give, samples.take(where)) for host, where in zip(used, places, strict=True)
        ]
        return Payload.merged([answer.result() for answer in answers], places)

    def doing(self) -> list[str]:
        return [line for host in self._hosts for line in host.ask(LoaderHost.doing).result()]

    def _index(self, source: int, chunk: int) -> int:
        hosts = self._of_source[source]
        return hosts[chunk % len(hosts)]

    def _host(self, source: int, chunk: int) -> Handle[LoaderHost]:
        return self._hosts[self._index(source, chunk)]
