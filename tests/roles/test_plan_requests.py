"""Plans of several steps in one request are those of single requests, and the planner knows as much."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.arrange.plan import GroupPlan
from overlord.messages import Later
from overlord.roles import plan_requests
from overlord.roles.plan_requests import HostPlans, PlanRequests
from overlord.roles.plan_window import OldestSteps, PlanHost, PlanRequest, SharedPlans
from overlord.roles.planner import Planner
from tests.small_sources import Numbered, job_of


class Listener:
    """Hears which plans have arrived."""

    def note_plans(self, plans, first_chunks):
        assert plans
        assert len(first_chunks)


class Near:
    """The planner of a run, said to share memory with whoever calls it, or not."""

    def __init__(self, loader: ol.Loader, is_near: bool) -> None:
        self.name, self.engine = "planner", self
        self.is_near = is_near
        self.told: list[Any] = []
        self.was_told = threading.Event()
        self.num_requests = 0
        self._planner = loader._roles.planner

    def shares_memory_with(self, name: str) -> bool:
        return self.is_near

    def call(self, method: Any, *args: Any) -> Any:
        self.num_requests += 1
        return self._planner.call(method, *args)

    def tell(self, method: Any, *args: Any) -> None:
        self.told.append(args)
        self._planner.tell(method, *args)
        self.was_told.set()


def host_of(loader: ol.Loader, is_near: bool = False) -> HostPlans:
    return HostPlans(Near(loader, is_near), loader.tree, Listener())  # pyright: ignore[reportArgumentType]


def requests(loader: ol.Loader, group: int) -> PlanRequests:
    return host_of(loader).of_group(group)


def finite_job(dp: int) -> ol.Job:
    return job_of(
        {"a": Numbered(first=1, repeat=False), "b": Numbered(rows=11, first=100, repeat=False)}, mesh=ol.Mesh(dp=dp)
    )


def as_values(plan: GroupPlan | Later | None) -> Any:
    if not isinstance(plan, GroupPlan):
        return plan
    micros = [(micro.samples.table.tolist(), micro.row.tolist(), micro.num_rows) for micro in plan.microbatches]
    return plan.step, plan.group, plan.loss_tokens, micros


def read(plan: Callable[[int, int], GroupPlan | Later | None], order: list[int], dp: int) -> list[list[Any]]:
    """Each group's plans, groups in a given order, until the run ends for all."""
    found: list[list[Any]] = [[] for _ in range(dp)]
    for turn in range(600):
        group = order[turn % len(order)] % dp
        one = plan(len(found[group]), group)
        if isinstance(one, Later):
            continue
        if one is None:
            if all(len(plans) == len(found[group]) for plans in found):
                return found
            continue
        found[group].append(as_values(one))
    raise AssertionError("the run does not end")


@settings(max_examples=16, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 3), st.booleans())
def test_plans_of_several_steps_are_those_of_single_requests_in_any_order_of_groups(dp, order, num_hosts, is_near):
    order = [*order, 0, 1, 2]  # every group has its turn
    with ol.start(finite_job(dp)) as loader:
        expected = read(lambda step, group: loader._roles.planner.call(Planner.plan, step, group, step).result(), order, dp)
    with ol.start(finite_job(dp)) as loader:
        hosts = [host_of(loader, is_near) for _ in range(num_hosts)]
        groups = [hosts[group % num_hosts].of_group(group) for group in range(dp)]
        assert read(lambda step, group: groups[group].plan(step, step, False), order, dp) == expected


def sending_planner(loader: ol.Loader, groups: list[PlanRequests]) -> Planner:
    """The planner of a run, which plans ahead and sends what it has planned to the hosts of groups."""
    planner: Planner = loader._roles.engine._roles["planner"]  # pyright: ignore[reportAttributeAccessIssue]
    planner._send = lambda group, plans: groups[group].receive(plans)
    return planner


@settings(max_examples=16, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 3), st.booleans())
def test_plans_that_were_sent_to_hosts_are_those_of_single_requests(dp, order, num_hosts, is_near):
    order = [*order, 0, 1, 2, 3]
    with ol.start(finite_job(dp)) as loader:
        expected = read(lambda step, group: loader._roles.planner.call(Planner.plan, step, group, step).result(), order, dp)
    with ol.start(finite_job(dp)) as loader:
        hosts = [host_of(loader, is_near) for _ in range(num_hosts)]
        groups = [hosts[group % num_hosts].of_group(group) for group in range(dp)]
        sending_planner(loader, groups)
        assert read(lambda step, group: groups[group].plan(step, step, False), order, dp) == expected


def test_a_host_tells_the_planner_of_a_step_in_one_message_when_all_of_its_groups_have_come_to_it():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=3))) as loader:
        host = host_of(loader)
        planner: Near = host._planner  # pyright: ignore[reportAssignmentType]
        groups = [host.of_group(group) for group in range(3)]
        for group in groups:
            assert isinstance(group.plan(0, 0, False), GroupPlan)
        planner.told.clear()
        for step in (1, 2, 3):
            for group in groups:
                assert isinstance(group.plan(step, step, False), GroupPlan)
                oldest = loader._roles.planner.call(Planner.status).result().oldest_needed
                assert oldest == (step if group is groups[-1] else step - 1)
        assert len(planner.told) == 3


class FastHost:
    """A host with one group, whose planner says that steps are very short."""

    def __init__(self, loader: ol.Loader) -> None:
        self.plans = host_of(loader)
        self.near: Near = self.plans._planner  # pyright: ignore[reportAttributeAccessIssue]
        self.group = self.plans.of_group(0)
        self._planner = loader._roles.planner
        assert isinstance(self.group.plan(0, 0, False), GroupPlan)
        assert isinstance(self._planner.call(Planner.plan, 4, 0, 0).result(), GroupPlan)  # so those before it are planned
        self.last = self.receive_from(1)
        self.near.told.clear()

    def receive_from(self, step: int) -> int:
        """Receive plans from a step on, as if the planner had sent them. Returns the last step of them."""
        request = PlanRequest(step, 0, step - 1, False, PlanHost(self.plans._name, is_near=False), None)
        found = self._planner.call(Planner.plans_for_host, request).result()
        assert isinstance(found, SharedPlans)
        self.group.receive(replace(found, is_fast=True))
        return found.last


def test_while_steps_are_very_short_the_news_of_several_travel_in_one_message(monkeypatch):
    are_taken = threading.Event()
    monkeypatch.setattr(plan_requests.time, "sleep", lambda seconds: are_taken.wait())
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        host = FastHost(loader)
        for step in (1, 2, 3):
            assert isinstance(host.group.plan(step, step, False), GroupPlan)
        assert not host.near.told
        host.near.was_told.clear()
        are_taken.set()
        assert host.near.was_told.wait(30)
        ((news,),) = host.near.told
        assert news.of_group == {0: 3}
        assert loader._roles.planner.call(Planner.status).result().oldest_needed == 3


def test_while_steps_are_very_short_a_group_waits_for_plans_that_are_on_their_way(monkeypatch):
    monkeypatch.setattr(plan_requests, "_PLANS_S", 60.0)
    with ol.start(job_of({"a": Numbered(first=1)})) as loader, ThreadPoolExecutor() as threads:
        host = FastHost(loader)
        num_requests, step = host.near.num_requests, host.last + 1
        waiting = threads.submit(host.group.plan, step, step, False)
        host.receive_from(step)
        assert isinstance(plan := waiting.result(), GroupPlan)
        assert plan.step == step
        assert host.near.num_requests == num_requests


def test_a_group_requests_a_plan_that_does_not_come_by_itself(monkeypatch):
    monkeypatch.setattr(plan_requests, "_PLANS_S", 0.001)
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        host = FastHost(loader)
        num_requests, step = host.near.num_requests, host.last + 1
        assert isinstance(host.group.plan(step, step, False), GroupPlan)
        assert host.near.num_requests == num_requests + 1


def test_the_slowest_group_of_a_host_is_the_one_that_others_wait_for():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        host = host_of(loader)
        fast, slow = host.of_group(0), host.of_group(1)
        assert isinstance(slow.plan(0, 0, False), GroupPlan)
        step = 0
        while isinstance(found := fast.plan(step, step, False), GroupPlan):
            step += 1
        assert isinstance(found, Later)
        assert "data-parallel group 1 are still at step 0" in found.reason


def test_a_group_that_leaves_its_host_holds_the_others_of_the_host_back_no_more():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        host = host_of(loader)
        stays, leaves = host.of_group(0), host.of_group(1)
        assert isinstance(leaves.plan(0, 0, False), GroupPlan)
        for step in (0, 1):
            assert isinstance(stays.plan(step, step, False), GroupPlan)
        leaves.reset()
        loader._roles.planner.call(Planner.group_left, 1).result()
        assert loader._roles.planner.call(Planner.status).result().oldest_needed == 1


def test_what_a_host_tells_another_planner_counts_for_nothing():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        plans = requests(loader, 0)
        plans.plan(0, 0, False)
        loader._roles.planner.tell(Planner.note_oldest, OldestSteps({0: 5}, "another"))
        assert loader._roles.planner.call(Planner.status).result().oldest_needed == 0


def test_the_planner_knows_from_kept_plans_how_far_a_group_is():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        plans = requests(loader, 0)
        for step in range(12):
            assert isinstance(plans.plan(step, step, False), GroupPlan)
            assert loader._roles.planner.call(Planner.status).result().oldest_needed == step
            assert loader._roles.planner.call(Planner.status).result().taken_to == step


def test_a_slow_group_holds_the_others_back_however_many_plans_they_request():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        slow, fast = (requests(loader, group) for group in range(2))
        assert isinstance(slow.plan(0, 0, False), GroupPlan)
        reached = 0
        while isinstance(fast.plan(reached, reached, False), GroupPlan):
            reached += 1
        assert reached == loader.job.prefetch + 3
        assert isinstance(slow.plan(1, 1, False), GroupPlan)
        assert isinstance(fast.plan(reached, reached, False), GroupPlan)


@pytest.mark.parametrize("is_near", [True, False])
def test_a_group_may_go_back(is_near):
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        host = host_of(loader, is_near)
        groups = [host.of_group(group) for group in range(2)]
        first = [[as_values(group.plan(step, step, False)) for group in groups] for step in range(20)]
        again = [[as_values(group.plan(step, step, False)) for group in groups] for step in range(20)]
        assert again == first


def test_a_note_that_arrives_after_its_group_has_left_counts_for_nothing():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        gone, other = (requests(loader, group) for group in range(2))
        gone.plan(0, 0, False)
        loader._roles.planner.call(Planner.group_left, 0).result()
        planner: Planner = loader._roles.engine._roles["planner"]  # pyright: ignore[reportAttributeAccessIssue]
        loader._roles.planner.tell(Planner.note_oldest, OldestSteps({0: 1}, planner._id))
        for step in range(30):
            assert isinstance(other.plan(step, step, False), GroupPlan)


def test_plans_of_another_state_are_forgotten():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        plans = requests(loader, 0)
        first = as_values(plans.plan(0, 0, False))
        state = loader.state_before(7)
        loader.load_state_dict(state)
        plans.reset()
        with pytest.raises(ol.errors.OverlordError, match="this run starts at step 7"):
            plans.plan(1, 1, False)
        assert as_values(plans.plan(7, 7, False)) != first
