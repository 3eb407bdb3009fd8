"""The steps that a planner keeps, and which groups may still request them.

Kept are the plans around the step that each group reads, and the progress before every step that somebody may come back to.
No group gets more than `max_lead` steps ahead of the slowest, so the window cannot grow.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.messages import Later
from overlord.records import record
from overlord.runtime.shared_memory import SharedObject

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from overlord.arrange.plan import Plan
    from overlord.stream.facts import Ints
    from overlord.stream.membership import DrawnStep
    from overlord.stream.progress import Progress

STEPS_AHEAD = 6
"""Steps that are planned beyond the requested one while that takes no waiting."""


@record
class Planned:
    """A planned step, kept while some group may request it."""

    step: DrawnStep
    plan: Plan


@record
class SharedPlans:
    """The plans of some steps in a row for all groups, in shared memory."""

    plans: SharedObject
    """Holds a tuple of (step, `Plan`)."""
    last: int
    """The last step that a group may have now: none may be too far ahead of the slowest."""
    first_chunks: Ints
    """For each source, the first chunk that a step may name which some group may still request."""
    planner: str
    """Of the planner that made them: another one may have other plans."""


class PlanWindow:
    """Plans and progress by step, and the needs of each group. Needs have a lock of their own, so that noting them never
    waits for planning; everything else is changed only under the planner's lock."""

    def __init__(
        self,
        start: Progress,
        num_groups: int,
        max_lead: int,
        *,
        logged: Mapping[int, Progress],
        needed: int | None = None,
        expected: Collection[int] = (),
    ) -> None:
        """`logged`: progress that a log has, by step, and `needed` the oldest step that the log knew as needed. `expected`:
        groups with ranks that will come."""
        known = {start.step: start, **logged}
        self._start = start.step
        self._num_groups = num_groups
        self._max_lead = max_lead
        self._lock = threading.Lock()
        self._needs: dict[int, int] = {}  # group to the oldest step that it may request
        self._late: set[int] = set(expected)  # groups with a rank that is expected and has not requested a step yet
        self._plans: dict[int, Planned] = {}
        self._shared: dict[int, SharedObject] = {}  # step to plans in shared memory, its own among them
        self._share_lock = threading.Lock()
        self._before: dict[int, Callable[[], Progress]] = {step: _constant(progress) for step, progress in known.items()}
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

    def note_request(self, group: int, step: int, oldest: int | None, is_late: bool) -> None:
        """Note that a group requests a step, and may still come back for `oldest`."""
        with self._lock:
            self._needs[group] = self._needs.get(group, step) if oldest is None else oldest
            self._set_late(group, is_late)

    def note_oldest(self, group: int, oldest: int) -> None:
        """Note that a group needs nothing before `oldest`. A group that has left meanwhile stays gone."""
        with self._lock:
            if group in self._needs:
                self._needs[group] = max(self._needs[group], oldest)

    def expect(self, group: int) -> None:
        with self._lock:
            self._late.add(group)

    def group_left(self, group: int, is_late: bool) -> None:
        with self._lock:
            self._needs.pop(group, None)
            self._set_late(group, is_late)

    def wait_for_slowest(self, step: int) -> Later | None:
        """Why a step has to wait for a group that is behind; None when it need not."""
        with self._lock:
            slowest = min(self._needs, key=lambda group: self._needs[group], default=None)
            behind = step if slowest is None else self._needs[slowest]
        if step - behind <= self._max_lead:
            return None
        return Later(
            f"the ranks of data-parallel group {slowest} are still at step {behind}, and no group may be more than "
            f"{self._max_lead} steps ahead of the slowest"
        )

    def last_for_all(self) -> int:
        """The last step that need not wait for a group that is behind; -1 if nobody reads."""
        with self._lock:
            return min(self._needs.values()) + self._max_lead if self._needs else -1

    def reading(self) -> list[int]:
        """The groups that read."""
        with self._lock:
            return list(self._needs)

    def oldest(self) -> int:
        """The oldest step that somebody may still request."""
        with self._lock:
            requested = min(self._needs.values(), default=self._floor)
            if requested > self._known_to or len(self._needs) == self._num_groups:
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

    def keep_plan(self, planned: Planned) -> None:
        self._plans[planned.step.number] = planned

    def share_plans(self, planned: Planned) -> SharedObject:
        """The plan of a step in shared memory, with those of the steps after it that are planned. Raises OSError where the
        system has no shared memory left."""
        first = planned.step.number
        with self._share_lock:
            shared = self._shared.get(first)
            if shared is None:
                together = [planned]
                while (following := self._plans.get(first + len(together))) is not None:
                    together.append(following)
                shared = SharedObject.of(tuple((one.step.number, _slim(one.plan)) for one in together))
                for number in range(first, first + len(together)):
                    self._shared[number] = shared
            return shared

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
        if looked_at is not None and not self._needs:  # nobody reads
            oldest = min(looked_at, self.reached)
        needed, requested = self._soon(oldest)
        for number in [n for n in self._plans if n not in needed and n not in requested]:
            del self._plans[number]
            self._shared.pop(number, None)
        if looked_at is None:
            self.note_taken(oldest)
        kept = {self._start, self.taken_to, *self._pinned.values()}
        needed, newest = range(oldest - self._max_lead, needed.stop), self.reached - self._max_lead
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
            return frozenset(self._needs) | self._late

    def kept_progress(self) -> list[Progress]:
        """The progress before every step that may be requested again, up to the newest, without gaps; and before these the
        one that a late rank may start from."""
        first = _first_in_a_row(self._before, self.reached, self._start)
        kept = [self._before[step]() for step in range(first, self.reached + 1)]
        return kept if self.taken_to >= first else [self._before[self.taken_to](), *kept]

    # For loaders

    def first_chunk(self, source: int) -> int:
        """The first chunk of a source that a kept step may name."""
        oldest = self.oldest()
        kept = [number for number in self._before if number >= oldest] or [max(self._before)]
        before = self._before[min(kept)]
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

    def _set_late(self, group: int, is_late: bool) -> None:
        (self._late.add if is_late else self._late.discard)(group)

    def _soon(self, oldest: int) -> tuple[range, range]:
        """The steps that groups may request soon: from the oldest needed one on, and from the oldest requested one on."""
        with self._lock:
            requested = min(self._needs.values(), default=oldest)
        num_steps = self._max_lead + STEPS_AHEAD + 1
        return range(oldest, oldest + num_steps), range(requested, requested + num_steps)


def _slim(plan: Plan) -> Plan:
    """Without what only people read, and the strategy's function, which may be costly to pickle."""
    return replace(plan, stages=(), cost=None)


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
