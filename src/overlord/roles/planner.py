"""The Planner: holds the only progress of a run and turns facts into plans, step by step, never seeing payload.

What it promises: `plan(step, group)` returns the same plan however often, by whomever and in whatever order it is called,
until the run ends, where it returns None to every group for the same step. A step that is no longer kept is planned again
from a milestone before it. No group gets more than `max_lead` steps ahead of the slowest, so memory is bounded.

No caller blocks another for long: steps are drawn a few at a time, waiting callers take turns, and nobody holds a lock while
facts are on their way from a loader. Steps further than `MOST_AHEAD` from what was drawn so far are refused
(`MOST_LOOKED_AHEAD` for callers that only look at plans): a wrong number must not keep the planner busy for days.

With a log, each step's progress is written down before its plan is returned. A planner that is made again with the same
arguments reads the log and goes on where the lost one was: it returns every step that anybody may still request, as it was.
No step is recorded there as taken by all while an expected rank has neither requested a step nor left.

The planner only orchestrates: `PlanWindow` knows which steps are kept and who needs them, `FactsCache` requests facts from
loaders, `StepDrawer` decides which samples make a step, the job's strategy where they go, and `Steering` which weights and
costs are in force.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from overlord.arrange.graph import arrange_step
from overlord.declare.mixture import MixtureProgress
from overlord.errors import DataError, OverlordError, SpecError
from overlord.messages import Later
from overlord.planlog.records import same
from overlord.roles.facts_cache import FactsCache, FetchedFacts
from overlord.roles.plan_window import STEPS_AHEAD, Planned, PlanWindow, SharedPlans
from overlord.runtime.recorder import SpanBatch, current_recorder
from overlord.runtime.threads import Threads
from overlord.status import Mix, PlannerCounters, PlannerStatus, process_use
from overlord.steering.decisions import Decision, Steered
from overlord.steering.steering import Steering
from overlord.stream.drawing import FactsMissing
from overlord.stream.epoch_watch import EpochWatch
from overlord.stream.membership import DrawnStep, StepDrawer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import GroupPlan, Plan
    from overlord.arrange.strategies import Strategy
    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture
    from overlord.messages import StepReport, WeightChange
    from overlord.planlog.lineage import LineageWriter
    from overlord.planlog.plan_log import PlanLog
    from overlord.roles.plan_window import OldestSteps, PlanHost, PlanRequest
    from overlord.roles.routes import Routes
    from overlord.stream.drawing import Extent
    from overlord.stream.facts import ChunkFacts
    from overlord.stream.progress import Progress

T = TypeVar("T")

MOST_AHEAD = 10_000
"""How many steps beyond those drawn so far may be requested. A service that was restarted without a log has to draw all
steps that its trainers have taken; any other caller that requests a step so far away has the number wrong."""

MOST_LOOKED_AHEAD = 1_000_000
"""The same for callers that only look at a step, as `overlord explain` does: nothing is kept for them."""

_CLOSE_S = 1.0
_log = logging.getLogger(__name__)
_SENT_TOGETHER = 4  # steps, at least, that are sent ahead in one message, which costs as much as several small steps
_LOOK_STEPS = 16  # between two looks at how often sources were read
_SLICE_STEPS = 16  # drawn in a row before another caller gets its turn


class Planner:
    """Plans the steps of a run. The module's docstring has the promises."""

    def __init__(  # noqa: PLR0913 - a run is put together here, by name
        self,
        start: Progress,
        batch: Batch,
        mixture: Mixture,
        *,
        strategy: Strategy,
        place: ClientPlaceTree,
        extents: Sequence[Extent],
        routes: Routes,
        has_loss_masks: bool = False,
        size_columns: Sequence[str] = (),
        max_lead: int = 8,
        usual_lead: int | None = None,
        log: PlanLog | None = None,
        steering: Steering | None = None,
        expected: Collection[int] = (),
        send: Callable[[int, SharedPlans], None] | None = None,
        lineage: LineageWriter | None = None,
        warn_epochs: Sequence[bool | int] | None = None,
    ) -> None:
        """`usual_lead`: see `PlanWindow`. `expected`: groups with ranks that will come. With `send`, which sends plans to
        the host of a group's constructor, the planner plans ahead by itself, so that constructors in other processes need
        not ask. `lineage` records which documents made each step, `warn_epochs` has `Source.warn_epochs` of each source."""
        self._start = start
        self._batch = batch
        self._mixture = mixture
        self._strategy = strategy
        self._place = place
        self._extents = extents
        self._has_loss_masks = has_loss_masks
        self._size_columns = size_columns
        self._max_lead = max_lead
        self._log = log
        self._lineage = lineage
        self._steering = steering or Steering(mixture, start, place, Steered(), log=log)
        self._lock = _Turns()
        self._send = send
        self._threads = Threads(1, "overlord-plan")
        self._is_planning = threading.Lock()  # held while a call that plans ahead is queued or runs
        self._id = uuid.uuid4().hex
        self._recorder = current_recorder()
        self._busy = ""
        self._num_planned, self._spent_s = 0, 0.0  # without waits for facts
        self._began_s = time.monotonic()
        self._epochs = None if warn_epochs is None else EpochWatch(start, extents, mixture.stop, warn_epochs)
        self._is_looking, self._next_look = threading.Lock(), start.step + _LOOK_STEPS
        self._settled = 0  # what is decided during the run is decided for the steps before this one
        self._window = PlanWindow(
            start,
            place,
            max_lead,
            logged={} if log is None else log.before,
            needed=None if log is None else log.needed,
            # Ranks that a lost planner knew may still come.
            expected={*expected, *(() if log is None else log.readers)},
            usual_lead=usual_lead,
        )
        # A source that starts again after its end never ends, as far as prefetching is concerned.
        self._ends = [None if mixture.stop == "all_exhausted" else extent.end for extent in extents]
        self._numbers = {name: number for number, name in enumerate(start.names)}
        note_origins = None if lineage is None else lineage.note_origins
        self._facts = FactsCache(routes, start.names, self._ends, self._window.first_chunk, on_facts=note_origins)
        if lineage is not None:
            lineage.look_up = self._facts.origins
        progress = self._window.first_progress()
        self._drawer = self._drawer_at(progress)
        drawn = np.flatnonzero(self._steering.schedule.at(progress.step) > 0).tolist()
        self._facts.expect_all({source: int(progress.chunk[source]) for source in drawn})

    def plan(self, step: int, group: int, oldest: int | None = None, is_late: bool = False) -> GroupPlan | Later | None:
        """The plan of one group for a step; None when the run ends before that step. `oldest` is the oldest step that the
        group may still request; `is_late`: a rank of it is expected and has not requested a step yet."""
        planned = self._planned(step, group, oldest, is_late)
        if planned is None or isinstance(planned, Later):
            return planned
        return planned.plan.for_constructor(step, group, self._place)

    def plans_for_host(self, request: PlanRequest) -> SharedPlans | Later | None:
        """Like `plan`, for a constructor in another process: the plans of this step and some others, for all groups that are
        known to read there. A step is cut once, however many groups request it."""
        planned = self._planned(request.step, request.group, request.oldest, request.is_late, request.host)
        if request.noted is not None:
            self.note_oldest(request.noted)
        if planned is None or isinstance(planned, Later):
            return planned
        groups = self._window.groups_of(request.host)
        if request.group not in groups:  # it left while the step was planned
            groups = tuple(sorted((*groups, request.group)))
        return self._share(planned, request.host, groups)

    def _planned(
        self, step: int, group: int, oldest: int | None, is_late: bool, host: PlanHost | None = None
    ) -> Planned | Later | None:
        """Note a request of a group; returns the planned step."""
        if group >= self._place.mesh.dp:
            raise OverlordError(f"the mesh has {self._place.mesh.dp} data-parallel groups; there is no group {group}")
        self._check_reachable(step)  # before it is noted as what the group needs
        self._window.note_request(group, step, oldest, is_late, host)
        later = self._window.wait_for_slowest(step)
        if later is not None:
            return later
        planned = self._window.plan(step)  # without waiting for steps that are drawn for other callers
        if planned is None:
            planned = self._draw_to(step, lambda: self._window.plan(step))
        else:
            self._release_if_free()
        self._wake()
        self._look_at_epochs()
        return planned

    def _look_at_epochs(self) -> None:
        """Tell of sources that come to the end of their epochs, now and then."""
        if self._epochs is None or self._drawer.number < self._next_look or not self._is_looking.acquire(blocking=False):
            return
        try:
            self._next_look = self._drawer.number + _LOOK_STEPS
            for text in self._epochs.look(self._window.newest_progress()):
                _log.warning("%s", text)
                self._recorder.events.note("epochs", text)
        finally:
            self._is_looking.release()

    def _share(self, planned: Planned, host: PlanHost, groups: Sequence[int]) -> SharedPlans:
        plans, step = self._window.plans_for(host, groups, planned), planned.step.number
        last = max(self._window.last_for_all(), step)
        is_fast = self._send is not None and self._window.is_fast and self._may_go_on(self._drawer.number)
        return SharedPlans(plans, last, self._window.needed_chunks(), self._id, is_fast)

    def _wake(self) -> None:
        """Go on planning ahead, in a thread, if there are steps that some group may have by now."""
        if self._is_ahead_due() and self._is_planning.acquire(blocking=False):
            self._threads.submit(self._plan_ahead)

    def _is_ahead_due(self) -> bool:
        """True if there are enough steps to plan ahead that they are worth a message to each host."""
        return self._send is not None and self._drawer.number + self._num_together() - 1 <= self._window.last_for_all()

    def _num_together(self) -> int:
        """How many steps are sent in one message: those that groups have left meanwhile last for twice as many."""
        return max(_SENT_TOGETHER, self._window.lead // 3)

    def _plan_ahead(self) -> None:
        """Plan the steps that groups may have, and send them. It waits for facts; an error is left to the request for the
        step."""
        try:
            while self._is_ahead_due() and self._plan_some():
                pass
        except Exception as error:  # noqa: BLE001 - raised again by the request for the step
            _log.debug("a step could not be planned ahead: %s", error)
        finally:
            self._is_planning.release()

    def _plan_some(self) -> bool:
        """Plan a few steps ahead, and send them to all groups that read. False if there was none to plan."""
        assert self._send is not None  # checked by `_wake`
        first: int | None = None
        fetched = FetchedFacts()
        num_planned, num_wanted = 0, self._num_together()
        while num_planned < num_wanted:
            missing: FactsMissing | None = None
            with self._lock:
                step = self._drawer.number
                if not (self._window.reached <= step <= self._window.last_for_all() and self._may_go_on(step)):
                    break
                self._facts.give(fetched)
                try:
                    if not self._draw_one(step):
                        break
                except FactsMissing as found:
                    missing = found
            if missing is not None:
                if first is not None:  # groups may wait for these steps
                    break
                self._facts.fetch(missing, fetched)  # without the lock
                continue
            first, num_planned, fetched = step if first is None else first, num_planned + 1, FetchedFacts()
        planned = None if first is None else self._window.plan(first)
        if planned is not None:
            for_near: SharedPlans | None = None  # the same for all hosts of this machine
            for host, groups in self._window.hosts():
                plans = for_near if host.is_near and for_near is not None else self._share(planned, host, groups)
                self._send(groups[0], plans)
                for_near = plans if host.is_near else for_near
            self._look_at_epochs()
        return first is not None

    def receive_facts(self, source: str, chunk: int, facts: ChunkFacts) -> None:
        """Keep the facts of a chunk that a loader has made. Returns at once."""
        self._facts.receive(self._numbers[source], chunk, facts)

    def note_oldest(self, noted: OldestSteps) -> None:
        """Note the oldest step that groups may still request, if they read from this planner."""
        if noted.planner == self._id and self._window.note_oldest(noted.of_group):
            self._release_if_free()
            self._wake()

    def expect(self, group: int, holds: bool = False) -> None:
        """Note that ranks of a group will come that have not requested a step yet. If it `holds`, other groups wait for it
        as for one that reads."""
        self._window.expect(group, holds)

    def group_left(self, group: int, is_late: bool = False) -> None:
        """Note that nobody reads a group now, so that it holds nobody back. `is_late`: some rank of it may still come."""
        self._window.group_left(group, is_late)

    def progress(self, step: int, most_ahead: int = MOST_AHEAD) -> Progress:
        """The progress of the run before a step."""
        before = self._window.progress(step)
        if before is None:
            self._check_reachable(step, most_ahead)
            before = self._draw_to(step - 1, lambda: self._window.progress(step), only_looks=True)
        if before is None:
            raise OverlordError(f"the run ended at step {self._window.end}; there is no progress before step {step}")
        return before()

    def checkpoint(self, step: int) -> tuple[Progress, Steered]:
        """Everything that a state before a step holds."""
        progress = self.progress(step)
        return progress, self._steering.before(step)

    def report(self, report: StepReport) -> list[str]:
        """Take a rank's report of a step; returns which parts were not counted, and why. Returns at once."""
        return self._steering.report(report, self._window.reached)

    def change_weights(self, change: WeightChange, first: int) -> int:
        """Draw by other weights; returns the step from which. Steps before `first` are known to be delivered."""
        with self._lock:
            return self._steering.change(change, max(first, self._window.reached, self._settled))

    def skip(self, value: Mapping[str, Any], from_step: int | None, first: int) -> int:
        """Leave something out; returns the step from which. Steps before `first` are known to be delivered."""
        with self._lock:
            return self._steering.skip(value, from_step, max(first, self._window.reached))

    def decisions(self) -> tuple[Decision, ...]:
        """The decisions taken while the run ran, in the order of steps."""
        return self._steering.decisions

    def whole_plan(self, step: int) -> Planned | None:
        """The plan of all groups, for `explain` and tests."""
        self._check_reachable(step, MOST_LOOKED_AHEAD)
        return self._draw_to(step, lambda: self._window.plan(step), only_looks=True)

    def kept_plan(self, step: int) -> Planned | None:
        """The plan of all groups if it is kept now; None otherwise. Draws nothing, and returns at once."""
        return self._window.plan(step)

    def mix(self, step: int) -> dict[str, Mix]:
        """Requested and realised mix over all steps before `step`."""
        return self._mix_of(self.progress(step, MOST_LOOKED_AHEAD), step)

    def known_mix(self, step: int) -> tuple[int, dict[str, Mix]]:
        """The mix before a step, or before the last one up to it whose progress is kept. Returns at once."""
        nearest, progress = self._window.known_progress(step)
        return nearest, self._mix_of(progress, nearest)

    def _mix_of(self, progress: Progress, step: int) -> dict[str, Mix]:
        weights = self._steering.weights_at(max(step - 1, 0))
        return {
            name: Mix(weights[name], int(samples), int(tokens))
            for name, samples, tokens in zip(progress.names, progress.samples, progress.tokens, strict=True)
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """Per source, documents split, truncated, dropped or empty, in chunks seen since this planner was made. Returns at
        once."""
        return self._facts.counts()

    def cursors(self) -> dict[str, Cursor]:
        """How far each source is. Returns at once."""
        needed, newest = self._window.first_chunks(), self._window.newest_progress()
        return {name: Cursor(needed[i], int(newest.chunk[i]), self._ends[i]) for i, name in enumerate(self._start.names)}

    def status_lines(self) -> list[str]:
        waits_for, number = self._facts.waits_for, self._drawer.number
        if waits_for:
            return [f"the planner is drawing step {number}, and waits for {waits_for}"]
        return [self._busy] if self._busy else []

    def status(self) -> PlannerStatus:
        return PlannerStatus(
            start=self._start.step,
            reached=self._window.reached,
            oldest_needed=self._window.oldest(),
            taken_to=self._window.taken_to,
            num_kept=self._window.num_plans,
            end=self._window.end,
            log=None if self._log is None else self._log.position,
            process=os.getpid(),
        )

    def counters(self, step: int) -> PlannerCounters:
        """How far it is, and what it has done; `step` is the one that the mix is wanted before. Returns at once."""
        at, mix = self.known_mix(step)
        newest = self._window.newest_progress()
        epochs = [float(chunk) / extent.chunks_per_epoch for chunk, extent in zip(newest.chunk, self._extents, strict=True)]
        drawn_s = time.monotonic() - self._began_s
        left_s = {
            name: left
            for name, first, now, extent in zip(newest.names, self._start.chunk, newest.chunk, self._extents, strict=True)
            if (left := extent.seconds_left(int(first), int(now), drawn_s)) is not None
        }
        return PlannerCounters(
            instance=self._id,
            use=process_use(self._recorder.events),
            status=self.status(),
            step=at,
            mix=mix,
            epochs=dict(zip(newest.names, epochs, strict=True)),
            left_s=left_s,
            documents=self.counts(),
            num_planned=self._num_planned,
            plan_s=self._spent_s,
            facts_s=self._facts.waited_s,
            straggler=self._window.newest_straggler(),
        )

    def take_spans(self) -> SpanBatch:
        """What was done in this process since the last call, and when. It is recorded from the first call on."""
        return self._recorder.spans.take()

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        # A source that hangs while a step is drawn must not hold up the end.
        if self._log is not None and self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._window.note_taken(min(self._window.oldest(), self._window.reached))
                self._log_readers()
                if self._lineage is not None:
                    self._lineage.close()
                self._log.close()
            finally:
                self._lock.release()

    def _drawer_at(self, progress: Progress) -> StepDrawer:
        return StepDrawer(
            progress,
            self._batch,
            self._mixture,
            self._extents,
            self._facts,
            schedule=self._steering.schedule,
            skips=self._steering.skips,
            has_loss_masks=self._has_loss_masks,
        )

    def _check_reachable(self, step: int, most_ahead: int = MOST_AHEAD) -> None:
        reached, end = self._window.reached, self._window.end
        if step < self._start.step:
            raise OverlordError(
                f"this run starts at step {self._start.step}; it has no step {step}. If it was moved there by a resize or "
                "by a loaded state, a client follows with rejoin or load_state_dict"
            )
        if step > reached + most_ahead and (end is None or step > end):
            raise SpecError(
                f"step {step:,} is too far away: this run has drawn the steps before {reached:,}, and at most "
                f"{most_ahead:,} more are drawn for a request. Check the requested step; if it is right and the "
                "run was started again without its place, start it from a checkpoint (resume=state) or from its log "
                "(resume='log')"
            )

    def _draw_to(self, step: int, take: Callable[[], T], *, only_looks: bool = False) -> T:
        """Plan up to a step, and take something from the window then. Other callers get their turns meanwhile, also while
        this one waits for facts."""
        turn, fetched, drawn_to = object(), FetchedFacts(), -1
        try:
            while True:
                missing: FactsMissing | None = None
                with self._lock:
                    if not only_looks:
                        self._release()
                    self._facts.give(fetched)
                    try:
                        is_there = self._reach(step)
                    except FactsMissing as found:
                        missing, is_there = found, False
                    taken = take() if is_there else None
                    self._window.pin(turn, self._drawer.number)
                    if only_looks:
                        self._window.release(looked_at=step)
                    if is_there:
                        return taken  # type: ignore[return-value] - taken just above
                    if self._drawer.number != drawn_to:  # what was fetched before is used up
                        fetched, drawn_to = FetchedFacts(), self._drawer.number
                if missing is not None:
                    # Without the lock: requests for steps that are planned, changes of weights, and callers that draw other
                    # steps go on.
                    self._facts.fetch(missing, fetched)
        finally:
            self._window.unpin(turn)

    def _reach(self, step: int) -> bool:
        """Draw towards a step, a few steps at most; True when it is planned, or the run is known to end before it. Steps
        before the oldest kept one are planned again from a milestone."""
        window = self._window
        if window.plan(step) is not None or (window.end is not None and step >= window.end) or step < self._start.step:
            return True
        if step < self._drawer.number or window.nearest(step) > self._drawer.number + 2 * (self._max_lead + STEPS_AHEAD):
            self._rewind(step)
        last = self._drawer.number + _SLICE_STEPS
        # A few steps more than requested, as long as that takes no waiting: planning several in a row costs less.
        while self._drawer.number <= step or self._can_go_on(step):
            if self._drawer.number >= last and self._drawer.number <= step:
                return False
            try:
                if not self._draw_one(step):
                    return True
            except FactsMissing:
                if self._drawer.number <= step:
                    raise
                return True  # nobody waits for this one
        return True

    def _draw_one(self, step: int) -> bool:
        """Draw the next step, and plan it if it is wanted: from `step` on they are. False when the run ends before it."""
        began = time.perf_counter()
        drawn = self._draw()
        if drawn is None:
            self._window.end = self._drawer.number
            return False
        self._keep_progress(drawn)
        if drawn.number >= step or self._window.is_wanted(drawn.number):
            self._window.keep_plan(Planned(drawn, self._arrange(drawn)))
            self._num_planned += 1
        self._spent_s += time.perf_counter() - began
        if self._recorder.spans.is_on:
            self._recorder.spans.add(f"plan step {drawn.number}", began, documents=len(drawn.samples))
        return True

    def _can_go_on(self, step: int) -> bool:
        """True if the next step can be planned beyond the requested one, without waiting for anything."""
        number = self._drawer.number
        if self._send is not None:  # `_plan_ahead` goes on
            return False
        return number <= step + STEPS_AHEAD and self._drawer.is_ready and self._may_go_on(number)

    def _may_go_on(self, number: int) -> bool:
        """True if a step can be drawn before it is requested: nothing is decided just before it."""
        is_over = self._window.end is not None and number >= self._window.end
        return not is_over and not (self._steering.may_decide and self._steering.is_due(number))

    def _draw(self) -> DrawnStep | None:
        number = self._drawer.number
        if self._log is not None:
            self._log.check_own()
        if number >= max(self._window.reached, self._settled) and self._steering.may_decide:
            self._steering.settle(number, lambda: self._mixture_progress(number))
            self._settled = number + 1
        self._busy = f"the planner is drawing step {number}"
        try:
            return self._drawer.next_step()
        except FactsMissing:
            raise  # the next try draws the same step
        except BaseException:
            self._rewind(number)  # a drawer that was interrupted has lost the samples it had drawn
            raise
        finally:
            self._busy = ""

    def _mixture_progress(self, step: int) -> MixtureProgress:
        """What a mixture that is a function of the progress gets before a step."""
        _, at = self._window.known_progress(step)
        per_epoch = [extent.chunks_per_epoch for extent in self._extents]
        return MixtureProgress(
            samples=Counter(dict(zip(at.names, at.samples.tolist(), strict=True))),
            tokens=Counter(dict(zip(at.names, at.tokens.tolist(), strict=True))),
            epochs=Counter(dict(zip(at.names, (at.chunk // np.array(per_epoch)).tolist(), strict=True))),
        )

    def _keep_progress(self, drawn: DrawnStep) -> None:
        """Keep the progress after a step, in the log too, before anybody gets the plan."""
        after = drawn.number + 1
        known = self._window.progress(after)
        if known is not None and not same(known(), drawn.after()):
            raise DataError(
                f"step {drawn.number} was drawn again and has changed: a source lists or returns other rows than "
                "before, or a transform is not deterministic; restore the data, or start from a checkpoint"
            )
        if after > self._window.reached and self._batch.outliers is not None:
            self._facts.count_delays(drawn.samples)
        if self._log is None:
            self._window.keep_progress(after, drawn.after)
        else:
            progress = drawn.after()
            self._window.keep_progress(after, lambda: progress)
            self._log.add_step(progress, self._window.kept_progress)
        if self._lineage is not None:
            self._lineage.add(drawn, self._steering.costs_decided(drawn.number) if self._steering.may_decide else None)

    def _release_if_free(self) -> None:
        if self._lock.acquire(timeout=0):
            try:
                self._release()
            finally:
                self._lock.release()

    def _release(self) -> None:
        self._window.release()
        if self._log is not None:
            self._log_readers()

    def _log_readers(self) -> None:
        """Write down who reads and what all have taken, so that a restarted planner knows whom to wait for."""
        assert self._log is not None  # checked by the callers
        self._log.add_readers(self._window.readers())
        self._log.add_needed(self._window.taken_to)

    def _rewind(self, step: int) -> None:
        number, progress = self._window.known_progress(step)
        self._drawer = self._drawer_at(replace(progress, step=number))

    def _arrange(self, step: DrawnStep) -> Plan:
        costs = self._steering.costs_at(step.number) if self._steering.may_decide else None
        plan = arrange_step(
            step,
            self._batch,
            self._place,
            self._strategy,
            unit=self._mixture.unit,
            size_columns=self._size_columns,
            in_force=costs,
        )
        if plan.cost is not None:
            self._steering.note_plan(step.number, plan)
        return plan


class _Turns:
    """A fair lock: it is granted in the order of requests. The thread that released a standard lock may take it again and
    again while others wait."""

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
            if mine not in self._waiting:  # it was granted just now
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


@dataclass(frozen=True, slots=True)
class Cursor:
    """Chunks of a source: the first that may still be requested, the one that is drawn from next, and the one that the
    source ends before (None: it never ends)."""

    needed: int
    next: int
    end: int | None
