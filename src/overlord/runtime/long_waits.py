"""Waits that last long are told of, whether they have a time limit or not: silence must not look like a hang.

    with waiting(lambda: "rank 0 waits for step 5: source 'web' is making chunk 3"):
        ...

The first warning comes after half a minute, the next ones after a minute, two, four and so on. They come from a thread of
their own, since whoever waits may be stuck in a call.
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


class waiting:
    """`describe` is called in the thread that warns, and may take a while."""

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
        """When to tell of it, by the monotonic clock."""
        return self._due

    def tell(self) -> None:
        now = time.monotonic()
        self._every_s *= 2
        self._due = now + self._every_s
        try:
            text = self._describe()
        except Exception as error:  # noqa: BLE001 - what explains a wait must not end it, nor the thread that explains
            text = f"something, and what it is cannot be said: {type(error).__name__}: {error}"
        if self in _watch:
            _log.warning("waiting for %.0f s: %s", now - self._began, text)


class _Watch:
    """One thread for all waits of the process, started with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: set[waiting] = set()
        self._looks_at = 0.0
        self._sooner = threading.Event()
        self._thread: threading.Thread | None = None

    def __contains__(self, wait: waiting) -> bool:
        return wait in self._waits

    def add(self, wait: waiting) -> None:
        with self._lock:
            self._waits.add(wait)
            if self._thread is None or not self._thread.is_alive():  # none survives a fork
                self._thread = threading.Thread(target=self._look, name="overlord-waiting", daemon=True)
                self._thread.start()
            elif wait.due < self._looks_at:
                self._sooner.set()

    def remove(self, wait: waiting) -> None:
        with self._lock:
            self._waits.discard(wait)

    def _look(self) -> None:
        while True:
            now = time.monotonic()
            with self._lock:
                due = [wait for wait in self._waits if wait.due <= now]
                self._looks_at = min((wait.due for wait in self._waits if wait.due > now), default=now + FIRST_S)
                self._sooner.clear()
            for wait in due:
                wait.tell()
            if not due:
                self._sooner.wait(max(self._looks_at - now, 0.0))


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # its thread is gone there, and its lock may be held
