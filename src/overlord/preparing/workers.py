"""Where the parts of a prepared source are made: in worker processes of this machine, or in tasks on a Ray cluster."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from overlord.chunks.workers.process import WorkerGoneError, WorkerProcess
from overlord.errors import WorkerDiedError
from overlord.preparing.parts import PartRecord, PartTask, try_part
from overlord.runtime.ray.cluster import Cluster
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TRIES = 2
"""Of a part whose worker process dies."""

_Answer = tuple[PartTask, "PartRecord | BaseException"]


def run_in_processes(tasks: Sequence[PartTask], num_processes: int) -> Iterator[tuple[PartTask, PartRecord]]:
    """Make parts in worker processes, which end with this one. A process that dies is replaced, and its part made again."""
    waiting: queue.SimpleQueue[PartTask] = queue.SimpleQueue()
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    supervisors = [_Supervisor(waiting, answers) for _ in range(min(num_processes, len(tasks)))]
    try:
        for supervisor in supervisors:
            supervisor.start()
        for _ in tasks:
            task, answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            yield task, answer
    finally:
        for supervisor in supervisors:
            supervisor.stop()


class _Supervisor(threading.Thread):
    """Has one worker process make parts, one at a time."""

    def __init__(self, waiting: queue.SimpleQueue[PartTask], answers: queue.SimpleQueue[_Answer]) -> None:
        super().__init__(name="overlord-prepare", daemon=True)
        self._waiting = waiting
        self._answers = answers
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            try:
                task = self._waiting.get_nowait()
            except queue.Empty:
                break
            try:
                self._answers.put((task, self._make(task)))
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits for it
                self._answers.put((task, error))
        if self._worker is not None:
            self._worker.close()

    def stop(self) -> None:
        """Kill the worker process. A part that it has not finished is not there."""
        with self._lock:
            self._stopped = True
            if self._worker is not None:
                self._worker.kill()

    def _make(self, task: PartTask) -> PartRecord | BaseException:
        ends: list[str] = []
        while len(ends) < _TRIES:
            worker = self._worker or WorkerProcess.start(self._admit, "overlord.preparing.parts")
            try:
                answer, _ = worker.request(task)
                return answer.open() if isinstance(answer, ErrorEnvelope) else answer
            except WorkerGoneError as error:
                ends.append(str(error))
                with self._lock:
                    self._worker = None
                worker.close()
                if self._stopped:
                    break
        first = next(iter(task.units))
        where = f"{first} and {len(task.units) - 1} more" if len(task.units) > 1 else str(first)
        return WorkerDiedError(
            f"source {task.name!r}: the worker process that prepares {where} dies ({'; '.join(ends)}): its transforms "
            "crash, or need more memory than there is; try fewer processes"
        )

    def _admit(self, worker: WorkerProcess) -> bool:
        with self._lock:
            if self._stopped:
                return False
            self._worker = worker
            return True


def run_on_ray(tasks: Sequence[PartTask], address: str | None) -> Iterator[tuple[PartTask, PartRecord]]:
    """Make parts in tasks of a Ray cluster, whose nodes must see the folder. Ray makes a part again whose node is lost."""
    cluster = Cluster(address=address)
    cluster.join()
    try:
        import ray

        make: Any = ray.remote(num_cpus=1, max_retries=3)(_make_on_node)
        # A few more than there are processors, so that none waits, and not all: a task holds its units.
        most = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        left = list(reversed(tasks))
        running: dict[Any, PartTask] = {}
        while left or running:
            while left and len(running) < most:
                task = left.pop()
                running[make.remote(task, os.getcwd())] = task
            done, _ = ray.wait(list(running))
            for reference in done:
                task = running.pop(reference)
                answer = ray.get(reference)
                if isinstance(answer, ErrorEnvelope):
                    raise answer.open()
                yield task, answer
    finally:
        cluster.leave()


def _make_on_node(task: PartTask, folder: str) -> PartRecord | ErrorEnvelope:
    """Errors are returned, because Ray would wrap what is raised."""
    if os.path.isdir(folder):
        os.chdir(folder)  # paths may be relative to the folder of the command
    return try_part(task)
