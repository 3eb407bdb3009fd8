"""Where a run writes down what its planner decided."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from overlord.errors import SpecError


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
