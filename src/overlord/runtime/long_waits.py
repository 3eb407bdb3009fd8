"""Logs a warning about every long wait, so that a slow run does not look like a hang.

    with warn_if_long(lambda: "rank 0 waits for step 5: source 'web' is making chunk 3"):
        ...

The first warning is logged after half a minute, the next ones after a minute, two, four and so on. A background thread logs
them, because the waiting thread may be blocked in a call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from overlord.runtime.liveness import LONG_WAIT

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_S = LONG_WAIT.after_s

_log = logging.getLogger("overlord.waiting")


class warn_if_long:
    """A context manager around a wait. `describe` is called in the thread that logs, and may take a while."""

    __slots__ = ("_began", "_describe", "_due", "_every_s")

    def __init__(self, describe: Callable[[], str], first_s: float = FIRST_S) -> None:
        self._describe = describe
        self._every_s = first_s

    def __enter__(self) -> None:
        self._began = time.monotonic()
        self._due = self._began + self._every_s
        _watch.add(self)

    def __exit__(self, *_: object) -> None:
        _watch.remove(self)

    @property
    def due(self) -> float:
        """When the next warning is due, on the monotonic clock."""
        return self._due

    def warn(self) -> None:
        now = time.monotonic()
        self._every_s *= 2
        self._due = now + self._every_s
        try:
            text = self._describe()
        except Exception as error:  # noqa: BLE001 - a failing description must end neither the wait nor this thread
            text = f"(describing the wait failed: {type(error).__name__}: {error})"
        if self in _watch:
            _log.warning("waiting for %.0f s: %s", now - self._began, text)


class _Watch:
    """The thread that logs for all waits of the process. The first wait starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: set[warn_if_long] = set()
        self._wakes_at = 0.0
        self._sooner = threading.Event()
        self._thread: threading.Thread | None = None

    def __contains__(self, wait: warn_if_long) -> bool:
        return wait in self._waits

    def add(self, wait: warn_if_long) -> None:
        with self._lock:
            self._waits.add(wait)
            if self._thread is None or not self._thread.is_alive():  # threads do not survive a fork
                self._thread = threading.Thread(target=self._run, name="overlord-waiting", daemon=True)
                self._thread.start()
            elif wait.due < self._wakes_at:
                self._sooner.set()

    def remove(self, wait: warn_if_long) -> None:
        with self._lock:
            self._waits.discard(wait)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            with self._lock:
                due = [wait for wait in self._waits if wait.due <= now]
                self._wakes_at = min((wait.due for wait in self._waits if wait.due > now), default=now + FIRST_S)
                self._sooner.clear()
            for wait in due:
                wait.warn()
            if not due:
                self._sooner.wait(max(self._wakes_at - now, 0.0))


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # in the child the thread is gone, and the lock may be held
