"""What a process offers to the roles that run in it: threads to read and to build, memory for batches, and worker
processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from overlord.data.arenas import Arenas
from overlord.data.processes import ProcessPool
from overlord.threads import Threads


@dataclass(frozen=True, slots=True)
class WorkplaceSize:
    """How many threads and worker processes a process may use. Unless given, one process per core, and one thread less
    than cores: building steps keeps one busy, and more threads than cores only take the interpreter from each other."""

    num_workers: int | None = None
    num_processes: int | None = None


class Workplace:
    """Threads and processes start when they are first needed, so one that is not used costs nothing."""

    def __init__(self, size: WorkplaceSize) -> None:
        num_workers = max(1, (os.cpu_count() or 1) - 1) if size.num_workers is None else size.num_workers
        self.read_threads = Threads(num_workers, "overlord-read", crowded=True)
        # Building mostly holds the interpreter: a second thread would not build sooner, and the two would hand the
        # interpreter to and fro at every array they copy. What takes long, decoding, runs on the read threads.
        self.build_threads = Threads(min(1, num_workers), "overlord-build", crowded=True)
        # One pool for all groups of the process: what one has just given back is still at hand for the processor.
        self.arenas = Arenas()
        self.processes = ProcessPool(size.num_processes or os.cpu_count() or 1)

    def close(self) -> None:
        self.build_threads.shutdown()
        self.read_threads.shutdown()
        self.processes.close()
