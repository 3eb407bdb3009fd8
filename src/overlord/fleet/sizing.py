"""Sizes the loaders of a job: profiles its sources, and chooses loaders, hosts and shadows under a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlord.errors import SourceError, SpecError
from overlord.fleet.profile import Effort, SourceProfiles, profile_sources
from overlord.loaders.model import Budget, Profile, chunks_per_step
from overlord.loaders.partition import Partitioning
from overlord.loaders.partition import partition as partition_of
from overlord.loaders.shadowing import Shadowing, shadows
from overlord.roles.assembly import cut_units, list_units, with_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Unit

_HOST_START_S = 1.0  # time in which a cluster notices that a process died and starts another
_NOTHING = 1e-9  # CPUs of an empty budget, which must be above 0


@dataclass(frozen=True, slots=True)
class Sizing:
    """The loaders and shadows of a job, and the measurements that they were computed from."""

    partitioning: Partitioning
    shadowing: Shadowing | None
    """None if all hosts are in one process, which is lost as a whole."""
    profiles: Mapping[str, Profile]
    rates: Mapping[str, float]
    """Chunks per second of each source at its peak in the schedule."""


def partition(job: Job, budget: Budget, *, step_s: float, most_s: float = 10.0) -> Partitioning:
    """Choose loaders, workers and hosts for the sources of a job whose trainers take `step_s` seconds for a step.

    Makes a few chunks of each source to measure their cost, for at most `most_s` seconds per source. SourceError if a source
    cannot be read, SpecError if the budget is too small.
    """
    found = profile_job(job, Effort(seconds=most_s))
    if found.failed:
        lines = "; ".join(f"source {name!r}: {type(error).__name__}: {error}" for name, error in found.failed.items())
        raise SourceError(f"not every source can be profiled: {lines}") from next(iter(found.failed.values()))
    return sizing_of(job, found.profiles, budget, step_s).partitioning


def profile_job(job: Job, effort: Effort | None = None, begin: Callable[[str], None] | None = None) -> SourceProfiles:
    """Profile every source of a job. Errors of sources that cannot be listed or read are collected, not raised."""
    units: dict[str, Sequence[Unit]] = {}
    failed: dict[str, Exception] = {}
    for name, source in job.sources.items():
        try:
            units |= list_units({name: source})
        except Exception as error:  # noqa: BLE001 - a user's source may raise anything
            failed[name] = error
    units = cut_units(job, units)
    found = profile_sources(with_windows(job, units), units, effort, begin)
    return SourceProfiles(found.profiles, failed | dict(found.failed))


def sizing_of(job: Job, profiles: Mapping[str, Profile], budget: Budget, step_s: float) -> Sizing:
    """The sizing of a job whose sources have these profiles. Memory of shadows is taken from the buffers."""
    if not step_s > 0:
        raise SpecError(f"step_s is a positive number of seconds, got {step_s}")
    steps = [step for step, _ in job.mix.schedule]
    per_step = [chunks_per_step(profiles, job.mix.at(step), job.batch, job.mix.unit) for step in steps]
    phases = [{name: chunks / step_s for name, chunks in phase.items()} for phase in per_step]
    rates = {name: max(phase[name] for phase in phases) for name in profiles}
    found = partition_of(profiles, phases, budget)
    spare_cpus, spare_bytes = budget.cpus - found.cpus, budget.memory_bytes - found.needed_bytes
    if budget.host_bytes == 0:
        return Sizing(found, None, profiles, rates)
    shadowing = shadows(
        found.partition,
        profiles,
        {name: rate * step_s for name, rate in rates.items()},
        step_s=step_s,
        prefetch=job.prefetch,
        spare=replace(budget, cpus=max(spare_cpus, _NOTHING), memory_bytes=max(spare_bytes, 1)),
        start_s=_HOST_START_S,
    )
    kept = [shadow for shadow in shadowing.hosts if shadow.is_kept]
    if kept:
        taken = sum(shadow.memory_bytes for shadow in kept)
        found = partition_of(profiles, phases, replace(budget, memory_bytes=budget.memory_bytes - taken))
        beside = (
            f"{len(kept)} shadow(s) take {taken:,} of the {budget.memory_bytes:,} bytes of memory and "
            f"{sum(shadow.cpus for shadow in kept):.3g} CPUs beside the loaders"
        )
        found = replace(found, reasons=(*found.reasons, beside))
    return Sizing(found, shadowing, profiles, rates)
