"""The seam between roles and where they run: spawn a role under a name, call a named role, rebind a name, stop.

A handle is a name: it goes on working when another role is bound to the name. Every call may be repeated.

A `Workplace` is what a process offers to the roles in it: threads for reading and building, memory for batches, and worker
processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from overlord.batches.buffers import Arenas
from overlord.chunks.workers.pool import ProcessPool
from overlord.runtime.cores import num_usable_cores
from overlord.runtime.threads import make_executor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from overlord.planlog.segments import LogTable
    from overlord.runtime.recorder import Recorder
    from overlord.status import StoreUse

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class Reply(Protocol[T_co]):
    """The result of a call, to come; `result` waits for it and raises what the role raised."""

    def result(self, timeout: float | None = None) -> T_co: ...


class Engine(Protocol):
    """Where roles run."""

    @property
    def recorder(self) -> Recorder:
        """What the run notes of itself in the process that started it."""
        ...

    @property
    def is_in_process(self) -> bool:
        """True where a call to a role is a plain call in this process."""
        ...

    @property
    def shares_memory(self) -> bool:
        """True where roles are in several processes, and those of one machine share memory: see `shares_memory_with`."""
        ...

    @property
    def is_one_machine(self) -> bool:
        """True where all roles run on this machine."""
        ...

    @property
    def keeps_planner(self) -> bool:
        """True where the planner lives and dies with the process that started the run."""
        ...

    @property
    def roles_live_on(self) -> bool:
        """True where roles go on when the process that started the run is lost, and another one takes them over."""
        ...

    @property
    def log_table(self) -> LogTable | None:
        """Where the planner's log is kept unless the user names another place; None where the planner needs none, because it
        lives and dies with the run."""
        ...

    @property
    def num_hosts(self) -> int | None:
        """How many loader hosts to spread sources over; None where all of them run in this process."""
        ...

    @property
    def most_hosts(self) -> int | None:
        """How many loader hosts there is any use for: on a cluster as many as it has CPUs for; None where nothing limits
        them."""
        ...

    def open(self, size: WorkplaceSize, loads: Sequence[EarlyLoad] = ()) -> None:
        """Set what each process of this engine may use; called once, before anything is spawned. Processes that are forked
        share what `loads` load."""
        ...

    def place_near(self, nodes: Sequence[str]) -> None:
        """Place the constructor of each data-parallel group on a node of a cluster: those that are spawned from now on.
        SpecError where there is only one machine."""
        ...

    @property
    def near(self) -> tuple[str, ...]:
        """The nodes that `place_near` named."""
        ...

    def expect_trainers(self, names: Sequence[Sequence[str]]) -> None:
        """Say where trainers are: for each data-parallel group the names of its node, as far as they are known (see
        `node_names`). Their constructors are placed there where the engine has that node; called before `open`."""
        ...

    @property
    def trainers_are_near(self) -> bool:
        """True if all trainers are known to be on this machine, in processes of their own."""
        ...

    def expect_groups(self, num_groups: int, *, are_light: bool) -> None:
        """Say how many data-parallel groups there will be, before their constructors are spawned, and whether these leave
        building to trainers (see `lay_out`)."""
        ...

    def move_near(self, name: str, node_names: Sequence[str]) -> bool:
        """Make a role again on the node that has one of these names, and stop the old one. False if it is there, or if the
        engine has no such node, or the user has said where the role is. Callers notice nothing, but what the role held is
        lost, as after a failure."""
        ...

    def spawn(self, name: str, make: Callable[[Workplace], R], *, apart_from: str = "") -> Handle[R]:
        """Make a role where this engine runs roles, and bind it to a name. `make` must pickle; it is called again when the
        role has to be restarted. It should not be lost together with the role `apart_from`."""
        ...

    def wait_until_started(self, names: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        """Wait until these roles (every one spawned so far unless given) are made; raises what making one raised."""
        ...

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Call a method of the role bound to a name. Use `Handle.call`, which is typed."""
        ...

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Call a role that another can stand in for: the call is not repeated when the role is lost. ClosedError then, now
        or with the result."""
        ...

    def call_near(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Call a role with which this process shares memory, so that the answer may lie there. Raises ClosedError, now or
        with the result, if the role is on another machine or was lost during the call."""
        ...

    def shares_memory_with(self, name: str) -> bool:
        """True if a role is in another process of this machine, as far as is known, and shares memory with this one."""
        ...

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Call a method whose result nobody waits for: advice. It is lost where the role is gone or does not keep up. Use
        `Handle.tell`, which is typed."""
        ...

    def rebind(self, name: str, to: str) -> None:
        """Bind a name to the role that another name is bound to, and stop the old role."""
        ...

    def stop(self, name: str) -> None: ...

    def publish(self, key: str, value: object) -> None:
        """Publish a value for every role to look up, in place of the old one. It must pickle, and nobody may change it."""
        ...

    def look_up(self, key: str) -> Any:
        """The value published last under a key; ClosedError once the engine is closed."""
        ...

    def store_use(self) -> StoreUse | None:
        """None where roles pass data by reference."""
        ...

    def close(self) -> None:
        """Stop every role."""
        ...


class _BoundCall(Protocol[R_co]):
    def __call__(self, method: Callable[Concatenate[R_co, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Reply[T]: ...


class _BoundTell(Protocol[R_co]):
    def __call__(self, method: Callable[Concatenate[R_co, P], Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...


class Handle(Generic[R]):
    """A typed name: `loader.call(SourceLoader.describe, chunk)`."""

    __slots__ = ("call", "engine", "name", "tell")

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.call: _BoundCall[R] = partial(engine.call, name)
        """Calls a method of the role that the name is bound to."""
        self.tell: _BoundTell[R] = partial(engine.tell, name)
        """Calls a method whose result nobody waits for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.engine, self.name)


_QUIET_S = 0.3  # most calls end sooner, without a warning
_CLOSE_S = 1.5  # in all; a call that still hangs then is left to its daemon thread
_MOST_LINES = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlyLoad:
    """A call of a function of a module that loads and keeps something large, which every process would load. It starts no
    thread."""

    module: str
    function: str
    arguments: tuple[str | bool | None, ...]


@dataclass(frozen=True, slots=True)
class WorkplaceSize:
    """How many threads and worker processes a process may use. By default one process per core, and one thread less than
    cores: building steps keeps one core busy, and more threads than cores only contend for the GIL."""

    num_workers: int | None = None
    num_processes: int | None = None
    machine_cores: int | None = None
    """Cores of the machine, or of the node, that the process is on; by default those that it may use."""
    num_sharing: int = 1
    """Processes with constructors that share these cores, if there are enough groups for them."""

    def num_decoders(self, num_groups: int) -> int:
        """How many threads decode for the constructors of the process, in a job of so many groups: together the processes
        that share the machine keep its cores busy. Decoding releases the GIL."""
        return -(-(self.machine_cores or num_usable_cores()) // min(self.num_sharing, num_groups))


class Workplace:
    """Threads, processes and buffers of this process. They start when they are first needed: unused ones cost nothing."""

    def __init__(self, size: WorkplaceSize) -> None:
        self.size = size
        num_workers = max(1, (os.cpu_count() or 1) - 1) if size.num_workers is None else size.num_workers
        self.read_threads = make_executor(num_workers, "overlord-read")
        # Building mostly holds the GIL: a second thread would not build sooner, and the two would pass the GIL back and
        # forth at every array they copy. Decoding, the slow part, runs on the read threads.
        self.build_threads = make_executor(min(1, num_workers), "overlord-build")
        # One pool for all groups of the process: a buffer that one has just returned is still in the CPU's cache.
        self.arenas = Arenas()
        self.processes = ProcessPool(size.num_processes or os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._kept: dict[str, Any] = {}

    def share(self, key: str, make: Callable[[], T]) -> T:
        """A value that roles of this process share; the first role that asks for it makes it."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]

    def close(self, busy: Sequence[str] = ()) -> None:
        """Stop everything. A call that hangs is waited for a moment, then abandoned; `busy` says what the calls do."""
        self.build_threads.shutdown(wait=False)
        self.read_threads.shutdown(wait=False)
        self.processes.close()  # before the threads that wait for them
        if self._join(_QUIET_S):
            return
        doing = "; ".join(busy[:_MOST_LINES]) or "a call of a source, a transform or a strategy"
        _log.warning("closing waits up to %g s for what is under way: %s", _CLOSE_S - _QUIET_S, doing)
        self._join(_CLOSE_S - _QUIET_S)

    def _join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        built = self.build_threads.join(timeout_s)
        return self.read_threads.join(max(deadline - time.monotonic(), 0.0)) and built
