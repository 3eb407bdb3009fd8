"""The registry of ranks: which ranks are reading, the next step of each, and which have stopped calling.

A rank belongs to the client that connected last: when a trainer is replaced, the old client gets an error if it is still
alive. A silent rank counts as gone after `patience_s`, and is back with its next call. A rank that is expected and has never
called is late. It counts as gone `patience_s` after the first call of any rank.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_REMEMBERED = 16  # replaced sessions that are remembered for each rank


@dataclass(slots=True)
class _RankEntry:
    session: str
    heard: float
    """When the client last called."""
    step: int | None = None
    """The next step of the rank; None before it has requested one."""
    is_reading: bool = False
    has_left: bool = False
    displaced: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class RankRegistry:
    """The ranks of a server: their sessions, their steps, and when each last called. Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ranks: dict[int, _RankEntry] = {}
        self._late: set[int] = set()
        self._first_came: float | None = None
        self._lost: set[int] = set()  # ranks that left by their silence
        self._called: set[int] = set()  # ranks whose client has called since the run was moved

    def expect(self, ranks: Collection[int]) -> None:
        """Note that these ranks will connect. Until their first request they are late."""
        with self._lock:
            self._late |= {rank for rank in ranks if rank not in self._ranks}

    def note_heartbeat(self, rank: int, session: str) -> None:
        """Note a heartbeat of a rank's client. Raises ClosedError when another client has taken its place."""
        with self._lock:
            self._of(rank, session).heard = self._clock()

    def note_request(self, rank: int, session: str, step: int) -> None:
        """Note that a rank requested a step. Raises ClosedError when another client has taken its place."""
        with self._lock:
            entry = self._of(rank, session)
            entry.heard = self._clock()
            entry.step, entry.is_reading, entry.has_left = step, True, False
            self._late.discard(rank)
            if self._first_came is None:
                self._first_came = entry.heard

    def note_delivery(self, rank: int, session: str, step: int) -> None:
        """Note that a step was handed to a rank."""
        with self._lock:
            entry = self._ranks.get(rank)
            if entry is not None and entry.session == session:
                entry.heard = self._clock()
                entry.step = step + 1
            self._changed.notify_all()

    def note_leave(self, rank: int, session: str | None = None) -> bool:
        """Note that a rank has stopped reading. Returns False, and changes nothing, if another client has the rank."""
        with self._lock:
            entry = self._ranks.get(rank)
            if entry is None:
                if session is None:
                    is_late = rank in self._late
                    self._late.discard(rank)
                    return is_late
                entry = self._of(rank, session)
            if session not in (None, entry.session):
                return False
            entry.is_reading, entry.has_left = False, True
            self._late.discard(rank)
            self._changed.notify_all()
            return True

    def note_silence(self, rank: int) -> bool:
        """As `note_leave`, for a rank that was silent: it is lost, until it calls again."""
        has_left = self.note_leave(rank)
        with self._lock:
            if has_left:
                self._lost.add(rank)
        return has_left

    def lost(self) -> set[int]:
        """The ranks that went silent since the run began or was moved."""
        with self._lock:
            return set(self._lost)

    def called(self) -> set[int]:
        """The ranks whose client has called since the run began or was moved."""
        with self._lock:
            return set(self._called)

    def silent(self, patience_s: float, *, with_late: bool = True) -> list[int]:
        """The ranks that read, or (`with_late`) are expected to, and did not call for `patience_s`."""
        with self._lock:
            since = self._clock() - patience_s
            silent = [rank for rank, entry in self._ranks.items() if entry.is_reading and entry.heard < since]
            if with_late and self._first_came is not None and self._first_came < since:
                silent += [rank for rank in self._late if self._heard_at(rank) < since]
            return silent

    def reading(self) -> dict[int, int]:
        """The ranks that are reading, with the next step of each."""
        with self._lock:
            return self._reading()

    def is_reading(self, rank: int, session: str) -> bool:
        """True while a rank reads, by this client."""
        with self._lock:
            entry = self._ranks.get(rank)
            return entry is not None and entry.is_reading and entry.session == session

    def is_of(self, rank: int, session: str) -> bool:
        """True if this client is the last that became the rank."""
        with self._lock:
            entry = self._ranks.get(rank)
            return entry is not None and entry.session == session

    def is_displaced(self, rank: int, session: str) -> bool:
        """True if another client has taken the place of this one."""
        with self._lock:
            entry = self._ranks.get(rank)
            return entry is not None and session in entry.displaced

    def last(self) -> dict[int, int]:
        """Every rank that ever read, with its next step."""
        with self._lock:
            return {rank: entry.step for rank, entry in self._ranks.items() if entry.step is not None}

    def forget(self, expected: Collection[int] = ()) -> None:
        """Forget the steps of all ranks, because the run was moved. Reading and `expected` ones are late until they call."""
        with self._lock:
            self._late |= {*expected, *(rank for rank, entry in self._ranks.items() if entry.is_reading)}
            self._first_came = None
            self._lost.clear()
            self._called.clear()
            for entry in self._ranks.values():
                entry.step, entry.is_reading = None, False

    def wait_until(self, holds: Callable[[dict[int, int]], bool], timeout_s: float) -> bool:
        """Wait until a condition holds for the reading ranks and their steps. Returns False after `timeout_s`."""
        with self._lock:
            return self._changed.wait_for(lambda: holds(self._reading()), timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks has connected and left. Returns False after `timeout_s`."""

        def all_left() -> bool:
            return all((entry := self._ranks.get(rank)) is not None and entry.has_left for rank in ranks)

        with self._lock:
            return self._changed.wait_for(all_left, timeout_s)

    def _heard_at(self, rank: int) -> float:
        entry = self._ranks.get(rank)
        return -math.inf if entry is None else entry.heard

    def _reading(self) -> dict[int, int]:
        return {rank: e.step for rank, e in self._ranks.items() if e.is_reading and e.step is not None}

    def _of(self, rank: int, session: str) -> _RankEntry:
        entry = self._ranks.get(rank)
        self._called.add(rank)
        if entry is None:
            entry = self._ranks[rank] = _RankEntry(session, self._clock())
        elif entry.session != session:
            if session in entry.displaced:
                raise ClosedError(f"another client has taken the place of this one for rank {rank}; connect again to return")
            entry.displaced.append(entry.session)
            entry.session = session
        self._lost.discard(rank)
        return entry
