"""The engine that spreads roles over processes of this machine.

What it promises: the planner lives in the process that started the run, and every other role in one of the worker processes,
which are fresh interpreters. A worker process that dies or hangs is replaced: its roles are
made again by the same functions, and calls to them are repeated. Worker processes end with the process that started them,
however that ends, and leave nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from overlord.errors import ClosedError, OverlordError, SpecError, WaitTimeoutError, WorkerDiedError
from overlord.runtime import liveness
from overlord.runtime.cores import choose_process, kind_of, lay_out, num_usable_cores, processes_for
from overlord.runtime.engine import EarlyLoad, Handle, Workplace, WorkplaceSize
from overlord.runtime.exclusive import OneProcess
from overlord.runtime.processes.directory import Directory
from overlord.runtime.processes.host_process import HostProcess, ProcessSettings
from overlord.runtime.processes.node import DIRECTORY, Location, Node
from overlord.runtime.processes.template import Template
from overlord.runtime.recorder import Recorder
from overlord.runtime.role_table import RoleTable, accept_calls
from overlord.runtime.shared_memory import Listener, why_unavailable, why_unsupported
from overlord.runtime.whereabouts import node_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from overlord.runtime.processes.node import NodeReply

R = TypeVar("R")

_CLOSE_S = liveness.PROCESS_CLOSING.after_s
_CONSTRUCTOR = "constructor"
_PLURALS = {"loaders": "loader hosts", _CONSTRUCTOR: "data constructors"}
_ONE_PROCESS = "Start a run in the process that uses it"


def default_engine(num_workers: int | None) -> tuple[Processes | None, str]:
    """The engine for a job whose trainers are other processes, with its reason: all cores, or this process (None) where that
    is all there is. `num_workers` is the job's."""
    if num_workers == 0:
        return None, "num_workers=0 makes everything when it is requested"
    reason = why_unavailable()
    if reason is not None:
        return None, reason
    num_cores = num_usable_cores()
    if processes_for(num_cores) == 1:
        return None, f"there {'is one core' if num_cores == 1 else f'are {num_cores} cores'}, and trainers need some too"
    return Processes(), "one for each core"


class Processes:
    """The engine for all cores of one machine, without a cluster.

    Loader hosts and data constructors run in at most `num_processes` processes, by default one for each core that this
    process may use; the planner runs in this process. Callers wait `patience_s` for a role whose process died. A process
    that is alive and answers no health check for `hung_after_s` is killed and replaced; None disables this. A process
    answers health checks while its roles are busy.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        patience_s: float = liveness.PROCESS_GONE.after_s,
        hung_after_s: float | None = liveness.PROCESS_HUNG.after_s,
    ) -> None:
        if num_processes is not None and num_processes < 1:
            raise SpecError(f"num_processes must be at least 1, got {num_processes}; leave the engine out to use no other")
        if patience_s <= 0:
            raise SpecError(f"patience_s is a positive number of seconds, got {patience_s}")
        if hung_after_s is not None and hung_after_s <= 0:
            raise SpecError(f"hung_after_s is a positive number of seconds or None, got {hung_after_s}")
        self.num_processes = num_processes or num_usable_cores()
        self._patience_s = patience_s
        self._hung_after_s = hung_after_s
        self._lock = threading.Lock()
        self._roles: dict[str, tuple[int, HostProcess | None]] = {}  # name to its number and process; None is this one
        self._starting: dict[str, tuple[int, HostProcess]] = {}
        self._num_spawned = DIRECTORY
        self._processes: list[HostProcess] = []
        self._template = Template(self._num_cores)
        self._directory = Directory()
        self._table = RoleTable()
        self._workplace: Workplace | None = None
        self._listener: Listener
        self._node: Node
        self._home = OneProcess("the engine of a run", _ONE_PROCESS)
        self.recorder = Recorder()
        self._most_constructing: int | None = None  # processes with constructors
        self.trainers_are_near = False
        self._closed = False

    is_in_process = False
    shares_memory = True
    is_one_machine = True
    keeps_planner = True
    log_table = None
    most_hosts = None
    roles_live_on = False

    @property
    def num_hosts(self) -> int | None:
        return self.num_processes

    def __str__(self) -> str:
        """What runs where."""
        with self._lock:
            kinds = Counter(kind_of(name) for name, (_, process) in self._roles.items() if process is not None)
            used = len({process for _, process in self._roles.values() if process is not None})
        roles = ", ".join(f"{count} {_PLURALS.get(kind, kind)}" for kind, count in kinds.items())
        return f"{used} worker processes on {num_usable_cores()} cores: {roles or 'no roles'}"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._node.__reduce__()

    def open(self, size: WorkplaceSize, loads: Sequence[EarlyLoad] = ()) -> None:
        reason = why_unsupported()
        if reason is not None:
            raise SpecError(f"the engine of processes cannot be used: {reason}; leave engine=Processes() out")
        with self._lock:
            if self._workplace is not None:
                raise SpecError("this engine runs a job already; give each overlord.start its own")
            self._workplace = Workplace(size)
        self._home = OneProcess("the engine of a run", _ONE_PROCESS)
        self._template.start(loads)
        self._listener = Listener()
        run = self._listener.address
        self._node = Node(run, run, self._table, self._directory, self._patience_s)
        self._table.hold(DIRECTORY, "directory", self._directory)
        threading.Thread(
            target=accept_calls, args=(self._listener, self._table), name="overlord-accept_calls", daemon=True
        ).start()
        settings = ProcessSettings(run, self._share(size), self._num_cores, self._patience_s, self._hung_after_s)
        self._processes = [HostProcess(index, settings, self._template) for index in range(self.num_processes)]

    def place_near(self, nodes: Sequence[str]) -> None:
        raise SpecError(
            f"near={list(nodes)} names nodes of a cluster, and this job runs in processes of one machine: leave near out, "
            "or run the job with engine=ol.Ray(address)"
        )

    near = ()

    def expect_trainers(self, names: Sequence[Sequence[str]]) -> None:
        """Note whether all trainers are on this machine."""
        own = set(node_names())
        self.trainers_are_near = bool(names) and all(own.intersection(each) for each in names)

    def expect_groups(self, num_groups: int, *, are_light: bool) -> None:
        self._most_constructing = lay_out(self.num_processes, num_groups).constructors if are_light else None

    def move_near(self, name: str, node_names: Sequence[str]) -> bool:  # noqa: ARG002 - there is one machine
        return False

    def spawn(self, name: str, make: Callable[[Workplace], R], *, apart_from: str = "") -> Handle[R]:
        self._home.check()
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed; call overlord.start again")
            if name in self._roles:
                raise OverlordError(f"a role named {name!r} is already running")
            self._num_spawned += 1
            number = self._num_spawned
            process = None
            if not _is_planner(name):
                offered = self._offered_to(name, apart_from)
                process = offered[choose_process(name, [each.names for each in offered])]
                process.add(number, name, make)
                self._starting[name] = number, process
            self._roles[name] = number, process
        if process is None:
            self._make_here(number, name, make)
        self._directory.bind(name, lambda: self._location(number, process))
        return Handle(self, name)

    def wait_until_started(self, names: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        with self._lock:
            waited_for = [name for name in self._starting if names is None or name in names]
            starting = {name: self._starting.pop(name) for name in waited_for}
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        for name, (number, process) in starting.items():
            try:
                failed = process.wait_until_made(number, max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                raise WaitTimeoutError(
                    f"role {name!r} did not start within {timeout_s:.0f} s in worker process {process.index}; run fewer "
                    "processes (Processes(num_processes=)), or wait longer (Processes(patience_s=))"
                ) from None
            if isinstance(failed, str):
                raise WorkerDiedError(
                    f"worker processes die before role {name!r} is made, {failed}; standard error may say why. If memory "
                    "ran out, run fewer (Processes(num_processes=))"
                )
            if failed is not None:
                raise failed.open()

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NodeReply[Any]:
        return self._node.call(name, method, *args, **kwargs)

    call_near = call

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NodeReply[Any]:
        return self._node.call_once(name, method, *args, **kwargs)

    def shares_memory_with(self, name: str) -> bool:  # noqa: ARG002 - all processes are on this machine
        return True

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self._node.tell(name, method, *args, **kwargs)

    def rebind(self, name: str, to: str) -> None:
        with self._lock:
            old, self._roles[name] = self._roles[name], self._roles.pop(to)
            self._directory.rebind(name, to)
        self._drop(*old)

    def stop(self, name: str) -> None:
        with self._lock:
            role = self._roles.pop(name, None)
            self._starting.pop(name, None)
            self._directory.unbind(name)
        if role is not None:
            self._drop(*role)

    def publish(self, key: str, value: object) -> None:
        self._directory.publish(key, value)

    def look_up(self, key: str) -> Any:
        return self._directory.look_up(key)

    def store_use(self) -> None:
        return None

    def close(self) -> None:
        if not self._home.is_this:
            return  # a copy in a forked process: the run belongs to the parent
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._workplace is None:
            return
        self._node.close()
        self._directory.close()
        for process in self._processes:
            process.begin_closing()
        self._table.close()
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.finish_closing(max(deadline - time.monotonic(), 0.0))
        self._template.close()
        self._workplace.close()
        self._listener.close()
        self._node.peers.close()

    def _offered_to(self, name: str, apart_from: str) -> Sequence[HostProcess]:
        """The processes that a new role may be placed in."""
        avoided = self._roles[apart_from][1] if apart_from else None
        offered = [each for each in self._processes if each is not avoided] or self._processes
        if self._most_constructing is not None and kind_of(name) == _CONSTRUCTOR:
            constructing = [each for each in offered if any(kind_of(role) == _CONSTRUCTOR for role in each.names)]
            if len(constructing) >= self._most_constructing:
                return constructing
        return offered

    def _make_here(self, number: int, name: str, make: Callable[[Workplace], Any]) -> None:
        assert self._workplace is not None  # start opens an engine before it spawns
        self._table.announce(number, name)
        with self.recorder.current():
            failed = self._table.make(number, make, self._workplace)
        if failed is not None:
            self.stop(name)
            raise failed.open()

    def _location(self, number: int, process: HostProcess | None) -> Location:
        return Location(self._node.address, number) if process is None else process.location(number)

    def _drop(self, number: int, process: HostProcess | None) -> None:
        if process is None:
            self._table.forget(number)()
        else:
            process.drop(number, _CLOSE_S)

    @property
    def _num_cores(self) -> int:
        """How many cores each process may keep busy."""
        return max(num_usable_cores() // self.num_processes, 1)

    def _share(self, size: WorkplaceSize) -> WorkplaceSize:
        """What each process may use: as much as the job says, by default its share of the cores."""
        return WorkplaceSize(
            self._num_cores if size.num_workers is None else size.num_workers,
            size.num_processes or self._num_cores,
            machine_cores=num_usable_cores(),
            num_sharing=self.num_processes,
        )


def _is_planner(name: str) -> bool:
    return kind_of(name) == "planner"
