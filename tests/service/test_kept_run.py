"""A run that is kept in a Ray cluster: it outlives its driver, its own process is replaced while trainers go on, and it ends
when nobody uses it any more."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from overlord.runtime.ray.stored_calls import JobTable
from overlord.service.auth import Listen
from overlord.service.kept_run import KeptRun, RunKeeper, ServeRequest, listen_again
from overlord.service.run_options import RunOptions
from tests.commands import environment
from tests.faults.disturbance import send
from tests.faults.trainers import wait_until
from tests.service.served import streams, two_sources, undisturbed
from tests.service.test_elastic import Meshes, Trainer
from tests.small_sources import read_all

JOB = two_sources(mesh=ol.Mesh(dp=2))
JOB_FILE = """
import overlord as ol
from tests.service.served import two_sources
job = two_sources(mesh=ol.Mesh(dp=2))
"""
pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


def keeper_of(name: str) -> int | None:
    """The process that has a run; None while there is none."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        actor = ray.get_actor("run#1", namespace=f"overlord-run-{name}")
        report: Any = ray.get(actor.check_health.remote(), timeout=5)
        return report.process
    except (ValueError, RayActorError, GetTimeoutError):
        return None


def role_processes(name: str) -> set[int]:
    """The processes of the roles of a run."""
    import ray
    from ray.util import list_named_actors

    namespace = f"overlord-run-{name}-roles"
    named: Any = list_named_actors(all_namespaces=True)
    actors: list[Any] = [ray.get_actor(e["name"], namespace=namespace) for e in named if e["namespace"] == namespace]
    reports: Any = ray.get([actor.check_health.remote() for actor in actors])
    return {report.process for report in reports}


def kill_keeper(name: str) -> None:
    process = keeper_of(name)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    assert wait_until(lambda: keeper_of(name) not in (None, process), 60)


def request_of(digest: str = "same", **fields: Any) -> ServeRequest:
    return ServeRequest(
        job=JOB, options=RunOptions(), listen=Listen(), leave_after_s=60.0, resume=None, digest=digest, **fields
    )


@contextmanager
def kept(name: str, **fields: Any) -> Iterator[tuple[KeptRun, list[ol.Client]]]:
    run, _ = KeptRun.start_or_take_back(name, request_of(**fields), "a test", before_start=lambda: None)
    try:
        address = run.announcement().address
        yield run, [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
    finally:
        run.close()


def left_in_cluster(name: str) -> list[Any]:
    from ray.experimental import internal_kv
    from ray.util import list_named_actors

    named: Any = list_named_actors(all_namespaces=True)
    actors = [entry for entry in named if name in entry["namespace"]]
    return actors + internal_kv._internal_kv_list(f"overlord-run-{name}", namespace="overlord")


class Served:
    """`overlord serve --ray` on the cluster of these tests."""

    def __init__(self, job: Path, *arguments: str) -> None:
        import ray

        cluster = ray.get_runtime_context().gcs_address
        command = [
            sys.executable,
            "-m",
            "overlord",
            "serve",
            str(job),
            "--json",
            "--ray",
            cluster,
            "--name",
            "cli",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.told = json.loads(line) if line else {}

    def end(self, number: int) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[1]


@pytest.mark.second_try(reason="Ray must start processes within a client's 60 s")
def test_a_killed_driver_costs_nothing_and_the_same_command_takes_the_run_back(tmp_path: Path):
    job, state = tmp_path / "kept_job.py", tmp_path / "state.json"
    job.write_text(JOB_FILE)
    first = Served(job)
    try:
        clients = [ol.connect(first.told["address"], rank=rank, timeout_s=60) for rank in range(2)]
        found = streams(clients, 4)
        refused = Served(job)  # a second driver, while there is one
        assert "already, started by process" in refused.process.communicate(timeout=60)[1]
        assert refused.process.returncode == 1
        first.end(signal.SIGKILL)
        _add(found, streams(clients, 10))
        kill_keeper("cli")
        _add(found, streams(clients, 10))
        assert clients[0].state_dict()["step"] == 24

        def is_taken_back() -> bool:  # once the run has missed its driver
            nonlocal first
            first = Served(job, "--state", str(state))
            if not first.told:
                first.process.communicate(timeout=60)
            return bool(first.told)

        assert wait_until(is_taken_back, 60)
        _add(found, streams(clients, 4))
        told = first.end(signal.SIGTERM)
        assert "taken back" in told
        assert "stopped before step 28" in told
    finally:
        first.process.kill()
    assert json.loads(state.read_text())["step"] == 28
    assert found == undisturbed(JOB, 28)
    assert wait_until(lambda: left_in_cluster("cli") == [], 20)


@pytest.mark.second_try(reason="Ray must start processes within a client's 60 s")
def test_a_run_that_loses_its_process_goes_on_with_its_roles_or_from_its_log():
    expected = undisturbed(JOB, 30)
    with kept("loses") as (run, clients):
        found = streams(clients, 3)
        state = clients[0].state_dict()
        _add(found, streams(clients, 3))
        for client in clients:
            client.load_state_dict(state)  # the run has been moved once
        kill_keeper("loses")
        again = streams(clients, 5)
        assert [a[:3] + b for a, b in zip(found, again, strict=True)] == [steps[:8] for steps in expected]
        processes = role_processes("loses")
        _forget_record("loses")  # as if it had been lost while it was moved
        kill_keeper("loses")
        more = streams(clients, 5)
        assert more == [steps[8:13] for steps in expected]
        assert role_processes("loses") == processes, "roles are made again where they were"
        assert run.drain(10)[0]
    assert wait_until(lambda: left_in_cluster("loses") == [], 20)


@pytest.mark.second_try(reason="Ray must start processes within a client's 60 s")
def test_a_run_whose_process_hangs_is_replaced_also_while_it_has_no_driver():
    with kept("hangs", hung_after_s=5.0) as (run, clients):
        found = streams(clients, 3)
        run._role.leave()  # the driver is dead, and watches nobody
        process = keeper_of("hangs")
        assert process is not None
        os.kill(process, signal.SIGSTOP)
        try:
            assert wait_until(lambda: keeper_of("hangs") not in (None, process), 100)
        finally:
            send(process, signal.SIGCONT)
        _add(found, streams(clients, 10))
        assert clients[0].state_dict()["step"] == 13
        assert found == undisturbed(JOB, 13)


@pytest.mark.second_try(reason="Ray must start processes within a client's 60 s")
def test_the_mesh_follows_its_trainers_also_when_the_process_of_the_run_is_replaced():
    """Three trainers, two, and three again. The process of the run is killed in each of these meshes."""
    job = two_sources(mesh=ol.Mesh(dp=3))
    request = replace(request_of(resize_on_leave=True), job=job, leave_after_s=4.0)
    run, _ = KeptRun.start_or_take_back("elastic", request, "a test", before_start=lambda: None)
    meshes = Meshes()
    try:
        address = run.announcement().address
        trainers = [Trainer(address, rank, meshes, sys.maxsize) for rank in range(3)]

        def wait_for_steps(size: int) -> None:
            """Until the trainers of a mesh of this size have finished some more steps."""
            so_far = max(meshes.finished, default=0)
            meshes.wait_for(
                lambda: max(meshes.finished, default=0) > so_far + 3 and list(meshes.parts)[-1][1] == size,
                f"{size} trainers go on after step {so_far}",
            )

        for trainer in trainers:
            trainer.start()
        wait_for_steps(3)
        kill_keeper("elastic")
        wait_for_steps(3)
        trainers[1].killed.set()
        trainers[1].join(30)
        for barrier in list(meshes._barriers.values()):
            barrier.abort()  # the collective of the others fails
        wait_for_steps(2)
        kill_keeper("elastic")
        with pytest.raises(ol.errors.WaitTimeoutError, match="its peers still train"):
            ol.join(address, rank=2, timeout_s=5)  # the process that took the run over knows that the seat is taken
        wait_for_steps(2)
        trainers[1] = Trainer(address, 1, meshes, sys.maxsize)
        trainers[1].start()
        wait_for_steps(3)
        kill_keeper("elastic")
        wait_for_steps(3)
        until = max(meshes.finished) + 100
        for trainer in trainers:
            trainer.until = until
        for trainer in trainers:
            trainer.join(100)
            assert trainer.error is None
            assert not trainer.is_alive()
    finally:
        run.close()
    assert [meshes.finished[step] for step in range(until + 1)] == [step.tolist() for step in read_all(job, until + 1)[0]]


def test_a_name_belongs_to_one_run_and_two_runs_share_a_cluster():
    with kept("one") as (_, left), kept("two") as (_, right):
        with pytest.raises(ol.errors.SpecError, match="another job, or the same with other options, under the name 'one'"):
            KeptRun.start_or_take_back("one", request_of("other"), "another", before_start=lambda: None)
        with pytest.raises(ol.errors.SpecError, match="under the name 'two' already, started by a test"):
            KeptRun.start_or_take_back("two", request_of(), "another", before_start=lambda: None)
        expected = undisturbed(JOB, 3)
        assert streams(left, 3) == streams(right, 3) == expected


def test_a_run_that_nobody_uses_ends_by_itself():
    run, _ = KeptRun.start_or_take_back("idle", request_of(forgotten_after_s=3.0), "a test", before_start=lambda: None)
    assert run.announcement().num_ranks == 2
    assert wait_until(lambda: left_in_cluster("idle") == [], 60)


def test_what_cannot_start_is_an_error_and_leaves_nothing():
    request = ServeRequest(job=JOB, options=RunOptions(near=("nowhere",)), listen=Listen(), leave_after_s=None, resume=None)
    with pytest.raises(ol.errors.SpecError, match="near names the node 'nowhere'"):
        KeptRun.start_or_take_back("wrong", request, "a test", before_start=lambda: None)
    assert left_in_cluster("wrong") == []


def test_a_run_listens_where_it_did_and_on_another_machine_at_its_address(caplog: pytest.LogCaptureFixture):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0"):
        again = listen_again(Listen(f"{host}:0", token="t" * 8), "127.0.0.1", port)
        assert again.address == f"{host}:{port}"
    assert not caplog.messages or "lost" not in caplog.text
    gone = Listen("192.0.2.7:7077", token="t" * 8)  # an address of no machine
    assert listen_again(gone, "127.0.0.1", port) == replace(gone, address=f"127.0.0.1:{port}")
    assert "192.0.2.7 was lost, and the run is on 127.0.0.1 now" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert listen_again(gone, "127.0.0.1", other.getsockname()[1]).address == "127.0.0.1:0"


@pytest.mark.second_try(reason="Ray must start processes within a client's 60 s")
def test_a_run_whose_nodes_are_lost_goes_on_elsewhere(caplog: pytest.LogCaptureFixture):
    """Its `near` names no node any more, and its host is that of no machine."""
    request = replace(request_of(), options=RunOptions(near=("lost", "lost")), listen=Listen("192.0.2.7:0", token="t" * 8))
    namespace = "overlord-run-elsewhere"
    JobTable(namespace).put("serving", b"grpc://192.0.2.7:1")  # as a process of it has left it
    run = RunKeeper(request, namespace)
    try:
        address = run.attend("a test")
        assert address.startswith("grpc://127.0.0.1:")
        assert "the node 'lost', which near names, is lost" in caplog.text
        clients = [ol.connect(address, rank=rank, token="t" * 8, timeout_s=60) for rank in range(2)]
        assert streams(clients, 3) == undisturbed(JOB, 3)
        for client in clients:
            client.close()
    finally:
        run.close()
        JobTable(namespace).clear()


def _add(found: list[list[tuple]], more: list[list[tuple]]) -> None:
    for steps, new in zip(found, more, strict=True):
        steps += new


def _forget_record(name: str) -> None:
    from overlord.runtime.ray.names import Names
    from overlord.service.takeover import RUN

    Names(f"overlord-run-{name}-roles", 1.0).publish(RUN, None)
