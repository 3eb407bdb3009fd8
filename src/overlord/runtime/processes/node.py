"""One process of a run: finds roles by name, calls them, and repeats the call when a process dies or a name is rebound.

A call to a role of the same process runs in the thread that asks for its result. A call to another process takes an idle
connection to it, or a new one, and gives it back with the result. Names are bound by the directory in the process that
started the run; other processes cache what it says, and ask again when a process does not have the role, is lost, or has not
answered for a second. A call is repeated until it is answered, the name is unbound, or its process has been lost for longer
than `patience_s`.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from overlord.errors import ClosedError, OverlordError, WaitTimeoutError, WorkerDiedError
from overlord.runtime import liveness
from overlord.runtime.peers import Peers, SentRequest
from overlord.runtime.retry import Backoff
from overlord.runtime.role_table import NOT_HERE, RAISED, VALUE, RoleNotHere, RoleTable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DIRECTORY = 0
"""The number of the directory among the roles of the process that started the run."""
_CHECK_S = liveness.PROCESS_REBOUND.after_s
_BACKOFF = Backoff(first_s=0.02, longest_s=0.5)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Location:
    """Where the role is that a name is bound to."""

    address: str
    """Of the process's listener. It stays the same when the process is replaced."""
    number: int
    is_up: bool = True
    ended: str = ""
    """How the process ended the last time that it did."""


class Locator(Protocol):
    """Knows the roles and the published values of a run: the directory itself, or a connection to it."""

    def locate(self, name: str) -> Location: ...

    def look_up(self, key: str) -> Any: ...


_nodes: WeakValueDictionary[str, Node] = WeakValueDictionary()
"""The runs that this process takes part in."""


def find_node(run: str) -> Node:
    """What an engine is pickled as."""
    node = _nodes.get(run)
    if node is None:
        raise OverlordError("a handle of a run can only be used in the processes of that run")
    return node


class Node:
    """This process as part of a run. In worker processes it is the engine of their roles. Thread-safe."""

    is_in_process = False
    shares_memory = True
    is_one_machine = True

    def __init__(self, run: str, address: str, table: RoleTable, locator: Locator | None, patience_s: float) -> None:
        """`locator` None: the directory is in the process that listens at the address `run`."""
        self.run = run
        self.address = address
        self.patience_s = patience_s
        self.closed = threading.Event()
        self._table = table
        self._locator: Locator = _Asking(self) if locator is None else locator
        self._is_caching = locator is None
        self._locations: dict[str, Location] = {}
        self.peers = Peers()
        _nodes[run] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return find_node, (self.run,)

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NodeReply[Any]:
        return NodeReply(self, name, (method.__name__, args, kwargs))

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NodeReply[Any]:
        return NodeReply(self, name, (method.__name__, args, kwargs), is_once=True)

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        call = method.__name__, args, kwargs
        try:
            location = self.locate(name)
            if location.address == self.address:
                self.run_here(location.number, call)
            else:
                self.peers.tell(location.address, location.number, call)
        except Exception as error:  # noqa: BLE001 - nobody waits for it: whoever needs a result calls, and gets the error
            _log.debug("%r was told to %s in vain: %s", name, method.__name__, error)

    def shares_memory_with(self, name: str) -> bool:  # noqa: ARG002 - all processes are on this machine
        return True

    call_near = call

    def look_up(self, key: str) -> Any:
        if self.closed.is_set():
            raise ClosedError(f"no value is published as {key!r}; the loader was closed")
        return self._locator.look_up(key)

    def locate(self, name: str, *, refresh: bool = False) -> Location:
        """Where a role is. `refresh` bypasses the cache. ClosedError if the name is not bound."""
        if self.closed.is_set():
            raise ClosedError(f"the engine of role {name!r} is closed; call overlord.start again")
        known = None if refresh or not self._is_caching else self._locations.get(name)
        if known is None:
            known = self._locations[name] = self._locator.locate(name)
        return known

    def run_here(self, number: int, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Any:
        """Run a call to a role of this process."""
        return self._table.call(number, *call)

    def close(self) -> None:
        """Make every caller of this process raise ClosedError, at the latest when the process that it waits for is gone."""
        self.closed.set()
        self.peers.begin_closing()


class _Asking:
    """The directory, as seen from another process."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def locate(self, name: str) -> Location:
        return self._ask("locate", name)

    def look_up(self, key: str) -> Any:
        return pickle.loads(self._ask("pickled_value", key))

    def _ask(self, method: str, key: str) -> Any:
        node = self._node
        try:
            kind, value = node.peers.ask(node.run, (True, DIRECTORY, method, (key,), {})).receive(None)
        except (ConnectionError, EOFError):
            raise ClosedError("the process that started this run is gone") from None
        if kind == VALUE:
            return value
        raise value.open() if kind == RAISED else ClosedError("the engine of this run is closed; call overlord.start again")


class NodeReply(Generic[T]):
    """The future of a call. Making it sends the call, unless the role is in this process: then `result` runs it. `result`
    sends it again when the role dies, unless it `is_once`."""

    __slots__ = ("_call", "_is_here", "_is_once", "_location", "_lost_at", "_name", "_node", "_outcome", "_pauses", "_sent")

    def __init__(
        self, node: Node, name: str, call: tuple[str, tuple[Any, ...], dict[str, Any]], is_once: bool = False
    ) -> None:
        self._node = node
        self._is_once = is_once
        self._name = name
        self._call = call
        self._sent: SentRequest | None = None
        self._outcome: tuple[int, Any] | None = None
        self._lost_at: float | None = None
        self._pauses = _BACKOFF.pauses()
        self._location = node.locate(name)
        self._send()

    def result(self, timeout: float | None = None) -> T:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            if self._is_here:
                self._run_here()
                continue
            left_s = _CHECK_S if deadline is None else min(_CHECK_S, max(deadline - time.monotonic(), 0.0))
            try:
                self._receive(left_s)
                continue
            except TimeoutError:
                is_lost = self._has_moved()
            except (RoleNotHere, ConnectionError, EOFError, BlockingIOError) as error:
                if self._is_once:
                    raise ClosedError(f"role {self._name!r} was lost") from error
                is_lost = True
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(f"role {self._name!r} did not answer {self._call[0]!r} within {timeout:.1f} s")
            if is_lost:
                self._send_again()
        kind, value = self._outcome
        if kind == RAISED:
            raise value.open()
        return value

    def _run_here(self) -> None:
        try:
            self._outcome = VALUE, self._node.run_here(self._location.number, self._call)
        except RoleNotHere:
            self._send_again()

    def _receive(self, timeout_s: float) -> None:
        """Set the outcome if it comes in time."""
        if self._sent is None:
            raise ConnectionRefusedError(f"the process of role {self._name!r} cannot be reached")
        outcome = self._sent.receive(timeout_s)
        if outcome[0] == NOT_HERE:
            raise RoleNotHere
        self._outcome = outcome

    def _has_moved(self) -> bool:
        """True if the name is bound to another role since the call was sent."""
        found = self._node.locate(self._name, refresh=True)
        if not found.is_up:
            self._note_lost(found)
        return found.number != self._location.number

    def _send_again(self) -> None:
        if self._sent is not None:
            self._sent.drop()
        found = self._node.locate(self._name, refresh=True)
        if found.number == self._location.number:
            self._note_lost(found)
            self._node.closed.wait(next(self._pauses))
        self._location = found
        self._send()

    def _send(self) -> None:
        self._is_here = self._location.address == self._node.address
        if self._is_here:
            return
        try:
            self._sent = self._node.peers.ask(self._location.address, (True, self._location.number, *self._call))
        except (ConnectionError, EOFError, BlockingIOError):
            self._sent = None  # `result` tries again

    def _note_lost(self, found: Location) -> None:
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > self._node.patience_s:
            raise WorkerDiedError(
                f"role {self._name!r} died and did not come back within {now - self._lost_at:.0f} s"
                f"{f': its process ended with {found.ended}' if found.ended else ''}. Its messages are in the log of this "
                "program; if memory ran out, run fewer processes (Processes(num_processes=)) or smaller buffers "
                "(buffer_bytes=); Processes(patience_s=) waits longer"
            )
