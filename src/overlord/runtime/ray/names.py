"""Calls a role by its name, and retries when its actor dies or the name is bound to another role.

The job's table binds a name to a role in an actor, and says on which node the actor is and where it listens. A process
caches what the table says, and looks it up again when the role does not answer. An actor on the same node is called over a
socket of the machine: that takes a twentieth of an actor call's CPU time, and arrays can stay in shared memory. Where that
connection is lost the call is sent again as an actor call, which Ray holds until the actor is back. A call is retried until
it is answered, the name is unbound, or the role has been gone for longer than `patience_s`.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

import cloudpickle
import ray
from ray import exceptions as ray_errors

from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.runtime import liveness
from overlord.runtime.peers import Peers, RoleCall, SentRequest
from overlord.runtime.ray.stored_calls import JobTable, StoredCall
from overlord.runtime.ray.telling import RemoteTells
from overlord.runtime.retry import Backoff
from overlord.runtime.role_table import NOT_HERE, RAISED, RoleNotHere, RoleTable, run_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

_CHECK_S = liveness.RAY_REBOUND.after_s
_BACKOFF = Backoff(first_s=0.02, longest_s=0.5)
# The role or its node died, or a result was lost with its node. All other Ray errors are raised to the caller.
_GONE = (
    ray_errors.RayActorError,
    ray_errors.ObjectLostError,
    ray_errors.WorkerCrashedError,
    ray_errors.NodeDiedError,
    RoleNotHere,
    EOFError,
    OSError,
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Binding:
    """The role that a name is bound to."""

    actor: str
    number: int

    def encode(self) -> bytes:
        return f"{self.number} {self.actor}".encode()

    @staticmethod
    def decode(encoded: bytes) -> Binding:
        number, _, actor = encoded.decode().partition(" ")
        return Binding(actor, int(number))


@dataclass(frozen=True, slots=True)
class HostedRole:
    """A role of an actor, and the call that makes it."""

    number: int
    name: str
    make: StoredCall


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Where an actor is. Another one after a restart."""

    node: str
    address: str | None
    """Of its listener; None where the node has no shared memory."""


_known: WeakValueDictionary[str, Names] = WeakValueDictionary()
_known_lock = threading.Lock()


def find_names(namespace: str, patience_s: float) -> Names:
    """The names of a job in this process. Every handle of the job shares them, and their connections."""
    with _known_lock:
        names = _known.get(namespace)
        if names is None or names.closed.is_set():
            names = _known[namespace] = Names(namespace, patience_s)
        return names


class Names:
    """The names of one job. Pickled as its namespace, so that handles work inside actors. Use `find_names`."""

    is_in_process = False
    shares_memory = True
    is_one_machine = False

    def __init__(self, namespace: str, patience_s: float) -> None:
        self.namespace = namespace
        self.table = JobTable(namespace)
        self.patience_s = patience_s
        self.closed = threading.Event()
        self.peers = Peers()
        self._node = ray.get_runtime_context().get_node_id()
        self._bound: dict[str, Binding] = {}
        self._actors: dict[str, Any] = {}
        self._places: dict[str, ActorPlace] = {}
        self._here: tuple[str, RoleTable] | None = None
        self._tells = RemoteTells()
        self._waiting = 0
        self._changed = threading.Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        return find_names, (self.namespace, self.patience_s)

    def host(self, actor: str, table: RoleTable, address: str | None) -> None:
        """Say that this process is an actor, which has the roles of `table` and listens at `address`."""
        self._here = actor, table
        self.table.put(f"place/{actor}", pickle.dumps(ActorPlace(self._node, address)))

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RoleReply[Any]:
        return RoleReply(self, name, (method.__name__, args, kwargs))

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RoleReply[Any]:
        return RoleReply(self, name, (method.__name__, args, kwargs), is_once=True)

    def call_near(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RoleReply[Any]:
        return RoleReply(self, name, (method.__name__, args, kwargs), only_near=True)

    def shares_memory_with(self, name: str) -> bool:
        try:
            return self.near_address(self.find(name)) is not None
        except ClosedError:
            return False

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        call = method.__name__, args, kwargs
        try:
            bound = self.find(name)
            table, address = self.table_here(bound), self.near_address(bound)
            if table is not None:
                table.call(bound.number, *call)
            elif address is None:
                self._tells.send(self.actor(bound.actor), bound.number, call)
            else:
                self.peers.tell(address, bound.number, call)
        except Exception as error:  # noqa: BLE001 - nobody waits for it: whoever needs a result calls, and gets the error
            self.forget(name)
            _log.debug("%r was told to %s in vain: %s", name, method.__name__, error)

    def bind(self, name: str, binding: Binding) -> None:
        self.table.put(f"role/{name}", binding.encode())

    def unbind(self, name: str) -> None:
        self.table.delete(f"role/{name}")

    def list_roles(self, actor: str, roles: Sequence[HostedRole]) -> None:
        """Note which roles an actor makes whenever it starts."""
        self.table.put(f"roles/{actor}", pickle.dumps(tuple(roles)))

    def listed_roles(self, actor: str) -> tuple[HostedRole, ...]:
        """The roles of an actor."""
        listed = self.table.get(f"roles/{actor}")
        return () if listed is None else pickle.loads(listed)

    def publish(self, key: str, value: object) -> None:
        self.table.put(f"value/{key}", cloudpickle.dumps(value))

    def look_up(self, key: str) -> Any:
        found = None if self.closed.is_set() else self.table.get(f"value/{key}")
        if found is None:
            raise ClosedError(f"no value is published as {key!r}; the loader was closed")
        return pickle.loads(found)

    def find(self, name: str, *, refresh: bool = False) -> Binding:
        """What a name is bound to. `refresh` bypasses the cache. ClosedError if it is not bound."""
        if self.closed.is_set():
            raise ClosedError(f"the engine of role {name!r} is closed; call overlord.start again")
        known = None if refresh else self._bound.get(name)
        if known is None:
            found = self.table.get(f"role/{name}")
            if found is None:
                raise ClosedError(f"no role named {name!r} is running; the loader was closed")
            known = self._bound[name] = Binding.decode(found)
        return known

    def forget(self, name: str) -> None:
        """Look up what a name is bound to, and where that is, before the next call."""
        bound = self._bound.pop(name, None)
        if bound is not None:
            self._places.pop(bound.actor, None)

    def actor(self, actor: str) -> Any:
        """The handle of an actor. ValueError if it is gone."""
        known = self._actors.get(actor)
        if known is None:
            known = self._actors[actor] = ray.get_actor(actor, namespace=self.namespace)
        return known

    def near_address(self, bound: Binding) -> str | None:
        """Where the actor of a role listens, if it is on this node."""
        place = self._places.get(bound.actor)
        if place is None:
            found = self.table.get(f"place/{bound.actor}")
            if found is None:
                return None  # it has not started yet, or has no shared memory
            place = self._places[bound.actor] = pickle.loads(found)
        return place.address if place.node == self._node else None

    def node_of(self, actor: str) -> str | None:
        """The node of an actor; None if it has not started yet."""
        found = self.table.get(f"place/{actor}")
        return None if found is None else pickle.loads(found).node

    def table_here(self, bound: Binding) -> RoleTable | None:
        """The roles of this process, if a name is bound to one of them."""
        return None if self._here is None or self._here[0] != bound.actor else self._here[1]

    def close(self, timeout_s: float) -> None:
        """Make every waiting caller of this process raise ClosedError, and wait until they all have."""
        self.closed.set()
        self.peers.begin_closing()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
        self.peers.close()
        self._tells.close()

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
                if not self._waiting:
                    self._changed.notify_all()


class RoleReply(Generic[T]):
    """The future of a call. Making it sends the call, unless the role is in this process: then `result` runs it. `result`
    sends it again when the role dies or moves; not when it dies if it `is_once`, and never if the call goes `only_near`,
    over a socket of the machine."""

    __slots__ = ("_bound", "_call", "_is_once", "_lost_at", "_name", "_names", "_only_near", "_pauses", "_ref", "_sent")

    def __init__(self, names: Names, name: str, call: RoleCall, only_near: bool = False, is_once: bool = False) -> None:
        self._names = names
        self._name = name
        self._call = call
        self._only_near = only_near
        self._is_once = is_once or only_near
        self._sent: SentRequest | None = None  # over a socket of the machine
        self._ref: Any = None
        self._lost_at: float | None = None
        self._pauses = _BACKOFF.pauses()
        self._bound = names.find(name)
        self._send(is_near_tried=False)

    def result(self, timeout: float | None = None) -> T:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._names.count_waiter():
            while True:
                left_s = _CHECK_S if deadline is None else min(_CHECK_S, max(deadline - time.monotonic(), 0.0))
                try:
                    kind, value = self._receive(left_s)
                except TimeoutError:
                    self._check(deadline, timeout)
                    found = self._names.find(self._name, refresh=True)
                    if found != self._bound:
                        self._bound = found
                        self._send(is_near_tried=False)
                    continue
                except _GONE as error:
                    self._note_lost(error)
                else:
                    if kind == RAISED:
                        raise value.open()
                    return value
                self._check(deadline, timeout)
                self._names.closed.wait(next(self._pauses))
                self._bound = self._names.find(self._name, refresh=True)
                self._send(is_near_tried=True)

    def _receive(self, timeout_s: float) -> tuple[int, Any]:
        """The kind of the answer, and the answer. TimeoutError if there is none yet; one of `_GONE` if none will come."""
        table = self._names.table_here(self._bound)
        if table is not None:
            kind, value = run_call(table, self._bound.number, *self._call)
            if kind == NOT_HERE:
                raise RoleNotHere
            return kind, value
        if self._sent is not None:
            kind, value = self._sent.receive(timeout_s)
        elif self._ref is not None:
            kind, value = ray.get(self._ref, timeout=timeout_s)
        else:
            raise ConnectionRefusedError(f"the actor of role {self._name!r} is gone")
        if kind == NOT_HERE:
            raise RoleNotHere(f"role {self._name!r} is not in {self._bound.actor}")
        return kind, value

    def _send(self, is_near_tried: bool) -> None:
        """Send the call over a socket of the machine if the role is near, and that was not tried before; else as an actor
        call."""
        if self._sent is not None:
            self._sent.drop()
        self._sent = self._ref = None
        if self._names.table_here(self._bound) is not None:
            return
        near = None if is_near_tried else self._names.near_address(self._bound)
        if near is not None:
            try:
                self._sent = self._names.peers.ask(near, (True, self._bound.number, *self._call))
                return
            except (ConnectionError, EOFError, BlockingIOError) as error:
                self._names.forget(self._name)
                if self._is_once:
                    raise self._out_of_reach() from error
        if self._only_near:
            raise self._out_of_reach()
        try:
            self._ref = self._names.actor(self._bound.actor).call.remote(self._bound.number, *self._call)
        except ValueError as error:  # the actor is gone; the name is about to be bound to another
            self._note_lost(error)

    def _check(self, deadline: float | None, timeout: float | None) -> None:
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError(f"role {self._name!r} did not answer {self._call[0]!r} within {timeout:.1f} s")

    def _note_lost(self, error: Exception) -> None:
        self._names.forget(self._name)
        if self._is_once:
            raise self._out_of_reach() from error
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > self._names.patience_s:
            raise WorkerDiedError(
                f"role {self._name!r} died and did not come back within {now - self._lost_at:.0f} s; see Ray's logs for why "
                "and whether the cluster still has a node with room for it (Ray(patience_s=) waits longer)"
            ) from error

    def _out_of_reach(self) -> ClosedError:
        return ClosedError(f"role {self._name!r} is not on this node, or was lost")
