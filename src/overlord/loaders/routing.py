"""The immutable table that maps each chunk to its loader host. A change makes a new table with the next version.

A chunk is a function of its number, so any host can make any chunk: a stale table is still correct, only slower. When a
source moves to other hosts, the old ones keep the chunks that they hold or are making, so that no chunk is made twice. Old
hosts leave the table when no step can name those chunks any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.loaders.model import Partition
    from overlord.stream.chunk_order import RunTurns


@dataclass(frozen=True, slots=True)
class Stretch:
    """From chunk `first` up to the next stretch, chunk k of a source belongs to host k mod n of the n `hosts`; of a source
    with `turns` in its table, to host t mod n, where t is the run of the chunk."""

    first: int
    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.first < 0 or not self.hosts:
            raise SpecError(f"a stretch begins at a chunk >= 0 and has a host, got {self.first} and {self.hosts}")


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """Routes chunks to hosts. `stretches` of each source begin at chunk 0. `shadows` maps the name of a host to its
    shadow. `turns` are of sources of which one host gets runs of chunks, because it reads each run at once."""

    stretches: Mapping[str, tuple[Stretch, ...]]
    shadows: Mapping[str, str] = field(default_factory=dict[str, str])
    version: int = 0
    turns: Mapping[str, RunTurns] = field(default_factory=dict[str, "RunTurns"])

    def __post_init__(self) -> None:
        for source, stretches in self.stretches.items():
            firsts = [stretch.first for stretch in stretches]
            if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
                raise SpecError(f"the stretches of source {source!r} must begin at 0 and follow each other, got {firsts}")

    @staticmethod
    def of(partition: Partition, names: Sequence[str], turns: Mapping[str, RunTurns] | None = None) -> RoutingTable:
        """The table of a partition whose hosts have these names."""
        hosts = {source: tuple(names[host] for host in found) for source, found in partition.hosts_of_all().items()}
        return RoutingTable({source: (Stretch(0, found),) for source, found in hosts.items()}, turns=turns or {})

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that has a chunk, without shadows."""
        every = (host for stretches in self.stretches.values() for stretch in stretches for host in stretch.hosts)
        return tuple(dict.fromkeys(every))

    def host_of(self, source: str, chunk: int) -> str:
        stretch = next(s for s in reversed(self.stretches[source]) if s.first <= chunk)
        return stretch.hosts[self.place_of(source, chunk) % len(stretch.hosts)]

    def place_of(self, source: str, chunk: int) -> int:
        """The number that says which of the hosts of its stretch has a chunk."""
        turns = self.turns.get(source)
        return chunk if turns is None else turns.turn(chunk)

    def sources_of(self, host: str) -> tuple[str, ...]:
        """The sources whose chunks a host has."""
        return tuple(name for name, found in self.stretches.items() if any(host in stretch.hosts for stretch in found))

    def with_hosts(self, source: str, hosts: Sequence[str], first: int) -> RoutingTable:
        """A table in which the chunks of a source from `first` on belong to these hosts."""
        before = tuple(stretch for stretch in self.stretches[source] if stretch.first < first)
        if not before or before[-1].hosts != tuple(hosts):
            before = (*before, Stretch(first if before else 0, tuple(hosts)))
        return self._newer(stretches={**self.stretches, source: before})

    def with_source(self, source: str, hosts: Sequence[str], turns: RunTurns | None = None) -> RoutingTable:
        """A table with one source more, whose chunks belong to these hosts."""
        of_all = self.turns if turns is None else {**self.turns, source: turns}
        return self._newer(stretches={**self.stretches, source: (Stretch(0, tuple(hosts)),)}, turns=of_all)

    def since(self, needed: Mapping[str, int]) -> RoutingTable:
        """A table without the stretches that end before the first needed chunk of their source."""
        kept: dict[str, tuple[Stretch, ...]] = {}
        for source, stretches in self.stretches.items():
            at = max(i for i, stretch in enumerate(stretches) if i == 0 or stretch.first <= needed.get(source, 0))
            kept[source] = (replace(stretches[at], first=0), *stretches[at + 1 :])
        return self if kept == dict(self.stretches) else self._newer(stretches=kept)

    def with_shadow(self, host: str, shadow: str | None) -> RoutingTable:
        """A table with this shadow for a host, or with none."""
        others = {name: found for name, found in self.shadows.items() if name != host}
        return self._newer(shadows=others if shadow is None else {**others, host: shadow})

    def with_shadow_in_place_of(self, host: str) -> RoutingTable:
        """A table in which a host and its shadow have swapped places."""
        shadow = self.shadows[host]

        def other(stretch: Stretch) -> Stretch:
            return replace(stretch, hosts=tuple(shadow if name == host else name for name in stretch.hosts))

        shadows = {name: found for name, found in self.shadows.items() if name != host} | {shadow: host}
        stretches = {source: tuple(map(other, found)) for source, found in self.stretches.items()}
        return self._newer(stretches=stretches, shadows=shadows)

    def _newer(
        self,
        *,
        stretches: Mapping[str, tuple[Stretch, ...]] | None = None,
        shadows: Mapping[str, str] | None = None,
        turns: Mapping[str, RunTurns] | None = None,
    ) -> RoutingTable:
        """A copy with the given fields replaced and the next version."""
        return RoutingTable(
            stretches=self.stretches if stretches is None else stretches,
            shadows=self.shadows if shadows is None else shadows,
            version=self.version + 1,
            turns=self.turns if turns is None else turns,
        )
