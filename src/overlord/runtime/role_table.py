"""The roles of one process, and the threads that run calls of other processes to them.

A role has a number, which no other role of the run ever has. The engine binds names to numbers.
"""

from __future__ import annotations

import logging
import pickle
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from overlord.errors import ClosedError, OverlordError
from overlord.runtime.serving_threads import ServingThreads
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.runtime.engine import Workplace
    from overlord.runtime.shared_memory import Connection, Listener

VALUE, RAISED, NOT_HERE = 0, 1, 2
"""What an answer is: (kind, value). NOT_HERE: the process does not have the role, or has it no longer."""
_RAISED_IN = "raised in role"
_log = logging.getLogger(__name__)


class RoleNotHere(Exception):
    """This process does not have the role. Never leaves the engine."""


@dataclass(slots=True)
class _Held:
    name: str
    made: threading.Event = field(default_factory=threading.Event)
    role: Any = None
    error: ErrorEnvelope | None = None


class RoleTable:
    """The roles of this process, by their numbers. A role that is announced and not made yet holds up its callers."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def announce(self, number: int, name: str) -> None:
        """Expect a role: calls to it wait until it is made."""
        self._held[number] = _Held(name)

    def make(self, number: int, make: Callable[[Workplace], Any], workplace: Workplace) -> ErrorEnvelope | None:
        """Make a role that was announced; returns the error that making it raised, which its callers get too."""
        held = self._held.get(number)
        if held is None:
            return None  # stopped meanwhile
        try:
            held.role = make(workplace)
        except Exception as error:  # noqa: BLE001 - raised in the process that asked for the role
            held.error = ErrorEnvelope.pickling(error, _RAISED_IN, held.name)
        held.made.set()
        if number not in self._held:
            _close(held)
        return held.error

    def wait_until_made(self, number: int) -> ErrorEnvelope | None:
        """Wait until a role is made; returns the error that making it raised, if any."""
        held = self._held.get(number)
        if held is None:
            return None  # stopped meanwhile
        held.made.wait()
        return held.error

    def fail(self, number: int, error: Exception) -> ErrorEnvelope:
        """Give up a role that was announced: its callers get this error."""
        found = ErrorEnvelope.pickling(error, _RAISED_IN, self._held[number].name)
        self._held[number].error = found
        self._held[number].made.set()
        return found

    def hold(self, number: int, name: str, role: object) -> None:
        """Add a role that is made already."""
        held = _Held(name, role=role)
        held.made.set()
        self._held[number] = held

    def call(self, number: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a role of this process, in this thread. RoleNotHere if it is not here, or was stopped during the call."""
        held = self._held.get(number)
        if held is None:
            raise RoleNotHere
        held.made.wait()
        if held.error is not None:
            raise held.error.open()
        try:
            return getattr(held.role, method)(*args, **kwargs)
        except ClosedError:
            if number not in self._held:
                raise RoleNotHere from None
            raise

    def name_of(self, number: int) -> str:
        held = self._held.get(number)
        return "" if held is None else held.name

    def forget(self, number: int) -> Callable[[], None]:
        """Forget a role: its callers are sent to the directory, which may know another. The function that is returned closes
        the role."""
        held = self._held.pop(number, None)
        return lambda: None if held is None else _close(held)

    def close(self) -> None:
        """Close every role, the newest first: a role is closed before those it calls."""
        for number in sorted(self._held, reverse=True):
            self.forget(number)()

    def status_lines(self) -> list[str]:
        """What the roles are busy with. Takes their locks, so that a process with a deadlocked role does not answer."""
        made = [held.role for held in list(self._held.values()) if hasattr(held.role, "status_lines")]
        return [line for role in made for line in role.status_lines()]


def _close(held: _Held) -> None:
    close = getattr(held.role, "close", None)
    if close is not None:
        close()


def accept_calls(listener: Listener, table: RoleTable) -> None:
    """Accept connections until the listener is closed, and answer the calls of each, one after the other."""
    threads = ServingThreads("overlord-answering")
    while True:
        try:
            connection = listener.accept()
        except OSError:
            return threads.close()
        threads.add(connection, partial(_answer_next, connection, table), connection.close)


def _answer_next(connection: Connection, table: RoleTable) -> bool:
    """Run the next call of a caller; returns whether the caller is still there."""
    try:
        try:
            is_wanted, number, method, args, kwargs = connection.receive()
        except (ConnectionError, EOFError):
            raise
        except Exception as error:  # noqa: BLE001 - unpickling imports the caller's own modules
            _log.warning("a call of another process could not be received: %s: %s", type(error).__name__, error)
            connection.send((RAISED, ErrorEnvelope.pickling(error, _RAISED_IN)))
            return True
        kind, value = run_call(table, number, method, args, kwargs)
        if is_wanted:
            _send(connection, kind, value, table.name_of(number), method)
        elif kind == RAISED:
            _log.debug("%s of %r failed, and nobody waited for it: %s", method, table.name_of(number), value)
    except (ConnectionError, EOFError):
        return False
    except OSError as error:  # not even the error could be sent
        _log.warning("the connection of a caller ends, and its call is repeated: %s", error)
        return False
    return True


def run_call(table: RoleTable, number: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, Any]:
    """Run a call of another process; returns its answer."""
    try:
        return VALUE, table.call(number, method, args, kwargs)
    except RoleNotHere:
        return NOT_HERE, None
    except Exception as error:  # noqa: BLE001 - raised again in the caller
        return RAISED, ErrorEnvelope.pickling(error, _RAISED_IN, table.name_of(number))


def _send(connection: Connection, kind: int, value: Any, name: str, method: str) -> None:
    """Send an answer, or the error why it cannot be sent: a caller takes a closed connection for the role's death."""
    try:
        connection.send((kind, value))
    except (ConnectionError, EOFError):
        raise  # the caller is gone
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, OSError, OverlordError) as error:
        _log.warning("the answer of %r to %s cannot be sent: %s: %s", name, method, type(error).__name__, error)
        connection.send((RAISED, ErrorEnvelope.pickling(error, _RAISED_IN, name)))
