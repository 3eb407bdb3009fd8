"""A run served to clients over Arrow Flight: the same stream, the same errors, and nothing a caller says can harm it."""

import contextlib
import logging
import re
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.service import wire
from overlord.service.auth import Listen
from overlord.service.run_api import ACTIONS
from overlord.service.server import Service
from tests.service.served import Raw, content, served, streams, two_sources, undisturbed
from tests.service.test_client import Gated
from tests.small_sources import Numbered, job_of

REFUSED = (pa.ArrowException, ol.OverlordError)


@pytest.mark.parametrize(
    "job",
    [
        two_sources(mesh=ol.Mesh(dp=2, cp=2)),
        two_sources(mesh=ol.Mesh(pp=3, tp=2)),
        two_sources(batch=ol.Batch(samples=6, sequence_length=16, layout="padded", columns=("document",))),
        two_sources(
            mesh=ol.Mesh(tp=2), strategy=lambda graph: graph.pack().distribute("dp").deal().broadcast_at("tp").plan()
        ),
    ],
    ids=["dp-cp", "pp-tp", "padded", "broadcast"],
)
def test_every_rank_gets_over_the_wire_what_it_gets_in_one_process(job):
    with served(job) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=20) for rank in range(job.mesh.world_size)]
        assert streams(clients, 6) == undisturbed(job, 6)


def test_clients_of_both_kinds_read_one_run_together():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with served(job) as (loader, address):
        assert streams([loader.client(0), ol.connect(address, rank=1, timeout_s=20)], 5) == undisturbed(job, 5)


def test_a_finite_run_ends_for_every_client_and_can_be_read_again():
    job = job_of({"a": Numbered(rows=12, first=1, repeat=False)}, mesh=ol.Mesh(dp=2))
    with served(job) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=20) for rank in range(2)]
        rounds = []
        for _ in range(2):
            for client in clients:
                iter(client)
            found = []
            while any(steps := [next(client, None) for client in clients]):
                found.append([content(step) for step in steps if step is not None])
            rounds.append(found)
        assert rounds[0]
        assert rounds[0] == rounds[1]


def test_states_are_saved_and_loaded_through_any_client():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with served(job) as (loader, address):
        left, right = (ol.connect(address, rank=rank, timeout_s=20) for rank in range(2))
        streams([left, right], 2)
        state = left.state_dict()
        assert state == right.state_dict() == loader.state_dict()
        after = streams([left, right], 2)
        left.load_state_dict(state)
        with pytest.raises(ol.errors.ClosedError, match="call load_state_dict on the client of rank 1 too"):
            next(right)
        right.load_state_dict(state)
        assert streams([left, right], 2) == after


def test_a_closed_client_still_knows_its_state_and_gives_no_more_steps():
    with served(two_sources()) as (_, address):
        with ol.connect(address, rank=0, timeout_s=20) as client:
            next(client)
        assert client.state_dict()["step"] == 1
        with pytest.raises(ol.errors.ClosedError, match="rank 0 is closed"):
            next(client)


def test_the_state_of_a_served_run_is_that_of_the_slowest_reading_rank():
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        left, right = (ol.connect(address, rank=rank, timeout_s=20) for rank in range(2))
        streams([left, right], 3)
        next(left)
        assert loader.state_dict()["step"] == 3
        right.close()
        assert loader.state_dict()["step"] == 4
        left.close()
        assert loader.state_dict()["step"] == 3, "nobody reads: the state that loses nothing"


def test_errors_of_the_run_come_back_as_their_own_types_with_their_notes():
    job = job_of({"a": Numbered(rows=40, first=1, buffer_bytes=100)})
    with (
        served(job) as (_, address),
        pytest.raises(ol.errors.BufferTooSmallError, match=r"chunk 0 takes .* raise") as caught,
    ):
        next(ol.connect(address, rank=0, timeout_s=20))
    assert any("built step 0" in note for note in caught.value.__notes__)


def test_an_error_of_the_users_code_comes_back_with_its_name():
    def strategy(graph: ol.DGraph) -> ol.Plan:
        raise ZeroDivisionError("too clever")

    with (
        served(two_sources(strategy=strategy)) as (_, address),
        pytest.raises(ol.OverlordError, match="ZeroDivisionError: too clever"),
    ):
        next(ol.connect(address, rank=0, timeout_s=20))


def test_a_state_of_another_job_and_a_rank_that_is_not_there_are_refused_as_in_one_process():
    with served(two_sources()) as (_, address):
        client = ol.connect(address, rank=0, timeout_s=20)
        with pytest.raises(ol.errors.StateError, match="not an Overlord state"):
            client.load_state_dict({"nonsense": 1})
        with pytest.raises(ol.errors.SpecError, match="rank must be from 0 to 0, got 5"):
            ol.connect(address, rank=5, timeout_s=20)
        assert next(client).number == 0


def test_a_timeout_says_what_the_service_is_waiting_for():
    source = Gated(rows=40, first=1)
    with served(job_of({"slow": source})) as (_, address):
        client = ol.connect(address, rank=0, timeout_s=2.0)
        with pytest.raises(ol.errors.WaitTimeoutError, match=r"(?s)rank 0 waited .* s for step 0: .*'slow'.*making chunk 0"):
            next(client)
        source.gate.set()
        assert next(client).number == 0


def ticket(welcome: dict, **fields) -> bytes:
    asked = {"rank": 0, "step": 0, "wait_s": 5.0, "session": "abcdefgh", "generation": 0}
    return wire.pack({"job": welcome["job"], "instance": welcome["instance"], **asked, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "not a Ticket of overlord's wire"),
        ({"rank": "0"}, "not a Ticket of overlord's wire"),
        ({"wait_s": 1e9}, "not a Ticket of overlord's wire"),
        ({"more": 1}, "not a Ticket of overlord's wire"),
        ({"session": ""}, "not a Ticket of overlord's wire"),
        ({"job": "another"}, "this service runs job .* and the call is for job another"),
    ],
)
def test_a_ticket_that_is_not_right_in_every_part_is_refused_and_logged(fields, message, caplog):
    with served(two_sources()) as (_, address):
        raw = Raw(address)
        welcome = raw.hello()
        with caplog.at_level(logging.WARNING, "overlord"), pytest.raises(pa.ArrowException, match=message):
            raw.get(ticket(welcome, **fields))
        assert any("refused a call" in record.message for record in caplog.records)
        assert isinstance(raw.get(ticket(welcome)), wire.Contents), "and it goes on serving"


def test_another_version_of_the_wire_and_an_unknown_action_are_refused():
    with served(two_sources()) as (_, address):
        raw = Raw(address)
        with pytest.raises(pa.ArrowException, match="install the same release of overlord on both sides"):
            raw.act("hello", wire.pack(wire.Hello(wire.VERSION + 1, 0)))
        with pytest.raises(pa.ArrowException, match=r"there is no action 'reboot'; there are hello, "):
            raw.act("reboot", b"")
        assert raw.hello()["start"] == 0


def test_the_rest_of_flight_is_not_offered():
    import pyarrow.flight as flight

    with served(two_sources()) as (_, address):
        client = flight.connect(address)
        for call in (
            lambda: list(client.list_flights()),
            lambda: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
            lambda: client.get_schema(flight.FlightDescriptor.for_path("x")),
        ):
            with pytest.raises(pa.ArrowException, match="answers do_get and actions, nothing else"):
                call()


def test_no_random_bytes_harm_the_service():
    job = two_sources()
    actions = st.sampled_from([*ACTIONS, "shutdown", ""])
    bodies = st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=8) | st.floats() | st.binary(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=8,
        ).map(wire.pack),
    )
    with served(job) as (_, address):
        raw = Raw(address)

        @settings(max_examples=150)
        @given(actions, bodies)
        def poke(action, body):
            with pytest.raises(REFUSED):
                raw.get(body)
            with contextlib.suppress(*REFUSED):
                raw.act(action, body)

        poke()
        assert streams([ol.connect(address, rank=0, timeout_s=20)], 4) == undisturbed(job, 4)


def test_nothing_of_the_transport_can_pickle():
    import overlord.service

    home = Path(overlord.service.__file__).parent
    for file in home.glob("*.py"):
        text = file.read_text().replace("never pickle", "")
        assert not re.search(r"pickle|marshal|\b(eval|exec)\(", text), file.name


def test_a_client_needs_no_ray():
    job = two_sources()
    code = """
import sys
class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("there is no ray here")
sys.meta_path.insert(0, NoRay())
import overlord as ol
client = ol.connect(sys.argv[1], rank=0, timeout_s=20)
print([next(client).number for _ in range(3)], "ray" in sys.modules)
client.close()
"""
    with served(job) as (_, address):
        done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[0, 1, 2] False"


def test_a_replaced_client_takes_the_place_of_the_old_one_which_is_told_so():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with served(job) as (_, address):
        other = ol.connect(address, rank=0, timeout_s=20)
        old = ol.connect(address, rank=1, timeout_s=20)
        expected = streams([other, old], 2)
        new = ol.connect(address, rank=1, timeout_s=20)
        assert [content(next(new)), content(next(new))] == expected[1]
        with pytest.raises(ol.errors.ClosedError, match="another client has taken the place of this one for rank 1"):
            next(old)
        old.close()
        streams([other, new], 6)


def test_a_rank_that_vanishes_holds_the_others_back_only_until_the_deadline(caplog):
    job = two_sources(mesh=ol.Mesh(dp=2), prefetch=1)
    with served(job, leave_after_s=0.5) as (_, address):
        raw = Raw(address)
        assert isinstance(raw.get(ticket(raw.hello(1), rank=1)), wire.Contents)  # and is never heard of again
        reading = ol.connect(address, rank=0, timeout_s=20)
        assert [next(reading).number for _ in range(12)] == list(range(12))
        assert any("rank 1 was silent for" in record.message for record in caplog.records)
        back = ol.connect(address, rank=1, timeout_s=20)
        assert content(next(back)) == undisturbed(job, 1)[1][0]


def test_a_trainer_that_is_busy_for_long_stays_on_the_roll():
    job = two_sources(mesh=ol.Mesh(dp=2), prefetch=1)
    with served(job, leave_after_s=0.4) as (_, address):
        busy, ahead = ol.connect(address, rank=0, timeout_s=20), ol.connect(address, rank=1, timeout_s=1.5)
        next(busy)
        with pytest.raises(ol.errors.WaitTimeoutError, match="group 0 are still at step"):  # three deadlines long
            list(islice(ahead, 10))


def test_a_client_that_is_dropped_without_a_word_falls_silent():
    job = two_sources(mesh=ol.Mesh(dp=2), prefetch=1)
    with served(job, leave_after_s=0.4) as (_, address):
        dropped, ahead = ol.connect(address, rank=0, timeout_s=20), ol.connect(address, rank=1, timeout_s=20)
        next(dropped)
        del dropped
        assert [next(ahead).number for _ in range(8)] == list(range(8))


def test_draining_lets_every_rank_finish_the_step_that_one_has_and_hands_out_no_more():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with served(job) as (loader, address):
        left, right = (ol.connect(address, rank=rank, timeout_s=3.0) for rank in range(2))
        streams([left, right], 2)
        next(left)
        drained = []
        thread = threading.Thread(target=lambda: drained.append(loader.drain(timeout_s=20)))
        thread.start()
        assert next(right).number == 2
        thread.join(20)
        assert drained == [True]
        for client in (left, right):
            with pytest.raises(ol.errors.WaitTimeoutError, match="the service is stopping and hands out no step after 2"):
                next(client)
        assert loader.state_dict()["step"] == 3


def test_a_step_that_was_fetched_ahead_is_not_taken_once_the_service_drains():
    with served(two_sources()) as (loader, address):
        raw = Raw(address)
        welcome = raw.hello()

        def take(step: int) -> wire.Refusal | None:
            asked = {"rank": 0, "step": step, "session": "abcdefgh", "generation": 0, "waited_s": 0.0}
            return raw.act("take", wire.pack({"job": welcome["job"], "instance": welcome["instance"], **asked}))

        assert isinstance(raw.get(ticket(welcome, ahead=True)), wire.NotReady), "it has not begun to read"
        assert isinstance(raw.get(ticket(welcome)), wire.Contents)
        for step in (1, 2):
            assert isinstance(raw.get(ticket(welcome, step=step, ahead=True)), wire.Contents)
        assert loader.state_dict()["step"] == 1
        assert take(1) is None
        assert loader.state_dict()["step"] == 2
        assert loader.drain(timeout_s=20), "the trainer has all that it took"
        refused = take(2)
        assert isinstance(refused, wire.NotReady)
        assert "the service is stopping and hands out no step after 1" in refused.reason
        assert loader.state_dict()["step"] == 2
        welcome["instance"] = "another1"
        assert isinstance(take(2), wire.Moved)


def test_draining_does_not_wait_for_ever_for_a_rank_that_does_not_come():
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        left, right = (ol.connect(address, rank=rank, timeout_s=5) for rank in range(2))
        streams([left, right], 1)
        next(left)
        assert not loader.drain(timeout_s=0.1)
        assert loader.state_dict()["step"] == 1


def test_a_loader_serves_once_and_a_taken_port_is_said():
    with served(two_sources()) as (loader, address):
        with pytest.raises(ol.errors.SpecError, match=f"serves at {address} already"):
            loader.serve()
        with ol.start(two_sources()) as second, pytest.raises(ol.errors.SpecError, match="is the port taken"):
            second.serve(address)


def test_a_service_may_hand_out_steps_only_or_answer_questions_only():
    with ol.start(two_sources()) as loader:
        steps = loader.client(0)._channel
        only_steps = Service("job", Listen(), instance="instance", steps=steps)
        asked = ticket({"job": "job", "instance": "instance"})
        with pytest.raises(ol.errors.ServiceError, match="only hands out steps"):
            Raw(only_steps.address).hello()
        assert isinstance(Raw(only_steps.address).get(asked), wire.Contents)
        front = Service("job", Listen(), instance="instance", run=steps, locate=lambda _: only_steps.addresses)
        with pytest.raises(pa.ArrowException, match="hands out no steps"):
            Raw(front.address).get(asked)
        client = ol.connect(front.address, rank=0, timeout_s=10)
        assert [next(client).number for _ in range(3)] == [0, 1, 2]
        assert client.state_dict()["step"] == 3
        for service in (front, only_steps):
            service.close()


# Ranks that are late


@pytest.mark.strangers
def test_a_rank_that_has_not_come_yet_keeps_its_steps_until_it_is_given_up(tmp_path):
    job = two_sources(mesh=ol.Mesh(dp=2))
    with ol.start(job, log=tmp_path / "log") as loader:
        client = ol.connect(loader.serve(leave_after_s=None), rank=0, timeout_s=20)
        for _ in range(6):
            next(client)
        assert loader.status().taken_to == 0
        assert loader.state_dict()["step"] == 0, "the state that loses nothing"
    with ol.start(job, log=tmp_path / "log", resume="log") as loader:
        assert loader.start_step == 0
        client = ol.connect(loader.serve(leave_after_s=0.4), rank=0, timeout_s=20)
        client.rejoin(at=6)
        while loader.status().taken_to < 7:  # until the other rank is given up
            next(client)
    with ol.start(job, log=tmp_path / "log", resume="log") as loader:
        assert loader.start_step >= 7


@pytest.mark.strangers
def test_a_rank_that_leaves_without_having_read_is_waited_for_no_longer(tmp_path):
    with ol.start(two_sources(mesh=ol.Mesh(dp=2)), log=tmp_path / "log") as loader:
        address = loader.serve(leave_after_s=None)
        client = ol.connect(address, rank=0, timeout_s=20)
        next(client)
        ol.connect(address, rank=1, timeout_s=20).close()
        for _ in range(5):
            next(client)
        assert loader.status().taken_to >= 3
        assert loader.state_dict()["step"] == 6
