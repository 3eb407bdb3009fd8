"""The values that scaling decides with: partitions of sources over loader hosts, the measured cost of a chunk, and the
budget of loaders. A partition changes which process reads a chunk, never the chunk's content.

A *loader* is one share of one source. A *loader host* is a process that holds shares of many sources. A *worker* makes one
chunk at a time. The need of a source is counted in workers: chunks per second times the seconds that one chunk takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from overlord.declare.source import MIB
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture

_REMEMBERED_CHUNKS = 16  # the window of a profile's moving mean
_WORKERS_PER_CPU = 8  # more concurrent reads seldom make storage faster
CHUNKS_AT_HAND = 2  # the chunk that steps draw from, and the next one


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
    """Assigns every share of every source to exactly one loader host."""

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
        """The index of the host of each share of a source, in the order of the shares."""
        held = {share.index: at for at, host in enumerate(self.hosts) for share in host if share.source == source}
        if not held:
            raise SpecError(f"no loader host holds source {source!r}")
        return tuple(held[index] for index in range(len(held)))

    def hosts_of_all(self) -> dict[str, tuple[int, ...]]:
        """The same for every source, in one pass."""
        held: dict[str, dict[int, int]] = {}
        for at, host in enumerate(self.hosts):
            for share in host:
                held.setdefault(share.source, {})[share.index] = at
        return {source: tuple(found[index] for index in range(len(found))) for source, found in held.items()}

    def num_shares(self) -> dict[str, int]:
        """The number of loaders of each source."""
        return {share.source: share.of for host in self.hosts for share in host}

    def check_sources(self, sources: Collection[str]) -> None:
        """Raise SpecError unless these are the sources that the partition holds."""
        held = self.num_shares()
        missing = [name for name in sources if name not in held]
        if missing:
            raise SpecError(f"a partition holds every source of its job; this one lacks {', '.join(map(repr, missing))}")
        foreign = [name for name in held if name not in sources]
        if foreign:
            raise SpecError(f"the partition has shares of {', '.join(map(repr, foreign))}, which the job does not have")


def by_share(num_shares: Mapping[str, int]) -> Partition:
    """Puts share i of every source in host i: for hosts that are all in one process."""
    indexes = range(max(num_shares.values(), default=0))
    return Partition(tuple(tuple(Share(name, i, n) for name, n in num_shares.items() if i < n) for i in indexes))


def evenly(num_shares: Mapping[str, int], loads: Mapping[str, float], num_hosts: int) -> Partition:
    """Spreads the shares over at most `num_hosts` hosts with nearly even loads: the heaviest share first, each to the host
    with the least load. A host that already has a share of a source gets another one only when no other host is left."""
    shares = [Share(name, index, n) for name, n in num_shares.items() for index in range(n)]
    if num_hosts < 1:
        raise SpecError(f"sources need at least 1 loader host, got {num_hosts}")
    hosts: list[list[Share]] = [[] for _ in range(min(num_hosts, len(shares)))]
    carried = [0.0] * len(hosts)
    held: list[set[str]] = [set() for _ in hosts]
    for share in sorted(shares, key=lambda share: (-loads[share.source] / share.of, share)):
        source = share.source
        at = min(range(len(hosts)), key=lambda host: (source in held[host], carried[host], len(hosts[host]), host))
        hosts[at].append(share)
        held[at].add(source)
        carried[at] += loads[share.source] / share.of
    return Partition(tuple(tuple(sorted(host)) for host in hosts))


def shares_by_load(num_shares: Mapping[str, int], loads: Mapping[str, float], num_hosts: int) -> dict[str, int]:
    """The shares of each source such that no share is more than one of `num_hosts` hosts can carry of the whole load: one
    heavy source then keeps all of them busy. Never fewer than `num_shares`."""
    total = sum(loads.values())
    needed = {name: math.ceil(num_hosts * load / total - 1e-9) if total else 1 for name, load in loads.items()}
    return {name: max(given, min(needed[name], num_hosts)) for name, given in num_shares.items()}


_BALANCED = 1.1
"""A partition whose busiest host has at most so many times the mean load is even enough."""
_FINEST = 3


def in_balance(
    num_shares: Mapping[str, int], most_shares: Mapping[str, int], loads: Mapping[str, float], num_hosts: int
) -> Partition:
    """As `evenly`, with more shares of sources where that makes the loads of hosts more even: the fewest that do, up to
    `most_shares` of a source. A step waits for the slowest source, so the busiest host sets the pace of all."""
    best = evenly(num_shares, loads, num_hosts)
    if not sum(loads.values()):
        return best
    for fineness in range(1, _FINEST + 1):
        if _unevenness(best, loads, num_hosts) <= _BALANCED:
            break
        part = sum(loads.values()) / (fineness * num_hosts)
        finer = {name: min(round(load / part), most_shares[name], num_hosts) for name, load in loads.items()}
        tried = evenly({name: max(n, finer[name]) for name, n in num_shares.items()}, loads, num_hosts)
        if _unevenness(tried, loads, num_hosts) < _unevenness(best, loads, num_hosts):
            best = tried
    return best


def _unevenness(partition: Partition, loads: Mapping[str, float], num_hosts: int) -> float:
    """The load of the busiest host over the mean of all."""
    busiest = max(sum(loads[share.source] / share.of for share in host) for host in partition.hosts)
    return busiest * num_hosts / sum(loads.values())


def hosts_beside(num_processes: int, num_groups: int) -> int:
    """How many loader hosts to run in `num_processes` processes beside the data constructors of `num_groups` groups, for
    sources whose chunks cost less than the batches made of them. A loader host and a constructor in one process contend for
    the GIL, and every host keeps chunks of its own: so hosts get the processes that no constructor needs, and no more than
    there are constructors. Three hosts feed four constructors (`python -m bench trainers`); where there are not even so
    many processes left, every process gets a host."""
    num_free = num_processes - num_groups
    return min(num_free, num_groups) if 4 * num_free >= 3 * num_groups else num_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The average cost of one chunk of a source."""

    source: str
    cpu_s: float
    """Seconds of processor time."""
    wait_s: float
    """Seconds of waiting, mostly for storage."""
    rows: float
    tokens: float
    chunk_bytes: int
    """Size of the largest expected chunk in memory, decoded, because buffers must hold it."""
    open_bytes: int = 0
    """Memory of one loader that holds the source open, without its chunks."""
    open_s: float = 0.0
    """Seconds until a new loader can begin its first chunk: it opens files, loads a tokeniser."""
    buffer_bytes: int = 0
    """The job's limit for the buffers of the source; 0 for no limit."""
    num_chunks: int = 0
    """How many chunks were measured."""
    sent_bytes: float = 0.0
    """Mean bytes of a chunk that its host sends to Data Constructors; 0 where they were not measured."""

    def __post_init__(self) -> None:
        bytes_and_counts = ("chunk_bytes", "open_bytes", "buffer_bytes", "sent_bytes", "num_chunks")
        for name in ("cpu_s", "wait_s", "tokens", "open_s", *bytes_and_counts):
            if not 0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} of source {self.source!r} must be a number >= 0, got {getattr(self, name)}")
        if not 0 < self.rows < math.inf:
            raise SpecError(f"a chunk of source {self.source!r} must have rows to be profiled, got {self.rows}")

    @property
    def chunk_s(self) -> float:
        """Seconds that one worker takes to make a chunk."""
        return self.cpu_s + self.wait_s

    @property
    def cpu_share(self) -> float:
        """The fraction of a worker's time in which it keeps a processor busy."""
        return self.cpu_s / self.chunk_s if self.chunk_s else 0.0

    @property
    def most_loaders(self) -> float:
        """The most loaders whose buffers can each hold the chunks at hand."""
        if not self.buffer_bytes or not self.chunk_bytes:
            return math.inf
        return max(1, self.buffer_bytes // (CHUNKS_AT_HAND * self.chunk_bytes))

    def with_measured(self, measured: Profile) -> Profile:
        """The moving mean of this profile and newly measured chunks. The cost of opening stays unless it was measured."""
        if measured.num_chunks == 0:
            return self
        known = min(self.num_chunks, _REMEMBERED_CHUNKS)
        new = measured.num_chunks / (known + measured.num_chunks)

        def mean(name: str) -> float:
            return (1 - new) * getattr(self, name) + new * getattr(measured, name)

        return replace(
            self,
            **{name: mean(name) for name in ("cpu_s", "wait_s", "rows", "tokens", "sent_bytes")},
            chunk_bytes=max(self.chunk_bytes, measured.chunk_bytes),
            open_bytes=measured.open_bytes or self.open_bytes,
            open_s=measured.open_s or self.open_s,
            num_chunks=self.num_chunks + measured.num_chunks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The resources that all loaders together may use."""

    cpus: float
    memory_bytes: int
    num_hosts: int | None = None
    """The most loader hosts; None for as many as are useful, on a cluster at most one for each CPU that it has."""
    workers_per_host: int = 4
    """Chunks that one host makes in parallel."""
    host_bytes: int = 128 * MIB
    """Memory of a host's process before it holds a chunk; 0 when all hosts are in one process."""
    headroom: float = 1.25
    """Workers per mean demand. Above 1, because chunks differ in cost and steps do not need them evenly."""
    host_bytes_per_s: float | None = None
    """Bytes that one host can send to Data Constructors in a second, over the network or between processes; None: any."""

    @staticmethod
    def in_one_process(*, cpus: float, memory_bytes: int) -> Budget:
        """For the embedded engine: one host with many workers per CPU, because most of them wait for storage."""
        return Budget(
            cpus=cpus,
            memory_bytes=memory_bytes,
            num_hosts=1,
            workers_per_host=_WORKERS_PER_CPU * math.ceil(cpus),
            host_bytes=0,
        )

    def __post_init__(self) -> None:
        if not 0 < self.cpus < math.inf:
            raise SpecError(f"a budget needs some processors, got cpus={self.cpus}")
        if self.memory_bytes < 1:
            raise SpecError(f"a budget needs some memory, got memory_bytes={self.memory_bytes}")
        if self.num_hosts is not None and self.num_hosts < 1:
            raise SpecError(f"sources need at least 1 loader host, got num_hosts={self.num_hosts}")
        if self.workers_per_host < 1:
            raise SpecError(f"a loader host needs at least 1 worker, got workers_per_host={self.workers_per_host}")
        if self.host_bytes < 0:
            raise SpecError(f"host_bytes cannot be negative, got {self.host_bytes}")
        if not 1 <= self.headroom < math.inf:
            raise SpecError(f"headroom is a factor of at least 1, got {self.headroom}")
        if self.host_bytes_per_s is not None and not 0 < self.host_bytes_per_s < math.inf:
            raise SpecError(f"a host sends more than 0 bytes a second, got host_bytes_per_s={self.host_bytes_per_s}")


def chunks_per_step(
    profiles: Mapping[str, Profile], weights: Mapping[str, float], batch: Batch, unit: Literal["samples", "tokens"]
) -> dict[str, float]:
    """How many chunks of each source a step takes on average. `weights` are shares of samples or of tokens, by `unit`."""
    drawn = {name: weight for name, weight in weights.items() if weight > 0}
    if batch.tokens is not None or unit == "tokens":
        for name in drawn:
            if profiles[name].tokens == 0:
                raise SpecError(f"steps are counted in tokens, but the chunks of source {name!r} have none")
    lengths = {name: profiles[name].tokens / profiles[name].rows for name in drawn}
    # Samples of each source, up to a common factor. Weights by tokens are divided by the tokens of a sample.
    samples = drawn if unit == "samples" else {name: weight / lengths[name] for name, weight in drawn.items()}
    if batch.samples is not None:
        factor = batch.samples / sum(samples.values())
    else:
        factor = (batch.tokens or 0) / sum(samples[name] * lengths[name] for name in samples)
    return {name: factor * samples[name] / profiles[name].rows if name in samples else 0.0 for name in profiles}


def chunks_held(loaders: int, workers: float) -> int:
    """Chunks of a source in memory: those at hand and one for each worker, but at least those at hand in each loader. None
    for a source that no step draws from."""
    return max(CHUNKS_AT_HAND + math.ceil(workers), CHUNKS_AT_HAND * loaders) if workers > 0 else 0


def held_bytes(profile: Profile, loaders: int, workers: float) -> int:
    """Memory of a source: holding it open in each loader, and its chunks."""
    return loaders * profile.open_bytes + chunks_held(loaders, workers) * profile.chunk_bytes


def workers_needed(profiles: Mapping[str, Profile], rates: Mapping[str, float], headroom: float) -> dict[str, float]:
    """Workers of each source that keep up with its rate, in chunks per second."""
    return {name: headroom * rates.get(name, 0.0) * profile.chunk_s for name, profile in profiles.items()}


def transfers_needed(profiles: Mapping[str, Profile], rates: Mapping[str, float], budget: Budget) -> dict[str, float]:
    """The hosts that each source keeps busy with sending, as a fraction or a multiple of one; 0 where a host may send any
    number of bytes."""
    if budget.host_bytes_per_s is None:
        return dict.fromkeys(profiles, 0.0)
    per_s = budget.host_bytes_per_s
    return {name: budget.headroom * rates.get(name, 0.0) * each.sent_bytes / per_s for name, each in profiles.items()}


def loaders_for(workers: float, workers_per_host: int) -> int:
    """The number of loaders, each in its own host, that together have this many workers."""
    return max(1, math.ceil(workers / workers_per_host - 1e-9))  # the tolerance is for rounding


def weights_ahead(mixture: Mixture, first: int, last: int) -> list[tuple[int, dict[str, float]]]:
    """(step, weights) at every step from `first` to `last` where the weight of a source can peak. Between two entries of the
    schedule weights are constant or linear, so only the ends of each interval matter."""
    changes = [step for step, _ in mixture.schedule if first < step <= last]
    ends = [last] if mixture.ramp == "linear" and last > first and last not in changes else []
    return [(step, mixture.at(step)) for step in (first, *changes, *ends)]


def duration(seconds: float) -> str:
    """Seconds as text: 1.5 s, 20 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
