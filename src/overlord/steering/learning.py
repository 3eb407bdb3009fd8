"""Learns the costs of later steps from the plans of earlier ones and the times that ranks reported for them."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.arrange.learned_cost import CostsInForce, LearnedCost
from overlord.steering.cost_fit import CostFit, summed_features

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import Plan
    from overlord.messages import StepReport
    from overlord.stream.facts import Floats, Ints

_log = logging.getLogger("overlord.steering")

_STEPS_KEPT = 64
_LONGEST_S = 86_400.0  # a microbatch that takes a day is a mistake
_ALIKE = 0.03  # groups that differ by less are not called slow: it would be noise
_SLOWEST = 2.0  # the least and the most that a group's work is changed by
_LEARN_FROM = 0.25  # a fit that is off by more says nothing


@dataclass(frozen=True, slots=True)
class _Arranged:
    """The work of a step: features of every microbatch, and which belong to each group."""

    features: Floats
    first: Ints


class Learning:
    """The measurements of one planner and the fit to them. `report` may be called from any thread."""

    def __init__(self, place: ClientPlaceTree, is_safe: bool) -> None:
        self._place = place
        self._is_safe = is_safe
        self._lock = threading.Lock()
        self._cost: LearnedCost | None = None
        self._fit: CostFit | None = None
        self._steps: dict[int, _Arranged] = {}

    def is_due(self, step: int) -> bool:
        return self._cost is not None and step % self._cost.every == 0

    def note_plan(self, step: int, plan: Plan) -> None:
        """Remember the plan of a step whose strategy uses a `LearnedCost`."""
        cost = plan.cost
        if not isinstance(cost, LearnedCost) or plan.axis != "dp":
            return
        if not self._is_safe:
            if self._cost is None:
                _log.warning("costs are not learned: on a cluster what is learned must be written down: give start(log=...)")
                self._cost = cost
            return
        of_samples = cost.features(plan.samples)[plan.order]
        features = summed_features(of_samples, plan.micro_of_order(), len(plan.offsets) - 1)
        first = np.concatenate([[0], np.cumsum(plan.counts)])
        with self._lock:
            if self._cost is None or self._cost.digest != cost.digest:
                self._cost, self._fit = cost, CostFit(features.shape[1], self._place.world_size)
                self._steps.clear()
            self._steps[step] = _Arranged(features, first)
            for old in [number for number in self._steps if number <= step - _STEPS_KEPT]:
                del self._steps[old]

    def report(self, report: StepReport) -> list[str]:
        """Record a rank's times of a step. Returns the reasons why they do not count."""
        with self._lock:
            if self._fit is None:
                return ["times are not used: the job's strategy has no LearnedCost"]
            if report.rank >= self._place.world_size:
                return [f"the mesh has {self._place.world_size} ranks; there is no rank {report.rank}"]
            bad = [value for value in report.seconds if not (math.isfinite(value) and 0 < value < _LONGEST_S)]
            if bad:
                return [f"a time of {bad[0]!r} seconds makes no sense"]
            step = self._steps.get(report.step)
            if step is None:
                return [f"how step {report.step} was arranged is no longer known"]
            group = self._place.coordinates(report.rank).dp
            micros = step.features[step.first[group] : step.first[group + 1]]
            if len(report.seconds) == 1:
                self._fit.add(report.step, report.rank, np.append(micros.sum(axis=0), len(micros)), report.seconds[0])
            elif len(report.seconds) == len(micros):
                for features, seconds in zip(micros, report.seconds, strict=True):
                    self._fit.add(report.step, report.rank, np.append(features, 1.0), seconds)
            else:
                return [f"rank {report.rank} had {len(micros)} microbatches and reports {len(report.seconds)} times"]
        return []

    def fit_costs(self, step: int, known: CostsInForce | None) -> dict[str, Any] | None:
        """Fit costs to the reported times, as a decision holds them. None while there are too few."""
        cost, fit = self._cost, self._fit
        if cost is None or fit is None:
            return None
        used = np.concatenate([module.coefficients for module in cost.as_learned(known).modules.values()])
        slow = {} if known is None else known.slow
        slow_ranks = {rank: factor for group, factor in slow.items() for rank in self._place.ranks_of(dp=group)}
        with self._lock:
            found = fit.solve(used, slow_ranks)
        if found is None or not found.coefficients.any() or found.error > _LEARN_FROM:
            return None
        slow = self._slow_groups(found.slowness) if cost.speeds else {}
        learned = CostsInForce(cost.digest, {n: tuple(c) for n, c in cost.split(found.coefficients).items()}, slow)
        made = {"by": "times", "error": round(found.error, 4), "times": found.num_times}
        _log.debug("from step %d on costs are %s, slow groups %s", step, learned.modules, slow)
        return {**self.value_of(learned), **made}

    def value_of(self, costs: CostsInForce | None) -> dict[str, Any]:
        """Costs as a decision holds them."""
        assert self._cost is not None  # nothing is due before a step was arranged by one
        costs = costs or CostsInForce(self._cost.digest)
        slow = {str(group): factor for group, factor in costs.slow.items()}
        modules = {name: list(values) for name, values in costs.modules.items()}
        return {"of": costs.of, "modules": modules, "slow": slow, "mesh": self._mesh()}

    def in_force(self, value: Mapping[str, Any]) -> CostsInForce:
        """Slowness is about ranks: it does not hold for another mesh."""
        slow = {int(g): float(f) for g, f in value["slow"].items()} if value["mesh"] == self._mesh() else {}
        return CostsInForce(value["of"], {name: tuple(c) for name, c in value["modules"].items()}, slow)

    def _mesh(self) -> list[Any]:
        mesh = self._place.mesh
        return [mesh.dp, mesh.cp, mesh.tp, mesh.pp, *mesh.order]

    def _slow_groups(self, slowness: Mapping[int, float]) -> dict[int, float]:
        """How much longer a group takes than others: as much as the slowest of its ranks, each compared with those at the
        same place in other groups, since stages of a pipeline have different work."""
        at_place: dict[tuple[int, int, int], list[float]] = {}
        for rank, factor in slowness.items():
            place = self._place.coordinates(rank)
            at_place.setdefault((place.pp, place.cp, place.tp), []).append(factor)
        usual = {place: float(np.median(factors)) for place, factors in at_place.items()}
        of_group: dict[int, float] = {}
        for rank, factor in slowness.items():
            place = self._place.coordinates(rank)
            relative = factor / usual[place.pp, place.cp, place.tp]
            of_group[place.dp] = max(of_group.get(place.dp, 0.0), relative)
        limited = {group: min(max(factor, 1 / _SLOWEST), _SLOWEST) for group, factor in of_group.items()}
        return {group: round(factor, 3) for group, factor in sorted(limited.items()) if abs(factor - 1) > _ALIKE}
