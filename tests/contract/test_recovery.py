"""A lost planner and a changed mesh, on every engine: the stream stays what it was, byte for byte."""

import os
import signal
import time
from pathlib import Path

import overlord as ol
from overlord.status import PlannerStatus
from tests.contract.conftest import Start, on_processes, on_ray
from tests.contract.streams import part, stream, text_job

COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)


def test_a_resized_run_is_the_same_on_every_engine(start: Start, tmp_path: Path):
    job = text_job(tmp_path, mesh=ol.Mesh(dp=2), strategy=ol.strategies.long_short(COST))

    def history(loader: ol.Loader) -> list[list]:
        found = stream(loader, 2)
        for mesh in (ol.Mesh(dp=3), ol.Mesh(dp=1, cp=2)):
            assert loader.resize(mesh, timeout_s=20) == len(found)
            found += stream(loader, 2)
        return found

    with ol.start(job) as loader:
        expected = history(loader)
    with start(job, log=str(tmp_path / "log")) as loader:
        assert history(loader) == expected


def test_trainers_do_not_notice_that_the_planner_was_killed(ray_cluster: None, tmp_path: Path):
    job = text_job(tmp_path, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        expected = stream(loader, 12)
    with on_ray(job, log=str(tmp_path / "log")) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = []
        for number in range(12):
            if number % 4 == 3:
                before = _status_when_logged(loader)
                os.kill(before.process, signal.SIGKILL)
                after = loader.status()
                assert after.process != before.process
                assert after.reached >= before.reached, "it goes on from its log, not from the beginning"
            found.append([(step.number, step.loss_tokens) for step in map(next, clients)])
        assert found == [[part[:2] for part in step] for step in expected]
        state = loader.state_dict()
    with ol.start(job, resume=state) as loader, ol.start(job) as other:
        assert stream(loader, 2) == stream(other, 14)[12:]


def _status_when_logged(loader: ol.Loader) -> PlannerStatus:
    """The status of the planner once all that it has planned is in its log: it stops planning where trainers wait."""
    deadline = time.monotonic() + 60
    while (status := loader.status()).log is None or status.log.num_waiting:
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def test_trainers_do_not_notice_that_worker_processes_were_killed(tmp_path: Path):
    job = text_job(tmp_path, loaders=2, mesh=ol.Mesh(dp=2), num_workers=1)
    with ol.start(job) as loader:
        expected = stream(loader, 12)
    with on_processes(job) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = []
        for number in range(12):
            killed = loader._roles.engine._processes[number % 2].pid  # pyright: ignore[reportAttributeAccessIssue]
            if number % 4 == 3 and killed is not None:
                os.kill(killed, signal.SIGKILL)
            found.append([part(next(client)) for client in clients])
        assert found == expected


def test_a_run_that_ended_goes_on_from_its_log_on_any_engine(start: Start, tmp_path: Path):
    job = text_job(tmp_path, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        expected = stream(loader, 8)
    with start(job, log=str(tmp_path / "log")) as loader:
        stream(loader, 5)
    with start(job, log=str(tmp_path / "log"), resume="log") as loader:
        first = loader.start_step
        assert 5 - job.prefetch - 1 <= first <= 5
        assert stream(loader, 8 - first) == expected[first:]
