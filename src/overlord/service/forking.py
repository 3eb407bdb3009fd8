"""gRPC does not survive a fork: its threads are gone in the child, and whatever waits for one of them waits for ever, at the
end of the process too. So a child makes no connection of its own, and lets go of those that it got without closing them."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from overlord.errors import SharedUseError

_user: int | None = None  # the process that made a connection or a server first
_held: weakref.WeakSet[Any] = weakref.WeakSet()


def check_not_forked() -> None:
    """Raises in a process whose parent had used gRPC when it forked: a call would hang, whatever its deadline."""
    global _user
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise SharedUseError(
            f"process {os.getpid()} was forked from process {_user}, which had connected to a service or served one: gRPC "
            "does not survive a fork. Start processes with multiprocessing's 'spawn' method, or fork before the first "
            "connect or serve, and call overlord.connect in each process"
        )


def hold(flight_object: Any) -> None:
    """Remember a Flight client or server, for the case that this process forks."""
    _held.add(flight_object)


def _let_go() -> None:
    """In the child: never close what the parent uses."""
    for flight_object in list(_held):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(flight_object))  # so that it is never finalised
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] in _held:
            finalizer.atexit = False  # pyarrow's, which would shut a server down


os.register_at_fork(after_in_child=_let_go)
