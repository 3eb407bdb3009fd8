"""The last minutes and hours of a run, in columns: what happened between two looks at its metrics.

A run counts totals; people look at rates. Each column has the differences of one span of time. Recent columns are about a
second wide, and are merged into wide ones for the hours before. Both are bounded, whatever the length of the run.
"""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.status import RunMetrics

RECENT_S = 300.0
"""How long narrow columns are kept."""
LONG_S = 4 * 3600.0
"""How long wide columns are kept."""
WIDE_S = 30.0
"""The width of a wide column."""
NOT_READING = 255
"""The wait of a rank that does not read, in the bytes of a column; others are 0 (none) to 250 (all the time)."""
_WHOLE = 250
_SHARES = 10_000


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """A span of time of a run."""

    at_s: float
    """Its end, in seconds since 1970."""
    span_s: float
    num_steps: int
    tokens: int
    waited_s: NDArray[np.float32]
    """By rank; NaN for those that did not read."""
    drawn: NDArray[np.float64]
    """By source, in the unit of the mixture."""
    weights: NDArray[np.float64]
    """By source, as asked at the end."""
    rss_bytes: int

    @property
    def wait_shares(self) -> NDArray[np.float32]:
        """The part of the time that each rank waited; NaN for those that did not read."""
        return np.clip(self.waited_s / np.float32(self.span_s), 0, 1)

    def to_plain(self) -> dict[str, Any]:
        """The column for the page: waits as bytes in base64, shares in ten-thousandths."""
        waits = np.round(self.wait_shares * _WHOLE)
        levels = np.where(np.isnan(waits), NOT_READING, waits).astype(np.uint8)
        total = self.drawn.sum()
        return {
            "t": round(self.at_s, 2),
            "d": round(self.span_s, 2),
            "s": round(self.num_steps / self.span_s, 3),
            "k": round(self.tokens / self.span_s),
            "w": base64.b64encode(levels.tobytes()).decode(),
            "m": _in_shares(self.drawn / total) if total > 0 else None,
            "a": _in_shares(self.weights),
            "r": self.rss_bytes,
        }


def _in_shares(values: NDArray[np.float64]) -> list[int]:
    return np.round(values * _SHARES).astype(np.int64).tolist()


def merge_columns(columns: Sequence[TimeColumn]) -> TimeColumn:
    """Neighbouring columns as one. Ranks and sources are those of the last, in which the job or the mesh may differ."""
    last = columns[-1]
    waits = [column.waited_s for column in columns if len(column.waited_s) == len(last.waited_s)]
    drawn = [column.drawn for column in columns if len(column.drawn) == len(last.drawn)]
    read = ~np.isnan(waits).all(axis=0)
    return TimeColumn(
        at_s=last.at_s,
        span_s=sum(column.span_s for column in columns),
        num_steps=sum(column.num_steps for column in columns),
        tokens=sum(column.tokens for column in columns),
        waited_s=np.where(read, np.nansum(waits, axis=0), np.nan).astype(np.float32),
        drawn=np.sum(drawn, axis=0),
        weights=last.weights,
        rss_bytes=max(column.rss_bytes for column in columns),
    )


def column_between(before: RunMetrics, after: RunMetrics) -> TimeColumn | None:
    """What happened between two looks; None where nothing can be said, as when the clock was set back."""
    span_s = after.up_s - before.up_s
    if span_s <= 0:
        return None
    names = list(after.sources)
    unit = "tokens" if after.unit == "tokens" else "samples"
    old, new = before.sources, after.sources
    is_moved = after.generation != before.generation  # the run may have gone back: its totals too
    drawn = [0 if is_moved or name not in old else getattr(new[name], unit) - getattr(old[name], unit) for name in names]
    tokens = 0 if is_moved else sum(new[name].tokens - old[name].tokens for name in names if name in old)
    weights = np.array([new[name].weight for name in names], np.float64)
    return TimeColumn(
        at_s=after.at_s,
        span_s=span_s,
        num_steps=0 if is_moved else max(after.step - before.step, 0),
        tokens=max(tokens, 0),
        waited_s=np.array([_waited_s(before, after, rank) for rank in after.ranks], np.float32),
        drawn=np.maximum(np.array(drawn, np.float64), 0),
        weights=weights / (weights.sum() or 1.0),
        rss_bytes=sum(use.rss_bytes for use in after.processes.values()),
    )


def _waited_s(before: RunMetrics, after: RunMetrics, rank: int) -> float:
    """The wait of a rank between two looks, with the part of one that is not over."""
    new, old = after.ranks[rank], before.ranks.get(rank)
    if new.step is None and (old is None or new.num_steps == old.num_steps):
        return float("nan")
    since = 0.0 if old is None else old.waited_s + old.waiting_s
    return max(new.waited_s + new.waiting_s - since, 0.0)


class RunHistory:
    """The columns of a run. One thread at a time may add; any may read."""

    def __init__(self) -> None:
        self._last: RunMetrics | None = None
        self._recent: deque[TimeColumn] = deque()
        self._long: deque[TimeColumn] = deque()
        self._open: list[TimeColumn] = []  # those of the wide column that is not full yet

    def add(self, metrics: RunMetrics) -> tuple[TimeColumn | None, TimeColumn | None]:
        """Note another look; returns the new narrow column, and the new wide one if one is full."""
        before, self._last = self._last, metrics
        column = None if before is None else column_between(before, metrics)
        if column is None:
            return None, None
        _append(self._recent, column, RECENT_S)
        self._open.append(column)
        if sum(each.span_s for each in self._open) < WIDE_S:
            return column, None
        wide = merge_columns(self._open)
        self._open = []
        _append(self._long, wide, LONG_S)
        return column, wide

    def recent(self) -> list[TimeColumn]:
        return list(self._recent)

    def long(self) -> list[TimeColumn]:
        """The wide columns, and at last the one that is not full yet."""
        open_columns = list(self._open)
        return [*self._long, *([merge_columns(open_columns)] if open_columns else [])]

    def over(self, span_s: float) -> TimeColumn | None:
        """The last seconds as one column; None where nothing is known of them."""
        columns = list(self._recent)
        kept = [column for column in columns if columns[-1].at_s - column.at_s < span_s]
        return merge_columns(kept) if kept else None


def _append(columns: deque[TimeColumn], column: TimeColumn, span_s: float) -> None:
    columns.append(column)
    while column.at_s - columns[0].at_s > span_s:
        columns.popleft()
