"""How a planner stands, as values."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.data.append_log import LogPosition


@dataclass(frozen=True, slots=True)
class Mix:
    """What was asked of a source and what it gave so far."""

    weight: float
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Chunks of a source: the first that may still be asked for, the one that is drawn from next, and the one that it ends
    before (None when it does not end)."""

    needed: int
    next: int
    end: int | None


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """How a planner stands."""

    start: int
    reached: int
    """The first step that was never drawn."""
    oldest_needed: int
    taken_to: int
    """Every step before this one was taken by all who read then, or were expected to; they may have left since."""
    num_kept: int
    """Plans that are kept."""
    end: int | None
    """The step that the run ends before; None while it is not known."""
    log: LogPosition | None
    process: int
    """The id of the process that it runs in."""
