"""The Autoscaler: adds loaders to a source before steps wait for it, and removes them when they are idle.

A pure function decides from measurements, and the Autoscaler applies the decision. The logger `overlord.scaling` logs each
decision with its reason. Scaling changes which loader makes a chunk, and when, never its content.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from overlord.errors import OverlordError, SpecError
from overlord.loaders.autoscaling import (
    Observed,
    Scaling,
    ScalingDecision,
    ScalingPolicy,
    ScalingState,
    decide,
)
from overlord.loaders.model import Budget, weights_ahead
from overlord.runtime import liveness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture
    from overlord.fleet.hosts import Fleet
    from overlord.roles.planner import Cursor

_log = logging.getLogger("overlord.scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscale:
    """Adds and removes loaders during a run. `budget` caps what they may use, `policy` says how soon loaders are added and
    removed, and `every_s` is the time between two rounds of the control loop."""

    budget: Budget
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)
    every_s: float = liveness.STATUS_EVERY_S

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise SpecError(f"every_s is a positive number of seconds, got {self.every_s}")

    def for_one_process(self) -> Autoscale:
        """A copy for the embedded engine, where a host is one more thread of this process and takes no memory of its own."""
        return replace(self, budget=replace(self.budget, workers_per_host=1, host_bytes=0, num_hosts=None))


class Autoscaler:
    """Scales the loaders of a fleet to the demand of the trainers. One thread at a time may call it."""

    def __init__(
        self,
        fleet: Fleet,
        autoscale: Autoscale,
        batch: Batch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._autoscale = autoscale
        self._batch = batch
        self._clock = clock
        self._state = ScalingState()
        self._told_most: int | None = None
        self._full_until: tuple[float, int] = (-math.inf, 0)  # (time, num_hosts): until then, the most hosts

    def reconcile(
        self, observed: Observed, mixture: Mixture, oldest: int, cursors: Mapping[str, Cursor]
    ) -> tuple[ScalingDecision, ...]:
        """Decide, act, and return the decisions. `oldest` is the oldest step that may still be requested."""
        policy = self._autoscale.policy
        last = observed.step + math.ceil(policy.ahead_s / observed.step_s)
        coming = _sources_drawn(mixture, observed.step, last)
        self._fleet.tidy(cursors, active=coming | _sources_drawn(mixture, oldest, observed.step))
        scaling = decide(
            observed,
            mixture,
            self._batch,
            self._fleet.partition,
            budget=self._budget(),
            state=self._state,
            policy=policy,
        )
        decisions = self._apply(scaling, cursors)
        self._state = scaling.state
        # Drawing prefetches the sources of the current step. Sources of later steps are prefetched here, so that their cost
        # is measured and their first step does not wait.
        for source in coming - _sources_drawn(mixture, observed.step, observed.step):
            self._fleet.warm(source, cursors[source])
        return decisions

    def _apply(self, scaling: Scaling, cursors: Mapping[str, Cursor]) -> tuple[ScalingDecision, ...]:
        if scaling.partition == self._fleet.partition:
            decisions = scaling.decisions
        else:
            try:
                self._fleet.repartition(scaling.partition, cursors)
                decisions = scaling.decisions
            except OverlordError as error:
                num_hosts = sum(1 for shares in self._fleet.partition.hosts if shares)
                self._full_until = self._clock() + liveness.NEXT_START_S, num_hosts
                why = f"; a host could not be started: {error}"
                decisions = tuple(replace(d, after=d.before, reason=d.reason + why) for d in scaling.decisions)
        for decision in decisions:
            _log.info("%s", decision)
        return decisions

    def _budget(self) -> Budget:
        budget = self._autoscale.budget
        most = self._fleet.most_hosts
        if budget.num_hosts is None and most is not None:
            # A trainer that only reads, or slow storage, could use any number of hosts, and each is a process.
            budget = replace(budget, num_hosts=most)
            if most != self._told_most:
                self._told_most = most
                _log.info("at most %d loader hosts, one for each CPU of the cluster, unless Budget(num_hosts=) is set", most)
        until, num_hosts = self._full_until
        if self._clock() >= until:
            return budget
        return replace(budget, num_hosts=max(min(num_hosts, budget.num_hosts or num_hosts), 1))


def _sources_drawn(mixture: Mixture, first: int, last: int) -> set[str]:
    """The sources that the steps from `first` to `last` draw from."""
    return {name for _, weights in weights_ahead(mixture, first, max(first, last)) for name in weights}
