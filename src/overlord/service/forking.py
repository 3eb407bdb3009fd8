"""Guards against forks, which gRPC does not survive. The child has none of gRPC's threads, so a call in it hangs for ever,
also at interpreter exit. A child may therefore not connect, and must not close the connections that it inherited."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Any

from overlord.errors import SharedUseError

if TYPE_CHECKING:
    from overlord.runtime.shared_memory import Connection, Listener

_first_process: int | None = None  # the process that made the first connection or server
_protected: weakref.WeakSet[Any] = weakref.WeakSet()
_local: weakref.WeakSet[Connection | Listener] = weakref.WeakSet()


def check_not_forked() -> None:
    """Raise SharedUseError in a process whose parent had used gRPC when it forked: calls would hang past their deadlines."""
    global _first_process
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():
        raise SharedUseError(
            f"process {os.getpid()} was forked from process {_first_process}, which had connected to a service or served "
            "one: gRPC does not survive a fork. Start processes with multiprocessing's 'spawn' method, or fork before the "
            "first connect or serve, and call overlord.connect in each process"
        )


def protect_in_forks(flight_object: Any) -> None:
    """Keep children of this process from closing a Flight client or server."""
    _protected.add(flight_object)


def close_in_forks(end: Connection | Listener) -> None:
    """Close a child's copy of a unix socket, so that the other side notices the end of this process while the child lives
    on."""
    _local.add(end)


def _leave_to_parent() -> None:
    """In the child, keep the garbage collector and exit hooks from closing the parent's connections and servers."""
    for end in list(_local):
        end.close_here()
    for flight_object in list(_protected):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(flight_object))  # never finalised
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] in _protected:
            finalizer.atexit = False  # pyarrow's finalizer would shut the server down


os.register_at_fork(after_in_child=_leave_to_parent)
