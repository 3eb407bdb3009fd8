"""Decides which loader hosts get a shadow: a hot standby that holds the same chunks as its host; and whether a shadow copies
chunks from its host or makes them itself.

A host that dies is restarted with empty buffers. Steps wait until it has made the chunks at hand again; trainers do not
notice while prefetched steps last. So a host needs a shadow when refilling its buffers takes longer than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.errors import SpecError
from overlord.loaders.model import (
    Budget,
    Partition,
    Profile,
    Share,
    duration,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROUNDING = 1e-9
_WAITING = 0.05  # what a second of waiting for storage costs, in CPU seconds: it takes a thread and a request, no core
_SMOOTHING = 0.3
_FEWEST_BYTES = 1 << 16  # a copy of fewer says nothing about the cost of a byte


@dataclass(frozen=True, slots=True)
class CopyCost:
    """CPU seconds of copying a chunk, at both ends."""

    request_s: float
    byte_s: float

    def of(self, num_bytes: float) -> float:
        """The seconds of a chunk of so many bytes."""
        return self.request_s + num_bytes * self.byte_s

    def with_measured(self, cpu_s: float, num_bytes: int) -> CopyCost:
        """After a copy of `num_bytes` took `cpu_s`."""
        if num_bytes < _FEWEST_BYTES:
            return self
        byte_s = max(cpu_s - self.request_s, 0.0) / num_bytes
        return CopyCost(self.request_s, self.byte_s + _SMOOTHING * (byte_s - self.byte_s))


NEAR = CopyCost(request_s=0.0005, byte_s=0.4e-9)
"""Through shared memory of one node, until it is measured."""
FAR = CopyCost(request_s=0.004, byte_s=2e-9)
"""From another node, until it is measured."""

FILE = CopyCost(request_s=0.002, byte_s=3e-9)
"""Through a file that is written and read again."""


def is_copied(cpu_s: float, wait_s: float, num_bytes: float, cost: CopyCost) -> bool:
    """Whether a chunk is copied, by a shadow or into a snapshot, rather than made again. Making it takes `cpu_s` seconds of
    a core and `wait_s` of waiting."""
    return cost.of(num_bytes) < cpu_s + _WAITING * wait_s


@dataclass(frozen=True, slots=True)
class Shadow:
    """Whether a host gets a shadow, and why."""

    host: int
    is_kept: bool
    refill_s: float
    """Seconds from the host's death until its replacement has made the chunks at hand."""
    slack_s: float
    """Seconds that trainers can continue without it, on prefetched steps."""
    memory_bytes: int
    """Memory that its shadow takes, or would take."""
    cpus: float
    """CPUs of its shadow, which copies or makes every chunk that its host makes."""
    reason: str


@dataclass(frozen=True, slots=True)
class Shadowing:
    """The decision for each host of a partition, in its order."""

    hosts: tuple[Shadow, ...]
    partition: Partition

    @property
    def shadowed(self) -> tuple[int, ...]:
        """The hosts that get a shadow, the longest stall first."""
        kept = [shadow for shadow in self.hosts if shadow.is_kept]
        return tuple(s.host for s in sorted(kept, key=lambda s: (s.slack_s - s.refill_s, s.host)))

    @property
    def sources(self) -> frozenset[str]:
        """The sources all of whose loaders have a shadow."""
        kept = set(self.shadowed)
        names = {share.source for host in self.partition.hosts for share in host}
        return frozenset(name for name in names if kept.issuperset(self.partition.hosts_of(name)))


def shadows(
    partition: Partition,
    profiles: Mapping[str, Profile],
    per_step: Mapping[str, float],
    *,
    step_s: float,
    prefetch: int,
    spare: Budget,
    start_s: float = 0.0,
) -> Shadowing:
    """Choose shadows for the hosts whose loss would stall trainers, the longest stall first, within the budget `spare`.

    `per_step` is the number of chunks of each source that a step takes, `prefetch` the number of prefetched steps of
    `step_s` seconds, `start_s` the seconds that the engine takes to start a host.
    """
    if not step_s > 0 or prefetch < 0 or start_s < 0:
        raise SpecError(
            "shadows need step_s above 0, and prefetch and start_s of at least 0, got "
            f"step_s={step_s}, prefetch={prefetch}, start_s={start_s}"
        )
    partition.check_sources(profiles)
    slack_s = prefetch * step_s
    wanted = [
        _HostLoss.of(host, profiles, per_step, step_s=step_s, start_s=start_s, budget=spare) for host in partition.hosts
    ]
    found: dict[int, Shadow] = {}
    left_bytes, left_cpus = spare.memory_bytes, spare.cpus
    for at in sorted(range(len(wanted)), key=lambda at: (-wanted[at].refill_s, at)):
        want = wanted[at]
        is_kept, why = False, "the steps that are ready outlast that"
        if want.refill_s > slack_s:
            is_kept = want.memory_bytes <= left_bytes and want.cpus <= left_cpus * (1 + _ROUNDING)
            why = f"trainers would wait {duration(want.refill_s - slack_s)}" + (
                ""
                if is_kept
                else f"; a shadow takes {want.memory_bytes:,} bytes and {want.cpus:.3g} CPUs, and only {left_bytes:,} bytes "
                f"and {left_cpus:.3g} CPUs are left for shadows"
            )
        if is_kept:
            left_bytes, left_cpus = left_bytes - want.memory_bytes, left_cpus - want.cpus
        reason = f"{want.refilling}, {prefetch} steps of {duration(step_s)} are ready: {why}"
        found[at] = Shadow(at, is_kept, want.refill_s, slack_s, want.memory_bytes, want.cpus, reason)
    return Shadowing(tuple(found[at] for at in range(len(wanted))), partition)


@dataclass(frozen=True, slots=True)
class _HostLoss:
    """The cost of losing a host, and of its shadow."""

    refill_s: float
    refilling: str
    memory_bytes: int
    cpus: float

    @staticmethod
    def of(
        host: Sequence[Share],
        profiles: Mapping[str, Profile],
        per_step: Mapping[str, float],
        *,
        step_s: float,
        start_s: float,
        budget: Budget,
    ) -> _HostLoss:
        read = [(profiles[share.source], share) for share in host if per_step.get(share.source, 0.0) > 0]
        if not read:
            return _HostLoss(0.0, "no step draws from it", 0, 0.0)
        # One more than the mean, because a step begins and ends inside a chunk.
        chunks = [math.ceil(per_step[profile.source] / share.of) + 1 for profile, share in read]
        work_s = sum(number * profile.chunk_s for number, (profile, _) in zip(chunks, read, strict=True))
        longest_s = max(profile.chunk_s for profile, _ in read)
        open_s = max(profile.open_s for profile, _ in read)
        making_s = max(work_s / min(budget.workers_per_host, sum(chunks)), longest_s)
        return _HostLoss(
            refill_s=start_s + open_s + making_s,
            refilling=f"starting takes {duration(start_s)}, opening {duration(open_s)}, "
            f"{sum(chunks)} chunks {duration(making_s)}",
            memory_bytes=budget.host_bytes
            + sum(p.open_bytes + n * p.chunk_bytes for n, (p, _) in zip(chunks, read, strict=True)),
            cpus=sum(per_step[profile.source] / share.of * _mirror_s(profile) / step_s for profile, share in read),
        )


def _mirror_s(profile: Profile) -> float:
    """CPU seconds that a shadow takes for a chunk. It may be on another node."""
    copied = is_copied(profile.cpu_s, profile.wait_s, profile.chunk_bytes, FAR)
    return FAR.of(profile.chunk_bytes) if copied else profile.cpu_s
