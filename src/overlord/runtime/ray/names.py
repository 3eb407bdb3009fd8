"""Calls a role by its name, and retries when its actor dies or the name is bound to another actor.

The job's table binds a name to an actor. A process caches the binding, and looks it up again when the actor does not answer.
A call is retried until it is answered, the name is unbound, or the role has been gone for longer than `patience_s`.
"""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import cloudpickle
import ray
from ray import exceptions as ray_errors

from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.runtime import liveness
from overlord.runtime.ray.stored_calls import JobTable
from overlord.runtime.retry import Backoff
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_CHECK_S = liveness.RAY_REBOUND.after_s
_BACKOFF = Backoff(first_s=0.02, longest_s=0.5)
# The role or its node died, or a result was lost with its node. All other Ray errors are raised to the caller.
_GONE = (
    ray_errors.RayActorError,
    ray_errors.ObjectLostError,
    ray_errors.WorkerCrashedError,
    ray_errors.NodeDiedError,
)


class Names:
    """The names of one job. Pickled as its namespace, so that handles work inside actors."""

    is_in_process = False
    shares_memory = False

    def __init__(self, namespace: str, patience_s: float) -> None:
        self.namespace = namespace
        self.table = JobTable(namespace)
        self.patience_s = patience_s
        self.closed = threading.Event()
        self._actors: dict[str, tuple[str, Any]] = {}
        self._waiting = 0
        self._changed = threading.Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        return Names, (self.namespace, self.patience_s)

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RayReply:
        return RayReply(self, name, method.__name__, args, kwargs)

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        with suppress(ClosedError, WorkerDiedError):
            self.call(name, method, *args, **kwargs)

    def bind(self, name: str, actor: str) -> None:
        self.table.put(f"role/{name}", actor.encode())

    def unbind(self, name: str) -> None:
        self.table.delete(f"role/{name}")

    def publish(self, key: str, value: object) -> None:
        self.table.put(f"value/{key}", cloudpickle.dumps(value))

    def look_up(self, key: str) -> Any:
        found = None if self.closed.is_set() else self.table.get(f"value/{key}")
        if found is None:
            raise ClosedError(f"no value is published as {key!r}; the loader was closed")
        return pickle.loads(found)

    def look_up_actor(self, name: str) -> str:
        """Return the name of the actor that a role's name is bound to."""
        if self.closed.is_set():
            raise ClosedError(f"the engine of role {name!r} is closed; call overlord.start again")
        found = self.table.get(f"role/{name}")
        if found is None:
            raise ClosedError(f"no role named {name!r} is running; the loader was closed")
        return found.decode()

    def find_actor(self, name: str, refresh: bool) -> tuple[str, Any]:
        """Return the name and the handle of the actor that a role's name is bound to. `refresh` bypasses the cache."""
        if self.closed.is_set():
            raise ClosedError(f"the engine of role {name!r} is closed; call overlord.start again")
        known = self._actors.get(name)
        if known is None or refresh:
            actor = self.look_up_actor(name)
            if known is None or known[0] != actor:
                known = actor, ray.get_actor(actor, namespace=self.namespace)
                self._actors[name] = known
        return known

    def close(self, timeout_s: float) -> None:
        """Make every waiting caller of this process raise ClosedError, and wait until they all have."""
        self.closed.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    @contextmanager
    def count_waiter(self) -> Iterator[None]:
        """Count this thread among those that wait for a result; `close` waits until none is left."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()


class RayReply(Generic[T]):
    """The future of a call. Making it sends the call; `result` sends it again when the role dies or moves."""

    __slots__ = ("_actor", "_call", "_lost_at", "_name", "_names", "_pauses", "_ref")

    def __init__(self, names: Names, name: str, method: str, args: tuple, kwargs: dict) -> None:
        self._names = names
        self._name = name
        self._call = (method, args, kwargs)
        self._actor = ""
        self._ref: Any = None
        self._lost_at: float | None = None
        self._pauses = _BACKOFF.pauses()
        self._send(refresh=False)

    def result(self, timeout: float | None = None) -> T:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._names.count_waiter():
            while True:
                left = _CHECK_S if deadline is None else min(_CHECK_S, max(deadline - time.monotonic(), 0.0))
                try:
                    if self._ref is not None:
                        outcome: Any = ray.get(self._ref, timeout=left)
                        break
                except ray_errors.GetTimeoutError:
                    self._check(deadline, timeout)
                    if self._names.look_up_actor(self._name) != self._actor:
                        self._send(refresh=True)
                    continue
                except _GONE as error:
                    self._note_lost(error)
                self._check(deadline, timeout)
                self._names.closed.wait(next(self._pauses))
                self._send(refresh=True)
        if isinstance(outcome, ErrorEnvelope):
            raise outcome.open()
        return outcome

    def _send(self, refresh: bool) -> None:
        try:
            self._actor, actor = self._names.find_actor(self._name, refresh)
        except ValueError as error:  # the actor is gone; the name is about to be bound to another
            self._ref = None
            self._note_lost(error)
        else:
            self._ref = actor.call.remote(*self._call)

    def _check(self, deadline: float | None, timeout: float | None) -> None:
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError(f"role {self._name!r} did not answer {self._call[0]!r} within {timeout:.1f} s")

    def _note_lost(self, error: Exception) -> None:
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > self._names.patience_s:
            raise WorkerDiedError(
                f"role {self._name!r} died and did not come back within {now - self._lost_at:.0f} s; see Ray's logs for why "
                "and whether the cluster still has a node with room for it (Ray(patience_s=) waits longer)"
            ) from error
