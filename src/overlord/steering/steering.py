"""Steering: the decisions about weights and costs that are made during a run. It belongs to the planner, and is called under
the planner's lock but for `report`.

A decision is logged durably before anything follows from it. Decisions that follow from reports are due at certain steps.
Each is made just before its step is drawn for the first time, whether reports have come or not. So a restarted planner
finds the decisions of every step that a rank may have received, and makes none twice.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from overlord.declare.mixture import Epochs, Mixture, MixtureProgress, shares
from overlord.errors import SpecError, StorageError
from overlord.steering.decisions import (
    COSTS,
    MESH,
    SKIP,
    SOURCE,
    WEIGHTS,
    Decision,
    Steered,
    in_force,
    mixture_digest,
)
from overlord.steering.feedback import ReportedLosses, checked_weights, loss_sums, weight_update
from overlord.steering.learning import Learning
from overlord.stream.skips import SkipSchedule
from overlord.stream.weights import WeightSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.arrange.learned_cost import CostsInForce
    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import Plan
    from overlord.messages import StepReport, WeightChange
    from overlord.stream.progress import Progress

_log = logging.getLogger("overlord.steering")


class DecisionLog(Protocol):
    """Records decisions durably before anything follows from them. `planlog.PlanLog` is one."""

    heard: ReportedLosses
    """Reported losses that no decision has followed from yet."""
    lock: threading.RLock
    """Held while `heard` is looked at or changed."""

    @property
    def decisions(self) -> tuple[Decision, ...]: ...

    def decide(self, decision: Decision) -> None:
        """Record a decision. Raises StorageError where that fails: then the decision must not be followed."""
        ...

    def note(self, decision: Decision) -> None:
        """Record a decision that changes nothing, if possible."""
        ...

    def add_report(self, step: int, rank: int, sums: Mapping[str, tuple[int, int]]) -> bool:
        """Record reported losses. Returns False where they were recorded before."""
        ...


class Steering:
    """The decisions of one run, and the reports that the next ones follow from.

    `is_safe` says whether decisions survive the loss of the planner: there is a log, or the planner ends with the run.
    """

    def __init__(
        self,
        mixture: Mixture,
        start: Progress,
        place: ClientPlaceTree,
        steered: Steered,
        *,
        log: DecisionLog | None = None,
        is_safe: bool = True,
        skips: Sequence[tuple[int, Mapping[str, Any]]] = (),
    ) -> None:
        """`skips`: what the job leaves out, and from which step on, as values of decisions."""
        self._mixture = mixture
        self._digest = mixture_digest(mixture)
        self._names = start.names
        self._start = start.step
        self._log = log
        self._is_safe = is_safe
        known = steered.decisions if log is None else log.decisions
        self._decisions = [decision for decision in known if decision.name != MESH]
        self._heard = ReportedLosses.from_plain(steered.heard) if log is None else log.heard
        self._losses_lock = threading.RLock() if log is None else log.lock
        self._settled = {(d.name, d.step) for d in self._decisions if d.value.get("by") != "user"}
        self._decided_until = max((d.value.get("until", 0) for d in self._decisions), default=0)
        self._learning = Learning(place, is_safe)
        self.may_decide = mixture.feedback is not None or mixture.function is not None or bool(self._decisions)
        """False while there is nothing to decide or to look up: the declared weights and costs hold at every step."""
        self.schedule = WeightSchedule(mixture, start.names)
        self.skips = SkipSchedule(start.names)
        for step, value in (*skips, *((d.step, d.value) for d in self._decisions if d.name == SKIP)):
            self._leave_out(step, value)
        for decision in sorted(self._decisions, key=lambda d: d.step):
            if decision.name == WEIGHTS:
                self.schedule.change(decision.step, decision.value["weights"])
            elif decision.name == SOURCE:
                self.schedule.add(decision.step, decision.value["source"], decision.value["share"])

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """In the order of their steps; of two for one step the later one holds."""
        return tuple(sorted(self._decisions, key=lambda d: d.step))

    def weights_at(self, step: int) -> dict[str, float]:
        """The share of each source at a step, also of those that have none."""
        return dict(zip(self._names, self.schedule.at(step).tolist(), strict=True))

    def before(self, step: int) -> Steered:
        """The decisions and reports that a state before a step holds."""
        feedback = self._mixture.feedback
        with self._losses_lock:
            heard = () if feedback is None else tuple(self._heard.before(step, feedback))
        # What a function returned for steps that are only drawn ahead is left out: how many are, depends on timing.
        made = [d for d in self._decisions if d.step < step or d.value.get("by") != "function"]
        return Steered(in_force(made, step), heard)

    def report(self, report: StepReport, reached: int) -> list[str]:
        """Record a rank's report of a step. Returns the reasons why parts of it do not count. Never waits for planning."""
        if not self._start <= report.step < reached:
            return [f"it is for step {report.step}, and this run has given steps {self._start} to {reached - 1}"]
        refused = self._record_losses(report) if report.losses else []
        return refused + (self._learning.report(report) if report.seconds else [])

    def change(self, change: WeightChange, first: int) -> int:
        """Change the weights. Returns the first step that is drawn by them. `first` is the first step that may change."""
        change.check(self._names)
        for decision in self._decisions:
            if decision.value.get("id") == change.id:
                return decision.step
        if not self._is_safe:
            raise SpecError(
                "weights can change while a job runs on a cluster only if that is written down, since the planner may be "
                "lost: give start(log=...)"
            )
        step = first if change.from_step is None else change.from_step
        if step < first:
            raise SpecError(f"step {step} is drawn already; weights can change from step {first} on")
        weights = None if change.weights is None else shares(change.weights)
        decision = Decision(step, WEIGHTS, {"weights": weights, "of": self._digest, "by": "user", "id": change.id})
        if self._log is not None:
            self._log.decide(decision)
        self._add(decision)
        return step

    def skip(self, value: Mapping[str, Any], from_step: int | None, first: int) -> int:
        """Leave something out: `value` is that of the decision, with the id of the request. Returns the first step without
        it. `first` is the first step that may change."""
        for decision in self._decisions:
            if decision.value.get("id") == value["id"]:
                return decision.step
        if not self._is_safe:
            raise SpecError(
                "documents can be skipped while a job runs on a cluster only if that is written down, since the planner may "
                "be lost: give start(log=...)"
            )
        step = first if from_step is None else from_step
        if step < first:
            raise SpecError(f"step {step} is drawn already; documents can be skipped from step {first} on")
        source = value["source"]
        if value["rows"] is None and not any(w for name, w in self.weights_at(step).items() if name != source):
            raise SpecError(f"source {source!r} is the only one with a weight at step {step}: nothing would be left to draw")
        decision = Decision(step, SKIP, {**value, "by": "user"})
        if self._log is not None:
            self._log.decide(decision)
        self._add(decision)
        return step

    def _leave_out(self, step: int, value: Mapping[str, Any]) -> None:
        if value["rows"] is None:
            self.schedule.remove(step, value["source"])
        self.skips.add(step, value)

    def is_due(self, step: int) -> bool:
        """Whether something has to be decided before a step is drawn."""
        return bool(self._due(step))

    def settle(self, step: int, progress: Callable[[], MixtureProgress]) -> None:
        """Make the decisions that are due before a step is drawn for the first time; `progress` is that before it."""
        if self._calls_function(step):
            self._by_function(step, progress())
        for name, decide in self._due(step):
            self._settled.add((name, step))
            decision, as_before = decide(step)
            if not self._try_record(decision):
                decision = as_before
                if self._log is not None:
                    self._log.note(as_before)
            self._add(decision)

    def costs_at(self, step: int) -> CostsInForce | None:
        """The learned costs that a step is arranged by."""
        value = self.costs_decided(step)
        return None if value is None else self._learning.in_force(value)

    def costs_decided(self, step: int) -> Any:
        """The value of the decision about costs that holds at a step; None where there is none."""
        found = [d for d in self._decisions if d.name == COSTS and d.step <= step]
        return max(found, key=lambda d: d.step).value if found else None

    def note_plan(self, step: int, plan: Plan) -> None:
        """Remember the plan of a step, to learn from the times that ranks report for it."""
        self.may_decide = True
        self._learning.note_plan(step, plan)

    def _due(self, step: int) -> list[tuple[str, Callable[[int], tuple[Decision, Decision]]]]:
        feedback = self._mixture.feedback
        due: list[tuple[str, Callable[[int], tuple[Decision, Decision]]]] = []
        if feedback is not None and feedback.window_before(step) is not None and (WEIGHTS, step) not in self._settled:
            due.append((WEIGHTS, self._by_feedback))
        if self._is_safe and self._learning.is_due(step) and (COSTS, step) not in self._settled:
            due.append((COSTS, self._by_times))
        return due

    def _calls_function(self, step: int) -> bool:
        """Whether the mixture's function is called before a step. Weights that a user has set hold until they are unset."""
        mixture = self._mixture
        if mixture.function is None or (WEIGHTS, step) in self._settled:
            return False
        held = self._latest_weights(step)
        if held is None or held.value["weights"] is None:
            return True
        return held.value.get("by") != "user" and (step % mixture.every == 0 or isinstance(mixture.function, Epochs))

    def _by_function(self, step: int, progress: MixtureProgress) -> None:
        function = self._mixture.function
        assert function is not None  # only then is it called
        before = self.weights_at(step)
        found = checked_weights(lambda: function(step, progress), before)
        if found.note:
            _log.warning("the weights stay as they are from step %d on: %s", step, found.note)
        held = self._latest_weights(step)
        weights = {name: share for name, share in found.weights.items() if share > 0}
        for name, share in self.schedule.added_at(step).items() if not found.note else ():
            if name not in weights:  # the function knows nothing of a source that was added
                weights = {other: weight * (1 - share) for other, weight in weights.items()} | {name: share}
        if isinstance(function, Epochs) and held is not None and held.value["weights"] == weights:
            return  # a phase goes on: it follows from the progress, so there is nothing to write down
        decision = Decision(step, WEIGHTS, {"of": self._digest, "by": "function", "weights": weights, "note": found.note})
        if self._try_record(decision):
            self._settled.add((WEIGHTS, step))
            self._add(decision)

    def _latest_weights(self, step: int) -> Decision | None:
        """The decision about weights that holds at a step."""
        held = [d for d in reversed(self._decisions) if d.name == WEIGHTS and d.step <= step]
        return max(held, key=lambda d: d.step) if held else None  # of two for one step, the one made later

    def _by_feedback(self, step: int) -> tuple[Decision, Decision]:
        feedback = self._mixture.feedback
        assert feedback is not None  # only then is it due
        first, end = feedback.window_before(step) or (0, 0)
        with self._losses_lock:
            losses, num_reports = self._heard.losses(first, end), self._heard.num_reports(first, end)
            self._heard.forget_before(end)
            self._decided_until = end
        found = weight_update(feedback.rule, self.weights_at(step), losses)
        made = {"of": self._digest, "by": "feedback", "until": end, "losses": losses, "reports": num_reports}
        as_before = Decision(step, WEIGHTS, {**made, "weights": self._weights_held(step), "note": found.note})
        if found.note:
            _log.warning("the weights stay as they are from step %d on: %s", step, found.note)
            return as_before, as_before
        return Decision(step, WEIGHTS, {**made, "weights": found.weights}), as_before

    def _weights_held(self, step: int) -> dict[str, float] | None:
        """The weights of the decision in force at a step; None where the declared mixture is."""
        held = [d for d in in_force(self._decisions, step) if d.name == WEIGHTS and d.step <= step]
        return held[0].value["weights"] if held else None

    def _by_times(self, step: int) -> tuple[Decision, Decision]:
        in_force_now = self.costs_at(step)
        as_before = Decision(step, COSTS, self._learning.value_of(in_force_now))
        fitted = self._learning.fit_costs(step, in_force_now)
        return (as_before if fitted is None else Decision(step, COSTS, fitted)), as_before

    def _try_record(self, decision: Decision) -> bool:
        """Log a decision. Returns False, with a warning, where the log cannot be written."""
        if self._log is None:
            return True
        try:
            self._log.decide(decision)
        except StorageError as error:
            _log.warning("nothing is decided about %s at step %d: %s", decision.name, decision.step, error)
            return False
        return True

    def _add(self, decision: Decision) -> None:
        if decision.name == WEIGHTS:
            self.schedule.change(decision.step, decision.value["weights"])
        elif decision.name == SKIP:
            self._leave_out(decision.step, decision.value)
        else:  # only the latest are ever looked at: one for each step that may be planned again
            costs = [d for d in self._decisions if d.name == COSTS]
            if len(costs) > 64:
                self._decisions.remove(costs[0])
        self._decisions.append(decision)
        self.may_decide = True

    def _record_losses(self, report: StepReport) -> list[str]:
        if self._mixture.feedback is None:
            return ["losses are not used: the job's mixture has no feedback=ol.policies.Feedback(...)"]
        sums, refused = loss_sums(report.losses, report.tokens)
        unknown = [name for name in sums if name not in self._names]
        refused += [f"there is no source {name!r}" for name in unknown]
        known = {name: value for name, value in sums.items() if name in self._names}
        with self._losses_lock:
            if report.step < self._decided_until:
                return [*refused, f"it is late: steps before {self._decided_until} were decided on"]
            if known and not self._record_report(report, known):
                refused.append(f"rank {report.rank} had reported step {report.step} before")
        return refused

    def _record_report(self, report: StepReport, sums: dict[str, Any]) -> bool:
        """Count a rank's losses of a step. Returns False where they were counted before."""
        if self._log is not None:
            return self._log.add_report(report.step, report.rank, sums)
        return self._heard.add(report.step, report.rank, sums)
