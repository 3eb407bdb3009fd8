"""Gets the plans of groups from the planner. Where constructors are in other processes, the planner sends the plans of some
steps to each process before they are needed, for all groups whose constructors are there. Those that are missing are
requested.

The planner learns as much as from single requests of groups: which step they may still come back for. A process tells it in
one message, when all of its groups have come to a step; while steps are very short, every few milliseconds.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from overlord.messages import Later
from overlord.roles.plan_window import OldestSteps, PlanHost, PlanRequest
from overlord.roles.planner import Planner
from overlord.runtime.serving_threads import let_others_serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import GroupPlan
    from overlord.roles.plan_window import SharedPlans, StepPlans
    from overlord.runtime.engine import Handle
    from overlord.stream.facts import Ints

_TOLD_EVERY = 2
"""Steps that a group takes, while another of its process takes none, until the planner is told: it must know the slowest."""
_NEWS_S = 0.006
"""How long news wait for others while steps are very short: a message costs the planner as much as a tenth of a step."""
_PLANS_S = 0.03
"""How long a group waits then for plans that are on their way, until it requests its own."""
_IDLE_S = 1.0
"""After this time without news, the thread ends that tells them."""


class PlanListener(Protocol):
    """Is told which plans have arrived."""

    def note_plans(self, plans: Sequence[GroupPlan], first_chunks: Ints) -> None:
        """`first_chunks`: of each source, the first chunk that a step may name which some group may still request."""
        ...


class GroupPlans(Protocol):
    """The plans of one group."""

    def plan(self, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        """See `Planner.plan`."""
        ...

    def find(self, step: int) -> GroupPlan | None:
        """The plan of a step, if it is kept here. It stays here."""
        ...

    def receive(self, found: SharedPlans) -> None:
        """Keep plans that the planner sent by itself."""
        ...

    def reset(self) -> None:
        """Forget the plans: the run goes on from another state, or nobody reads the group."""
        ...


class SinglePlans:
    """Requests every plan when it is needed: for a planner in the same process."""

    def __init__(self, planner: Handle[Planner], group: int) -> None:
        self._planner = planner
        self._group = group

    def plan(self, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        return self._planner.call(Planner.plan, step, self._group, oldest, is_late).result()

    def find(self, step: int) -> None:
        """Nothing is kept."""

    def receive(self, found: SharedPlans) -> None:
        """Nothing is sent to a constructor in the process of its planner."""

    def reset(self) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class _Kept:
    """What a process knows of one group."""

    plans: dict[int, GroupPlan] = field(default_factory=lambda: {})
    noted: int = -1
    """The oldest step that the group may still request."""
    told: int = -1
    """The same, as the planner was told it last."""
    cut_to: int = -1
    """The newest step whose plan has arrived."""
    sender: str = ""
    """The planner whose plans are kept: one that the group itself has called."""
    num_resets: int = 0


class HostPlans:
    """The plans of all groups whose constructors are in this process. Thread-safe."""

    def __init__(self, planner: Handle[Planner], place: ClientPlaceTree, listener: PlanListener) -> None:
        self._planner = planner
        self._place = place
        self._listener = listener
        self._name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._groups: dict[int, _Kept] = {}
        self._requests: dict[int, Future[SharedPlans | Later | None]] = {}  # under way, by step
        self._arrived = threading.Condition(self._lock)
        self._is_fast = False  # as the planner said last, see `SharedPlans`
        self._has_news = threading.Event()
        self._teller: threading.Thread | None = None

    def of_group(self, group: int) -> PlanRequests:
        with self._lock:
            self._groups[group] = _Kept()
        return PlanRequests(self, group)

    def plan(self, group: int, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        """The plan of a group for a step: see `Planner.plan`."""
        with self._lock:
            of_group = self._groups[group]
            of_group.noted = max(of_group.noted, oldest)
            if self._is_coming(of_group, step):
                let_others_serve()
                self._arrived.wait_for(lambda: not self._is_coming(self._groups[group], step), _PLANS_S)
                of_group = self._groups[group]
            kept = of_group.plans.pop(step, None)
            news = None if kept is None or not self._is_news(of_group) else self._take_news_in_time(of_group.sender)
            under_way = self._requests.get(step) if kept is None and of_group.sender else None
        self._tell(news)
        if kept is not None:
            return kept
        if under_way is not None:
            found = self._wait_for_other(under_way, group, step)
            if found is not None:
                return found
        return self._request(group, step, oldest, is_late)

    def find(self, group: int, step: int) -> GroupPlan | None:
        """The plan of a group for a step, if it has arrived. It is kept until the group is past the step."""
        with self._lock:
            return self._groups[group].plans.get(step)

    def receive(self, found: SharedPlans) -> None:
        """Keep plans that the planner sent by itself, except for groups that have never called that planner: it may have
        another state."""
        arrived = self._keep(found)
        if arrived:
            self._listener.note_plans(arrived, found.first_chunks)

    def reset(self, group: int) -> None:
        """Forget the plans of a group, and tell the planner where the others are: they may have waited for it."""
        with self._lock:
            old = self._groups[group]
            self._groups[group] = _Kept(num_resets=old.num_resets + 1)
            news = self._take_news(old.sender)
        self._tell(news)

    def _tell(self, news: OldestSteps | None) -> None:
        if news is not None:
            self._planner.tell(Planner.note_oldest, news)

    def _is_coming(self, of_group: _Kept, step: int) -> bool:
        """True if the planner is about to send the plan of a step by itself."""
        return self._is_fast and bool(of_group.sender) and step > of_group.cut_to

    def _take_news_in_time(self, planner: str) -> OldestSteps | None:
        """What a planner is told now. While steps are very short, a thread tells it what was news meanwhile. The lock is
        held."""
        if not self._is_fast:
            return self._take_news(planner)
        self._has_news.set()
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell_together, name="overlord-tell", daemon=True)
            self._teller.start()
        return None

    def _tell_together(self) -> None:
        while True:
            while self._has_news.wait(_IDLE_S):
                time.sleep(_NEWS_S)
                self._has_news.clear()
                with self._lock:
                    found = [self._take_news(planner) for planner in {kept.sender for kept in self._groups.values()}]
                for news in found:
                    self._tell(news)
            with self._lock:
                if not self._has_news.is_set():
                    self._teller = None
                    return

    def _reading(self, planner: str) -> dict[int, _Kept]:
        """The groups that read from a planner."""
        return {group: kept for group, kept in self._groups.items() if planner and kept.sender == planner}

    def _is_news(self, of_group: _Kept) -> bool:
        """True if the planner is to be told where this group is: not while others of the process are behind, unless it goes
        on without them."""
        reading = self._reading(of_group.sender).values()
        least = min((each.noted for each in reading), default=-1)
        return least > min((each.told for each in reading), default=-1) or of_group.noted - of_group.told >= _TOLD_EVERY

    def _take_news(self, planner: str) -> OldestSteps | None:
        """What a planner has not been told yet, which it is told now."""
        news = {group: kept for group, kept in self._reading(planner).items() if kept.noted > kept.told}
        for kept in news.values():
            kept.told = kept.noted
        return OldestSteps({group: kept.noted for group, kept in news.items()}, planner) if news else None

    def _wait_for_other(
        self, under_way: Future[SharedPlans | Later | None], group: int, step: int
    ) -> GroupPlan | Later | None:
        """The plan that the request of another group brings; None if it brings none for this group."""
        try:
            found = under_way.result()
        except Exception:  # noqa: BLE001 - raised in the thread that requested it; this one requests the step itself
            return None
        if isinstance(found, Later):
            return found
        with self._lock:
            return self._groups[group].plans.pop(step, None)

    def _request(self, group: int, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        done: Future[SharedPlans | Later | None] = Future()
        with self._lock:
            of_group = self._groups[group]
            of_group.noted = of_group.told = oldest  # it may have gone back
            num_resets = of_group.num_resets
            news = self._take_news(of_group.sender)
            self._requests.setdefault(step, done)
        try:
            host = PlanHost(self._name, self._planner.engine.shares_memory_with(self._planner.name))
            request = PlanRequest(step, group, oldest, is_late, host, news)
            found = self._planner.call(Planner.plans_for_host, request).result()
            plan = found if found is None or isinstance(found, Later) else self._take(group, step, found, num_resets)
            done.set_result(found)
        except OSError as error:  # the system has no shared memory left
            done.set_exception(error)
            return self._planner.call(Planner.plan, step, group, oldest, is_late).result()
        except BaseException as error:
            done.set_exception(error)
            raise
        finally:
            with self._lock:
                if self._requests.get(step) is done:
                    del self._requests[step]
        return plan

    def _take(self, group: int, step: int, found: SharedPlans, num_resets: int) -> GroupPlan:
        """Keep the plans that a request of a group has brought, for other groups too; returns that of the step."""
        whole = found.plans.open()
        plans = self._cut(whole, group, step, found.last)
        with self._lock:
            of_group = self._groups[group]
            if num_resets == of_group.num_resets:
                of_group.sender = found.planner
                later = {number: plan for number, plan in of_group.plans.items() if number >= of_group.noted}
                of_group.plans = later | {plan.step: plan for plan in plans[1:]}
                of_group.cut_to = max(of_group.cut_to, plans[-1].step)
                self._arrived.notify_all()
        self._listener.note_plans([*plans, *self._keep(found, whole)], found.first_chunks)
        return plans[0]

    def _keep(self, found: SharedPlans, whole: StepPlans = ()) -> list[GroupPlan]:
        """Keep the plans of every group that the group does not have yet; returns them."""
        with self._lock:
            self._is_fast = found.is_fast
            missing = {
                group: (kept.num_resets, kept.cut_to)
                for group, kept in self._reading(found.planner).items()
                if kept.cut_to < found.last
            }
        arrived: list[GroupPlan] = []
        whole = whole or (found.plans.open() if missing else ())
        for group, (num_resets, cut_to) in missing.items():
            plans = self._cut(whole, group, cut_to + 1, found.last)
            with self._lock:
                of_group = self._groups[group]
                plans = [plan for plan in plans if plan.step > of_group.cut_to]  # others were requested meanwhile
                if num_resets != of_group.num_resets or not plans:
                    continue
                later = {number: plan for number, plan in of_group.plans.items() if number >= of_group.noted}
                of_group.plans = later | {plan.step: plan for plan in plans}
                of_group.cut_to = plans[-1].step
                self._arrived.notify_all()
            arrived += plans
        return arrived

    def _cut(self, whole: StepPlans, group: int, first: int, last: int) -> list[GroupPlan]:
        wanted = [(step, plans) for step, plans in whole if first <= step <= last and plans.has_group(group)]
        return [plans.for_constructor(step, group, self._place) for step, plans in wanted]


class PlanRequests:
    """The plans of one group of a process."""

    def __init__(self, plans: HostPlans, group: int) -> None:
        self._plans = plans
        self._group = group

    def plan(self, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        return self._plans.plan(self._group, step, oldest, is_late)

    def find(self, step: int) -> GroupPlan | None:
        return self._plans.find(self._group, step)

    def receive(self, found: SharedPlans) -> None:
        """Keep plans that the planner sent to this process, for this group and the others."""
        self._plans.receive(found)

    def reset(self) -> None:
        self._plans.reset(self._group)
