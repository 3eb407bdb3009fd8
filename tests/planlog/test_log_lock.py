"""Two runs are not given one log: the second is refused while the first is alive, or, where that cannot be known, takes the
log over, and the first is told."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import overlord as ol
from overlord.errors import SharedUseError, StorageError
from overlord.planlog.plan_log import ClusterLog, Era, PlanLog
from overlord.planlog.records import Header
from overlord.stream.progress import Progress
from tests.buckets import s3_bucket
from tests.commands import environment
from tests.planlog.test_cluster_log import NEVER_S, Table
from tests.roles.mortal import free_log, planner_of
from tests.small_sources import Numbered, job_of, same, tokens_of

JOB = job_of({"a": Numbered(first=1), "b": Numbered(first=100)})
HOLDER = """
import os, sys
import overlord as ol
from tests.planlog.test_log_lock import JOB
loader = ol.start(JOB, log=sys.argv[1])
child = os.fork()
if child == 0:
    sys.stdin.read()  # outlives its parent, with all of its open files
    os._exit(0)
print(os.getpid(), flush=True)
next(loader.client(0))
sys.stdin.read()
"""


def test_a_second_run_of_a_process_is_refused_until_the_first_is_closed(tmp_path: Path):
    log = tmp_path / "runs" / "log"
    with ol.start(JOB, log=log) as first:
        with pytest.raises(SharedUseError, match=r"runs/log belongs to a run of this process.*close that loader first"):
            ol.start(JOB, log=f"file://{log}")
        with pytest.raises(SharedUseError):
            ol.start(JOB, log=ol.Log(tmp_path / "runs" / ".." / "runs" / "log"), resume="log")
        with ol.start(JOB, log=tmp_path / "other"):
            pass
        next(first.client(0))
    with ol.start(JOB, log=log, resume="log"):
        pass


def test_a_run_that_fails_to_start_leaves_no_lock(tmp_path: Path):
    with ol.start(JOB, log=tmp_path):
        pass
    for _ in range(2):
        with pytest.raises(ol.errors.StateError, match="differs"):
            ol.start(job_of({"a": Numbered(first=1), "b": Numbered(first=7)}), log=tmp_path)


def test_a_living_process_keeps_its_log_and_a_killed_one_loses_it_at_once(tmp_path: Path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment(), "text": True}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        with pytest.raises(SharedUseError, match=rf"belongs to a run in process {pid} on .*, which is alive.*another log="):
            ol.start(JOB, log=tmp_path, resume="log")
        os.kill(pid, signal.SIGKILL)
        holder.wait(60)
        with ol.start(JOB, log=tmp_path, resume="log") as loader:  # its forked child is still there
            assert next(loader.client(0)).number == loader.start_step


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with s3_bucket("locks") as options:
        yield options


def log_at(place: str, tmp_path: Path, bucket: dict[str, str]) -> ol.Log | ClusterLog:
    if place == "table":
        return ClusterLog(Table(), sync_s=NEVER_S)
    if place == "folder":
        return ol.Log(tmp_path, sync_s=NEVER_S)
    return ol.Log(f"s3://locks/{tmp_path.name}/log", sync_s=NEVER_S, storage_options=bucket)


def read_until_told(loader: ol.Loader, most: int) -> int:
    """Read steps, with the log synced after each, until the run is told that its log was taken; returns how many."""
    planner, client = planner_of(loader), loader.client(0, timeout_s=60)
    assert planner._log is not None
    for number in range(most):
        try:
            next(client)
        except SharedUseError:
            with pytest.raises(SharedUseError, match="taken over"):
                next(client)  # again: nothing goes on by itself
            return number
        with suppress(StorageError):  # it was replaced: the planner says so
            planner._log.sync()
    raise AssertionError(f"nothing was told in {most} steps")


@pytest.mark.parametrize("place", ["table", "bucket", "folder"])
def test_a_run_whose_log_is_taken_over_is_told_and_the_other_goes_on(
    place: str, tmp_path: Path, bucket: dict[str, str], caplog: pytest.LogCaptureFixture
):
    log = log_at(place, tmp_path, bucket)
    with ol.start(JOB) as undisturbed:
        client = undisturbed.client(0)
        expected = [tokens_of(next(client)) for _ in range(12)]
    with ol.start(JOB, log=log) as first:
        client = first.client(0, timeout_s=60)
        for _ in range(3):
            next(client)
        if place == "folder":
            free_log(first)  # as where a file system has no locks
        with ol.start(JOB, log=log, resume="log") as second:
            at = second.start_step
            taken = second.client(0, timeout_s=60)
            steps = [tokens_of(next(taken)) for _ in range(3)]
            with caplog.at_level(logging.ERROR, "overlord.planlog"):
                read_until_told(first, 40)
            assert f"another run (process {os.getpid()} on " in caplog.text
            assert any("has taken over the plan log" in event.text for event in first._roles.engine.recorder.events.recent())
            steps += [tokens_of(next(taken)) for _ in range(3)]
            assert same(steps, expected[at : at + 6])


def test_another_planner_of_the_same_run_is_no_other_run(caplog: pytest.LogCaptureFixture):
    log, start = ClusterLog(Table(), sync_s=NEVER_S), Progress.start(("a",))
    old = PlanLog(Era(log, Header("job", 0, "samples", {})), start, keep=0)
    old.sync()
    for era in (0, 1):  # made again, and after a resize
        new = PlanLog(Era(log, Header("job", era, "samples", {})), start, keep=0)
        new.sync()
    old.add_needed(3)
    with pytest.raises(StorageError, match="was replaced"):
        old.sync()
    old.check_own()
    old.close()
    assert not caplog.records
    new.check_own()
