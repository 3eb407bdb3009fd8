"""What a client may call on its run stands in one protocol; every call has a row, and both sides provide it."""

import inspect

import msgspec
import pytest

import overlord as ol
from overlord.messages import Decision, StepReport, WeightChange
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
}
"""What each action has carried since the first release; msgspec writes fields in this order."""


def test_every_method_of_the_protocol_has_one_row():
    assert sorted(call.method for call in CALLS.values()) == METHODS == sorted(ARGUMENTS)


def test_the_actions_are_those_of_the_first_release_and_one_more():
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
        return [
            run.change_weights(change),
            run.change_weights(change),
            list(run.decisions()),
            run.feedback(StepReport(0, 0, {"z": 1.0}, {}, ()), 0),
            run.state_before(0),
            run.load_state(run.state_before(step=2), 0),
            isinstance(run.status_lines(), list),
        ]

    with ol.start(job_with()) as loader:
        here = results(loader)
    with served(job_with()) as (_, address):
        channel = FlightChannel(address, 0, timeout_s=30)
        there = results(channel.run)
        channel.close()
    assert there == here
    assert isinstance(here[2][0], Decision)
