"""Who may use a client or a loader: the process that made it, and one thread at a time.

Neither threads nor connections survive a fork, and locks may be held by threads that are gone. A copy in a forked process
would take the very steps that the original takes, or wait for ever; so it is refused, and closing it closes nothing.
"""

from __future__ import annotations

import os
import threading

from overlord.errors import SharedUseError


class OneProcess:
    """The process that something was made in."""

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
                f"it: a copy would take the same steps as the original, or wait for ever. {self._remedy}"
            )


class OneThread:
    """Lets one thread in at a time, and tells a second one so instead of letting it wait. Threads may take turns."""

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
