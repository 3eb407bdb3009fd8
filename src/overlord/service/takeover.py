"""What a run leaves behind in its cluster when its process is lost, and how another process finds it.

Where roles outlive the process that started the run (`Engine.roles_live_on`), the loader records what the run is. A process
that takes it over makes no role again: trainers go on reading meanwhile. While a run is moved to another state or mesh its
record is empty, and a process that finds that starts from the log instead. Loaders, which know no steps, go on even then,
and the other roles are made again in the processes that there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.errors import ClosedError
from overlord.fleet.hosts import FLEET, FleetState
from overlord.roles.assembly import PLANNER, constructor_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from overlord.checkpoint.fingerprint import Fingerprint
    from overlord.declare.job import Job
    from overlord.declare.source import Unit
    from overlord.planlog.plan_log import Era
    from overlord.runtime.ray.engine import Ray
    from overlord.service.elastic import ElasticMesh
    from overlord.steering.decisions import Steered
    from overlord.stream.progress import Progress

RUN = "run"
"""The key under which a run's record is published."""
SEATS = "seats"
"""The key under which the seats of its trainers are, where its mesh follows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run is, apart from its roles."""

    job: Job
    fingerprint: Fingerprint
    start: Progress
    steered: Steered
    era: Era | None
    generation: int
    instance: str
    """By which clients know the service: they need not notice that another process has it now."""
    accept_changes: Collection[str] | bool
    first: Progress | None = None
    """Where the planner begins; None: where trainers do."""
    elastic_mesh: ElasticMesh | None = None
    """Where the mesh follows the trainers: which groups are there. None: all of the job's mesh."""


@dataclass(frozen=True, slots=True)
class LeftRun:
    """A run whose roles live on."""

    record: RunRecord
    units: Mapping[str, Sequence[Unit]]
    fleet: FleetState


def find_left_run(engine: Ray, running: Collection[str]) -> LeftRun | None:
    """The run whose roles an engine has taken over; None if they do not make a whole one."""
    fleet = find_left_loaders(engine, running)
    try:
        record: RunRecord | None = engine.look_up(RUN)
        if fleet is None or record is None:
            return None
        units: dict[str, Any] = {name: engine.look_up(f"units/{name}") for name in record.job.sources}
    except ClosedError:  # it was lost before all of this was written
        return None
    needed = {PLANNER, *(constructor_name(group) for group in range(record.job.mesh.dp))}
    if not needed <= set(running):
        return None
    for name in set(running) - needed - set(fleet.hosts):
        engine.stop(name)  # spawned just before the process was lost
    return LeftRun(record, units, fleet)


def find_left_loaders(engine: Ray, running: Collection[str]) -> FleetState | None:
    """The loaders among the roles that an engine has taken over; None if some are lost."""
    try:
        saved: FleetState = engine.look_up(FLEET)
    except ClosedError:
        return None
    return saved.without_lost_shadows(running)
