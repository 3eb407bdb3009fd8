"""Loaders that come, go and die on every engine: the stream stays what it was, byte for byte."""

import os
import signal
import time
from pathlib import Path

import pytest

import overlord as ol
from overlord.loaders.model import Partition, Share
from overlord.roles.loader_host import HostStatus, LoaderHost
from overlord.roles.planner import Planner
from overlord.runtime.engine import Handle
from tests.contract.conftest import Start, on_processes, on_ray
from tests.contract.streams import part, stream, text_job
from tests.faults.disturbance import pause, send

ONE = ((Share("web"), Share("code"), Share("chat")),)
MANY = ((Share("web", 0, 3), Share("code")), (Share("web", 1, 3), Share("chat")), (Share("web", 2, 3),))


def repartition(loader: ol.Loader, hosts: tuple[tuple[Share, ...], ...]) -> None:
    loader._roles.fleet.repartition(Partition(hosts), loader._roles.planner.call(Planner.cursors).result())


def status_of(loader: ol.Loader, host: str) -> HostStatus:
    return Handle[LoaderHost](loader._roles.engine, host).call(LoaderHost.status).result(60)


@pytest.fixture
def job(tmp_path: Path) -> ol.Job:
    return text_job(tmp_path, mesh=ol.Mesh(dp=2))


def test_a_run_whose_loaders_change_is_the_same_on_every_engine_and_gives_hosts_back(start: Start, job: ol.Job):
    with ol.start(job) as loader:
        expected = stream(loader, 60)
    with start(job, partition=Partition(ONE)) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = _stream(clients, 2)
        repartition(loader, MANY)
        assert loader.report().loaders == {"web": 3, "code": 1, "chat": 1}
        found += _stream(clients, 4)
        repartition(loader, (*ONE, (), ()))
        found += _stream(clients, 54)
        loader._roles.fleet.tidy(loader._roles.planner.call(Planner.cursors).result())
        assert [host.name for host in loader._roles.fleet.hosts] == ["loaders/0"]
        assert loader.report().loaders == {"web": 1, "code": 1, "chat": 1}
        assert found == expected


def _stream(clients: list[ol.Client], count: int) -> list:
    return [[part(next(client)) for client in clients] for _ in range(count)]


def test_a_lost_loader_is_stood_in_for_by_its_shadow(ray_cluster: None, job: ol.Job, monkeypatch: pytest.MonkeyPatch):
    with ol.start(job) as loader:
        expected = stream(loader, 20)
    # Looked after by hand: the thread would do the same, at moments of its own.
    never = ol.scaling.Autoscale(budget=ol.scaling.Budget(cpus=2, memory_bytes=1 << 30), every_s=3600)
    with on_ray(job, shadows=ol.scaling.Budget(cpus=2, memory_bytes=1 << 30), autoscale=never) as loader:
        fleet, keeper = loader._roles.fleet, loader._roles.control_loop._shadows
        assert keeper is not None
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        monkeypatch.setattr("overlord.fleet.hosts._ANSWER_S", 60.0)  # a busy machine must not look like a lost loader
        host = fleet.names[0]
        shadow = fleet.add_shadow(host)
        found = _stream(clients, 6)  # in which everybody has looked the shadow up
        assert keeper.reconcile(6, fleet.statuses(), None, job.mix) == ()
        os.kill(status_of(loader, host).process, signal.SIGKILL)
        found += _stream(clients, 4)
        status_of(loader, host)  # it is made anew by now
        changes = keeper.reconcile(10, fleet.statuses(), None, job.mix)
        assert [(change.host, change.change) for change in changes] == [(host, "its shadow took over")]
        assert fleet.names == (shadow,)
        assert loader.report().shadows == {shadow: host}, "the one that was lost"

        monkeypatch.setattr("overlord.fleet.hosts._ANSWER_S", 1.0)
        stopped = status_of(loader, shadow).process
        pause(stopped)
        try:
            found += _stream(clients, 4)
            changes = [change for _ in range(3) for change in keeper.reconcile(14, fleet.statuses(), None, job.mix)]
        finally:
            send(stopped, signal.SIGCONT)
        assert [change.reason for change in changes] == ["it did not answer and was killed"]
        assert fleet.names == (shadow,), "the name means another now"
        ends = time.monotonic() + 60
        while status_of(loader, shadow).process == stopped:  # one that goes on again may still answer before it ends
            assert time.monotonic() < ends
        found += _stream(clients, 6)
        assert found == expected


def test_a_shadow_is_in_another_process_than_its_loader_and_takes_over(job: ol.Job, monkeypatch: pytest.MonkeyPatch):
    with ol.start(job) as loader:
        expected = stream(loader, 20)
    never = ol.scaling.Autoscale(budget=ol.scaling.Budget(cpus=2, memory_bytes=1 << 30), every_s=3600)
    shadows = ol.scaling.Budget(cpus=2, memory_bytes=1 << 30)
    with on_processes(job, partition=Partition(ONE), shadows=shadows, autoscale=never) as loader:
        fleet, keeper = loader._roles.fleet, loader._roles.control_loop._shadows
        assert keeper is not None
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        monkeypatch.setattr("overlord.fleet.hosts._ANSWER_S", 60.0)
        host = fleet.names[0]
        shadow = fleet.add_shadow(host)
        found = _stream(clients, 6)
        assert keeper.reconcile(6, fleet.statuses(), None, job.mix) == ()
        lost = status_of(loader, host).process
        assert status_of(loader, shadow).process != lost
        os.kill(lost, signal.SIGKILL)
        found += _stream(clients, 4)
        assert status_of(loader, host).process != lost
        changes = keeper.reconcile(10, fleet.statuses(), None, job.mix)
        assert [(change.host, change.change) for change in changes] == [(host, "its shadow took over")]
        assert fleet.names == (shadow,)
        found += _stream(clients, 10)
        assert found == expected
