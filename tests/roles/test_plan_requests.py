"""Plans of several steps in one request are those of single requests, and the planner knows as much."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.arrange.plan import GroupPlan
from overlord.messages import Later
from overlord.roles.plan_requests import PlanRequests
from overlord.roles.planner import Planner
from tests.small_sources import Numbered, job_of


class Listener:
    """Hears which plans have arrived."""

    def note_plans(self, plans, first_chunks):
        assert plans
        assert len(first_chunks)


def requests(loader: ol.Loader, group: int) -> PlanRequests:
    return PlanRequests(loader._planner, group, loader.tree, Listener())


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


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=12))
def test_plans_of_several_steps_are_those_of_single_requests_in_any_order_of_groups(dp, order):
    order = [*order, 0, 1, 2]  # every group has its turn
    with ol.start(finite_job(dp)) as loader:
        expected = read(lambda step, group: loader._planner.call(Planner.plan, step, group, step).result(), order, dp)
    with ol.start(finite_job(dp)) as loader:
        groups = [requests(loader, group) for group in range(dp)]
        assert read(lambda step, group: groups[group].plan(step, step, False), order, dp) == expected


def test_the_planner_knows_from_kept_plans_how_far_a_group_is():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        plans = requests(loader, 0)
        for step in range(12):
            assert isinstance(plans.plan(step, step, False), GroupPlan)
            assert loader._planner.call(Planner.status).result().oldest_needed == step
            assert loader._planner.call(Planner.status).result().taken_to == step


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


def test_a_note_that_arrives_after_its_group_has_left_counts_for_nothing():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        gone, other = (requests(loader, group) for group in range(2))
        gone.plan(0, 0, False)
        loader._planner.call(Planner.group_left, 0).result()
        loader._planner.tell(Planner.note_oldest, 0, 1)
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
