"""How sources are spread over loader hosts. Changes who reads a chunk, never what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """Part `index` of the `of` parts of a source: its chunks k with k mod `of` = `index`."""

    source: str
    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise SpecError(f"source {self.source!r} in {self.of} shares has shares 0 to {self.of - 1}, not {self.index}")


@dataclass(frozen=True, slots=True)
class Partition:
    """Which shares of which sources live in which loader host: every share in exactly one."""

    hosts: tuple[tuple[Share, ...], ...]

    def __post_init__(self) -> None:
        found: dict[str, list[Share]] = {}
        for share in (share for host in self.hosts for share in host):
            found.setdefault(share.source, []).append(share)
        for name, shares in found.items():
            if sorted(shares) != [Share(name, index, shares[0].of) for index in range(shares[0].of)]:
                held = ", ".join(f"{share.index} of {share.of}" for share in sorted(shares))
                raise SpecError(f"every share of source {name!r} must live in one loader host; the hosts have {held}")

    def hosts_of(self, source: str) -> tuple[int, ...]:
        """The host of each share of a source, in the order of the shares."""
        held = {share.index: at for at, host in enumerate(self.hosts) for share in host if share.source == source}
        if not held:
            raise SpecError(f"no loader host holds source {source!r}")
        return tuple(held[index] for index in range(len(held)))


def by_share(num_shares: Mapping[str, int]) -> Partition:
    """Share i of every source in host i: for hosts that stand in one process anyway."""
    indexes = range(max(num_shares.values(), default=0))
    return Partition(tuple(tuple(Share(name, i, n) for name, n in num_shares.items() if i < n) for i in indexes))


def evenly(num_shares: Mapping[str, int], loads: Mapping[str, float], num_hosts: int) -> Partition:
    """The shares over at most `num_hosts` hosts, so that their loads are nearly even: the heaviest first, each to the
    host that has least. Hosts that have a share of a source already come last for another of it."""
    shares = [Share(name, index, n) for name, n in num_shares.items() for index in range(n)]
    if num_hosts < 1:
        raise SpecError(f"sources need at least 1 loader host, got {num_hosts}")
    hosts: list[list[Share]] = [[] for _ in range(min(num_hosts, len(shares)))]
    carried = [0.0] * len(hosts)
    for share in sorted(shares, key=lambda share: (-loads[share.source] / share.of, share)):
        has_some = [any(other.source == share.source for other in host) for host in hosts]
        at = min(range(len(hosts)), key=lambda host: (has_some[host], carried[host], len(hosts[host]), host))
        hosts[at].append(share)
        carried[at] += loads[share.source] / share.of
    return Partition(tuple(tuple(sorted(host)) for host in hosts))
