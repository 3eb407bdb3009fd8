"""What runs inside a worker process of the engine: make roles, answer calls, until the parent is gone or says so."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import resource
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.runtime.engine import Workplace
from overlord.runtime.interpreters import belong_to
from overlord.runtime.processes.control import (
    CheckHealth,
    DropRole,
    EndProcess,
    LogSender,
    MakeRoles,
    ProcessHealth,
    ProcessStarted,
    RoleDropped,
    RoleMade,
    Setup,
)
from overlord.runtime.processes.node import Node
from overlord.runtime.role_table import RoleTable, accept_calls
from overlord.runtime.shared_memory import Connection, Listener

if TYPE_CHECKING:
    from collections.abc import Callable


def main(control_number: int, listener_number: int, index: int, parent: int) -> None:
    belong_to(parent, f"overlord-{index}")
    faulthandler.enable()
    _allow_many_files()
    control = Connection(socket.socket(fileno=control_number))
    try:
        setup: Setup = control.receive()
        _Worker(control, setup, Listener(listener_number)).run()
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent is gone: there is nobody to clean up for


class _Worker:
    def __init__(self, control: Connection, setup: Setup, listener: Listener) -> None:
        self._control = control
        self._sending = threading.RLock()  # the first message that is sent in packets logs so, which is a message too
        self._listener = listener
        self._table = RoleTable()
        self._workplace = Workplace(setup.size)
        # Kept, because handles find the node of this process by the run's address.
        self._node = Node(setup.run, listener.address, self._table, None, setup.patience_s)
        self._is_accepting = False
        pa.set_cpu_count(setup.num_cores)
        logging.getLogger().addHandler(LogSender(self._send))
        logging.getLogger("overlord").setLevel(setup.log_level)

    def run(self) -> None:
        """Do what the parent says. This thread does nothing that takes long, so that it answers health checks."""
        self._send(ProcessStarted())
        while True:
            message = self._control.receive()
            if isinstance(message, MakeRoles):
                self._begin_roles(message)
            elif isinstance(message, DropRole):
                self._start_thread(self._close_role, message.number, self._table.forget(message.number))
            elif isinstance(message, CheckHealth):
                self._send(ProcessHealth(tuple(self._table.status_lines())))
            elif isinstance(message, EndProcess):
                self._end()

    def _begin_roles(self, message: MakeRoles) -> None:
        for number, name in message.roles:
            self._table.announce(number, name)
        self._start_thread(self._make_roles, message)
        if not self._is_accepting:  # now that the roles are known, calls to them wait instead of being sent away
            self._is_accepting = True
            self._start_thread(accept_calls, self._listener, self._table)

    def _make_roles(self, message: MakeRoles) -> None:
        try:
            makes = pickle.loads(message.pickled)
        except Exception as error:  # noqa: BLE001 - unpickling imports the user's own modules
            for number, _ in message.roles:
                self._send(RoleMade(number, self._table.fail(number, error)))
            return
        # Side by side: a role may wait for another of this process while it is made.
        for (number, _), make in zip(message.roles, makes, strict=True):
            self._start_thread(self._make_role, number, make)

    def _make_role(self, number: int, make: Any) -> None:
        self._send(RoleMade(number, self._table.make(number, make, self._workplace)))

    def _close_role(self, number: int, close: Callable[[], None]) -> None:
        try:
            close()
        finally:
            self._send(RoleDropped(number))

    def _end(self) -> None:
        self._node.close()
        self._table.close()
        self._workplace.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without waiting for threads that answer callers

    def _send(self, message: object) -> None:
        with self._sending:
            self._control.send(message)

    def _start_thread(self, call: Any, *args: Any) -> None:
        threading.Thread(target=call, args=args, name=f"overlord-{call.__name__}", daemon=True).start()


def _allow_many_files() -> None:
    """Raise the limit on open files: every connection and every piece of shared memory on its way here is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
