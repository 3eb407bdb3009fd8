"""What a client may call on its run stands in one protocol; every call has a row, and both sides provide it."""

import inspect
from dataclasses import replace

import msgspec
import pytest

import overlord as ol
from overlord.messages import Decision, MeshChange, SeatRequest, SkipChange, SourceChange, StepReport, WeightChange
from overlord.service.channel import FlightChannel
from overlord.service.run_api import ACTIONS, CALLS, RunApi
from tests.service.served import served
from tests.steering.steered import job_with

METHODS = sorted(name for name, _ in inspect.getmembers(RunApi, inspect.isfunction) if not name.startswith("_"))
ARGUMENTS = {
    "state_before": (7,),
    "load_state": ({"overlord": 2, "step": 3}, -1),
    "status_lines": (),
    "feedback": (StepReport(3, 1, {"a": 0.5}, {"a": 2.0}, (0.25, 0.5)), 4),
    "change_weights": (WeightChange({"a": 1.0}, None, "0123456789abcdef"),),
    "decisions": (),
    "metrics": (),
    "status": (),
    "report": (5,),
    "plan_summary": (5,),
    "change_mesh": (MeshChange(ol.Mesh(dp=3, cp=2), None, 0.5, "0123456789abcdef"),),
    "state_dict": (),
    "drain": (2.0,),
    "leave_out": (SkipChange("a", "numbered", (3, 5), None, "0123456789abcdef"),),
    "locate": ([(0, 1, 2), (1, 0, 3)],),
    "count_steps": (0.5, 1000),
    "may_follow": (4,),
    "add_declared_source": (SourceChange("c", 0.25, None, "0123456789abcdef"),),
    "seat_of": (SeatRequest(2, "0123456789abcdef", 7, "abc/1"),),
    "evaluations": (),
    "open_eval": ("val",),
}
BODIES = {
    "state_before": {"job": "j", "step": 7},
    "load_state": {"job": "j", "state": {"overlord": 2, "step": 3}, "generation": -1},
    "doing": {"job": "j"},
    "feedback": {
        "job": "j",
        "generation": 4,
        "rank": 1,
        "step": 3,
        "losses": {"a": 0.5},
        "tokens": {"a": 2.0},
        "seconds": [0.25, 0.5],
    },
    "change_weights": {"job": "j", "weights": {"a": 1.0}, "from_step": None, "id": "0123456789abcdef"},
    "decisions": {"job": "j"},
    "metrics": {"job": "j"},
    "status": {"job": "j"},
    "report": {"job": "j", "step": 5},
    "plan": {"job": "j", "step": 5},
    "resize": {
        "job": "j",
        "sizes": {"pp": 1, "dp": 3, "cp": 2, "tp": 1},
        "order": ("pp", "dp", "cp", "tp"),
        "at": None,
        "timeout_s": 0.5,
        "id": "0123456789abcdef",
    },
    "checkpoint": {"job": "j"},
    "drain": {"job": "j", "timeout_s": 2.0},
    "skip": {
        "job": "j",
        "source": "a",
        "file": "numbered",
        "rows": (3, 5),
        "from_step": None,
        "id": "0123456789abcdef",
    },
    "locate": {"job": "j", "documents": [(0, 1, 2), (1, 0, 3)]},
    "count_steps": {"job": "j", "wait_s": 0.5, "most_bytes": 1000},
    "seat": {"job": "j", "rank": 2, "session": "0123456789abcdef", "unfinished": 7, "after": "abc/1"},
    "may_follow": {"job": "j", "generation": 4},
    "add_source": {"job": "j", "source": "c", "share": 0.25, "from_step": None, "id": "0123456789abcdef"},
    "evaluations": {"job": "j"},
    "open_eval": {"job": "j", "name": "val"},
}
"""What each action has carried since the first release; msgspec writes fields in this order."""


def test_every_method_of_the_protocol_has_one_row():
    assert sorted(call.method for call in CALLS.values()) == METHODS == sorted(ARGUMENTS)


def test_the_actions_are_those_of_the_first_release_and_those_of_later_ones_after_them():
    assert list(ACTIONS) == ["hello", "here", "leave", "take", *BODIES]


@pytest.mark.parametrize("action", list(CALLS))
def test_a_request_carries_the_arguments_and_has_the_bytes_of_the_first_release(action):
    call = CALLS[action]
    body = msgspec.msgpack.encode(call.action.request.of("j", *ARGUMENTS[call.method]))
    assert body == msgspec.msgpack.encode(BODIES[action])
    assert msgspec.msgpack.decode(body, type=call.action.request).arguments() == ARGUMENTS[call.method]


def test_the_loader_and_a_channel_over_flight_both_provide_every_method():
    with served(job_with()) as (loader, address):
        channel = FlightChannel(address, 0, timeout_s=30)
        for method in METHODS:
            expected = list(inspect.signature(getattr(RunApi, method)).parameters)[1:]
            assert list(inspect.signature(getattr(loader, method)).parameters) == expected
            assert callable(getattr(channel.run, method))
        channel.close()


def test_every_call_has_the_same_result_over_flight_as_in_process():
    def results(run: RunApi) -> list:
        change = WeightChange({"a": 1.0}, 5, "0123456789abcdef")
        skip = SkipChange("a", "numbered", (3,), None, "abcdef0123456789")
        change_mesh = MeshChange(ol.Mesh(dp=2), None, 0.5, "0123456789abcdef")
        return [
            run.change_weights(change),
            run.change_weights(change),
            list(run.decisions()),
            run.leave_out(skip),
            run.leave_out(skip),
            [decision.name for decision in run.decisions()],
            run.feedback(StepReport(0, 0, {"z": 1.0}, {}, ()), 0),
            run.state_before(0),
            run.load_state(run.state_before(step=2), 0),
            isinstance(run.status_lines(), list),
            run.plan_summary(3),
            run.report(4),
            run.report(),
            run.state_dict(),
            replace(run.status(), process=0),
            [metrics.sources[name].samples for metrics in [run.metrics()] for name in metrics.sources],
            run.locate([(0, 0, 1), (1, 2, 0)]),
            run.change_mesh(change_mesh),
            run.change_mesh(change_mesh),
            run.metrics().mesh["dp"],
            run.metrics().generation,
            run.count_steps().endless,
            run.drain(0.5),
        ]

    with ol.start(job_with()) as loader:
        here = results(loader)
    with served(job_with()) as (_, address):
        channel = FlightChannel(address, 0, timeout_s=30)
        there = results(channel.run)
        channel.close()
    assert there == here
    assert isinstance(here[2][0], Decision)
