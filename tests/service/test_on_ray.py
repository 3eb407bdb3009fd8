"""A run on Ray or in worker processes, served: every constructor has a server of its own, and dies without its trainers
noticing."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

import overlord as ol
from tests.roles.mortal import free_log
from tests.service.served import Raw, streams, two_sources, undisturbed

JOB = two_sources(mesh=ol.Mesh(dp=2, cp=2))


@pytest.fixture(params=["processes", "ray"])
def loader(request: pytest.FixtureRequest) -> Iterator[ol.Loader]:
    engine: ol.Processes | ol.Ray = ol.Processes(2)
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        engine = ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions())
    with ol.start(JOB, engine=engine) as loader:
        yield loader


def listener(address: str) -> int:
    """The process that listens at an address of this machine."""
    port = int(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            assert connection.pid is not None
            return connection.pid
    raise AssertionError(f"nobody listens at {address}")


def test_each_group_is_served_by_its_own_constructor_and_the_stream_is_that_of_one_process(loader):
    front = loader.serve()
    homes = [Raw(front).hello(rank, needs_flight=True)["address"] for rank in range(4)]
    assert homes[0] == homes[1] != homes[2] == homes[3]
    assert len({os.getpid(), *map(listener, homes)}) == 3, "there is a core for each group"
    clients = [ol.connect(front, rank=rank, timeout_s=60) for rank in range(4)]
    assert streams(clients, 5) == undisturbed(JOB, 5)
    assert clients[0].state_dict() == loader.state_dict()
    assert loader.drain(10)
    for client in clients:
        client.close()
    assert loader.wait_for_leave(range(4), 10)


@pytest.mark.second_try(reason="Ray must replace a killed actor within a client's 60 s")
def test_trainers_go_on_when_their_constructor_is_killed(loader):
    front = loader.serve(token="hard-to-guess")
    clients = [ol.connect(front, rank=rank, token="hard-to-guess", timeout_s=60) for rank in range(4)]
    found = streams(clients, 2)
    raw = Raw(front, "hard-to-guess")
    killed = listener(raw.hello(3, needs_flight=True)["address"])
    os.kill(killed, signal.SIGKILL)
    for steps, more in zip(found, streams(clients, 3), strict=True):
        steps += more
    assert found == undisturbed(JOB, 5)
    assert listener(raw.hello(3, needs_flight=True)["address"]) != killed


def test_a_state_is_loaded_and_a_mesh_is_changed_through_all_servers(loader):
    front = loader.serve()
    clients = [ol.connect(front, rank=rank, timeout_s=60) for rank in range(4)]
    streams(clients, 2)
    state = clients[0].state_dict()
    after = streams(clients, 2)
    clients[0].load_state_dict(state)
    with pytest.raises(ol.errors.ClosedError, match="call load_state_dict on the client of rank 3 too"):
        next(clients[3])
    for client in clients[1:]:
        client.load_state_dict(state)
    assert streams(clients, 2) == after
    assert loader.resize(ol.Mesh(dp=1)) == 4
    with pytest.raises(ol.errors.ClosedError, match="rejoin if its mesh was changed"):
        next(clients[0])
    clients[0].rejoin()
    assert streams(clients[:1], 3) == [steps[4:] for steps in undisturbed(two_sources(), 7)]


@pytest.mark.strangers
def test_a_rank_that_is_late_after_two_restarts_from_the_log_still_gets_its_step(ray_cluster, tmp_path):
    runs = []

    def restarted() -> str:
        for loader in runs[-1:]:
            free_log(loader)  # it is not closed: for its log this is a kill
        runs.append(ol.start(JOB, engine=ol.Ray("auto", loader_hosts=1), log=tmp_path / "log", resume="log"))
        return runs[-1].serve()

    def reads(address: str, ranks: range, step: int) -> None:
        for rank in ranks:
            client = ol.connect(address, rank=rank, timeout_s=60)
            client.rejoin(at=step)
            assert next(client).number == step

    try:
        address = restarted()
        reads(address, range(4), 0)
        for step in (1, 2):
            reads(restarted(), range(3), step)
        reads(restarted(), range(3, 4), 1)
    finally:
        for loader in runs:
            loader.close()
