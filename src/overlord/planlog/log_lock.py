"""Keeps two runs from writing one log in a folder. On object stores and in a cluster's table, where nothing is freed when a
process dies, the newer run takes the log over, and the older one is told: see `PlanLog.check_own`.

The lock is a POSIX record lock on a file in the folder, held by the process of the run. The system frees it when that
process ends, however it ends, so that a run can be started again at once. Forked processes do not inherit it. Where a file
system has no locks, the log is used without one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
from errno import EACCES, EAGAIN
from typing import TYPE_CHECKING

from overlord.errors import SharedUseError
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    from overlord.declare.policies import Log

_log = logging.getLogger("overlord.planlog")

FILE = "lock"
_MOST_BYTES = 500

_guard = threading.Lock()
_held: dict[tuple[int, str], LogLock] = {}  # by process and file: a process can take its own record locks again


class LogLock:
    """The log of a run, locked. `release` may be called twice."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._key = os.getpid(), path
        self._descriptor = descriptor

    def release(self) -> None:
        with _guard:
            if _held.pop(self._key, None) is not None and self._key[0] == os.getpid():
                os.close(self._descriptor)


def lock_log(log: Log) -> LogLock | None:
    """Lock a log in a folder for a run of this process. Raises SharedUseError if another run has it. None for other logs,
    and where locks do not work; whether the folder can be written shows when the log is."""
    location = os.fspath(log.location)
    if is_remote(location) and not location.startswith("file://"):
        return None
    folder = os.path.realpath(location.removeprefix("file://"))
    path = os.path.join(folder, FILE)
    with _guard:
        if (os.getpid(), path) in _held:  # before it is opened: closing it again would free the lock
            raise SharedUseError(
                f"the log at {log.location} belongs to a run of this process that was not closed: two runs in one log would "
                "undo each other's recovery; close that loader first, or give this one another log=..."
            )
        try:
            os.makedirs(folder, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, this_process().encode(), 0)
        except OSError as error:
            owner = _read_owner(descriptor) if error.errno in (EACCES, EAGAIN) else None
            os.close(descriptor)
            if owner is None:
                _log.warning(
                    "%s cannot be locked: %s. A second run that is given this log by mistake will not be refused",
                    path,
                    error,
                )
                return None
            raise SharedUseError(
                f"the log at {log.location} belongs to a run in {owner}, which is alive: two runs in one log would undo "
                "each other's recovery; stop that run first, or give this one another log=..."
            ) from None
        lock = _held[os.getpid(), path] = LogLock(path, descriptor)
        return lock


def this_process() -> str:
    """How messages name this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _read_owner(descriptor: int) -> str:
    return os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").strip() or "another process"
