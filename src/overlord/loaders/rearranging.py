"""Changes a partition and moves as few shares as possible, because a share that moves starts with empty buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.loaders.model import Budget, Partition, Share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROUNDING = 1e-9


def rearrange(current: Partition, loaders: Mapping[str, int], workers: Mapping[str, float], budget: Budget) -> Partition:
    """Change the number of loaders of each source, and relieve hosts that have more work than workers where possible.

    Host i stays host i. A host without shares stays in the partition, empty, and may get shares later. `workers` is the need
    of each source over all its loaders.
    """
    hosts = _Hosts(current, loaders, workers, budget)
    before = current.num_shares()
    added = [Share(name, index, n) for name, n in loaders.items() for index in range(before[name], n)]
    for share in sorted(added, key=lambda share: (-hosts.load(share), share)):
        hosts.put(share, hosts.place_for(share))
    for at in range(len(hosts.shares)):
        hosts.relieve(at)
    return hosts.partition()


def without_least_busy_host(
    current: Partition, workers: Mapping[str, float], budget: Budget, margin: float
) -> Partition | None:
    """Empty the least busy host into the others, which keep a `margin` of their workers free. None when they have no
    room."""
    hosts = _Hosts(current, current.num_shares(), workers, budget)
    used = [at for at, shares in enumerate(hosts.shares) if shares]
    if len(used) < 2:
        return None
    emptied = min(used, key=lambda at: (hosts.busy(at), -at))
    for share in sorted(hosts.shares[emptied], key=lambda share: (-hosts.load(share), share)):
        room = budget.workers_per_host / (1 + margin)
        there = [at for at in used if at != emptied and hosts.can_take(at, share, room)]
        if not there:
            return None
        hosts.shares[emptied].remove(share)
        hosts.put(share, max(there, key=lambda at: (hosts.busy(at), -at)))
    return hosts.partition()


def moves(before: Partition, after: Partition) -> list[tuple[Share, int, int]]:
    """(share, host before, host after) of each share that is in both partitions and changed its host."""
    at = {share: host for host, shares in enumerate(before.hosts) for share in shares}
    return [
        (share, at[share], host)
        for host, shares in enumerate(after.hosts)
        for share in shares
        if at.get(share, host) != host
    ]


class _Hosts:
    """A partition that is being changed."""

    def __init__(self, current: Partition, loaders: Mapping[str, int], workers: Mapping[str, float], budget: Budget) -> None:
        self._workers = workers
        self._budget = budget
        self.shares: list[list[Share]] = [
            [
                Share(share.source, share.index, loaders[share.source])
                for share in host
                if share.index < loaders[share.source]
            ]
            for host in current.hosts
        ]

    def load(self, share: Share) -> float:
        return self._workers[share.source] / share.of

    def busy(self, at: int) -> float:
        return sum(self.load(share) for share in self.shares[at])

    def put(self, share: Share, at: int) -> None:
        if at == len(self.shares):
            self.shares.append([])
        self.shares[at].append(share)

    def can_take(self, at: int, share: Share, room: float) -> bool:
        return not self._has(at, share.source) and self.busy(at) + self.load(share) <= room + _ROUNDING

    def place_for(self, share: Share) -> int:
        """Best fit: the fullest host with room, else an empty or new host, else (at `num_hosts`) the least busy host."""
        used = [at for at, shares in enumerate(self.shares) if shares]
        there = [at for at in used if self.can_take(at, share, self._budget.workers_per_host)]
        if there:
            return max(there, key=lambda at: (self.busy(at), -at))
        if self._budget.num_hosts is None or len(used) < self._budget.num_hosts:
            return next((at for at, shares in enumerate(self.shares) if not shares), len(self.shares))
        return min(used, key=lambda at: (self._has(at, share.source), self.busy(at), at))

    def relieve(self, at: int) -> None:
        """Move shares out of a host that has more work than workers, while another host has room for them."""
        room = self._budget.workers_per_host
        while len(self.shares[at]) > 1 and (excess := self.busy(at) - room) > _ROUNDING:
            by_load = sorted(self.shares[at], key=lambda share: (self.load(share), share))
            # Prefer the smallest share that removes the excess by itself; if none does, the largest share.
            enough = [share for share in by_load if self.load(share) >= excess]
            share = next((share for share in [*enough, *_falling(by_load, enough)] if self._can_leave(share, at)), None)
            if share is None:
                return
            self.shares[at].remove(share)
            self.put(share, self.place_for(share))

    def partition(self) -> Partition:
        return Partition(tuple(tuple(sorted(host)) for host in self.shares))

    def _can_leave(self, share: Share, at: int) -> bool:
        """True if another host has room for the share, or a host may be added."""
        if self.load(share) == 0:
            return False
        used = [other for other, shares in enumerate(self.shares) if shares]
        if self._budget.num_hosts is None or len(used) < self._budget.num_hosts:
            return True
        return any(other != at and self.can_take(other, share, self._budget.workers_per_host) for other in used)

    def _has(self, at: int, source: str) -> bool:
        return any(share.source == source for share in self.shares[at])


def _falling(by_load: Sequence[Share], without: Sequence[Share]) -> list[Share]:
    return [share for share in reversed(by_load) if share not in without]
