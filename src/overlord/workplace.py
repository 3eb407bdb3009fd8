"""What a process offers to the roles that run in it: threads to read and to build, and worker processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from overlord.data.processes import ProcessPool
from overlord.threads import Threads


@dataclass(frozen=True, slots=True)
class WorkplaceSize:
    """How many threads and worker processes a process may use; one per core unless given."""

    num_workers: int | None = None
    num_processes: int | None = None


class Workplace:
    """Threads and processes start when they are first needed, so one that is not used costs nothing."""

    def __init__(self, size: WorkplaceSize) -> None:
        num_workers = size.num_workers or os.cpu_count() or 1
        self.read_threads = Threads(num_workers, "overlord-read")
        # Building mostly holds the interpreter, so more threads than this would only wait for each other.
        self.build_threads = Threads(2, "overlord-build")
        self.processes = ProcessPool(size.num_processes or os.cpu_count() or 1)

    def close(self) -> None:
        self.build_threads.shutdown()
        self.read_threads.shutdown()
        self.processes.close()
