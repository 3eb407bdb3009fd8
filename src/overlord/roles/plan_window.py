"""The steps that a planner keeps, and which groups may still request them.

Kept are the plans around the step that each group reads, and the progress before every step that somebody may come back to.
No group gets more than `max_lead` steps ahead of the slowest, and that far only while steps are very short, so the window
cannot grow. Somebody may come back to any step (a second client of a rank begins at the start), so some progress of all
that was drawn is kept too: a bounded number of milestones, and the steps that were requested far behind the others lately.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from overlord.arrange.balancing import max_over_mean
from overlord.arrange.cutting import ConstructorPlans, CutPlan, cut_plan, part_of
from overlord.messages import Later
from overlord.records import record
from overlord.runtime.shared_memory import SharedObject

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import Plan
    from overlord.stream.facts import Ints
    from overlord.stream.membership import DrawnStep
    from overlord.stream.progress import Progress

MOST_MILESTONES = 64
"""A step that is requested again is drawn from the milestone before it, at most about a 32nd of all steps away. The progress
of a run of 300 sources takes about 20 KB."""
_FIRST_SPACING = 128  # steps from milestone to milestone, until there are too many: then every other one goes
_VISITED = 16  # steps of those who read far behind the others

STEPS_AHEAD = 6
"""Steps that are planned beyond the requested one while that takes no waiting."""

_LEAD_S = 0.06
"""How long the plans should last that a group may have beyond the step of the slowest."""
_PACE_STEPS = 8  # that the pace is measured over


@record
class Planned:
    """A planned step, kept while some group may request it."""

    step: DrawnStep
    plan: Plan


@record
class PlanRequest:
    """A request of a group for the plan of a step. Hosts, which are processes with the constructors of several groups, get
    plans together: see `SharedPlans`."""

    step: int
    group: int
    oldest: int
    """The oldest step that the group may still request."""
    is_late: bool
    """True if a rank of the group is expected and has not requested a step yet."""
    host: PlanHost
    noted: OldestSteps | None
    """About other groups of the host, where there is news."""


@record
class OldestSteps:
    """The oldest step that groups may still request."""

    of_group: Mapping[int, int]
    planner: str
    """The planner that they read from: to another one, this says nothing."""


@record
class PlanHost:
    """A process with the constructors of one group or several."""

    name: str
    is_near: bool
    """True if it shares memory with the planner."""

    def __hash__(self) -> int:
        return hash(self.name)


StepPlans: TypeAlias = "tuple[tuple[int, ConstructorPlans], ...]"
"""The plans of some steps, each with the step's number."""


@record
class SentPlans:
    """The plans of some steps for the groups of a host on another machine: only its own part of each."""

    plans: StepPlans

    def open(self) -> StepPlans:
        return self.plans


@record
class SharedPlans:
    """The plans of some steps in a row for a host: those of all groups, in shared memory, or those of its own groups."""

    plans: SharedObject | SentPlans
    """Opens as `StepPlans`."""
    last: int
    """The last step that a group may have now: none may be too far ahead of the slowest."""
    first_chunks: Ints
    """For each source, the first chunk that a step may name which some group may still request."""
    planner: str
    """Of the planner that made them: another one may have other plans."""
    is_fast: bool = False
    """True while steps are so short that groups may be further ahead than usual. More plans come by themselves then, and the
    planner learns soon enough which steps groups are past if it is told every few milliseconds."""


class _Needs:
    """The oldest step that each group may request. Their least is known without looking at all groups: thousands of groups
    note every step."""

    __slots__ = ("_num_at", "of")

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self._num_at: Counter[int] = Counter()  # groups by their oldest step: few steps, because none is far ahead

    def note(self, group: int, step: int) -> None:
        self.drop(group)
        self.of[group] = step
        self._num_at[step] += 1

    def drop(self, group: int) -> None:
        step = self.of.pop(group, None)
        if step is not None:
            self._num_at[step] -= 1
            if not self._num_at[step]:
                del self._num_at[step]

    @property
    def least(self) -> int | None:
        return min(self._num_at, default=None)


class _Lead:
    """How many steps a group may be ahead of the slowest one now: `usual`, and up to `most` while steps are so short that
    groups would wait for plans all the time."""

    __slots__ = ("_at", "_clock", "_most", "_since", "_usual", "now")

    def __init__(self, usual: int, most: int, clock: Callable[[], float]) -> None:
        self._usual = usual
        self._most = most
        self._clock = clock
        self._since = -1  # the step that the slowest group was at when the clock was read last
        self._at = 0.0
        self.now = usual

    def note(self, least: int | None) -> None:
        """Note the oldest step that some group may still request."""
        if least is None or self._usual == self._most or 0 <= least - self._since < _PACE_STEPS:
            return
        at, passed = self._clock(), least - self._since
        if self._since >= 0 and passed > 0:
            self.now = min(max(int(_LEAD_S * passed / max(at - self._at, 1e-9)), self._usual), self._most)
        self._since, self._at = least, at

    @property
    def is_longer(self) -> bool:
        """True while groups may be further ahead than usual."""
        return self.now > self._usual


class PlanWindow:
    """Plans and progress by step, and the needs of each group. Needs have a lock of their own, so that noting them never
    waits for planning; everything else is changed only under the planner's lock."""

    def __init__(
        self,
        start: Progress,
        place: ClientPlaceTree,
        max_lead: int,
        *,
        logged: Mapping[int, Progress],
        needed: int | None = None,
        expected: Collection[int] = (),
        usual_lead: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`logged`: progress that a log has, by step, and `needed` the oldest step that the log knew as needed. `expected`:
        groups with ranks that will come. `usual_lead`: how many steps a group may be ahead of the slowest, unless steps are
        very short; `max_lead` unless given."""
        known = {start.step: start, **logged}
        self._start = start.step
        self._place = place
        self._num_groups = place.mesh.dp
        self._max_lead = max_lead
        self._lock = threading.Lock()
        self._needs = _Needs()
        self._lead = _Lead(max_lead if usual_lead is None else usual_lead, max_lead, clock)
        self._host_of: dict[int, PlanHost] = {}  # group that reads to the process that its constructor is in
        self._groups_of: dict[PlanHost, tuple[int, ...]] = {}
        self._late: set[int] = set(expected)  # groups with a rank that is expected and has not requested a step yet
        self._awaited: set[int] = set()  # groups that have requested nothing yet, and hold the others back all the same
        self._plans: dict[int, Planned] = {}
        self._cuts: dict[int, CutPlan | Plan] = {}  # step to its plan as constructors get it
        self._shared: dict[int, SharedObject] = {}  # step to plans in shared memory, its own among them
        self._share_lock = threading.Lock()
        self._before: dict[int, Callable[[], Progress]] = {step: _constant(progress) for step, progress in known.items()}
        self._milestones = [start.step]
        self._spacing = _FIRST_SPACING
        self._visited: deque[int] = deque(maxlen=_VISITED)
        self._pinned: dict[object, int] = {}  # how far callers have come that draw towards a step in several turns
        self._needed_chunks: tuple[int, Ints] = -1, np.zeros(0, np.int64)  # by the oldest step that was needed
        self._first_chunks = _constant(start), _first_chunks(start)  # of the progress that was looked at last
        self.reached = max(known)
        """The first step that was never drawn."""
        self.end: int | None = None
        """The step that the run ends before, once it is known."""
        # Until all groups have requested a step from this planner, they may be as far back as the log knew them.
        self._known_to = self.reached
        least = start.step if needed is None else min(needed, self.reached)
        self._floor = start.step if needed is None else _first_in_a_row(known, self.reached, least)
        self.taken_to = least
        """Every step before this one was taken by all groups that read or were expected."""

    # Who needs what

    def note_request(self, group: int, step: int, oldest: int | None, is_late: bool, host: PlanHost | None = None) -> None:
        """Note that a group, whose constructor is in `host`, requests a step and may still come back for `oldest`."""
        with self._lock:
            if step + self._max_lead + STEPS_AHEAD < self.reached and step not in self._visited:
                self._visited.append(step)
            self._awaited.discard(group)
            self._needs.note(group, self._needs.of.get(group, step) if oldest is None else oldest)
            self._lead.note(self._needs.least)
            self._set_late(group, is_late)
            if host is not None and self._host_of.get(group) != host:
                self._leave_host(group)
                self._host_of[group] = host
                self._groups_of[host] = tuple(sorted((*self._groups_of.get(host, ()), group)))

    def note_oldest(self, noted: Mapping[int, int]) -> bool:
        """Note that groups need nothing before a step. A group that has left meanwhile stays gone. True if there are steps
        now that no group needs."""
        with self._lock:
            before = self._needs.least
            for group, oldest in noted.items():
                known = self._needs.of.get(group)
                if known is not None and known < oldest:
                    self._needs.note(group, oldest)
            least = self._needs.least
            self._lead.note(least)
            return least != before

    def expect(self, group: int, holds: bool = False) -> None:
        with self._lock:
            self._late.add(group)
            if holds and group not in self._needs.of:
                self._awaited.add(group)

    def group_left(self, group: int, is_late: bool) -> None:
        with self._lock:
            self._awaited.discard(group)
            self._needs.drop(group)
            self._leave_host(group)
            self._set_late(group, is_late)

    def wait_for_slowest(self, step: int) -> Later | None:
        """Why a step has to wait for a group that is behind; None when it need not."""
        with self._lock:
            lead = self._lead.now
            if self._awaited and step - self._start > lead:
                group = min(self._awaited)
                return Later(
                    f"{describe_ranks(self._place.ranks_of(group))} (data-parallel group {group}) did not read a step yet, "
                    "and all ranks are expected to; close the client of a rank that is not to read"
                )
            behind = self._needs.least
            if behind is None or step - behind <= lead:
                return None
            slowest = min(group for group, oldest in self._needs.of.items() if oldest == behind)
        return Later(
            f"the ranks of data-parallel group {slowest} are still at step {behind}, and no group may be more than "
            f"{lead} steps ahead of the slowest"
        )

    def last_for_all(self) -> int:
        """The last step that need not wait for a group that is behind; -1 if nobody reads."""
        with self._lock:
            least = self._start if self._awaited and self._needs.least is not None else self._needs.least
            return -1 if least is None else least + self._lead.now

    @property
    def lead(self) -> int:
        """How many steps a group may be ahead of the slowest one now."""
        return self._lead.now

    @property
    def is_fast(self) -> bool:
        """True while steps are so short that groups may be further ahead than usual."""
        return self._lead.is_longer

    def hosts(self) -> list[tuple[PlanHost, tuple[int, ...]]]:
        """The hosts of groups that read, each with those groups in rising order."""
        with self._lock:
            return list(self._groups_of.items())

    def groups_of(self, host: PlanHost) -> tuple[int, ...]:
        """The groups of a host that read, in rising order."""
        with self._lock:
            return self._groups_of.get(host, ())

    def oldest(self) -> int:
        """The oldest step that somebody may still request."""
        with self._lock:
            requested = self._floor if self._needs.least is None else self._needs.least
            if requested > self._known_to or len(self._needs.of) == self._num_groups:
                return requested
            return min(requested, self._floor)

    def is_wanted(self, step: int) -> bool:
        """True if some group may request this step soon."""
        return any(step in steps for steps in self._soon(min(self.oldest(), self.reached)))

    # What is kept

    @property
    def num_plans(self) -> int:
        return len(self._plans)

    def plan(self, step: int) -> Planned | None:
        return self._plans.get(step)

    def newest_straggler(self) -> float | None:
        """The costliest group of the newest plan over the mean; None where there is no plan, or its strategy knows no cost.
        Safe to call at any time."""
        plans = dict(self._plans)
        stages = plans[max(plans)].plan.stages if plans else ()
        costs = next((stage.bucket_costs for stage in reversed(stages) if stage.bucket_costs is not None), None)
        return None if costs is None else max_over_mean(costs)

    def keep_plan(self, planned: Planned) -> None:
        self._plans[planned.step.number] = planned

    def plans_for(self, host: PlanHost, groups: Sequence[int], planned: Planned) -> SharedObject | SentPlans:
        """The plans of a step and of those after it that are planned, for a host with these groups. Raises OSError where the
        system has no shared memory left."""
        with self._share_lock:
            shared = self._shared.get(planned.step.number) if host.is_near else None
            if shared is not None:
                return shared
            together = self._cut_from(planned)
            if not host.is_near:
                return SentPlans(tuple((step, part_of(cut, step, groups, self._place)) for step, cut in together))
            shared = SharedObject.of(tuple(together))
            for number, _ in together:
                if number in self._plans:
                    self._shared[number] = shared
            return shared

    def _cut_from(self, planned: Planned) -> list[tuple[int, CutPlan | Plan]]:
        """A plan and those after it, up to the first that is missing, each cut once."""
        together: list[tuple[int, CutPlan | Plan]] = []
        following: Planned | None = planned
        while following is not None:
            number = following.step.number
            cut = self._cuts.get(number) or cut_plan(following.plan, self._place)
            if number in self._plans:
                self._cuts[number] = cut
            together.append((number, cut))
            following = self._plans.get(number + 1)
        return together

    def progress(self, step: int) -> Callable[[], Progress] | None:
        """The progress before a step, computed when called; None if it is not kept."""
        return self._before.get(step)

    def nearest(self, step: int) -> int:
        """The last step up to this one whose progress is kept."""
        return _nearest(self._before, step)

    def known_progress(self, step: int) -> tuple[int, Progress]:
        """The last step up to this one whose progress is kept, and that progress. Safe to call at any time."""
        known = dict(self._before)
        nearest = _nearest(known, step)
        return nearest, known[nearest]()

    def newest_progress(self) -> Progress:
        """Safe to call at any time."""
        known = dict(self._before)
        return known[max(known)]()

    def first_progress(self) -> Progress:
        """The progress to draw from at first: before the oldest step that the log knew as needed."""
        return self._before.get(self._floor, self._before[self._start])()

    def keep_progress(self, step: int, progress: Callable[[], Progress]) -> None:
        """Keep the progress before a step, up to which all was drawn."""
        self._before[step] = progress
        self.reached = max(self.reached, step)
        if step >= self._milestones[-1] + self._spacing:
            self._before[step] = _constant(progress())  # a function would hold the draws that it is computed from
            self._milestones.append(step)
            if len(self._milestones) > MOST_MILESTONES:
                del self._milestones[1::2]
                self._spacing *= 2

    def pin(self, turn: object, step: int) -> None:
        """Keep the progress before a step for a caller that goes on from there in its next turn."""
        self._pinned[turn] = step

    def unpin(self, turn: object) -> None:
        self._pinned.pop(turn, None)

    def release(self, looked_at: int | None = None) -> None:
        """Drop what nobody needs. `looked_at`: a step that a caller only looks at.

        A group may come back for a few steps when its constructor is lost, so progress behind the oldest step is kept as far
        as one group may be ahead of another.
        """
        oldest = min(self.oldest(), self.reached)
        if looked_at is not None and self._needs.least is None:  # nobody reads
            oldest = min(looked_at, self.reached)
        needed, requested = self._soon(oldest)
        for number in [n for n in self._plans if n not in needed and n not in requested]:
            del self._plans[number]
            self._shared.pop(number, None)
            self._cuts.pop(number, None)
        if looked_at is None:
            self.note_taken(oldest)
        with self._lock:
            kept = {self.taken_to, *self._milestones, *self._visited, *self._pinned.values()}
        # One more than plans: whoever has the plan of a step may ask for the progress after it.
        needed, requested = range(oldest - self._max_lead, needed.stop + 1), range(requested.start, requested.stop + 1)
        newest = self.reached - self._max_lead
        for number in [n for n in self._before if n < newest and n not in needed and n not in requested and n not in kept]:
            del self._before[number]

    # For the log

    def note_taken(self, oldest: int) -> None:
        """Note that every step before `oldest` was taken by all groups, unless some rank is late."""
        with self._lock:
            is_anybody_late = bool(self._late)
        if not is_anybody_late and oldest in self._before:
            self.taken_to = max(self.taken_to, oldest)

    def readers(self) -> frozenset[int]:
        """The groups that read or are expected to."""
        with self._lock:
            return frozenset(self._needs.of) | self._late

    def kept_progress(self) -> list[Progress]:
        """The progress before every step that may be requested again, up to the newest, without gaps; and before these the
        one that a late rank may start from."""
        first = _first_in_a_row(self._before, self.reached, self._start)
        kept = [self._before[step]() for step in range(first, self.reached + 1)]
        return kept if self.taken_to >= first else [self._before[self.taken_to](), *kept]

    # For loaders

    def first_chunk(self, source: int) -> int:
        """The first chunk of a source that a kept step may name. Safe to call at any time."""
        oldest, known = self.oldest(), dict(self._before)
        kept = [number for number in known if number >= oldest] or [max(known)]
        before = known[min(kept)]
        if before is not self._first_chunks[0]:
            self._first_chunks = before, _first_chunks(before())
        return self._first_chunks[1][source]

    def first_chunks(self) -> list[int]:
        """Of every source, the first chunk that a step may name which is still needed. Safe to call at any time."""
        return _first_chunks(self.known_progress(self.oldest())[1])

    def needed_chunks(self) -> Ints:
        """The same as an array, computed once for each step."""
        oldest = min(self.oldest(), self.reached)
        step, needed = self._needed_chunks
        if step != oldest:
            needed = np.array(self.first_chunks(), np.int64)
            self._needed_chunks = oldest, needed
        return needed

    def _leave_host(self, group: int) -> None:
        host = self._host_of.pop(group, None)
        if host is not None:
            others = tuple(other for other in self._groups_of[host] if other != group)
            if others:
                self._groups_of[host] = others
            else:
                del self._groups_of[host]

    def _set_late(self, group: int, is_late: bool) -> None:
        (self._late.add if is_late else self._late.discard)(group)

    def _soon(self, oldest: int) -> tuple[range, range]:
        """The steps that groups may request soon: from the oldest needed one on, and from the oldest requested one on."""
        with self._lock:
            requested = oldest if self._needs.least is None else self._needs.least
        num_steps = self._max_lead + STEPS_AHEAD + 1
        return range(oldest, oldest + num_steps), range(requested, requested + num_steps)


def _constant(progress: Progress) -> Callable[[], Progress]:
    return lambda: progress


def _nearest(known: Collection[int], step: int) -> int:
    """The last of the numbers up to `step`; the first of all where all are later."""
    return max((number for number in known if number <= step), default=min(known))


def _first_in_a_row(known: Collection[int], last: int, least: int) -> int:
    """The first of the numbers that lead up to `last` without a gap, none below `least`."""
    while last > least and last - 1 in known:
        last -= 1
    return last


def _first_chunks(progress: Progress) -> list[int]:
    """Of each source, the first chunk that a step from there on may name."""
    first = progress.chunk.copy()
    np.minimum.at(first, progress.carried.source, progress.carried.chunk)
    return first.tolist()


def describe_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, however many they are."""
    listed = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
