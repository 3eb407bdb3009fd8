"""Smaller declarations: the plan log, length curricula, and very long documents that wait for one another."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Log:
    """The planner's log, for `start(log=...)`. A run whose planner is lost, or that is started with resume="log", continues
    from it."""

    location: str | os.PathLike[str]
    """A folder (on a cluster, one that all machines see), or the URL of an object store."""
    snapshot_every: int = 1000
    """Steps between two snapshots; records before the last two snapshots are deleted."""
    sync_s: float = 1.0
    """Seconds between two fsyncs: a crash of the machine loses at most so much."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    """Endpoint, region and credentials of an object store, as obstore names them."""

    def __post_init__(self) -> None:
        if not self.location or not isinstance(self.location, (str, os.PathLike)):
            raise SpecError(
                f"a log needs a place: a folder, or a URL such as s3://bucket/run/log; got location={self.location!r}"
            )
        object.__setattr__(self, "location", os.path.expanduser(os.fspath(self.location)))
        if self.snapshot_every < 1:
            raise SpecError(f"snapshot_every is a number of steps, at least 1, got {self.snapshot_every}")
        if self.sync_s <= 0:
            raise SpecError(f"sync_s is a positive number of seconds, got {self.sync_s}")


@dataclass(frozen=True, slots=True)
class OutlierDelay:
    """Very long documents wait for one another and come together in one step, so that no rank has one alone.

    It decides which step a document is in, so it is part of the stream: keep it whatever mesh a run has.
    """

    lengths: tuple[int, ...]
    """Rising lengths in tokens, one queue for each: a document waits in the queue of the largest that it reaches."""
    together: int
    """How many documents of a queue come at once: the microbatches of a step over all ranks, so that each gets one."""
    most_steps: int = 8
    """The longest that a document waits, in steps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths or sorted({0, *self.lengths}) != [0, *self.lengths]:
            raise SpecError(f"lengths are rising numbers of tokens, at least one of them, got {self.lengths}")
        if self.together < 1:
            raise SpecError(f"together is how many long documents come at once, at least 1, got {self.together}")
        if self.most_steps < 1:
            raise SpecError(f"most_steps is the longest that a document waits, at least 1, got {self.most_steps}")


def check_limits(limits: Mapping[int, int], tokens: int | None, sequence_length: int, document_multiple: int) -> None:
    """Refuse what is not {step: tokens}, and batches of `tokens` a step (None: of samples) that it makes no sense for."""
    if tokens is None:
        raise SpecError("document_limits cuts documents into several samples: count steps in tokens=...")
    if not limits or min(limits) != 0:
        raise SpecError(f"document_limits is {{step: tokens}} and begins at step 0, got {dict(limits)}")
    for step, limit in limits.items():
        if not 1 <= limit <= sequence_length:
            raise SpecError(
                f"document_limits are from 1 to sequence_length ({sequence_length}) tokens, got {limit} at step {step}"
            )
        if limit % document_multiple:
            raise SpecError(
                f"document_limits must be multiples of document_multiple: {limit} at step {step} is not one of "
                f"{document_multiple}"
            )


def limit_at(limits: Mapping[int, int], step: int) -> int:
    starts = sorted(limits)
    return limits[starts[bisect_right(starts, step) - 1]]
