"""The seam between roles and where they run. Spawn a role under a name, ask a named role, rebind a name, stop.

A handle is a name: it goes on working when another role is bound to the name. Every ask may be repeated.

A `Workplace` is what a process offers to the roles that run in it: threads to read and to build, memory for batches, and
worker processes.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from overlord.batches.buffers import Arenas
from overlord.chunks.workers.pool import ProcessPool
from overlord.runtime.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class Answer(Protocol[T_co]):
    """What an ask returns; `result` waits for it and raises what the role raised."""

    def result(self, timeout: float | None = None) -> T_co: ...


@dataclass(frozen=True, slots=True)
class StoreUse:
    """How full the memory is that roles hand each other data through."""

    num_bytes: int
    limit_bytes: int


class Engine(Protocol):
    """Where roles run."""

    @property
    def num_hosts(self) -> int | None:
        """How many loader hosts to spread sources over; None where all of them stand in one process."""
        ...

    def open(self, size: WorkplaceSize) -> None:
        """Say what each process of this engine may use; called once, before anything is spawned."""
        ...

    def spawn(self, name: str, make: Callable[[Workplace], R]) -> Handle[R]:
        """Make a role where this engine runs roles, and bind it to a name. `make` must pickle, and may be called again
        when the role has to be made anew."""
        ...

    def started(self, names: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        """Wait until these roles (every one spawned so far unless given) are made; raises what making one raised."""
        ...

    def ask(self, name: str, method: str, args: tuple, kwargs: dict) -> Answer:
        """Call a method of the role bound to a name. Use `Handle.ask`, which is typed."""
        ...

    def rebind(self, name: str, to: str) -> None:
        """Let a name mean the role that another name means; the old role is stopped."""
        ...

    def stop(self, name: str) -> None: ...

    def publish(self, key: str, value: object) -> None:
        """Let every role look a value up, in place of what had this key. It must pickle, and nobody may change it."""
        ...

    def published(self, key: str) -> Any:
        """What was published last under a key; ClosedError once the engine is closed."""
        ...

    def store_use(self) -> StoreUse | None:
        """None where roles hand each other data as it is."""
        ...

    def close(self) -> None:
        """Stop every role."""
        ...


class Handle(Generic[R]):
    """A typed name: `loader.ask(SourceLoader.describe, chunk)`."""

    __slots__ = ("engine", "name")

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name

    def ask(self, method: Callable[Concatenate[R, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Answer[T]:
        return self.engine.ask(self.name, method.__name__, args, kwargs)


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
        self.read_threads = Threads(num_workers, "overlord-read")
        # Building mostly holds the interpreter: a second thread would not build sooner, and the two would hand the
        # interpreter to and fro at every array they copy. What takes long, decoding, runs on the read threads.
        self.build_threads = Threads(min(1, num_workers), "overlord-build")
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
