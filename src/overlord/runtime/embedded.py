"""The engine that runs every role in this process. A call to a role is a plain call in the caller's thread; roles guard
their own state."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from overlord.errors import ClosedError, OverlordError, SpecError
from overlord.runtime.engine import EarlyLoad, Handle, Workplace, WorkplaceSize
from overlord.runtime.recorder import Recorder, current_recorder, reset_recorder, set_recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

R = TypeVar("R")
T = TypeVar("T")


class Immediate(Generic[T]):
    """The result of a call that was made already."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T:  # noqa: ARG002 - of the protocol
        return self._value


class Embedded:
    """The engine for one process: no server, no cluster, no setup."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._roles: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._workplace: Workplace | None = None

    def open(self, size: WorkplaceSize, loads: Sequence[EarlyLoad] = ()) -> None:  # noqa: ARG002 - nothing is forked
        if self._workplace is not None:
            raise SpecError("this engine runs a job already; give each overlord.start its own")
        with self.recorder.current():
            self._workplace = Workplace(size)

    def spawn(self, name: str, make: Callable[[Workplace], R], *, apart_from: str = "") -> Handle[R]:  # noqa: ARG002 - all roles are in this process
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed; call overlord.start again")
            if name in self._roles:
                raise OverlordError(f"a role named {name!r} is already running")
        assert self._workplace is not None  # start opens an engine before it spawns
        with self.recorder.current():
            role = make(self._workplace)
        with self._lock:
            self._roles[name] = role
        return Handle(self, name)

    is_in_process = True
    shares_memory = False
    is_one_machine = True
    keeps_planner = True
    log_table = None
    most_hosts = None
    roles_live_on = False

    @property
    def num_hosts(self) -> int | None:
        return None

    def place_near(self, nodes: Sequence[str]) -> None:
        raise SpecError(
            f"near={list(nodes)} names nodes of a cluster, and this job runs in one process: leave near out, or run the job "
            "with engine=ol.Ray(address)"
        )

    near = ()

    def expect_trainers(self, names: Sequence[Sequence[str]]) -> None:
        """Do nothing: there is one machine."""

    trainers_are_near = False

    def expect_groups(self, num_groups: int, *, are_light: bool) -> None:
        """Do nothing: there is one process."""

    def move_near(self, name: str, node_names: Sequence[str]) -> bool:  # noqa: ARG002 - there is one machine
        return False

    def wait_until_started(self, names: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        """Return at once: `spawn` has made every role before it returned."""

    def publish(self, key: str, value: object) -> None:
        self._values[key] = value

    def look_up(self, key: str) -> Any:
        if self._closed or key not in self._values:
            raise ClosedError(f"no value is published as {key!r}; the loader was closed")
        return self._values[key]

    def store_use(self) -> None:
        return None

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        role = self._roles.get(name)
        if role is None:
            raise ClosedError(f"no role named {name!r} is running; the loader was closed")
        if current_recorder() is self.recorder:
            return Immediate(getattr(role, method.__name__)(*args, **kwargs))
        token = set_recorder(self.recorder)  # the first call of a thread of the user, or of a server
        try:
            return Immediate(getattr(role, method.__name__)(*args, **kwargs))
        finally:
            reset_recorder(token)

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        return self.call(name, method, *args, **kwargs)

    def call_near(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        return self.call(name, method, *args, **kwargs)

    def shares_memory_with(self, name: str) -> bool:  # noqa: ARG002 - all roles are in this process
        return self.shares_memory

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        with suppress(ClosedError):
            self.call(name, method, *args, **kwargs)

    def rebind(self, name: str, to: str) -> None:
        with self._lock:
            old, self._roles[name] = self._roles[name], self._roles.pop(to)
        _close(old)

    def stop(self, name: str) -> None:
        with self._lock:
            role = self._roles.pop(name, None)
        _close(role)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            roles, self._roles = list(self._roles.values()), {}
        busy = [line for role in roles if hasattr(role, "status_lines") for line in role.status_lines()]
        for role in reversed(roles):  # a role is closed before those it calls
            _close(role)
        if self._workplace is not None:
            self._workplace.close(busy)


def _close(role: Any) -> None:
    close = getattr(role, "close", None)
    if close is not None:
        close()
