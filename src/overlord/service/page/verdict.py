"""The first line of the page: whether the run is well, and if not, what is wrong. For somebody who was just woken up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from overlord.service.page.history import TimeColumn
    from overlord.status import RunMetrics

LOOK_BACK_S = 30.0
"""Shares of time are those of so many seconds."""
_LONG_WAIT_S = 5.0
_MANY_STEPS = 5.0  # a wait as long as so many steps is long
_HIGH_SHARE = 0.2
_MUCH_LESS, _FEW = 0.1, 0.1  # few ranks that wait much less than the mean hold the others up
_RECENT_FAULT_S = 120.0
_MOST_TEXT = 120
_FAULTS = ("restart", "rank_lost", "retry", "log")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run is, in a word and a sentence."""

    level: Literal["ok", "idle", "warn", "bad"]
    text: str


def judge(metrics: RunMetrics, lately: TimeColumn | None) -> Verdict:
    """The worst that there is to say. `lately` is what happened in the last seconds."""
    silent = [name for name, role in metrics.roles.items() if role.process is None]
    if silent:
        return Verdict("bad", f"{_list(silent)} {'do' if len(silent) > 1 else 'does'} not answer.")
    reading = [rank for rank, found in metrics.ranks.items() if found.step is not None]
    if not reading:
        return _judge_unread(metrics)
    return _judge_wait(metrics, lately) or _judge_faults(metrics) or _judge_share(metrics, lately)


def _judge_unread(metrics: RunMetrics) -> Verdict:
    num_ranks, num_left = len(metrics.ranks), sum(found.num_steps > 0 for found in metrics.ranks.values())
    if num_left == 0:
        return Verdict("idle", f"Nobody reads yet: waits for {num_ranks:,} rank{'s' * (num_ranks > 1)} to connect.")
    end = None if metrics.planner is None else metrics.planner.end
    if end is not None and metrics.step >= end:
        return Verdict("idle", f"The run has ended: all {end:,} steps were taken.")
    return Verdict("idle", f"Nobody reads now: {num_left:,} of {num_ranks:,} ranks have read and left.")


def _judge_wait(metrics: RunMetrics, lately: TimeColumn | None) -> Verdict | None:
    rank, found = max(metrics.ranks.items(), key=lambda item: item[1].waiting_s)
    step_s = 0.0 if lately is None or lately.num_steps == 0 else lately.span_s / lately.num_steps
    if found.waiting_s <= max(_LONG_WAIT_S, _MANY_STEPS * step_s):
        return None
    others = sum(other.waiting_s > _LONG_WAIT_S for other in metrics.ranks.values()) - 1
    more = f", and {others:,} other rank{'s' * (others > 1)} too" if others > 0 else ""
    step = 0 if found.step is None else found.step
    return Verdict("bad", f"Rank {rank} has waited {found.waiting_s:.0f} s for step {step:,}{more}.")


def _judge_faults(metrics: RunMetrics) -> Verdict | None:
    faults = [event for event in metrics.events if event.kind in _FAULTS]
    newest = [event for event in faults if metrics.at_s - event.at_s < _RECENT_FAULT_S]
    if not newest:
        return None
    last = newest[-1]
    count = f" ({len(newest)} faults in two minutes)" if len(newest) > 1 else ""
    return Verdict(
        "warn", f"Steps go on after a fault {max(metrics.at_s - last.at_s, 0):.0f} s ago{count}: {_cut(last.text)}"
    )


def _judge_share(metrics: RunMetrics, lately: TimeColumn | None) -> Verdict:
    if lately is None or len(lately.waited_s) != len(metrics.ranks) or np.isnan(lately.waited_s).all():
        return Verdict("ok", "Running.")
    shares = lately.wait_shares
    mean, rank = float(np.nanmean(shares)), int(np.nanargmax(shares))
    quick = np.flatnonzero(shares < mean * _MUCH_LESS).tolist()
    if mean > _HIGH_SHARE and 0 < len(quick) <= max(len(metrics.ranks) * _FEW, 1):
        who = f"rank{'s' * (len(quick) > 1)} {_list([str(each) for each in quick])}"
        return Verdict("warn", f"Ranks wait {mean:.0%} of their time, but not {who}: the others may wait for the slowest.")
    if mean > _HIGH_SHARE:
        return Verdict("warn", f"Ranks wait {mean:.0%} of their time for data, rank {rank} the most ({shares[rank]:.0%}).")
    if lately.num_steps == 0:
        return Verdict("ok", f"No step was taken in the last {lately.span_s:.0f} s; no rank waits for data.")
    return Verdict("ok", f"Data keeps up: ranks wait {mean:.1%} of their time.")


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _cut(text: str) -> str:
    """A line that is read at a glance; the event has all of it."""
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT].rpartition(' ')[0]} …"
