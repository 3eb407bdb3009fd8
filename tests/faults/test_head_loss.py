"""The head of a Ray cluster is lost, and all of the cluster with it: the run goes on from its log on the next cluster."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

import overlord as ol
from tests.commands import ROOT, environment
from tests.service.served import streams, two_sources, undisturbed
from tests.service.test_reconnect import free_port

JOB = two_sources(mesh=ol.Mesh(dp=2))
JOB_FILE = """
import overlord as ol
from tests.service.served import two_sources
job = two_sources(mesh=ol.Mesh(dp=2))
"""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program; it is killed with all that it started."""
    pipe = subprocess.PIPE
    impatient = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # Ray waits a minute for its head otherwise
    running = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment(**impatient),
        cwd=ROOT,
    )
    try:
        yield running
    finally:
        kill_family(running.pid)
        running.communicate()


def kill_family(pid: int) -> None:
    if psutil.pid_exists(pid):
        for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                each.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


def first_line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


@pytest.mark.timeout(400)
@pytest.mark.second_try(reason="two Ray clusters must start within a client's patience")
def test_a_run_whose_cluster_lost_its_head_goes_on_from_its_log_on_another(tmp_path: Path):
    job, address = tmp_path / "job.py", f"127.0.0.1:{free_port()}"
    job.write_text(JOB_FILE)
    served = ["-m", "overlord", "serve", str(job), "--json", "--address", address, "--log", str(tmp_path / "log")]
    served += ["--resume", "log", "--drain", "0"]
    clients: list[ol.Client] = []
    found: list[list[tuple]] = [[], []]
    with ExitStack() as programs:
        for num_steps in (6, 10):
            cluster = programs.enter_context(process("-m", "bench.ray_cluster", "--cpus", "8"))
            service = programs.enter_context(process(*served, "--ray", first_line(cluster)))
            assert json.loads(first_line(service))["address"].endswith(address)
            if not clients:
                clients = [ol.connect(f"grpc://{address}", rank=rank, timeout_s=240) for rank in range(2)]
            for of_rank, more in zip(found, streams(clients, num_steps), strict=True):
                of_rank += more
            kill_family(cluster.pid)
            if num_steps == 6:
                assert service.wait(120) != 0, "the service says that its cluster is gone, and ends"
                assert service.stderr is not None
                assert "Ray" in service.stderr.read()
    assert found == undisturbed(JOB, 16)
    assert os.path.isdir(tmp_path / "log")
