"""`overlord serve` as a process of its own, alone or with worker processes, and what can be done to them, its disk and its
log."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from overlord.planlog.plan_log import read_newest
from overlord.planlog.segments import segments_at
from tests.commands import start_service
from tests.faults.disturbance import (
    Cause,
    NotRecoveredError,
    children,
    corrupted,
    send,
    signals,
    storage_causes,
    torn,
    trainer_causes,
)
from tests.faults.jobs import WORLD_SIZE
from tests.faults.schedule import Fault
from tests.faults.store import Store
from tests.faults.trainers import Trainers

JOB_FILE = """
from tests.faults.jobs import disturbed_job
job = disturbed_job({url!r})
"""
WEIGHTS: Mapping[str, int] = {
    "service killed": 5,
    "service paused": 3,
    "service hung and restarted": 3,
    "log torn": 5,
    "log corrupted": 3,
    "disk full": 5,
    **{f"worker {how}": 3 for how in ("killed", "stopped", "paused")},
    "trainer killed": 3,
    "trainer paused": 2,
    "trainers restarted from their state": 3,
    "storage errors": 3,
    "storage drops answers": 3,
    "storage cuts answers": 3,
    "storage stalls": 3,
    "storage shut": 3,
}

WITH_PROCESSES: Mapping[str, int] = {**WEIGHTS, "host killed": 10, "template killed": 2, "host stopped": 2, "host paused": 4}
"""With worker processes there are more parts that can fail. One that hangs is noticed after half a minute."""


class AsService:
    """See the module's docstring. After it was killed the service is started again, from its log, at the same address."""

    def __init__(
        self, folder: Path, store: Store, pace_s: float, num_processes: int = 0, job_file: str | None = None
    ) -> None:
        self.name = "processes" if num_processes else "service"
        self._num_processes = num_processes
        self._job = folder / "job.py"
        self._job.write_text(job_file or JOB_FILE.format(url=store.url))
        self._words = folder / "service.txt"
        self._log = folder / "log"
        self._address = f"127.0.0.1:{free_port()}"
        self._process = self._started()
        self.trainers = Trainers(self._address, WORLD_SIZE, folder, pace_s)
        workers = signals(self._workers, lambda: self.trainers)
        hosts = signals(self._hosts, lambda: self.trainers)
        self.causes: dict[str, Cause] = {
            **{f"worker {how}": cause for how, cause in workers.items()},
            **{f"host {how}": cause for how, cause in hosts.items()},
            **trainer_causes(lambda: self.trainers),
            **storage_causes(store, lambda: self.trainers),
            "template killed": signals(self._templates, lambda: self.trainers)["killed"],
            "service killed": self._killed,
            "service paused": self._paused,
            "service hung and restarted": self._hung,
            "log torn": self._torn,
            "log corrupted": self._corrupted,
            "disk full": self._full,
        }

    def close(self) -> None:
        self.trainers.close()
        self._process.kill()
        self._process.wait()

    def _hosts(self) -> list[tuple[str, int]]:
        """The processes that have loader hosts and data constructors."""
        if not self._num_processes:
            return []
        return [("a worker process", child) for _, template in self._templates() for child in children(template)]

    def _templates(self) -> list[tuple[str, int]]:
        """The process that worker processes are forked from, and that ends with all of them."""
        return [("the template", child) for child in children(self._process.pid)] if self._num_processes else []

    def _workers(self) -> list[tuple[str, int]]:
        """The processes that run transforms."""
        parents = [host for _, host in self._hosts()] if self._num_processes else [self._process.pid]
        return [("a worker of transforms", child) for parent in parents for child in children(parent)]

    def _started(self, resume: str = "log") -> subprocess.Popen[str]:
        process = self._tried(resume)
        if process.poll() is not None:
            raise NotRecoveredError(f"the service does not start: {self._told()}")
        return process

    def _tried(self, resume: str = "log") -> subprocess.Popen[str]:
        """A service that has said where it is, or has ended."""
        options = ["--address", self._address, "--log", self._log, "--resume", resume, "--processes", self._num_processes]
        return start_service(self._job, *options, errors=self._words)

    def _told(self) -> str:
        """What the service that was started last said about itself."""
        return self._words.read_text()[-1500:]

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _killed(self, fault: Fault) -> str:
        self._kill()
        self._process = self._started()
        return "and started again from its log"

    def _paused(self, fault: Fault) -> str:
        send(self._process.pid, signal.SIGSTOP)
        self.trainers.wait(0.05 + 2 * fault.amount)
        send(self._process.pid, signal.SIGCONT)
        return f"{0.05 + 2 * fault.amount:.2f} s"

    def _hung(self, fault: Fault) -> str:
        """What an operator, or whatever keeps services alive, does about one that hangs."""
        send(self._process.pid, signal.SIGSTOP)
        self.trainers.wait(0.2 + fault.amount)
        return self._killed(fault)

    def _torn(self, fault: Fault) -> str:
        self._kill()
        detail = torn(self._log, fault)
        return detail + self._recovered()

    def _corrupted(self, fault: Fault) -> str:
        """The service must refuse a damaged log, name the file and the way out; an operator takes it."""
        self._kill()
        segment = corrupted(self._log, fault)
        process = self._tried()
        if process.poll() is None:
            process.kill()
            process.wait()
            raise NotRecoveredError(f"a log with a damaged middle was taken: {segment}")
        if process.returncode != 1 or f"{segment} is damaged at byte" not in self._told():
            raise NotRecoveredError(f"a damaged log was not told of: {self._told()}")
        segment.unlink()
        return f"{segment.name}: refused, and deleted as it says{self._recovered()}"

    def _recovered(self) -> str:
        """Start from a log that has lost its end. If trainers went back to a checkpoint, and that was in the end, what is
        left stands later than they do; then an operator starts from the checkpoint, with another log."""
        found = read_newest(segments_at(str(self._log)))
        if found is None or found.recovered.needed <= self.trainers.reached_by_all:
            self._process = self._started()
            return ""
        state = self.trainers.checkpoint()
        assert state is not None, "trainers that went back have a checkpoint"
        self._log = self._log.with_name(f"{self._log.name}-again")
        self._process = self._started(str(state))
        return f"; what is left stands at step {found.recovered.needed}, so it starts from {state.name}"

    def _full(self, fault: Fault) -> str:
        """No file of the service can grow beyond what its log has now."""
        process = self._process.pid
        before = resource.prlimit(process, resource.RLIMIT_FSIZE)
        newest = sorted(self._log.iterdir())[-1]
        room = newest.stat().st_size + int(400 * fault.which)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (room, before[1]))
        self.trainers.wait(0.3 + 1.5 * fault.amount)
        if fault.which < 0.3:  # and it dies before there is room again
            return self._killed(fault) + f", with room for {room} bytes"
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)
        return f"room for {room} bytes, {0.3 + 1.5 * fault.amount:.1f} s"


def free_port() -> int:
    """One that no other server gets by asking for any: it stays free while the service is away."""
    for port in random.Random(os.getpid()).sample(range(20_000, 30_000), 1000):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
