"""What a process offers to the roles that run in it: threads to read and to build, memory for batches, and worker
processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from overlord.data.arenas import Arenas
from overlord.data.processes import ProcessPool
from overlord.threads import Threads

_QUIET_S = 0.3  # most calls end sooner, and nobody is told
_CLOSE_S = 1.5  # in all; what still hangs then is left to daemon threads
_MOST_LINES = 3
_log = logging.getLogger(__name__)


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

    def close(self, busy: Sequence[str] = ()) -> None:
        """Stop everything. A call that hangs is waited for a moment, then left behind; `busy` says what calls do."""
        self.build_threads.shutdown(wait=False)
        self.read_threads.shutdown(wait=False)
        self.processes.close()  # before the threads that wait for them
        if self._joined(_QUIET_S):
            return
        doing = "; ".join(busy[:_MOST_LINES]) or "a call of a source, a transform or a strategy"
        _log.warning("closing waits up to %g s for what is under way: %s", _CLOSE_S - _QUIET_S, doing)
        self._joined(_CLOSE_S - _QUIET_S)

    def _joined(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        built = self.build_threads.join(timeout_s)
        return self.read_threads.join(max(deadline - time.monotonic(), 0.0)) and built
