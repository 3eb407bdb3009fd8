"""Guards that restrict a client or a loader to the process that made it, and to one thread at a time.

Neither threads nor connections survive a fork, and locks may be held by threads that no longer exist. A copy in a forked
process would take the same steps as the original, or wait forever. So using the copy raises SharedUseError, and closing it
does nothing.
"""

from __future__ import annotations

import os
import threading

from overlord.errors import SharedUseError


class OneProcess:
    """Raises SharedUseError in any process but the one that made the guarded object."""

    __slots__ = ("_remedy", "_what", "pid")

    def __init__(self, what: str, remedy: str) -> None:
        self._what = what
        self._remedy = remedy
        self.pid = os.getpid()

    @property
    def is_this(self) -> bool:
        return os.getpid() == self.pid

    def check(self) -> None:
        if os.getpid() != self.pid:
            raise SharedUseError(
                f"{self._what} was made in process {self.pid} and is used in process {os.getpid()}, which was forked from "
                f"it: a copy would take the same steps as the original, or wait forever. {self._remedy}"
            )


class OneThread:
    """Admits one thread at a time, and raises SharedUseError in a second one, which would block. Threads may take turns."""

    __slots__ = ("_remedy", "_what", "lock", "user")

    def __init__(self, what: str, remedy: str) -> None:
        self._what = what
        self._remedy = remedy
        self.lock = threading.Lock()
        """Held by the thread that is inside."""
        self.user = 0
        """The identifier of that thread."""

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise self.error()
        self.user = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def error(self) -> SharedUseError:
        """The error for a second thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return SharedUseError(
            f"{self._what} is in use in thread {names.get(self.user, str(self.user))!r} and was called in thread "
            f"{threading.current_thread().name!r}: two threads at once would share out one rank's steps by chance. "
            f"{self._remedy}"
        )
