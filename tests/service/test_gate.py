"""Strangers: what a service takes from those who have not shown its token, and what a client takes from no true service."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import overlord as ol
from overlord.errors import ServiceError
from overlord.messages import StepReport
from overlord.service import gate, wire
from overlord.service.admin import Control
from overlord.service.channel import FlightChannel
from overlord.service.flight_steps import SCHEMA
from overlord.service.gate import (
    STRANGER_BYTES,
    STRANGER_S,
    Gate,
    parse_peer,
)
from overlord.service.link import Link
from tests.commands import environment
from tests.service.served import Raw, served, two_sources

pytestmark = [pytest.mark.strangers, pytest.mark.skipif(not gate.has_gate(), reason="needs what Linux tells of connections")]

TOKEN = "hard-to-guess"
SERVER = f"""
import sys
import overlord as ol
from tests.service.served import two_sources
loader = ol.start(two_sources())
print(loader.serve(token={TOKEN!r}), flush=True)
sys.stdin.read()
"""


def most_memory(pid: int) -> int:
    """The most bytes that a process ever had in memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


STRANGER = """
import sys
import pyarrow.flight as flight
address, how = sys.argv[1:]
options = [("grpc.default_compression_algorithm", 2)] if how == "compressed" else []
client, body = flight.connect(address, generic_options=options), bytes(512 << 20)
list(client.do_get(flight.Ticket(body)) if how == "do_get" else client.do_action(flight.Action("hello", body)))
"""


@pytest.mark.second_try(
    reason="on a busy machine the gate's thread may be late, and the compressed half megabyte is all there"
)
@pytest.mark.parametrize("how", ["do_action", "do_get", "compressed"])
def test_strangers_cannot_fill_the_memory_of_a_service(how):
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()
    )
    strangers: list[subprocess.Popen] = []
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        before = most_memory(process.pid)
        command = [sys.executable, "-c", STRANGER, address, how]
        strangers = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
        for _ in strangers:
            assert "without showing the token" in process.stderr.readline()
        assert most_memory(process.pid) - before < 256 << 20
        with ol.connect(address, rank=0, token=TOKEN, timeout_s=30) as client:
            assert next(client).number == 0
    finally:
        for each in (process, *strangers):
            each.kill()
            each.communicate()


def test_whoever_has_the_token_may_send_much_also_on_a_new_connection(caplog):
    with served(two_sources(), token=TOKEN) as (_, address):
        for _ in range(3):
            link = Link(address, TOKEN, None)
            with pytest.raises(ServiceError, match="not a LoadStateRequest of overlord's wire"):
                link.send("load_state", bytes(8 << 20), 20.0)
            link.close()
    assert "cut the connection" not in caplog.text


def test_hundreds_of_silent_connections_do_not_keep_trainers_out():
    with served(two_sources(), token=TOKEN) as (_, address):
        port = int(address.rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        with ol.connect(address, rank=0, token=TOKEN, timeout_s=30) as client:
            assert [next(client).number for _ in range(5)] == list(range(5))
        for stranger in strangers:
            stranger.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A connection: the stranger's side, and the server's."""
    stranger = socket.create_connection(listener.getsockname())
    stranger.settimeout(20)
    return stranger, listener.accept()[0]


def grpc_name(connection: socket.socket) -> str:
    host, port = connection.getsockname()
    return f"ipv4:{host}:{port}"


def is_cut(connection: socket.socket) -> bool:
    """Waits for the end of a connection that nobody sends on."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_stranger_that_sends_much_is_cut_and_one_that_has_shown_the_token_is_not(listener):
    watched = Gate(listener.getsockname()[1])
    try:
        stranger, there = pair(listener)
        trainer, here = pair(listener)
        watched.admit(grpc_name(trainer))
        for connection in (stranger, trainer):
            connection.sendall(bytes(STRANGER_BYTES // 2))
        trainer.sendall(bytes(STRANGER_BYTES))
        stranger.sendall(bytes(STRANGER_BYTES))
        assert is_cut(stranger)
        here.sendall(b"!")
        assert trainer.recv(1) == b"!"
        for connection in (stranger, there, trainer, here):
            connection.close()
    finally:
        watched.close()


def test_a_port_that_is_used_again_has_to_show_the_token_again(listener):
    watched = Gate(listener.getsockname()[1])
    try:
        trainer, here = pair(listener)
        watched.admit(grpc_name(trainer))
        name = trainer.getsockname()
        trainer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # free its port at once
        trainer.close()
        here.close()
        while watched._admitted:  # until it was noticed
            pass
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(name)
            stranger.settimeout(20)
            stranger.connect(listener.getsockname())
            there = listener.accept()[0]
            stranger.sendall(bytes(2 * STRANGER_BYTES))
            assert is_cut(stranger)
            there.close()
    finally:
        watched.close()


def test_a_stranger_has_only_so_much_time(listener):
    clock = Clock()
    watched = Gate(listener.getsockname()[1], clock)
    try:
        stranger, there = pair(listener)
        while not watched._strangers:
            clock.now += 0.001
        clock.now += STRANGER_S + 1.0
        assert is_cut(stranger)
        stranger.close()
        there.close()
    finally:
        watched.close()


def test_peers_are_read_as_grpc_writes_them():
    assert parse_peer("ipv4:10.0.0.1:5000") == ("10.0.0.1", 5000)
    assert parse_peer("ipv6:%5B::1%5D:5000") == ("::1", 5000)
    assert parse_peer("ipv6:%5B::ffff:10.0.0.1%5D:5000") == ("10.0.0.1", 5000)
    assert parse_peer("unix:/tmp/socket") is None
    assert parse_peer("") is None


# Servers that are none of Overlord's, or mean harm


class Foreign(flight.FlightServerBase):
    """Answers actions and tickets with whatever it is given."""

    def __init__(self, results: dict[str, list[bytes]], step: list[tuple[pa.RecordBatch, bytes]]) -> None:
        self._results = results
        self._step: Any = step  # the stubs know no batches with metadata
        super().__init__("grpc://127.0.0.1:0")

    def do_action(self, context, action):
        return iter(self._results.get(action.type, []))

    def do_get(self, context, ticket):
        return flight.GeneratorStream(SCHEMA, iter(self._step))


def batch(*regions: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(regions, pa.binary_view())], schema=SCHEMA)


WELCOME = wire.pack(wire.Value(wire.Welcome("job", "instance", None, 0, 0, None)))
REGION = bytes(range(64))


@pytest.mark.parametrize(
    "results",
    [[], [b""], [b"\xc1"], [b"\x91" * 100_000], [wire.pack(wire.Value(5))], [wire.pack(wire.Value({"job": 1}))]],
    ids=["none", "empty", "garbage", "deep", "a number", "another struct"],
)
def test_what_is_no_service_of_ours_is_said_when_a_client_connects(results):
    with Foreign({"hello": results}, []) as server, pytest.raises(ol.errors.ServiceError, match=f"127.0.0.1:{server.port}"):
        ol.connect(f"127.0.0.1:{server.port}", rank=0, timeout_s=5)


@pytest.mark.parametrize(
    "fields",
    [
        [wire.Array("tokens", "<i4", (1 << 40,), 0, 0)],
        [wire.Array("tokens", "<i4", (1 << 62, 4), 0, 0)],
        [wire.Array("tokens", "<i4", (-1,), 0, 0)],
        [wire.Array("tokens", "<i4", (4,), 7, 0)],
        [wire.Array("tokens", "<i4", (4,), 0, 1 << 40)],
        [wire.Array("tokens", "<i4", (4,), 0, -8)],
        [wire.Array("tokens", "<i4", (1 << 40,), 0, 0, 1 << 20)],
        [wire.Array("tokens", "|O", (4,), 0, 0)],
        [wire.Array("tokens", "nonsense", (4,), 0, 0)],
        [wire.Column("text", wire.Array("text", "|u1", (64,), 0, 0), True, True)],
    ],
)
def test_a_damaged_step_is_refused_before_memory_is_taken_for_it(fields):
    step = wire.pack(wire.Contents(0, 1, [fields]))
    with Foreign({"hello": [WELCOME], "leave": [wire.pack(wire.Value(None))]}, [(batch(REGION), step)]) as server:
        client = ol.connect(f"127.0.0.1:{server.port}", rank=0, timeout_s=5)
        # Of numbers that no service sends, and of numbers that do not fit to what came with them.
        wrong = f"(step 0 came damaged from .*|.*):{server.port}.* install the same release on both sides"
        with pytest.raises(ol.errors.ServiceError, match=wrong):
            next(client)
        client.close()


def test_another_step_than_was_asked_for_is_refused():
    step = wire.pack(wire.Contents(9, 1, [[wire.Array("tokens", "<i4", (4,), 0, 0)]]))
    with Foreign({"hello": [WELCOME]}, [(batch(REGION), step)]) as server:
        client = ol.connect(f"127.0.0.1:{server.port}", rank=0, timeout_s=5)
        with pytest.raises(ol.errors.ServiceError, match="sent step 9 where step 0 was requested"):
            next(client)


@pytest.mark.strangers
@pytest.mark.parametrize(
    "results",
    [
        {"hello": [wire.pack(wire.Value({"job": 1}))]},
        {"hello": [WELCOME], "decisions": [wire.pack(wire.Value([3]))], "change_weights": [wire.pack(wire.Value("3"))]},
    ],
    ids=["greeting", "values"],
)
def test_what_is_no_service_of_ours_is_said_when_a_run_is_steered(results):
    with Foreign(results, []) as server, Control(f"127.0.0.1:{server.port}", timeout_s=5) as control:
        wrong = f":{server.port} does not answer as an overlord service of this release does"
        with pytest.raises(ol.errors.ServiceError, match=wrong):
            control.decisions()
        with pytest.raises(ol.errors.ServiceError, match=wrong):
            control.set_weights({"a": 1.0})


@pytest.mark.strangers
def test_a_state_of_another_type_is_refused_and_reports_and_waits_go_on_without_an_answer():
    other = [wire.pack(wire.Value(3))]
    with Foreign({"hello": [WELCOME], "state_before": other, "doing": other, "feedback": other}, []) as server:
        channel = FlightChannel(f"grpc://127.0.0.1:{server.port}", 0, timeout_s=5)
        with pytest.raises(ol.errors.ServiceError, match="does not answer as an overlord service of this release does"):
            channel.run.state_before(0)
        assert channel.run.status_lines() == []
        (note,) = channel.run.feedback(StepReport(0, 0, {"a": 1.0}, {"a": 2.0}, (0.5,)), 0)
        assert note.startswith("the service did not take it: ")
        channel.close()


def test_deeply_nested_requests_are_refused_and_the_service_goes_on():
    with served(two_sources()) as (_, address):
        link = Link(address, None, None)
        for body in (b"\x91" * 1_000_000, b"\x81\xa5state" * 100_000):
            with pytest.raises((ol.OverlordError, ServiceError)):
                link.send("load_state", body, 20.0)
            with pytest.raises(flight.FlightError):
                Raw(address).get(body)
        with pytest.raises(ServiceError, match="there is no action 'nonsense'"):
            link.send("nonsense", b"", 20.0)
        link.close()
        with ol.connect(address, rank=0, timeout_s=30) as client:
            assert next(client).number == 0
