"""Chooses, before a run, the loaders and workers of each source under a budget, and their hosts, with a reason for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlord.errors import SpecError
from overlord.loaders.model import (
    Budget,
    Partition,
    Profile,
    chunks_held,
    duration,
    evenly,
    loaders_for,
    transfers_needed,
    workers_needed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Source

_NAMED_AT_MOST = 5  # sources in a message
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Allotment:
    """The resources that one source gets, and the reason."""

    source: str
    loaders: int
    workers: float
    """At the peak of the source in the schedule; fractional, because sources share workers."""
    cpus: float
    needed_bytes: int
    """Memory for its chunks, and for holding it open in each of its loaders."""
    buffer_bytes: int
    """The limit for its chunks in memory."""
    reason: str


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A partition, the share of the budget that each source gets, and the reasons."""

    partition: Partition
    sources: Mapping[str, Allotment]
    num_workers: int
    """The most chunks that one host makes in parallel."""
    cpus: float
    """At the peak of the schedule."""
    needed_bytes: int
    """Memory that is needed to keep up."""
    memory_bytes: int
    """Memory that may be used: buffers get the rest of the budget."""
    reasons: tuple[str, ...]
    """Reasons that concern more than one source: the number of hosts, and the use of the budget."""

    def applied_to(self, job: Job) -> Job:
        """A copy of the job with the chosen loaders, buffers and workers. Its stream is the same."""
        self.partition.check_sources(job.sources)
        sources: dict[str, Source] = {}
        for name, source in job.sources.items():
            given = self.sources[name]
            sources[name] = source.with_loaders(given.loaders, given.buffer_bytes or source.buffer_bytes)
        return replace(job, sources=sources, num_workers=self.num_workers)


@dataclass(frozen=True, slots=True)
class _Need:
    """The need of a source at its peak in the schedule."""

    profile: Profile
    rate: float
    """Chunks a second."""
    workers: float
    sending: float
    """The hosts that it keeps busy with sending."""
    loaders: int

    @property
    def num_chunks(self) -> int:
        return chunks_held(self.loaders, self.workers)

    @property
    def chunk_bytes(self) -> int:
        return self.num_chunks * self.profile.chunk_bytes

    @property
    def open_bytes(self) -> int:
        return self.loaders * self.profile.open_bytes


def partition(profiles: Mapping[str, Profile], phases: Sequence[Mapping[str, float]], budget: Budget) -> Partitioning:
    """Choose loaders, workers and hosts for every source in `profiles`.

    `phases` are the chunks per second of each source in each phase of the schedule. Loaders and memory are sized for each
    source's own peak, processors for the peak of all sources together. With `budget.host_bytes_per_s` no host has to send
    more than that: a source that is cheap to make but large gets several loaders too. SpecError for a budget that is too
    small; its message lists the sources that need most.
    """
    if not profiles or not phases:
        raise SpecError("a partition needs the profile of at least one source, and the rates of at least one phase")
    cpus = _check_cpus(profiles, phases, budget)
    busy = [workers_needed(profiles, rates, budget.headroom) for rates in phases]
    sending = [transfers_needed(profiles, rates, budget) for rates in phases]
    needs: dict[str, _Need] = {}
    for name, profile in profiles.items():
        workers = max(in_phase[name] for in_phase in busy)
        rate = max(rates.get(name, 0.0) for rates in phases)
        sent = max(in_phase[name] for in_phase in sending)
        loaders = max(loaders_for(workers, budget.workers_per_host), math.ceil(sent - _ROUNDING))
        needs[name] = _Need(profile, rate, workers, sent, loaders)
        _check_buffer(needs[name])
    layout, fullest = _fewest_hosts(needs, busy, sending, budget)
    needed_bytes = _check_memory(needs, len(layout.hosts), budget)
    chunks = sum(need.chunk_bytes for need in needs.values())
    factor = (
        1 + (budget.memory_bytes - needed_bytes) / chunks if chunks else 1.0
    )  # the rest of the budget goes to the buffers
    allotments = {name: _allotment(need, factor, layout, budget) for name, need in needs.items()}
    return Partitioning(
        partition=layout,
        sources=allotments,
        num_workers=max(1, math.ceil(fullest - _ROUNDING)),
        cpus=cpus,
        needed_bytes=needed_bytes,
        memory_bytes=needed_bytes - chunks + sum(given.buffer_bytes for given in allotments.values()),
        reasons=_reasons(layout, fullest, cpus, needed_bytes, budget),
    )


def _check_cpus(profiles: Mapping[str, Profile], phases: Sequence[Mapping[str, float]], budget: Budget) -> float:
    """Returns the processors that are busy at the peak of the schedule; SpecError if the budget has fewer."""
    used = [{name: rates.get(name, 0.0) * profile.cpu_s for name, profile in profiles.items()} for rates in phases]
    most = max(used, key=lambda by_source: sum(by_source.values()))
    cpus = sum(most.values())
    if cpus > budget.cpus * (1 + _ROUNDING):
        raise SpecError(
            f"the sources need {cpus:.3g} CPUs at the peak of the schedule, the budget has {budget.cpus:.3g}: "
            f"{_largest(most, '.3g')}; give at least {cpus:.3g} CPUs, let steps come {budget.cpus / cpus:.2g} times as "
            "fast, or make the transforms of these sources cheaper"
        )
    return cpus


def _check_buffer(need: _Need) -> None:
    profile = need.profile
    if profile.buffer_bytes and need.chunk_bytes > profile.buffer_bytes:
        raise SpecError(
            f"source {profile.source!r} needs buffer_bytes of at least {need.chunk_bytes:,}: {need.num_chunks} chunks of up "
            f"to {profile.chunk_bytes:,} bytes, for {need.workers:.3g} workers in {need.loaders} loader(s); it has "
            f"{profile.buffer_bytes:,}; raise it, or write the data in smaller units"
        )


def _fewest_hosts(
    needs: Mapping[str, _Need], busy: Sequence[Mapping[str, float]], sending: Sequence[Mapping[str, float]], budget: Budget
) -> tuple[Partition, float]:
    """The fewest hosts whose workers and transfers suffice in every phase, and the busy workers of the fullest host."""
    loaders = {name: need.loaders for name, need in needs.items()}
    workers = {name: need.workers for name, need in needs.items()}
    room = budget.workers_per_host
    loads = {name: max(need.workers, need.sending * room) for name, need in needs.items()}
    together = max(sum(in_phase.values()) for in_phase in busy)
    sent = max(sum(in_phase.values()) for in_phase in sending)
    least = max(math.ceil(together / room - _ROUNDING), math.ceil(sent - _ROUNDING), max(loaders.values()))
    most = sum(loaders.values())
    if budget.num_hosts is not None:
        if sent > budget.num_hosts + _ROUNDING:
            per_s = budget.host_bytes_per_s or 0.0
            sends = {name: need.sending * per_s for name, need in needs.items()}
            raise SpecError(
                f"the sources send as much as {sent:.3g} loader hosts can at {per_s:.3g} bytes a second each, and there are "
                f"{budget.num_hosts}: {_largest(sends, '.3g')} bytes a second; allow {least} hosts, or drop columns that "
                "trainers do not need"
            )
        if least > budget.num_hosts:
            raise SpecError(
                f"the sources need {together:.3g} workers at the same time, {budget.num_hosts} loader host(s) have "
                f"{budget.num_hosts * room}: {_largest(workers, '.3g')}; allow {least} hosts, or "
                f"{math.ceil(together / budget.num_hosts)} workers in each"
            )
        most = min(most, budget.num_hosts)
    num_hosts = min(least, most)
    while True:
        layout = evenly(loaders, loads, num_hosts)
        fullest, most_sent = (
            max(sum(in_phase[share.source] / share.of for share in host) for host in layout.hosts for in_phase in phases)
            for phases in (busy, sending)
        )
        if (fullest <= room + _ROUNDING and most_sent <= 1 + _ROUNDING) or num_hosts == most:
            return layout, fullest
        num_hosts += 1


def _check_memory(needs: Mapping[str, _Need], num_hosts: int, budget: Budget) -> int:
    """Returns the memory that the loaders need; SpecError if the budget has less."""
    processes = num_hosts * budget.host_bytes
    needed = {name: need.chunk_bytes + need.open_bytes for name, need in needs.items()}
    total = processes + sum(needed.values())
    if total > budget.memory_bytes:
        raise SpecError(
            f"the loaders need {total:,} bytes of memory, the budget has {budget.memory_bytes:,}: {num_hosts} host(s) take "
            f"{processes:,} as processes, the sources {_largest(needed, ',')}; give more memory, write heavy sources in "
            "smaller units, or allow more workers_per_host, which makes hosts fewer"
        )
    return total


def _allotment(need: _Need, factor: float, layout: Partition, budget: Budget) -> Allotment:
    profile = need.profile
    room = int(factor * need.chunk_bytes)
    buffer = min(room, profile.buffer_bytes) if profile.buffer_bytes else room
    return Allotment(
        source=profile.source,
        loaders=need.loaders,
        workers=need.workers,
        cpus=need.rate * profile.cpu_s,
        needed_bytes=need.chunk_bytes + need.open_bytes,
        buffer_bytes=buffer,
        reason=_reason(need, layout, budget),
    )


def _largest(values: Mapping[str, float], spec: str) -> str:
    """The sources with the largest values, as text: 'a' 3, 'b' 2, and 7 more."""
    names = sorted((name for name in values if values[name] > 0), key=lambda name: (-values[name], name))
    more = len(names) - _NAMED_AT_MOST
    listed = ", ".join(f"{name!r} {values[name]:{spec}}" for name in names[:_NAMED_AT_MOST])
    return f"{listed}, and {more} more" if more > 0 else listed


def _reason(need: _Need, layout: Partition, budget: Budget) -> str:
    profile = need.profile
    if need.workers == 0:
        return "no step draws from it: it is only held open"
    demand = (
        f"{need.rate:.3g} chunks/s of {duration(profile.chunk_s)} each ({duration(profile.cpu_s)} CPU, "
        f"{duration(profile.wait_s)} waiting) need {need.workers:.3g} workers with headroom {budget.headroom:g}"
    )
    if budget.host_bytes_per_s is not None:
        demand += f" and send {need.rate * profile.sent_bytes:.3g} bytes/s"
    if need.loaders > 1 and need.loaders > loaders_for(need.workers, budget.workers_per_host):
        return (
            f"{demand}: with headroom more than the {budget.host_bytes_per_s:.3g} of one host, so {need.loaders} loaders, "
            "each in another host"
        )
    if need.loaders > 1:
        return (
            f"{demand}: more than the {budget.workers_per_host} of one host, so {need.loaders} loaders, each in another host"
        )
    (host,) = layout.hosts_of(profile.source)
    others = len({share.source for share in layout.hosts[host]}) - 1
    return f"{demand}: one loader, " + (
        f"in host {host} with {others} other source(s)" if others else f"alone in host {host}"
    )


def _reasons(layout: Partition, fullest: float, cpus: float, needed_bytes: int, budget: Budget) -> tuple[str, ...]:
    num_hosts = len(layout.hosts)
    is_crowded = fullest > budget.workers_per_host + _ROUNDING
    return (
        f"{num_hosts} loader host(s) of {budget.workers_per_host} workers: in the fullest {fullest:.3g} are busy at the "
        "peak of the schedule" + (", more than it has: num_hosts allows no better" if is_crowded else ""),
        f"{cpus:.3g} of {budget.cpus:.3g} CPUs are busy at the peak of the schedule"
        + (f": less than headroom {budget.headroom:g} is left" if cpus * budget.headroom > budget.cpus else ""),
        f"{needed_bytes:,} of {budget.memory_bytes:,} bytes of memory are needed, {num_hosts * budget.host_bytes:,} of them "
        "for the processes of the hosts; buffers may take the rest, within the job's buffer_bytes",
    )
