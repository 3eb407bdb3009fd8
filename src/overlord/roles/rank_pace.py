"""How fast the ranks of a data-parallel group go through their steps, and how long they wait for them."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.runtime.recorder import current_recorder
from overlord.status import WAIT_BOUNDS_S, RankCounters

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.runtime.recorder import SpanRing

_MOST_AT_ONCE = 64  # steps that a rank may have taken since it was looked at last


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the ranks of a group go through their steps, summed over ranks, since its constructor was made."""

    num_steps: int = 0
    busy_s: float = 0.0
    """From receiving a step to requesting the next: the time that the trainer works on it."""
    num_waits: int = 0
    waited_s: float = 0.0
    """From requesting a step to receiving it."""

    def plus(self, other: Pace) -> Pace:
        return Pace(
            self.num_steps + other.num_steps,
            self.busy_s + other.busy_s,
            self.num_waits + other.num_waits,
            self.waited_s + other.waited_s,
        )

    def minus(self, other: Pace) -> Pace:
        return self.plus(Pace(-other.num_steps, -other.busy_s, -other.num_waits, -other.waited_s))


@dataclass(slots=True)
class _RankMeter:
    """What one rank has taken, and how long it waited."""

    taken: int = -1
    """The last step that the rank has taken."""
    fetched: int = -1
    """The last step whose tokens are counted."""
    num_steps: int = 0
    tokens: int = 0
    waited_s: float = 0.0
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS_S) + 1))

    def note_wait(self, step: int, waited_s: float) -> None:
        # A trainer that shares memory may have taken several steps since the last look: the wait is that of all of them.
        num_steps = step - self.taken if 0 <= self.taken < step <= self.taken + _MOST_AT_ONCE else 1
        self.taken = step
        self.num_steps += num_steps
        self.waited_s += waited_s
        self.waits[bisect_left(WAIT_BOUNDS_S, waited_s / num_steps)] += num_steps

    def counters(self) -> RankCounters:
        return RankCounters(self.num_steps, self.tokens, self.waited_s, tuple(self.waits))


class PaceMeter:
    """Measures a `Pace` from when ranks request steps and when they receive them. Callers hold a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, spans: SpanRing | None = None) -> None:
        self._clock = clock
        self._spans = spans or current_recorder().spans
        self._offset = time.perf_counter() - clock()  # once: two spans that touch must not overlap
        self._requested: dict[int, tuple[int, float]] = {}
        self._got: dict[int, tuple[int, float]] = {}
        self._num_steps = self._num_waits = 0
        self._busy_s = self._waited_s = 0.0
        self._ranks: dict[int, _RankMeter] = {}

    @property
    def pace(self) -> Pace:
        return Pace(self._num_steps, self._busy_s, self._num_waits, self._waited_s)

    @property
    def ranks(self) -> dict[int, RankCounters]:
        """The same by rank, also of ranks that have left."""
        return {rank: meter.counters() for rank, meter in self._ranks.items()}

    def waiting(self) -> dict[int, float]:
        """The ranks that have requested a step and not received it, with the seconds since then."""
        now, got = self._clock(), self._got
        return {
            rank: now - since for rank, (step, since) in self._requested.items() if rank not in got or got[rank][0] != step
        }

    def note_tokens(self, rank: int, step: int, num_tokens: int) -> None:
        """A rank gets the batches of a step, maybe again."""
        meter = self._meter_of(rank)
        if step > meter.fetched or step < meter.fetched - _MOST_AT_ONCE:  # the second: the rank reads again from before
            meter.fetched = step
            meter.tokens += num_tokens

    def _meter_of(self, rank: int) -> _RankMeter:
        meter = self._ranks.get(rank)
        if meter is None:
            meter = self._ranks[rank] = _RankMeter()
        return meter

    def note_request(self, rank: int, step: int, waited_s: float = 0.0) -> None:
        """A rank requests a step, maybe again, or has requested it `waited_s` ago."""
        requested, got, now = self._requested.get(rank), self._got.get(rank), self._clock()
        if requested is not None and requested[0] == step:
            return
        began = now - waited_s if got is None else max(now - waited_s, got[1])
        self._requested[rank] = step, began
        if got is not None and got[0] == step - 1:
            self._num_steps += 1
            self._busy_s += began - got[1]
            if self._spans.is_on:
                self._add_span(f"train on step {got[0]}", rank, got[1], began)

    def note_delivery(self, rank: int, step: int) -> None:
        requested, got, now = self._requested.get(rank), self._got.get(rank), self._clock()
        if requested is not None and requested[0] == step and (got is None or got[0] != step):
            self._num_waits += 1
            self._waited_s += now - requested[1]
            self._meter_of(rank).note_wait(step, now - requested[1])
            if self._spans.is_on:
                self._add_span(f"wait for step {step}", rank, requested[1], now)
        self._got[rank] = step, now

    def note_take(self, rank: int, step: int, waited_s: float) -> None:
        """A rank takes a step that it fetched ahead, after waiting for it for that long."""
        self.note_request(rank, step, waited_s)
        self.note_delivery(rank, step)

    def _add_span(self, name: str, rank: int, began: float, ended: float) -> None:
        self._spans.add(name, began + self._offset, track=f"rank {rank}", ended=ended + self._offset)

    def restart(self) -> None:
        """The run goes on from another state: the next step of each rank follows no other."""
        for meter in self._ranks.values():
            meter.taken = meter.fetched = -1

    def rank_left(self, rank: int) -> None:
        self._requested.pop(rank, None)
        self._got.pop(rank, None)
        meter = self._meter_of(rank)
        meter.taken = meter.fetched = -1
