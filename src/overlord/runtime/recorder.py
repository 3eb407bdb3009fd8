"""What a run notes of itself in a process: events, always, and spans of work and of waits, while somebody collects them.

An engine has a recorder for each run, so that two runs in one process do not see each other's. Roles take the one that is
current when they are made. Code that belongs to no run, as that of storage, notes with the one of the thread it runs in.
In a worker process there is one run, and one recorder.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.runtime.events import EventRing

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

MOST_SPANS = 1 << 16
"""Of a process between two collections: some megabytes."""
COLLECTED_S = 30.0
"""Spans are recorded for so long after they were last collected."""
_LEAST_S = 2e-5  # what is shorter explains nothing, and there is much of it

TimedSpan = tuple[str, str, float, float, dict[str, Any] | None]
"""Name, track, the seconds since 1970 when it began, how many it took, and what else is known of it."""


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """The spans of a process since the last collection."""

    process: int
    node: str
    spans: list[TimedSpan]
    num_lost: int


class SpanRing:
    """The newest spans of a run in this process. Safe to call from any thread. While `is_on` is false, callers measure
    nothing."""

    def __init__(self) -> None:
        self.is_on = False
        self._until = 0.0
        self._lock = threading.Lock()
        self._spans: deque[TimedSpan] = deque(maxlen=MOST_SPANS)
        self._num_added = 0
        self._since_1970 = time.time() - time.perf_counter()

    def add(self, name: str, began: float, *, track: str | None = None, ended: float | None = None, **more: Any) -> None:
        """Add a span that ends now, or has `ended`; times of `time.perf_counter`. `track`: the line that it is drawn on, by
        default that of this thread."""
        now = time.perf_counter() if ended is None else ended
        if now - began < _LEAST_S:
            return
        if now > self._until:
            self.is_on = False
            return
        if track is None:
            thread = threading.current_thread()
            track = f"{thread.name} ({thread.native_id})"  # several threads of a process may have one name
        with self._lock:
            self._spans.append((name, track, began + self._since_1970, now - began, more or None))
            self._num_added += 1

    @contextmanager
    def around(self, name: str, **more: Any) -> Generator[None]:
        """Add the span of a block. For code that is not hot."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.is_on:
                self.add(name, began, **more)

    def around_each(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """The same items, with a span around the wait for each."""
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self.add(name, began)
            yield item

    def take(self) -> SpanBatch:
        """Return the spans since the last call, and go on recording for a while."""
        self._until = time.perf_counter() + COLLECTED_S
        self.is_on = True
        with self._lock:
            spans, added = list(self._spans), self._num_added
            self._spans.clear()
            self._num_added = 0
        return SpanBatch(os.getpid(), os.uname().nodename, spans, added - len(spans))


class Recorder:
    """The events and spans of one run in this process."""

    def __init__(self) -> None:
        self.events = EventRing()
        self.spans = SpanRing()

    @contextmanager
    def current(self) -> Generator[None]:
        """Meanwhile this thread, and threads that it makes executors with, note for this run."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_of_process = Recorder()
_current: ContextVar[Recorder] = ContextVar("recorder", default=_of_process)
current_recorder = _current.get
"""The recorder of the run that this thread works for; that of the process where it works for none."""
set_recorder, reset_recorder = _current.set, _current.reset
"""As `Recorder.current`, in less time."""
os.register_at_fork(after_in_child=_of_process.__init__)  # locks may be held, and what it has is the parent's


def note_event(kind: str, text: str) -> None:
    """Note an event of the run that this thread works for."""
    _current.get().events.note(kind, text)
