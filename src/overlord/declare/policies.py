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
    """Where the planner writes down what it decided: a folder (on a cluster, one that all machines see), or a URL of an
    object store. A run whose planner is lost, or that is started with resume="log", goes on from it."""

    location: str | os.PathLike[str]
    snapshot_every: int = 1000
    """Steps between two snapshots; what is older than the last two is deleted."""
    sync_s: float = 1.0
    """Seconds between two moments at which everything is safe from a crash of the machine."""
    storage_options: Mapping[str, str] = field(default_factory=dict)

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
    """Documents of at least `lengths[0]` tokens wait, in one queue for each of the rising `lengths`, until `together` of a
    queue are there; these then come in one step. With `together` = the microbatches of a step over all ranks, each
    gets one, and none is alone with a long document. Nobody waits longer than `most_steps` steps.

    It decides which step a document is in, so it is part of the stream: give it once, whatever mesh a run has.
    """

    lengths: tuple[int, ...]
    together: int
    most_steps: int = 8

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
