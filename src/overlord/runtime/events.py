"""What happened to a run, with times: faults, retries, scaling and moves, in a bounded ring of each process.

Code that handles such a thing notes it with the run's recorder (`recorder.py`), beside its log line. `Loader.metrics`
collects the rings of all processes of a run.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

MOST_EVENTS = 512
_MOST_TEXT = 500

KINDS = {
    "restart": "a role or its process was lost or hung, and is started again",
    "retry": "a request to storage failed and is repeated",
    "rank_lost": "a rank was silent for too long, and the others go on without it",
    "scaling": "the autoscaler changed the loaders of a source, or could not",
    "shadow": "a shadow came, left or took over",
    "resize": "the mesh of the run was changed",
    "moved": "the run was moved to another state",
    "weights": "the weights of the mixture were changed by hand",
    "skip": "documents were left out by hand",
    "serving": "the run is served at an address",
    "draining": "no new step is handed out",
    "epochs": "a source comes to the end of its epochs, or will be read very often",
    "log": "the plan log cannot be written, or can be again",
}
"""Every kind of event, and its meaning."""


@dataclass(frozen=True, slots=True)
class Event:
    """A line of what happened."""

    at_s: float
    """Seconds since 1970."""
    kind: str
    """One of `KINDS`."""
    text: str
    process: int
    """The id of the process that noted it."""
    number: int
    """Counts the events of that process."""


class EventRing:
    """The newest events of a process. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._num_events = 0

    def note(self, kind: str, text: str) -> None:
        with self._lock:
            self._events.append(Event(time.time(), kind, text[:_MOST_TEXT], os.getpid(), self._num_events))
            self._num_events += 1

    def recent(self) -> tuple[Event, ...]:
        with self._lock:
            return tuple(self._events)


class EventHistory:
    """The events of a run, out of the rings of its processes, each once. One thread at a time may call it."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._seen: dict[int, int] = {}  # process to the number of its newest event
        self.counts: Counter[str] = Counter()
        """How many events of each kind there were."""

    def add(self, recent: tuple[Event, ...]) -> None:
        """Add the ring of a process."""
        for event in recent:
            if event.at_s >= self._since_s and event.number > self._seen.get(event.process, -1):
                self._seen[event.process] = event.number
                self._events.append(event)
                self.counts[event.kind] += 1

    def newest(self) -> tuple[Event, ...]:
        """In the order of their times."""
        return tuple(sorted(self._events, key=lambda event: event.at_s))
