"""What the mixture asks of each source, now and in the schedule ahead, in workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from overlord.planning.loaders.scaling import Budget, Profile, chunks_per_step, weights_ahead, workers_needed
from overlord.spec import Batch, Mixture


@dataclass(frozen=True, slots=True)
class Demand:
    """What each source needs where a stretch of the schedule asks most of it."""

    wanted: Mapping[str, float]
    """Workers, with headroom."""
    workers: Mapping[str, float]
    """Likewise, but no more at any step than the processors and hosts of the budget can do; cut alike for all sources."""
    step: Mapping[str, int]
    """The step from which that is so."""
    rate: Mapping[str, float]
    """Chunks a second at that step."""
    together: float
    """The most workers that are busy at the same time."""
    shortage: str
    """What the budget lacks; empty if it suffices."""


def demand_ahead(
    profiles: Mapping[str, Profile], mixture: Mixture, batch: Batch, budget: Budget, first: int, last: int, step_s: float
) -> Demand:
    """The demand from step `first` to step `last`, each taking `step_s` seconds. Costs are as in `profiles`."""
    wanted, workers, rate = (dict.fromkeys(profiles, 0.0) for _ in range(3))
    since = dict.fromkeys(profiles, first)
    together, most, shortage = 0.0, 0.0, ""
    for step, weights in weights_ahead(mixture, first, last):
        per_step = chunks_per_step(profiles, weights, batch, mixture.unit)
        rates = {name: chunks / step_s for name, chunks in per_step.items()}
        needs = workers_needed(profiles, rates, budget.headroom)
        allowed, lacking = _allowed(profiles, needs, budget)
        if lacking and sum(needs.values()) > most:
            most, shortage = sum(needs.values()), f"from step {step:,} on {lacking}"
        together = max(together, allowed * sum(needs.values()))
        for name, need in needs.items():
            if need > wanted[name]:
                wanted[name], since[name], rate[name] = need, step, rates[name]
            workers[name] = max(workers[name], allowed * need)
    return Demand(wanted, workers, since, rate, together, shortage)


def _allowed(profiles: Mapping[str, Profile], needs: Mapping[str, float], budget: Budget) -> tuple[float, str]:
    """The part of the needs that the budget has processors and workers for, and what it lacks."""
    cpus = sum(need * profiles[name].cpu_share for name, need in needs.items())
    workers = sum(needs.values())
    room = math.inf if budget.num_hosts is None else budget.num_hosts * budget.workers_per_host
    allowed = min(1.0, budget.cpus / cpus if cpus else 1.0, room / workers if workers else 1.0)
    if allowed == 1:
        return 1.0, ""
    if budget.cpus * workers <= room * cpus:
        return allowed, f"the sources need {cpus:.3g} CPUs with headroom, and the budget has {budget.cpus:.3g}"
    return allowed, f"the sources need {workers:.3g} workers, and {budget.num_hosts} hosts have {room}"
