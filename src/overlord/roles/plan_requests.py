"""Gets the plans of a group from the planner. Where processes share memory, the planner sends those of several steps before
they are needed; otherwise, and where one is missing, they are requested.

The planner learns as much as from single requests: which step the group may still come back for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from overlord.messages import Later
from overlord.roles.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import GroupPlan, Plan
    from overlord.roles.plan_window import SharedPlans
    from overlord.runtime.engine import Handle
    from overlord.stream.facts import Ints


class PlanListener(Protocol):
    """Is told which plans have arrived."""

    def note_plans(self, plans: Sequence[GroupPlan], first_chunks: Ints) -> None:
        """`first_chunks`: of each source, the first chunk that a step may name which some group may still request."""
        ...


class PlanRequests:
    """The plans of one group. Thread-safe."""

    def __init__(
        self, planner: Handle[Planner], group: int, place: ClientPlaceTree, listener: PlanListener | None = None
    ) -> None:
        """With a `listener`, plans come through shared memory, several steps at a time."""
        self._planner = planner
        self._group = group
        self._place = place
        self._listener = listener
        self._lock = threading.Lock()
        self._kept: dict[int, GroupPlan] = {}
        self._noted = -1  # the oldest step that the planner was told
        self._cut_to = -1  # the newest step whose plan has arrived
        self._sender = ""  # the planner whose plans are kept
        self._num_resets = 0

    def plan(self, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        """See `Planner.plan`."""
        if self._listener is None:
            return self._planner.call(Planner.plan, step, self._group, oldest, is_late).result()
        with self._lock:
            kept, num_resets = self._kept.pop(step, None), self._num_resets
            is_news, self._noted = oldest > self._noted, max(self._noted, oldest)
        if kept is not None:
            if is_news:
                self._planner.tell(Planner.note_oldest, self._group, oldest)
            return kept
        try:
            found = self._planner.call(Planner.shared_plans, step, self._group, oldest, is_late).result()
        except OSError:  # the system has no shared memory left
            return self._planner.call(Planner.plan, step, self._group, oldest, is_late).result()
        if found is None or isinstance(found, Later):
            return found
        plans = self._cut(found, step)
        with self._lock:
            if num_resets == self._num_resets:
                self._sender = found.planner
                later = {number: plan for number, plan in self._kept.items() if number >= oldest}
                self._kept = later | {plan.step: plan for plan in plans[1:]}
                self._cut_to = max(self._cut_to, plans[-1].step)
        self._listener.note_plans(plans, found.first_chunks)
        return plans[0]

    def receive(self, found: SharedPlans) -> None:
        """Keep plans that the planner sent by itself, unless they are of a planner whose plans were never requested: that of
        another state."""
        with self._lock:
            if self._listener is None or found.planner != self._sender:
                return
            num_resets, first = self._num_resets, self._cut_to + 1
        plans = self._cut(found, first)
        with self._lock:
            plans = [plan for plan in plans if plan.step > self._cut_to]  # others were requested meanwhile
            if num_resets != self._num_resets or not plans:
                return
            later = {number: plan for number, plan in self._kept.items() if number >= self._noted}
            self._kept = later | {plan.step: plan for plan in plans}
            self._cut_to = plans[-1].step
        self._listener.note_plans(plans, found.first_chunks)

    def _cut(self, found: SharedPlans, first: int) -> list[GroupPlan]:
        whole: tuple[tuple[int, Plan], ...] = found.plans.open()
        wanted = [(number, plan) for number, plan in whole if first <= number <= found.last]
        return [plan.for_constructor(number, self._group, self._place) for number, plan in wanted]

    def reset(self) -> None:
        """Forget the plans: the run goes on from another state, or nobody reads the group."""
        with self._lock:
            self._kept, self._noted, self._cut_to, self._sender = {}, -1, -1, ""
            self._num_resets += 1
