"""The options of how a run is carried out, declared once: `overlord.start`, `attach` and `overlord serve` all take them.

None of them changes the contents of a step. An engine refuses what it cannot do before anything starts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from overlord.declare.policies import Log
from overlord.errors import SpecError
from overlord.fleet.control_loop import Loaders
from overlord.planlog.plan_log import ClusterLog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from overlord.declare.job import Job
    from overlord.fleet.autoscaler import Autoscale
    from overlord.loaders.model import Budget, Partition
    from overlord.runtime.engine import Engine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where a run logs its plans, which loaders it has, and where its constructors are."""

    log: str | Path | Log | ClusterLog | None = None
    """Where the planner records its decisions; None: in the cluster's own table if there is a cluster."""
    partition: Partition | None = None
    """Which loaders share a process."""
    autoscale: Autoscale | Budget | None = None
    """Add and remove loaders within this budget."""
    shadows: Budget | None = None
    """What Shadow Loaders may use in addition, on a cluster."""
    near: Sequence[str] = ()
    """For each data-parallel group, the node of its trainers, on a cluster."""
    profile: str | Path | None = None
    """A file for who did what when, for Perfetto, or "otel" for OpenTelemetry; written by the process of the run."""

    def __post_init__(self) -> None:
        if self.log is not None and not isinstance(self.log, (Log, ClusterLog)):
            object.__setattr__(self, "log", Log(self.log))
        if isinstance(self.near, str):
            raise SpecError(f"near is a list of nodes, one for each data-parallel group, got the text {self.near!r}")
        object.__setattr__(self, "near", tuple(self.near))
        if self.shadows is not None and self.shadows.host_bytes_per_s is not None:
            raise SpecError(
                "shadows are chosen by what they hold and make, not by what they send: leave host_bytes_per_s "
                "(host-bandwidth=) out of their budget; that of autoscale has it"
            )

    def place(self, engine: Engine) -> None:
        """Tell an engine that is not open yet where constructors go; SpecError if it has no nodes."""
        if self.near:
            engine.place_near(self.near)

    def log_on(self, engine: Engine) -> Log | ClusterLog | None:
        """The log of a run on an engine that is open."""
        assert self.log is None or isinstance(self.log, (Log, ClusterLog))  # made so above
        if self.log is None and engine.log_table is not None:
            return ClusterLog(engine.log_table)
        return self.log

    @property
    def loaders(self) -> Loaders:
        return Loaders.of(self.partition, self.autoscale, self.shadows)

    def to_arguments(self) -> dict[str, Any]:
        """The same options as arguments of `overlord.start`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def warn_of_small_store(engine: Engine, job: Job) -> None:
    """Say so before the first step if the cluster's object store cannot hold the steps that are kept ready: Ray then writes
    to disk what does not fit, which is slower."""
    use, batch = engine.store_use(), job.batch
    tokens = batch.tokens or (batch.samples or 0) * (batch.sequence_length or 0)
    needed = _TOKEN_BYTES * tokens * (job.prefetch + 1)
    if use is not None and use.limit_bytes is not None and needed > use.limit_bytes:
        _log.warning(
            "the object store of the cluster has %s bytes, and the tokens of the %d steps that are kept ready take %s: Ray "
            "writes what does not fit to disk, which is slower; give it more (Ray(object_store_bytes=), or `ray start "
            "--object-store-memory`), or lower Job(prefetch=)",
            f"{use.limit_bytes:,}",
            job.prefetch + 1,
            f"{needed:,}",
        )


_TOKEN_BYTES = 4
