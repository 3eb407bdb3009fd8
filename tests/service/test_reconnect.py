"""Clients outlive their service: they find it again, go on byte for byte, and give up when they were told to."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from typing import Any

import pytest

import overlord as ol
from overlord.service.auth import Listen
from overlord.service.server import Service
from tests.commands import environment
from tests.service.served import content, served, streams, two_sources, undisturbed

_GIVEN: set[int] = set()

SERVER = """
import sys
import overlord as ol
from tests.service.served import two_sources
loader = ol.start(two_sources(mesh=ol.Mesh(dp=2)))
print(loader.serve(f"127.0.0.1:{sys.argv[1]}"), flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    """A port that no other server gets by asking for any: it stays free while the service of a test is away."""
    for port in random.Random(os.getpid()).sample(range(20_000, 30_000), 1000):
        if port not in _GIVEN:
            _GIVEN.add(port)
            with closing(socket.socket()) as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no port is free")


def server_process(port: int, program: str = SERVER, *args: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(port), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("grpc://")
    return process


@pytest.mark.second_try(reason="a server must start again within a client's 60 s")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_is_killed_or_hangs_and_comes_back_is_not_noticed_in_the_stream(how):
    job = two_sources(mesh=ol.Mesh(dp=2))
    port = free_port()
    process = server_process(port)
    try:
        clients = [ol.connect(f"127.0.0.1:{port}", rank=rank, timeout_s=60) for rank in range(2)]
        before = streams(clients, 3)
        os.kill(process.pid, how)
        if how == signal.SIGSTOP:
            threading.Timer(0.5, os.kill, (process.pid, signal.SIGCONT)).start()
        else:
            process.communicate()
            process = server_process(port)
        after = streams(clients, 3)
        assert [a + b for a, b in zip(before, after, strict=True)] == undisturbed(job, 6)
    finally:
        process.kill()
        process.communicate()


def test_a_restarted_service_is_brought_back_to_the_state_that_clients_had_loaded():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        client = loader.client(0)
        next(client)
        next(client)
        state = client.state_dict()
    expected = [steps[2:] for steps in undisturbed(job, 7)]
    port = free_port()
    with served(job, address=f"127.0.0.1:{port}") as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=30) for rank in range(2)]
        for client in clients:
            client.load_state_dict(state)
        before = streams(clients, 2)
    with served(job, address=f"127.0.0.1:{port}") as (loader, _):
        after = streams(clients, 3)
        assert loader.start_step == 2
        assert [a + b for a, b in zip(before, after, strict=True)] == expected
        for client in clients:  # and states can be loaded as before
            client.load_state_dict(state)
        assert streams(clients, 5) == expected


def test_a_service_resumed_later_than_a_client_stands_says_so():
    job, port = two_sources(), free_port()
    with served(job, address=f"127.0.0.1:{port}") as (_, address):
        client = ol.connect(address, rank=0, timeout_s=20)
        next(client)
        state = ol.connect(address, rank=0, timeout_s=20)
        steps = [next(state) for _ in range(4)]
        assert steps[-1].number == 3
        later = state.state_dict()
    with (
        served(job, resume=later, address=f"127.0.0.1:{port}"),
        pytest.raises(ol.OverlordError, match="this run starts at step 4; it has no step 1"),
    ):
        next(client)


def test_a_service_that_comes_back_with_another_job_is_not_read_on():
    port = free_port()
    with served(two_sources(), address=f"127.0.0.1:{port}") as (_, address):
        client = ol.connect(address, rank=0, timeout_s=20)
        next(client)
    with (
        served(two_sources(seed=1), address=f"127.0.0.1:{port}"),
        pytest.raises(ol.errors.ServiceError, match=r"runs job .* call overlord.connect again"),
    ):
        next(client)


def test_a_service_that_is_gone_ends_in_an_error_when_the_time_is_up():
    with served(two_sources(), address=f"127.0.0.1:{free_port()}") as (_, address):
        client = ol.connect(address, rank=0, timeout_s=0.8)
        next(client)
    with pytest.raises(
        ol.errors.WaitTimeoutError, match=r"rank 0 waited .* s for step 1: the service went away: grpc://127"
    ):
        next(client)
    with pytest.raises(ol.errors.ServiceError, match=r"rank 0 could not reach the service for .* s.*is it running"):
        client.state_dict()
    client.close()  # tells nobody, and does not mind
    with pytest.raises(ol.errors.ServiceError, match="was closed while it waited"):
        client.state_dict()


def test_connecting_waits_for_a_service_that_is_still_starting():
    port = free_port()
    found: list[int] = []

    def read() -> None:
        with ol.connect(f"127.0.0.1:{port}", rank=0, timeout_s=30) as client:
            found.append(next(client).number)

    reader = threading.Thread(target=read)
    reader.start()
    with served(two_sources(), address=f"127.0.0.1:{port}"):
        reader.join(30)
    assert found == [0]


def test_a_rank_whose_constructor_moves_follows_it_through_the_address_book():
    job = two_sources()
    with ol.start(job) as loader:
        channel = loader.client(0)._channel
        here = [True, False]
        name: dict[str, Any] = {"job": "job", "listen": Listen(), "instance": "instance"}
        homes = [Service(**name, steps=channel, serves=lambda _, i=i: here[i]) for i in range(2)]
        front = Service(**name, run=channel, locate=lambda _: homes[here.index(True)].addresses)
        client = ol.connect(front.address, rank=0, timeout_s=20)
        found = [content(next(client)) for _ in range(2)]
        here.reverse()  # told that it is elsewhere now
        found += [content(next(client)) for _ in range(2)]
        assert homes[1].ranks.reading() == {0: 4}
        here.reverse()
        homes[1].close()  # gone without a word
        found += [content(next(client)) for _ in range(2)]
        assert [found] == undisturbed(job, 6)
        for service in (front, homes[0]):
            service.close()


LOGGED = """
import sys
import overlord as ol
from tests.service.served import two_sources
loader = ol.start(two_sources(mesh=ol.Mesh(dp=2, cp=2)), log=sys.argv[2], resume="log")
print(loader.serve(f"127.0.0.1:{sys.argv[1]}"), flush=True)
sys.stdin.read()
"""


@pytest.mark.second_try(reason="a server must start again within a client's 60 s")
@pytest.mark.strangers
@pytest.mark.parametrize("late", [1, 2], ids=["of the same group", "of another group"])
def test_a_rank_that_is_late_after_two_crashes_still_gets_its_step(tmp_path, late):
    job = two_sources(mesh=ol.Mesh(dp=2, cp=2))
    expected = undisturbed(job, 9)
    port = free_port()
    process = server_process(port, LOGGED, str(tmp_path))
    try:
        clients = [ol.connect(f"127.0.0.1:{port}", rank=rank, timeout_s=60) for rank in range(4)]
        found = streams(clients, 5)
        others = [rank for rank in range(4) if rank != late]
        for _ in range(3):  # each time all others go on by a step, and the service dies before the late one is heard
            process.kill()
            process.communicate()
            process = server_process(port, LOGGED, str(tmp_path))
            for rank in others:
                found[rank].append(content(next(clients[rank])))
        process.kill()
        process.communicate()
        process = server_process(port, LOGGED, str(tmp_path))
        found[late] += [content(next(clients[late])) for _ in range(3)]
        for steps, more in zip(found, streams(clients, 1), strict=True):
            steps += more
        assert found == expected
    finally:
        process.kill()
        process.communicate()
