"""How fast ranks go through their steps, and how much of the time they wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Of all ranks of a group together, since its constructor was made."""

    num_steps: int = 0
    busy_s: float = 0.0
    """From getting a step to asking for the next: what a trainer takes for it."""
    num_waits: int = 0
    waited_s: float = 0.0
    """From asking for a step to getting it."""

    def plus(self, other: Pace) -> Pace:
        return Pace(
            self.num_steps + other.num_steps,
            self.busy_s + other.busy_s,
            self.num_waits + other.num_waits,
            self.waited_s + other.waited_s,
        )

    def minus(self, other: Pace) -> Pace:
        return self.plus(Pace(-other.num_steps, -other.busy_s, -other.num_waits, -other.waited_s))


class PaceMaker:
    """Told when a rank asks for a step and when it gets it. Not safe for threads by itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[int, tuple[int, float]] = {}
        self._got: dict[int, tuple[int, float]] = {}
        self._num_steps = self._num_waits = 0
        self._busy_s = self._waited_s = 0.0

    @property
    def pace(self) -> Pace:
        return Pace(self._num_steps, self._busy_s, self._num_waits, self._waited_s)

    def asks(self, rank: int, step: int) -> None:
        """A rank asks for a step, maybe again."""
        asked, got, now = self._asked.get(rank), self._got.get(rank), self._clock()
        if asked is not None and asked[0] == step:
            return
        self._asked[rank] = step, now
        if got is not None and got[0] == step - 1:
            self._num_steps += 1
            self._busy_s += now - got[1]

    def gets(self, rank: int, step: int) -> None:
        asked, got, now = self._asked.get(rank), self._got.get(rank), self._clock()
        if asked is not None and asked[0] == step and (got is None or got[0] != step):
            self._num_waits += 1
            self._waited_s += now - asked[1]
        self._got[rank] = step, now

    def leaves(self, rank: int) -> None:
        self._asked.pop(rank, None)
        self._got.pop(rank, None)
