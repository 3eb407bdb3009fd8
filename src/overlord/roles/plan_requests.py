"""Requests the plans of a group from the planner, several steps at a time where a request costs something.

The planner learns as much as from single requests: with each plan that is used, which step the group may still come back
for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from overlord.messages import Later
from overlord.roles.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.arrange.plan import GroupPlan, GroupPlans
    from overlord.runtime.engine import Handle


class PlanRequests:
    """The plans of one group. Thread-safe."""

    def __init__(
        self, planner: Handle[Planner], group: int, most: int, note: Callable[[GroupPlans], None] | None = None
    ) -> None:
        """Requests up to `most` plans together; `note` is called with plans when they have arrived."""
        self._planner = planner
        self._group = group
        self._most = most
        self._note = note
        self._lock = threading.Lock()
        self._kept: dict[int, GroupPlan] = {}
        self._noted = -1  # the oldest step that the planner was told
        self._num_resets = 0

    def plan(self, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        """See `Planner.plan`."""
        if self._most == 1:
            return self._planner.call(Planner.plan, step, self._group, oldest, is_late).result()
        with self._lock:
            kept, num_resets = self._kept.pop(step, None), self._num_resets
            is_news, self._noted = oldest > self._noted, max(self._noted, oldest)
        if kept is not None:
            if is_news:
                self._planner.tell(Planner.note_oldest, self._group, oldest)
            return kept
        found = self._planner.call(Planner.plans, step, self._group, oldest, is_late, self._most).result()
        if found is None or isinstance(found, Later):
            return found
        with self._lock:
            if num_resets == self._num_resets:
                later = {number: plan for number, plan in self._kept.items() if number >= oldest}
                self._kept = later | {plan.step: plan for plan in found.plans[1:]}
        if self._note is not None:
            self._note(found)
        return found.plans[0]

    def reset(self) -> None:
        """Forget the plans: the run goes on from another state, or nobody reads the group."""
        with self._lock:
            self._kept, self._noted = {}, -1
            self._num_resets += 1
