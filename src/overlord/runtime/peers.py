"""The connections of a process to others of its machine, over which roles call each other.

A call takes an idle connection to the other process, or a new one, and gives it back with the answer. Calls that nobody
waits for go over a connection of their own and are run in their order.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

from overlord.runtime.exclusive import OneProcess
from overlord.runtime.serving_threads import let_others_serve
from overlord.runtime.shared_memory import Connection, connect_to

RoleCall = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method's name, its arguments, and those by name."""

_QUICK_S = 0.001
"""After this time a thread that waits for an answer lets others serve: the answer may depend on that."""
_ONE_PROCESS = "Its connections belong to the process that started the run; start another run in this one"


class Peers:
    """The connections to other processes, by the addresses of their listeners. Thread-safe."""

    def __init__(self) -> None:
        self._idle: dict[str, deque[Connection]] = {}
        self._one_way: dict[str, _OneWay] = {}
        self._is_closed = False
        self._home = OneProcess("the engine of a run", _ONE_PROCESS)

    def send(self, address: str, request: Any) -> Connection:
        """Send a request over an idle connection, or a new one, which the caller has until it gives it back."""
        self._home.check()
        idle = self._idle.setdefault(address, deque())
        while True:
            try:
                connection, is_new = idle.pop(), False
            except IndexError:
                connection, is_new = connect_to(address), True
            try:
                connection.send(request)
            except (ConnectionError, EOFError):
                connection.close()  # it was of a process that has been replaced since
                if is_new:
                    raise
            except BaseException:
                connection.close()
                raise
            else:
                return connection

    def give_back(self, address: str, connection: Connection) -> None:
        """Keep a connection, whose request was answered, for the next request."""
        if self._is_closed:
            connection.close()
        else:
            self._idle[address].append(connection)

    def ask(self, address: str, request: Any) -> SentRequest:
        """Send a request, as `send` does; what is returned has the connection until the answer has come."""
        return SentRequest(self, address, self.send(address, request))

    def tell(self, address: str, number: int, call: RoleCall) -> None:
        """Send a call that nobody waits for. BlockingIOError if the process does not keep up, ConnectionError if it is
        gone."""
        self._one_way.setdefault(address, _OneWay(address)).send(number, call)

    def begin_closing(self) -> None:
        """Keep no connection whose request is answered from now on."""
        self._is_closed = True

    def close(self) -> None:
        """Close the connections that no call uses."""
        self._is_closed = True
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        for one_way in self._one_way.values():
            one_way.close()


class SentRequest:
    """A request that waits for its answer. One that is dropped closes its connection: an answer that nobody reads would be
    taken for that of the next request."""

    __slots__ = ("_address", "_connection", "_peers")

    def __init__(self, peers: Peers, address: str, connection: Connection) -> None:
        self._peers = peers
        self._address = address
        self._connection: Connection | None = connection

    def receive(self, timeout_s: float | None) -> Any:
        """The answer. TimeoutError if there is none after `timeout_s`; after any other error none will come."""
        connection = self._connection
        if connection is None:
            raise ConnectionResetError("the connection of this request is closed")
        try:
            answer = connection.receive() if timeout_s is None else _receive_answer(connection, timeout_s)
        except TimeoutError:
            raise
        except BaseException:
            self.drop()
            raise
        self._connection = None
        self._peers.give_back(self._address, connection)
        return answer

    def drop(self) -> None:
        """Give the request up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        self.drop()


def _receive_answer(connection: Connection, timeout_s: float) -> Any:
    """Wait for the answer to a request. TimeoutError after `timeout_s`, EOFError when the other process is gone."""
    with suppress(TimeoutError):
        return connection.receive(min(timeout_s, _QUICK_S))
    let_others_serve()
    return connection.receive(timeout_s)


class _OneWay:
    """The connection for calls to a process that nobody waits for: they are run there one after the other."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def send(self, number: int, call: RoleCall) -> None:
        """Send a call. BlockingIOError if the process does not keep up, ConnectionError if it is gone."""
        with self._lock:
            if self._connection is not None:
                try:
                    return self._connection.send((False, number, *call), waits=False)
                except ConnectionError:
                    self._connection.close()
            self._connection = connect_to(self._address)
            self._connection.send((False, number, *call), waits=False)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
