"""`attach` on a cluster that does not end with rank 0: the run is a role of the cluster, and so are its control loop and its
server."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from tests.commands import environment
from tests.faults.comparison import undisturbed
from tests.faults.trainers import wait_until
from tests.service.served import two_sources

JOB = two_sources(mesh=ol.Mesh(dp=2))
TRAINER = """
import json, sys, threading
import overlord as ol
from overlord.scaling import Budget
from overlord.trainer import attach
from tests.faults.trainer import digest
from tests.service.served import two_sources

budget = Budget(cpus=2, memory_bytes=1 << 30)
engine = ol.Ray(sys.argv[1], loader_hosts=1)
client = attach(two_sources(mesh=ol.Mesh(dp=2)), engine=engine, autoscale=budget, torch=False, timeout_s=60)
print(json.dumps([thread.name for thread in threading.enumerate()]), flush=True)
for _ in sys.stdin:
    print(json.dumps(digest(next(client))), flush=True)
client.close()
"""
pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


class Rank:
    def __init__(self, rank: int, port: int, folder: Path) -> None:
        import ray

        launched = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._errors = (folder / f"errors-{rank}").open("w+")
        command = [sys.executable, "-c", TRAINER, ray.get_runtime_context().gcs_address]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment() | {name: str(value) for name, value in launched.items()},
        )

    def say(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, Path(self._errors.name).read_text()
        return json.loads(line)

    def take(self, num_steps: int) -> list[str]:
        assert self.process.stdin is not None
        taken = []
        for _ in range(num_steps):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            taken.append(self.say())
        return taken

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for file in (self.process.stdin, self.process.stdout, self._errors):
            assert file is not None
            file.close()


@contextmanager
def ranks(port: int, folder: Path) -> Iterator[list[Rank]]:
    started = [Rank(rank, port, folder) for rank in range(2)]
    try:
        yield started
    finally:
        for each in started:
            each.end()


def runs() -> set[str]:
    """The namespaces of runs that `attach` has started here, and of their roles."""
    from ray.util import list_named_actors

    named: Any = list_named_actors(all_namespaces=True)
    return {entry["namespace"] for entry in named if entry["namespace"].startswith("overlord-run-attach")}


def test_the_other_ranks_read_on_when_rank_0_is_killed_and_a_new_start_takes_the_place_of_the_run(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    expected = [list(steps) for steps in zip(*undisturbed(JOB, 4), strict=True)]  # by rank
    with ranks(port, tmp_path) as (first, other):
        threads = [first.say(), other.say()]
        assert not any("loader-control" in name for name in threads[0])
        assert (first.take(3), other.take(1)) == (expected[0][:3], expected[1][:1])
        before = runs()
        assert len(before) == 2  # the run, and its roles
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(30)
        assert other.take(2) == expected[1][1:3]
        assert runs() == before
    with ranks(port, tmp_path) as again:  # as a launcher starts them, with the address that they had
        for rank in again:
            rank.say()
        assert runs() == before
        assert [rank.take(2) for rank in again] == [steps[:2] for steps in expected]
        assert [rank.close() for rank in reversed(again)] == [0, 0]
    assert wait_until(lambda: not runs(), 30)
