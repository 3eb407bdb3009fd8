"""Learns the costs of later steps from the plans of earlier ones and the times that ranks reported for them.

The ranks of a ring wait for each other inside it, so the time that one of them reports contains the wait for those that came
late. The rank that came last did not wait: the shortest time that the ranks of a ring report is that of its work.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.arrange.learned_cost import COMMUNICATION, CostsInForce, LearnedCost
from overlord.steering.cost_fit import CostFit
from overlord.steering.planned_work import PlannedWork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
    from overlord.arrange.plan import Plan
    from overlord.messages import StepReport
    from overlord.stream.facts import Floats

_log = logging.getLogger("overlord.steering")

_STEPS_KEPT = 64
_LONGEST_S = 86_400.0  # a microbatch that takes a day is a mistake
_ALIKE = 0.03  # ranks that differ by less are not called slow: it would be noise
_SLOWEST = 2.0  # the least and the most that a rank's work is changed by
_LEARN_FROM = 0.25  # a fit that is off by more says nothing


class Learning:
    """The measurements of one planner and the fit to them. `report` may be called from any thread."""

    def __init__(self, place: ClientPlaceTree, is_safe: bool) -> None:
        self._place = place
        self._is_safe = is_safe
        self._lock = threading.Lock()
        self._cost: LearnedCost | None = None
        self._fit: CostFit | None = None
        self._steps: dict[int, PlannedWork] = {}
        self._rings: dict[int, dict[tuple[int, tuple[int, ...]], dict[int, float]]] = {}
        """The times of a step's rings that not all ranks have reported yet, by ring and ranks."""
        self._communication: float | None = None
        """What the last plan with rings assumed that receiving a token costs; None without such a plan."""

    def is_due(self, step: int) -> bool:
        return self._cost is not None and step % self._cost.every == 0

    def note_plan(self, step: int, plan: Plan) -> None:
        """Remember the plan of a step whose strategy uses a `LearnedCost`."""
        cost = plan.cost
        if not isinstance(cost, LearnedCost):
            return
        if not self._is_safe:
            if self._cost is None:
                _log.warning("costs are not learned: on a cluster what is learned must be written down: give start(log=...)")
                self._cost = cost
            return
        work = PlannedWork.of(plan, cost)
        with self._lock:
            if self._cost is None or self._cost.digest != cost.digest:
                self._cost, self._fit = cost, CostFit(work.features.shape[1], self._place.world_size)
                self._steps.clear()
                self._rings.clear()
            self._steps[step] = work
            if work.rings is not None:
                self._communication = work.rings.communication
            for old in [number for number in self._steps if number <= step - _STEPS_KEPT]:
                del self._steps[old]
                self._rings.pop(old, None)

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
            micros, rings = step.of_rank(report.rank, self._place)
            if len(report.seconds) == len(micros):
                for features, ring, seconds in zip(micros, rings, report.seconds, strict=True):
                    if ring < 0:
                        self._fit.add(report.step, report.rank, np.append(features, 1.0), seconds)
                    else:
                        self._add_ring(report, step.ring_ranks(ring, report.rank, self._place), ring, features, seconds)
            elif len(report.seconds) > 1:
                return [f"rank {report.rank} had {len(micros)} microbatches and reports {len(report.seconds)} times"]
            elif max(rings, default=-1) >= 0:
                return [
                    f"rank {report.rank} shared documents of step {report.step} with other ranks, and the time of the whole "
                    "step contains the wait for them: report the seconds of each microbatch"
                ]
            else:
                self._fit.add(report.step, report.rank, np.append(micros.sum(axis=0), len(micros)), sum(report.seconds))
        return []

    def _add_ring(self, report: StepReport, ranks: tuple[int, ...], ring: int, features: Floats, seconds: float) -> None:
        assert self._fit is not None  # the caller has looked
        waiting = self._rings.setdefault(report.step, {})
        told = waiting.setdefault((ring, ranks), {})
        told[report.rank] = seconds
        if len(told) == len(ranks):
            del waiting[ring, ranks]
            self._fit.add_ring(report.step, ranks, np.append(features, 1.0), min(told.values()))

    def fit_costs(self, step: int, known: CostsInForce | None) -> dict[str, Any] | None:
        """Fit costs to the reported times, as a decision holds them. None while there are too few."""
        cost, fit = self._cost, self._fit
        if cost is None or fit is None:
            return None
        in_use = cost.as_learned(known)
        used = np.concatenate([module.coefficients for module in in_use.modules.values()])
        sent = self._communication or 0.0
        if known is not None and in_use is not cost:
            sent = sum(known.modules.get(COMMUNICATION, ()))
        with self._lock:
            found = fit.solve(np.append(used, sent), {} if known is None else known.slow)
            axes: set[Bucket] = {work.axis for work in self._steps.values()}
        if found is None or not found.coefficients.any() or found.error > _LEARN_FROM:
            return None
        slow = self._slow_ranks(found.slowness, axes) if cost.speeds else {}
        modules = {name: tuple(values) for name, values in cost.split(found.coefficients[:-1]).items()}
        if self._communication is not None:
            modules[COMMUNICATION] = (float(found.coefficients[-1]),)
        learned = CostsInForce(cost.digest, modules, slow)
        made = {"by": "times", "error": round(found.error, 4), "times": found.num_times}
        _log.debug("from step %d on costs are %s, slow ranks %s", step, learned.modules, slow)
        return {**self.value_of(learned), **made}

    def value_of(self, costs: CostsInForce | None) -> dict[str, Any]:
        """Costs as a decision holds them."""
        assert self._cost is not None  # nothing is due before a step was arranged by one
        costs = costs or CostsInForce(self._cost.digest)
        slow = {str(rank): factor for rank, factor in costs.slow.items()}
        modules = {name: list(values) for name, values in costs.modules.items()}
        return {"of": costs.of, "modules": modules, "slow": slow, "slow_of": "ranks", "mesh": self._mesh()}

    def in_force(self, value: Mapping[str, Any]) -> CostsInForce:
        """Slowness is about ranks: it does not hold for another mesh."""
        slow = {int(g): float(f) for g, f in value["slow"].items()} if value["mesh"] == self._mesh() else {}
        if value.get("slow_of") != "ranks":  # decided by an older release, which knew data-parallel groups only
            slow = {rank: factor for group, factor in slow.items() for rank in self._place.ranks_of(group)}
        return CostsInForce(value["of"], {name: tuple(c) for name, c in value["modules"].items()}, slow)

    def _mesh(self) -> list[Any]:
        mesh = self._place.mesh
        return [mesh.dp, mesh.cp, mesh.tp, mesh.pp, *mesh.order]

    def _slow_ranks(self, slowness: Mapping[int, float], axes: set[Bucket]) -> dict[int, float]:
        """How much longer a rank takes than its peers: those with its stage, tensor-parallel index and, unless they are one
        pool, context-parallel index in other groups, since stages of a pipeline have different work."""

        def peers(rank: int) -> tuple[int, ...]:
            place = self._place.coordinates(rank)
            return (place.pp, place.tp) if axes <= {"cp", "world"} else (place.pp, place.tp, place.cp)

        of_peers: dict[tuple[int, ...], list[float]] = {}
        for rank, factor in slowness.items():
            of_peers.setdefault(peers(rank), []).append(factor)
        usual = {each: float(np.median(factors)) for each, factors in of_peers.items()}
        relative = {rank: factor / usual[peers(rank)] for rank, factor in sorted(slowness.items())}
        limited = {rank: round(min(max(factor, 1 / _SLOWEST), _SLOWEST), 3) for rank, factor in relative.items()}
        return {rank: factor for rank, factor in limited.items() if abs(factor - 1) > _ALIKE}
