"""The Planner: holds the only progress of a run and turns facts into plans, step by step, never seeing payload.

What it promises: `plan(step, group)` gives the same plan however often, by whomever and in whatever order it is asked,
until the run ends, where it gives None to every group for the same step. A step that is no longer kept is planned again
from the start of the run. No group gets more than `max_lead` steps ahead of the slowest, so nothing that is kept can grow.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlord.errors import OverlordError, SpecError
from overlord.planning.dgraph import DGraph
from overlord.planning.drawing import Extent
from overlord.planning.facts import ChunkFacts
from overlord.planning.membership import DrawnStep, StepDrawer
from overlord.planning.place_tree import ClientPlaceTree
from overlord.planning.plan import GroupPlan, Plan
from overlord.planning.progress import Progress
from overlord.planning.strategies import Strategy
from overlord.roles.routes import Routes
from overlord.spec import Batch, Mixture


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that is not ready, and why: the asker is ahead of someone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned step, kept while some group may ask for it."""

    step: DrawnStep
    plan: Plan


@dataclass(frozen=True, slots=True)
class Mix:
    """What was asked of a source and what it gave so far."""

    weight: float
    samples: int
    tokens: int


class Planner:
    """See the module's docstring."""

    def __init__(
        self,
        start: Progress,
        batch: Batch,
        mixture: Mixture,
        strategy: Strategy,
        place: ClientPlaceTree,
        extents: Sequence[Extent],
        routes: Routes,
        masked: bool = False,
        max_lead: int = 8,
    ) -> None:
        self._start = start
        self._batch = batch
        self._mixture = mixture
        self._strategy = strategy
        self._place = place
        self._extents = extents
        self._routes = routes
        self._max_lead = max_lead
        self._masked = masked
        self._lock = threading.Lock()
        self._needs_lock = threading.Lock()  # apart, so that noting needs never waits for planning
        self._facts: dict[int, tuple[int, ChunkFacts]] = {}
        self._counted_to: dict[int, int] = {}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in start.names}
        self._planned: dict[int, Planned] = {}
        self._end: int | None = None
        self._needs: dict[int, int] = {}
        self._busy = ""
        self._drawer = self._drawer_from(start)
        self._before: dict[int, Callable[[], Progress]] = {start.step: lambda: start}
        for source in np.flatnonzero(self._drawer_weights() > 0).tolist():
            self._routes.prefetch(source, int(start.chunk[source]))

    def plan(self, step: int, group: int) -> GroupPlan | Later | None:
        """The plan of one group for a step; None when the run ends before that step."""
        with self._needs_lock:
            self._needs.setdefault(group, step)
            slowest = min(self._needs, key=lambda g: self._needs[g])
            oldest = self._needs[slowest]
        if step - oldest > self._max_lead:
            return Later(
                f"the ranks of data-parallel group {slowest} are still at step {oldest}, and no group may be more than "
                f"{self._max_lead} steps ahead of the slowest"
            )
        with self._lock:
            self._forget_before(oldest)
            planned = self._reach(step)
        return None if planned is None else planned.plan.for_group(step, group)

    def needs(self, group: int, step: int) -> None:
        """Note the oldest step that a group may still ask for."""
        with self._needs_lock:
            self._needs[group] = step

    def leaves(self, group: int) -> None:
        """Note that nobody reads a group any more, so that it holds nobody back."""
        with self._needs_lock:
            self._needs.pop(group, None)

    def progress(self, step: int) -> Progress:
        """The progress of the run before a step."""
        before = self._before.get(step)
        if before is None:
            with self._lock:
                self._reach(step - 1)
                before = self._before.get(step)
        if before is None:
            raise OverlordError(f"the run ended at step {self._end}; there is no progress before step {step}")
        return before()

    def whole_plan(self, step: int) -> Planned | None:
        """The plan of all groups, for `explain` and tests."""
        with self._lock:
            return self._reach(step)

    def mix(self, step: int) -> dict[str, Mix]:
        """Asked and realised mix over all steps before `step`."""
        progress = self.progress(step)
        weights = self._mixture.at(max(step - 1, 0))
        return {
            name: Mix(weights.get(name, 0.0), int(samples), int(tokens))
            for name, samples, tokens in zip(progress.names, progress.samples, progress.tokens, strict=True)
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """Per source, how many documents were split, truncated, dropped or empty in the chunks planned from so far."""
        with self._lock:
            return {name: dict(counts) for name, counts in self._counts.items()}

    def doing(self) -> list[str]:
        busy = self._busy
        return [busy] if busy else []

    def _drawer_weights(self) -> np.ndarray:
        weights = self._mixture.at(self._start.step)
        return np.array([weights.get(name, 0.0) for name in self._start.names])

    def _drawer_from(self, progress: Progress) -> StepDrawer:
        count_loss = self._routes.count_loss if self._masked else None
        return StepDrawer(progress, self._batch, self._mixture, self._extents, self._describe, count_loss)

    def _reach(self, step: int) -> Planned | None:
        """Plan up to a step; steps before the oldest kept one are planned again from the start."""
        if step in self._planned:
            return self._planned[step]
        if step < self._start.step:
            raise OverlordError(f"this run starts at step {self._start.step}; it has no step {step}")
        if self._end is not None and step >= self._end:
            return None
        if step < self._drawer.number:
            self._rewind(step)
        while self._drawer.number <= step:
            self._busy = f"the planner is drawing step {self._drawer.number}"
            drawn = self._drawer.next_step()
            if drawn is None:
                self._end = self._drawer.number
                self._busy = ""
                return None
            self._before[drawn.number + 1] = drawn.after
            if drawn.number >= self._oldest_needed(step):
                self._planned[drawn.number] = Planned(drawn, self._arranged(drawn))
        self._busy = ""
        return self._planned[step]

    def _oldest_needed(self, step: int) -> int:
        with self._needs_lock:
            return min([step, *self._needs.values()])

    def _rewind(self, step: int) -> None:
        known = max(number for number in self._before if number <= step)
        self._drawer = self._drawer_from(replace(self._before[known](), step=known))

    def _arranged(self, step: DrawnStep) -> Plan:
        graph = DGraph(step.samples, self._batch, self._place, step.rows).mix(step.weights)
        try:
            plan = self._strategy(graph)
        except Exception as error:
            error.add_note(f"while the strategy arranged step {step.number}")
            raise
        groups = self._place.mesh.dp
        if plan.num_groups != groups or plan.axis != "dp" or plan.group_size != 1:
            raise SpecError(
                f"the strategy distributed step {step.number} over {plan.num_groups} groups along {plan.axis}, but Data "
                f"Constructors serve the {groups} data-parallel groups: use distribute('dp')"
            )
        return plan

    def _forget_before(self, oldest: int) -> None:
        for number in [n for n in self._planned if n < oldest]:
            del self._planned[number]
        for number in [n for n in self._before if n < oldest and n != self._start.step]:
            del self._before[number]

    def _describe(self, source: int, chunk: int) -> ChunkFacts:
        known_chunk, facts = self._facts.get(source, (-1, None))
        if facts is not None and known_chunk == chunk:
            return facts
        before = self._busy
        self._busy = f"{before}, and waits for the facts of chunk {chunk} of source {self._start.names[source]!r}"
        facts = self._routes.describe(source, chunk, self._keep_from(source, chunk))
        self._busy = before
        end = self._extents[source].end
        if end is None or chunk + 1 < end:
            self._routes.prefetch(source, chunk + 1)
        # One chunk per source is enough: draws move on, and a rewind may ask again.
        self._facts[source] = (chunk, facts)
        if chunk >= self._counted_to.get(source, 0):
            self._counted_to[source] = chunk + 1
            self._counts[self._start.names[source]].update(facts.counts)
        return facts

    def _keep_from(self, source: int, chunk: int) -> int:
        """The first chunk of a source that a step still kept may name."""
        kept = [number for number in self._before if number != self._start.step] or [self._start.step]
        progress = self._before[min(kept)]()
        carried = progress.carried.chunk[progress.carried.source == source]
        return min(int(progress.chunk[source]), chunk, *carried.tolist())
