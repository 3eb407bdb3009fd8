"""The Planner: holds the only progress of a run and turns facts into plans, step by step, never seeing payload.

What it promises: `plan(step, group)` gives the same plan however often, by whomever and in whatever order it is asked,
until the run ends, where it gives None to every group for the same step. A step that is no longer kept is planned again
from the start of the run. No group gets more than `max_lead` steps ahead of the slowest, so nothing that is kept can grow.

Nobody is held up by what another asks for: steps are drawn a few at a time, and whoever waits comes in between. Steps that
are further than `MOST_AHEAD` from what was drawn so far are refused (`MOST_LOOKED_AHEAD` for whoever only looks at plans):
a wrong number must not keep the planner busy for days.

With a log, each step's progress is written down before its plan is handed out. A planner that is made again with the same
arguments reads it and goes on where the lost one was: it gives every step that anybody may still ask for, as it was. No step
is recorded there as taken by all while a rank that is expected has neither asked nor left.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from overlord.arrange.graph import DGraph
from overlord.errors import DataError, OverlordError, SpecError
from overlord.messages import Later, StepReport, WeightChange
from overlord.planlog.records import same
from overlord.records import record
from overlord.steering.decisions import Decision, Steered
from overlord.steering.steering import Steering
from overlord.stream.membership import DrawnStep, StepDrawer
from overlord.stream.outliers import count_delays

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import GroupPlan, Plan
    from overlord.arrange.strategies import Strategy
    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture
    from overlord.planlog.append_log import LogPosition
    from overlord.planlog.plan_log import PlanLog
    from overlord.roles.routes import Routes
    from overlord.stream.drawing import Extent
    from overlord.stream.facts import ChunkFacts
    from overlord.stream.progress import Progress

T = TypeVar("T")

MOST_AHEAD = 10_000
"""How many steps beyond those drawn so far may be asked for. A service that was started again without a log has to draw all
that its trainers have taken; whatever else asks for a step so far away has the number wrong."""

MOST_LOOKED_AHEAD = 1_000_000
"""The same for whoever only looks at a step, as `overlord explain` does: nobody is waited for, and nothing is kept."""

_CLOSE_S = 1.0
_STEPS_AHEAD = 6
_SLICE_STEPS = 16  # drawn in a row before somebody else may have the planner


@record
class Planned:
    """A planned step, kept while some group may ask for it."""

    step: DrawnStep
    plan: Plan


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
        log: PlanLog | None = None,
        steering: Steering | None = None,
        expected: Collection[int] = (),
    ) -> None:
        """`expected` are the groups whose ranks will come."""
        self._start = start
        self._batch = batch
        self._mixture = mixture
        self._strategy = strategy
        self._place = place
        self._extents = extents
        self._routes = routes
        self._max_lead = max_lead
        self._masked = masked
        self._lock = _Turns()
        self._needs_lock = threading.Lock()  # apart, so that noting needs never waits for planning
        self._counts_lock = threading.Lock()
        self._facts: dict[int, tuple[int, ChunkFacts]] = {}
        self._expected: dict[int, int] = {}  # source to the chunk its loader was told to prepare
        self._counted_to: dict[int, int] = {}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in start.names}
        self._planned: dict[int, Planned] = {}
        self._end: int | None = None
        self._needs: dict[int, int] = {}
        # Groups with a rank that is expected and has not asked yet. Those that a lost planner knew may still come.
        self._late: set[int] = {*expected, *(() if log is None else log.readers)}
        self._pinned: dict[object, int] = {}  # how far those have come who draw towards a step in several turns
        self._busy = ""
        self._log = log
        self._steering = steering or Steering(mixture, start, place, Steered(), log)
        known = {start.step: start} if log is None else {start.step: start, **log.before}
        self._before: dict[int, Callable[[], Progress]] = {step: _given(progress) for step, progress in known.items()}
        self._kept_before = _given(start), _first_chunks(start)  # what `_keep_from` looked at last
        self._reached = max(known)
        # Until all groups have asked this planner for something, they may be as far back as the log knew them.
        self._known_to = self._reached
        self._floor = start.step if log is None else _first_in_a_row(known, self._reached, min(log.needed, self._reached))
        self._taken_to = start.step if log is None else min(log.needed, self._reached)
        progress = known.get(self._floor, start)
        self._drawer = self._drawer_from(progress)
        for source in np.flatnonzero(self._steering.schedule.at(progress.step) > 0).tolist():
            self._routes.prefetch(source, int(progress.chunk[source]), self._last_chunk(source))

    def plan(self, step: int, group: int, oldest: int | None = None, is_late: bool = False) -> GroupPlan | Later | None:
        """The plan of one group for a step; None when the run ends before that step. `oldest` is the oldest step that the
        group may still ask for; `is_late` says that a rank of it is expected and has not asked yet."""
        if group >= self._place.mesh.dp:
            raise OverlordError(f"the mesh has {self._place.mesh.dp} data-parallel groups; there is no group {group}")
        self._check_reachable(step)  # before it is noted as what the group needs
        with self._needs_lock:
            self._needs[group] = self._needs.get(group, step) if oldest is None else oldest
            self._set_late(group, is_late)
        later = self._held_back(step)
        if later is not None:
            return later
        planned = self._planned.get(step)  # without waiting for what is being drawn for somebody else
        if planned is None or self._lock.acquire(timeout=0):
            if planned is not None:
                try:
                    self._forget()
                finally:
                    self._lock.release()
            else:
                planned = self._drawn_to(step, lambda: self._planned.get(step))
        return None if planned is None else planned.plan.for_constructor(step, group, self._place.mesh.cp)

    def expect(self, group: int) -> None:
        """Note that ranks of a group will come that have not asked yet."""
        with self._needs_lock:
            self._late.add(group)

    def group_left(self, group: int, is_late: bool = False) -> None:
        """Note that nobody reads a group now, so that it holds nobody back. `is_late` says that some rank may still come."""
        with self._needs_lock:
            self._needs.pop(group, None)
            self._set_late(group, is_late)

    def progress(self, step: int, most_ahead: int = MOST_AHEAD) -> Progress:
        """The progress of the run before a step."""
        before = self._before.get(step)
        if before is None:
            self._check_reachable(step, most_ahead)
            before = self._drawn_to(step - 1, lambda: self._before.get(step), looks=True)
        if before is None:
            raise OverlordError(f"the run ended at step {self._end}; there is no progress before step {step}")
        return before()

    def checkpoint(self, step: int) -> tuple[Progress, Steered]:
        """All that a state before a step holds."""
        progress = self.progress(step)
        return progress, self._steering.before(step)

    def report(self, report: StepReport) -> list[str]:
        """Take a rank's report of a step; gives what was not counted, and why. Answered at once, whatever is being drawn."""
        return self._steering.report(report, self._reached)

    def change_weights(self, change: WeightChange, first: int) -> int:
        """Draw by other weights; gives the step from which. Steps before `first` are known to be given."""
        with self._lock:
            return self._steering.change(change, max(first, self._reached))

    def decisions(self) -> tuple[Decision, ...]:
        """What was decided while the run ran, in the order of steps."""
        return self._steering.decisions

    def whole_plan(self, step: int) -> Planned | None:
        """The plan of all groups, for `explain` and tests."""
        self._check_reachable(step, MOST_LOOKED_AHEAD)
        return self._drawn_to(step, lambda: self._planned.get(step), looks=True)

    def mix(self, step: int) -> dict[str, Mix]:
        """Asked and realised mix over all steps before `step`."""
        return self._mix_of(self.progress(step, MOST_LOOKED_AHEAD), step)

    def known_mix(self, step: int) -> tuple[int, dict[str, Mix]]:
        """The mix before a step, or before the last one up to it that is known. Answered at once."""
        known = dict(self._before)
        nearest = max((number for number in known if number <= step), default=min(known))
        return nearest, self._mix_of(known[nearest](), nearest)

    def _mix_of(self, progress: Progress, step: int) -> dict[str, Mix]:
        weights = self._steering.weights_at(max(step - 1, 0))
        return {
            name: Mix(weights[name], int(samples), int(tokens))
            for name, samples, tokens in zip(progress.names, progress.samples, progress.tokens, strict=True)
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """Per source, documents split, truncated, dropped or empty, in chunks seen since this planner was made. Answered at
        once, whatever is being drawn."""
        with self._counts_lock:
            return {name: dict(counts) for name, counts in self._counts.items()}

    def cursors(self) -> dict[str, Cursor]:
        """Where each source stands. Answered at once, whatever is being drawn."""
        known = dict(self._before)  # without the lock, which is held while a step waits for its chunks
        newest = known[max(known)]()
        oldest = known[max((step for step in known if step <= self._oldest()), default=min(known))]()
        needed = _first_chunks(oldest)
        return {
            name: Cursor(needed[i], int(newest.chunk[i]), self._last_chunk(i)) for i, name in enumerate(self._start.names)
        }

    def status_lines(self) -> list[str]:
        busy = self._busy
        return [busy] if busy else []

    def status(self) -> PlannerStatus:
        return PlannerStatus(
            start=self._start.step,
            reached=self._reached,
            oldest_needed=self._oldest(),
            taken_to=self._taken_to,
            num_kept=len(self._planned),
            end=self._end,
            log=None if self._log is None else self._log.position,
            process=os.getpid(),
        )

    def close(self) -> None:
        # A source that hangs while a step is drawn must not hold up the end.
        if self._log is not None and self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._note_taken(min(self._oldest(), self._reached))
                self._log.close()
            finally:
                self._lock.release()

    def _drawer_from(self, progress: Progress) -> StepDrawer:
        count_loss = self._routes.count_loss if self._masked else None
        ask = self._extents, self._describe, count_loss, self._expect, self._steering.schedule, self._peek
        return StepDrawer(progress, self._batch, self._mixture, *ask)

    def _check_reachable(self, step: int, most_ahead: int = MOST_AHEAD) -> None:
        if step < self._start.step:
            raise OverlordError(
                f"this run starts at step {self._start.step}; it has no step {step}. If it was moved there by a resize or "
                "by a loaded state, a client follows with rejoin or load_state_dict"
            )
        if step > self._reached + most_ahead and (self._end is None or step > self._end):
            raise SpecError(
                f"step {step:,} is too far away: this run has drawn the steps before {self._reached:,}, and at most "
                f"{most_ahead:,} more are drawn for a request. Check the step that was asked for; where it is right and the "
                "run was started again without its place, start it from a checkpoint (resume=state) or from its log "
                "(resume='log')"
            )

    def _set_late(self, group: int, is_late: bool) -> None:
        (self._late.add if is_late else self._late.discard)(group)

    def _held_back(self, step: int) -> Later | None:
        """Why a step must wait for a group that is behind it; None when it need not."""
        with self._needs_lock:
            slowest = min(self._needs, key=lambda g: self._needs[g], default=None)
            behind = step if slowest is None else self._needs[slowest]
        if step - behind <= self._max_lead:
            return None
        return Later(
            f"the ranks of data-parallel group {slowest} are still at step {behind}, and no group may be more than "
            f"{self._max_lead} steps ahead of the slowest"
        )

    def _drawn_to(self, step: int, take: Callable[[], T], *, looks: bool = False) -> T:
        """Plan up to a step, and take something from what is known then. Others get their turns meanwhile."""
        turn = object()
        try:
            while True:
                with self._lock:
                    if not looks:
                        self._forget()
                    is_there = self._reach(step)
                    taken = take() if is_there else None
                    self._pinned[turn] = self._drawer.number
                    if looks:
                        self._forget(step)
                    if is_there:
                        return taken  # type: ignore[return-value] - taken just above
        finally:
            self._pinned.pop(turn, None)

    def _reach(self, step: int) -> bool:
        """Draw towards a step, a few steps at most; True when it is planned or the run is known to end before it. Steps
        before the oldest kept one are planned again from the start."""
        if step in self._planned or (self._end is not None and step >= self._end) or step < self._start.step:
            return True
        nearest = max(number for number in self._before if number <= step)
        if step < self._drawer.number or nearest > self._drawer.number + 2 * (self._max_lead + _STEPS_AHEAD):
            self._rewind(step)
        last = self._drawer.number + _SLICE_STEPS
        # A few steps more than asked for, as long as nothing has to be waited for: planning several in a row costs less.
        while self._drawer.number <= step or self._is_ready_ahead_of(step):
            if self._drawer.number >= last and self._drawer.number <= step:
                return False
            drawn = self._drawn()
            if drawn is None:
                self._end = self._drawer.number
                return True
            self._note(drawn)
            if drawn.number >= step or self._is_wanted(drawn.number):
                self._planned[drawn.number] = Planned(drawn, self._arranged(drawn))
        return True

    def _is_ready_ahead_of(self, step: int) -> bool:
        number = self._drawer.number
        return number <= step + _STEPS_AHEAD and self._drawer.is_ready and not self._steering.is_due(number)

    def _drawn(self) -> DrawnStep | None:
        number = self._drawer.number
        if number >= self._reached:
            self._steering.settle(number)
        self._busy = f"the planner is drawing step {number}"
        try:
            return self._drawer.next_step()
        except BaseException:
            self._rewind(number)  # a drawer that was stopped in the middle has lost what it had drawn
            raise
        finally:
            self._busy = ""

    def _note(self, drawn: DrawnStep) -> None:
        """Keep the progress after a step, in the log too, before anybody gets its plan."""
        after = drawn.number + 1
        known = self._before.get(after)
        if known is not None and not same(known(), drawn.after()):
            raise DataError(
                f"step {drawn.number} was drawn again and is not what it was: a source lists or gives other rows than "
                "before, or a transform is not deterministic; restore the data, or start from a checkpoint"
            )
        if after > self._reached:
            with self._counts_lock:
                count_delays(drawn.samples, self._counts)
        self._reached = max(self._reached, after)
        if self._log is None:
            self._before[after] = drawn.after
        else:
            progress = drawn.after()
            self._before[after] = _given(progress)
            self._log.add_step(progress, self._kept)

    def _note_taken(self, oldest: int) -> None:
        """Note that all who read have taken every step before the oldest, unless somebody is late; and write down who reads,
        so that a planner that is made anew knows whom to wait for."""
        with self._needs_lock:
            readers, is_anybody_late = frozenset(self._needs) | self._late, bool(self._late)
        if not is_anybody_late and oldest in self._before:
            self._taken_to = max(self._taken_to, oldest)
        if self._log is not None:
            self._log.add_readers(readers)
            self._log.add_needed(self._taken_to)

    def _kept(self) -> list[Progress]:
        """The progress before every step that may be asked for again, up to the newest, without gaps; and first of all that
        before the oldest step that somebody who is late may ask for."""
        first = _first_in_a_row(self._before, self._reached, self._start.step)
        kept = [self._before[step]() for step in range(first, self._reached + 1)]
        return kept if self._taken_to >= first else [self._before[self._taken_to](), *kept]

    def _oldest(self) -> int:
        """The oldest step that somebody may still ask for."""
        with self._needs_lock:
            asked = min(self._needs.values(), default=self._floor)
            if asked > self._known_to or len(self._needs) == self._place.mesh.dp:
                return asked
            return min(asked, self._floor)

    def _rewind(self, step: int) -> None:
        known = max(number for number in self._before if number <= step)
        self._drawer = self._drawer_from(replace(self._before[known](), step=known))

    def _arranged(self, step: DrawnStep) -> Plan:
        costs = self._steering.costs_at(step.number)
        graph = DGraph(step.samples, self._batch, self._place, step.rows, step.in_rows, in_force=costs)
        try:
            plan = self._strategy(graph.mix(step.weights, self._mixture.unit))
            plan.check_groups(self._place)
        except Exception as error:
            error.add_note(f"while the strategy arranged step {step.number}")
            raise
        self._steering.arranged(step.number, plan)
        return plan

    def _soon(self, oldest: int) -> tuple[range, range]:
        """The steps that groups may ask for soon: from the oldest that is needed, and from the oldest that was asked for."""
        with self._needs_lock:
            asked = min(self._needs.values(), default=oldest)
        num_steps = self._max_lead + _STEPS_AHEAD + 1
        return range(oldest, oldest + num_steps), range(asked, asked + num_steps)

    def _is_wanted(self, number: int) -> bool:
        first, second = self._soon(min(self._oldest(), self._reached))
        return number in first or number in second

    def _forget(self, looked_at: int | None = None) -> None:
        """Let go of what nobody needs. A group whose ranks are apart may come back for a few steps when its constructor
        is lost, so the progress behind the oldest step is kept as far as one group may be ahead of another."""
        oldest = min(self._oldest(), self._reached)
        if looked_at is not None and not self._needs:  # somebody looks at plans, and nobody reads
            oldest = min(looked_at, self._reached)
        first, second = self._soon(oldest)
        for number in [n for n in self._planned if n not in first and n not in second]:
            del self._planned[number]
        if looked_at is None:
            self._note_taken(oldest)
        kept = {self._start.step, self._taken_to, *self._pinned.values()}
        first, newest = range(oldest - self._max_lead, first.stop), self._reached - self._max_lead
        for number in [n for n in self._before if n < newest and n not in first and n not in second and n not in kept]:
            del self._before[number]

    def _expect(self, source: int, chunk: int) -> None:
        if self._expected.get(source) != chunk:
            self._expected[source] = chunk
            self._routes.prefetch(source, chunk, self._last_chunk(source))

    def _describe(self, source: int, chunk: int) -> ChunkFacts:
        known_chunk, facts = self._facts.get(source, (-1, None))
        if facts is not None and known_chunk == chunk:
            return facts
        before = self._busy
        self._busy = f"{before}, and waits for the facts of chunk {chunk} of source {self._start.names[source]!r}"
        facts = self._routes.describe(source, chunk, self._keep_from(source, chunk))
        self._busy = before
        self._learn(source, chunk, facts)
        return facts

    def _peek(self, source: int, chunk: int) -> ChunkFacts | None:
        facts = self._routes.peek(source, chunk, self._keep_from(source, chunk))
        if facts is not None:
            self._learn(source, chunk, facts)
        return facts

    def _learn(self, source: int, chunk: int, facts: ChunkFacts) -> None:
        # One chunk per source is enough: draws move on, and a rewind may ask again.
        self._facts[source] = (chunk, facts)
        if chunk >= self._counted_to.get(source, 0):
            self._counted_to[source] = chunk + 1
            with self._counts_lock:
                self._counts[self._start.names[source]].update(facts.counts)

    def _last_chunk(self, source: int) -> int | None:
        """The chunk that a source ends before; None when it does not, or begins anew."""
        return None if self._mixture.stop == "all_exhausted" else self._extents[source].end

    def _keep_from(self, source: int, chunk: int) -> int:
        """The first chunk of a source that a step still kept may name."""
        oldest = self._oldest()
        kept = [number for number in self._before if number >= oldest] or [max(self._before)]
        before = self._before[min(kept)]
        if before is not self._kept_before[0]:
            self._kept_before = before, _first_chunks(before())
        return min(self._kept_before[1][source], chunk)


class _Turns:
    """A lock that is handed on in the order in which it was asked for: the standard one may be taken again and again by
    whoever let go of it last, while others wait."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_held = False

    def acquire(self, timeout: float = -1) -> bool:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return True
            if timeout == 0:
                return False
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=timeout):
            return True
        with self._guard:
            if mine not in self._waiting:  # it was handed over just now
                return True
            self._waiting.remove(mine)
            return False

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _first_in_a_row(known: Collection[int], last: int, least: int) -> int:
    """The first of the numbers that lead up to `last` without a gap, none below `least`."""
    while last > least and last - 1 in known:
        last -= 1
    return last


def _given(progress: Progress) -> Callable[[], Progress]:
    return lambda: progress


def _first_chunks(progress: Progress) -> list[int]:
    """Of each source, the first chunk that a step from there on may name."""
    first = progress.chunk.copy()
    np.minimum.at(first, progress.carried.source, progress.carried.chunk)
    return first.tolist()


@dataclass(frozen=True, slots=True)
class Mix:
    """What was asked of a source and what it gave so far."""

    weight: float
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Chunks of a source: the first that may still be asked for, the one that is drawn from next, and the one that it ends
    before (None when it does not end)."""

    needed: int
    next: int
    end: int | None


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """How a planner stands."""

    start: int
    reached: int
    """The first step that was never drawn."""
    oldest_needed: int
    taken_to: int
    """Every step before this one was taken by all who read then, or were expected to; they may have left since."""
    num_kept: int
    """Plans that are kept."""
    end: int | None
    """The step that the run ends before; None while it is not known."""
    log: LogPosition | None
    process: int
    """The id of the process that it runs in."""
