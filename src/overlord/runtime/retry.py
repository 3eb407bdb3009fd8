"""Repeating a call that failed for a passing reason."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow by a fixed factor, without jitter: the same faults lead to the same pauses."""

    first_s: float
    longest_s: float
    factor: float = 2.0

    def pauses(self) -> Iterator[float]:
        pause_s = self.first_s
        while True:
            yield pause_s
            pause_s = min(pause_s * self.factor, self.longest_s)


@dataclass(frozen=True, slots=True)
class FailedAttempt(Generic[E]):
    """An attempt that failed, as `on_failure` of `retry` sees it."""

    error: E
    number: int
    """1 for the first attempt."""
    waited_s: float
    """Since the first attempt began."""
    pause_s: float | None
    """Until the next attempt; None when this one was the last."""


def retry(
    attempt: Callable[[], T],
    *,
    on: type[E] | tuple[type[E], ...],
    pauses: Iterable[float],
    on_failure: Callable[[FailedAttempt[E]], None] | None = None,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `attempt` until it returns. Only errors of the type `on` are retried, one attempt after each pause; when there
    are no more pauses, the last error is raised. `on_failure` sees each failure, and may raise to give up."""
    began = clock()
    left = iter(pauses)
    for number in count(1):
        try:
            return attempt()
        except on as error:
            pause_s = next(left, None)
            if on_failure is not None:
                on_failure(FailedAttempt(error, number, clock() - began, pause_s))
            if pause_s is None:
                raise
        if pause_s:
            sleep(pause_s)
    raise AssertionError("unreachable: attempts are counted without end")
