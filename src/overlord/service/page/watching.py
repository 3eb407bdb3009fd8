"""Looks at a run about once a second, and tells everybody who watches its page.

The looks are taken in a thread of their own, whatever the run waits for, and seldom while nobody watches. A look is followed
by a pause a hundred times as long as the CPU time that it took this thread; what roles spend on answering is not counted.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from overlord.errors import ClosedError, OverlordError
from overlord.service.page.contract import changed, encode, sections_of
from overlord.service.page.history import RunHistory, TimeColumn
from overlord.service.page.verdict import LOOK_BACK_S, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.status import Event, PlannerStatus, RunMetrics

WATCHED_S, UNWATCHED_S = 1.0, 5.0
_PAUSE_PER_CPU = 100.0
_MOST_CAUSES = 12
_log = logging.getLogger(__name__)

TimeRange: TypeAlias = Literal["recent", "long"]


class PagedRun(Protocol):
    """What the page asks of a run; `Loader` has it."""

    def metrics(self) -> RunMetrics: ...

    def status(self) -> PlannerStatus: ...

    def status_lines(self) -> list[str]: ...

    def scaling(self) -> Sequence[object]: ...


@dataclass(frozen=True, slots=True)
class Viewer:
    """Somebody who watches: a range of time, and where its messages go. `send` returns at once, from any thread."""

    range: TimeRange
    send: Callable[[bytes | None], None]


class RunWatcher:
    """Watches one run until it is closed. Safe to call from any thread."""

    def __init__(self, run: PagedRun) -> None:
        self._run = run
        self._id = uuid.uuid4().hex  # another one: the page forgets what it knew
        self._lock = threading.Lock()
        self._viewers: list[Viewer] = []
        self._history = RunHistory()
        self._sections: dict[str, bytes] = {}
        self._events: tuple[Event, ...] = ()
        self._seen: RunMetrics | None = None
        self._is_watched = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overlord-page-look", daemon=True)
        self._thread.start()

    def join(self, viewer: Viewer) -> None:
        """Send a snapshot to a viewer, and from then on what changes."""
        with self._lock:
            columns = self._history.recent() if viewer.range == "recent" else self._history.long()
            is_open = viewer.range == "long"
            viewer.send(encode(self._sections, self._events, columns, name="snapshot", open_column=is_open))
            self._viewers.append(viewer)
            self._is_watched.set()

    def leave(self, viewer: Viewer) -> None:
        with self._lock:
            self._viewers = [other for other in self._viewers if other is not viewer]
            if not self._viewers:
                self._is_watched.clear()

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def close(self) -> None:
        self._closing.set()
        self._is_watched.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            for viewer in self._viewers:
                viewer.send(None)

    def _watch(self) -> None:
        while not self._closing.is_set():
            began = time.thread_time()
            try:
                self.look()
            except ClosedError:
                return
            except OverlordError as error:
                _log.warning("the page cannot tell how the run is: %s", error)
            pause_s = (time.thread_time() - began) * _PAUSE_PER_CPU
            self._closing.wait(max(WATCHED_S, pause_s))
            self._is_watched.wait(UNWATCHED_S - WATCHED_S)

    def look(self) -> None:
        """Look at the run once, and tell the viewers."""
        metrics = self._run.metrics()
        with self._lock:
            column, wide = self._history.add(metrics)
            verdict = judge(metrics, self._history.over(LOOK_BACK_S))
        causes = self._find_causes(metrics, verdict)
        decisions = [str(decision) for decision in self._run.scaling()]
        before, self._seen = self._seen, metrics
        sections = sections_of(metrics, before, verdict, causes=causes, decisions=decisions, id=self._id)
        with self._lock:
            news = changed(self._sections, sections)
            events = _newer(metrics.events, self._events)
            self._sections, self._events = sections, metrics.events
            narrow = encode(news, events, [] if column is None else [column], name="delta")
            wider: list[TimeColumn] = [wide] if wide is not None else self._history.long()[-1:]
            long = encode(news, events, wider, name="delta", open_column=wide is None) if self._is_long_watched() else b""
            for viewer in self._viewers:
                viewer.send(narrow if viewer.range == "recent" else long)

    def _is_long_watched(self) -> bool:
        return any(viewer.range == "long" for viewer in self._viewers)

    def _find_causes(self, metrics: RunMetrics, verdict: Verdict) -> list[str]:
        """What the run is busy with, where ranks wait for it."""
        if verdict.level == "bad" or any(rank.waiting_s > WATCHED_S for rank in metrics.ranks.values()):
            return self._run.status_lines()[:_MOST_CAUSES]
        return []


def _newer(events: Sequence[Event], known: Sequence[Event]) -> list[Event]:
    seen = {(event.process, event.number) for event in known}
    return [event for event in events if (event.process, event.number) not in seen]
