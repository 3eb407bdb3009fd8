"""While a step waits for the facts of a chunk, the planner goes on with everything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import overlord as ol
from overlord.messages import StepReport, WeightChange
from overlord.roles.planner import Planner
from tests.small_sources import Numbered, job_of

_open: dict[str, threading.Event] = {}
_asked: dict[str, threading.Event] = {}


@dataclass(frozen=True)
class Gated(Numbered):
    """A source whose units from the third on can be read only once its gate is open."""

    gate: str = ""

    def read(self, unit: ol.Unit):
        if unit.index >= 3:
            _asked[self.gate].set()
            assert _open[self.gate].wait(60)
        return super().read(unit)

    def identity(self) -> str:
        return f"Gated({self.first})"


@pytest.fixture(name="gate")
def make_gate(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name
    _open[name], _asked[name] = threading.Event(), threading.Event()
    yield name
    _open.pop(name).set()
    del _asked[name]


def test_ready_steps_notes_reports_and_weights_do_not_wait_for_a_loader(gate):
    job = job_of({"slow": Gated(first=1, gate=gate, shuffle=False)}, mesh=ol.Mesh(dp=1), num_workers=2)
    with ol.start(job) as loader:
        planner: Planner = loader._roles.engine._roles["planner"]  # pyright: ignore[reportAttributeAccessIssue]
        assert planner.plan(0, 0, 0) is not None
        waiting = threading.Thread(target=planner.whole_plan, args=(6,))
        waiting.start()
        assert _asked[gate].wait(30)
        while not planner.status_lines():  # a thread that reads ahead may come to the gate before the planner does
            waiting.join(0.01)
        assert "waits for the facts of chunk 3 of source 'slow'" in planner.status_lines()[0]
        assert planner.plan(0, 0, 0) is not None
        assert planner.whole_plan(0) is not None
        assert planner.progress(0).step == 0
        planner.report(StepReport(step=0, rank=0, seconds=(0.1,)))
        planner.group_left(0)
        first = planner.change_weights(WeightChange({"slow": 2.0}, None, "one"), 0)
        assert first == planner.status().reached
        assert waiting.is_alive()
        _open[gate].set()
        waiting.join(60)
        assert planner.whole_plan(7) is not None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_callers_that_wait_for_facts_get_the_steps_that_they_would_get_alone(gate, num_workers):
    source = Gated(first=1, gate=gate, shuffle=False)
    job = job_of({"slow": source, "other": Numbered(first=100)}, mesh=ol.Mesh(dp=4), num_workers=num_workers)
    found: dict[int, Any] = {}

    def ask(loader: ol.Loader, step: int, caller: int) -> None:
        plan = loader.plan(step)
        found[caller] = None if plan is None else plan.step.samples.table.tolist()

    with ol.start(job) as loader:
        threads = [threading.Thread(target=ask, args=(loader, 4 + caller % 3 * 9, caller)) for caller in range(6)]
        for thread in threads:
            thread.start()
        assert _asked[gate].wait(30)
        _open[gate].set()
        for thread in threads:
            thread.join(60)
    with ol.start(job) as loader:
        for caller in range(6):
            plan = loader.plan(4 + caller % 3 * 9)
            assert plan is not None
            assert found[caller] == plan.step.samples.table.tolist()
