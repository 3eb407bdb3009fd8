"""Which ranks are reading, where each stands, and which have fallen silent.

A rank belongs to the client that came last: when a trainer is replaced, the old one, should it still live, is told so.
Silence is not absence until `patience_s` have passed; a rank that is heard again is simply back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from overlord.errors import ClosedError

_REMEMBERED = 16  # sessions that lost a rank


@dataclass(slots=True)
class _Rank:
    session: str
    heard: float
    step: int | None = None
    """The step it takes next; None before it has asked for one."""
    is_reading: bool = False
    has_left: bool = False
    displaced: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Roll:
    """Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ranks: dict[int, _Rank] = {}

    def heard(self, rank: int, session: str) -> None:
        """Note that a rank's client is there. Raises ClosedError when another has taken its place."""
        with self._lock:
            self._of(rank, session).heard = self._clock()

    def asked(self, rank: int, session: str, step: int) -> None:
        with self._lock:
            entry = self._of(rank, session)
            entry.heard = self._clock()
            entry.step, entry.is_reading, entry.has_left = step, True, False

    def took(self, rank: int, session: str, step: int) -> None:
        """Note that a step was handed to a rank."""
        with self._lock:
            entry = self._ranks.get(rank)
            if entry is not None and entry.session == session:
                entry.heard = self._clock()
                entry.step = step + 1
            self._changed.notify_all()

    def left(self, rank: int, session: str | None = None) -> bool:
        """Note that a rank reads no more; False when it is not this client's to say."""
        with self._lock:
            entry = self._ranks.get(rank)
            if entry is None:
                if session is None:
                    return False
                entry = self._of(rank, session)
            if session not in (None, entry.session):
                return False
            entry.is_reading, entry.has_left = False, True
            self._changed.notify_all()
            return True

    def silent(self, patience_s: float) -> list[int]:
        """The reading ranks that were not heard from for so long."""
        with self._lock:
            since = self._clock() - patience_s
            return [rank for rank, entry in self._ranks.items() if entry.is_reading and entry.heard < since]

    def reading(self) -> dict[int, int]:
        """The ranks that are reading, with the step each takes next."""
        with self._lock:
            return self._reading()

    def last(self) -> dict[int, int]:
        """Every rank that ever read, with the step it would take next."""
        with self._lock:
            return {rank: entry.step for rank, entry in self._ranks.items() if entry.step is not None}

    def forget(self) -> None:
        """The run was moved: where ranks stood says nothing now."""
        with self._lock:
            for entry in self._ranks.values():
                entry.step, entry.is_reading = None, False

    def wait_until(self, holds: Callable[[dict[int, int]], bool], timeout_s: float) -> bool:
        """Wait until something holds of the reading ranks and their steps."""
        with self._lock:
            return self._changed.wait_for(lambda: holds(self._reading()), timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks has come and left again."""

        def all_left() -> bool:
            return all((entry := self._ranks.get(rank)) is not None and entry.has_left for rank in ranks)

        with self._lock:
            return self._changed.wait_for(all_left, timeout_s)

    def _reading(self) -> dict[int, int]:
        return {rank: e.step for rank, e in self._ranks.items() if e.is_reading and e.step is not None}

    def _of(self, rank: int, session: str) -> _Rank:
        entry = self._ranks.get(rank)
        if entry is None:
            entry = self._ranks[rank] = _Rank(session, self._clock())
        elif entry.session != session:
            if session in entry.displaced:
                raise ClosedError(f"another client has taken the place of this one for rank {rank}; connect anew to take it")
            entry.displaced.append(entry.session)
            entry.session = session
        return entry
