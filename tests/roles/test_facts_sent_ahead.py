"""Facts that loaders send before they are needed, and plans that are made before they are requested, change no step."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.roles.plan_window import SharedPlans
from overlord.roles.planner import Planner
from tests.small_sources import Numbered, job_of


def job() -> ol.Job:
    sources = {"a": Numbered(first=1, repeat=False), "b": Numbered(rows=11, first=100, repeat=False)}
    return job_of(sources, mesh=ol.Mesh(dp=2))


def plans(loader: ol.Loader, send: list[tuple[int, int]], ahead: bool) -> list[Any]:
    planner: Planner = loader._roles.engine._roles["planner"]  # pyright: ignore[reportAttributeAccessIssue]
    if ahead:
        planner._send = lambda group, shared: received[group].append(shared)
    received: list[list[SharedPlans]] = [[], []]
    found: list[Any] = []
    for step in range(60):
        for source, chunk in send:
            name = tuple(loader.job.sources)[source]
            planner.receive_facts(name, chunk, loader._roles.routes.describe_all([(source, chunk, 0)])[0])
        for group in range(2):
            plan = planner.plan(step, group, step)
            if plan is None:
                return found
            found.append([(micro.samples.table.tolist(), micro.row.tolist()) for micro in plan.microbatches])  # pyright: ignore[reportAttributeAccessIssue]
    raise AssertionError("the run does not end")


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=4), st.booleans())
def test_steps_are_the_same(send, ahead):
    with ol.start(job()) as loader:
        expected = plans(loader, [], ahead=False)
    with ol.start(job()) as loader:
        assert plans(loader, send, ahead) == expected
