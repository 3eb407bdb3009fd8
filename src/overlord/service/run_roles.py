"""The roles of a run on its engine, and what the run is: its job, its state and its generation.

`RunRoles` starts the roles or takes over those that another process has left, and makes planner and constructors again where
the run goes on for another mesh. When that may happen, and at which step, is decided in `service/moving.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.checkpoint.cache_keys import row_keys
from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.fleet.control_loop import LoaderControlLoop
from overlord.planlog.lineage_run import skip_value
from overlord.planlog.plan_log import ClusterLog
from overlord.roles.assembly import (
    PLANNER,
    are_decisions_safe,
    constructor_name,
    make_partition,
    make_planner,
    only_reads,
    plans_together,
)
from overlord.roles.chunk_snapshots import SnapshotPlace
from overlord.roles.planner import Planner
from overlord.roles.routes import Routes
from overlord.runtime.engine import Handle
from overlord.runtime.liveness import ROLE_BUSY, ROLE_REPORT
from overlord.runtime.long_waits import warn_if_long
from overlord.service.constructor import ServingConstructor, make_serving_constructor
from overlord.service.metrics import MetricsCollector, RunView
from overlord.service.placement import ConstructorPlaces
from overlord.service.readers import Readers
from overlord.service.takeover import RUN, SEATS, LeftRun, RunRecord
from overlord.status import StoreUse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Unit
    from overlord.fleet.control_loop import Loaders
    from overlord.fleet.hosts import FleetState
    from overlord.planlog.plan_log import Era
    from overlord.runtime.engine import Engine, Reply
    from overlord.service.elastic import Seats
    from overlord.status import PlannerStatus, RunMetrics
    from overlord.stream.progress import Progress

T = TypeVar("T")
STATUS_WAIT_S = ROLE_REPORT.after_s
"""How long a request for the state of a role waits."""
_STATUS_LINES_S = ROLE_BUSY.after_s
_NEW_PLANNER = f"{PLANNER}/new"


class RunRoles:
    """Planner, constructors and loaders of one run. Handles stay valid; what they lead to is replaced when the run is moved.
    Fields change only while the run is moved, one move at a time."""

    def __init__(
        self,
        engine: Engine,
        record: RunRecord,
        units: Mapping[str, Sequence[Unit]],
        loaders: Loaders,
        *,
        left: LeftRun | None = None,
        left_loaders: FleetState | None = None,
    ) -> None:
        """`left`: the roles run already, and another process had the run. `left_loaders`: only loaders do."""
        self.engine = engine
        self.job: Job = record.job
        self.tree = ClientPlaceTree(self.job.mesh)
        self.units = units
        self.num_units: dict[str, int] = {name: len(listed) for name, listed in units.items()}
        self.fingerprint = record.fingerprint
        self.saved_fingerprint = record.fingerprint.to_dict()
        self.start: Progress = record.start  # where trainers begin
        self.first: Progress = record.first or record.start  # where the planner does
        self.elastic_mesh = record.elastic_mesh
        self.steered = record.steered
        self.era = record.era
        self.generation = record.generation
        self.instance = record.instance
        self.is_new = left is None
        self.accept_changes = record.accept_changes
        self.readers = Readers()
        self._skips = [(skip.from_step, skip_value(skip, units[skip.source])) for skip in self.job.skip]
        loaders = loaders.for_engine(engine, self.job)
        loaders = replace(loaders, snapshots=self._snapshot_place(), row_keys=row_keys(self.job))
        self._expect_groups(self.job)
        if left is None:
            self._spawn(loaders, left_loaders)
        else:
            self._take(left, loaders)
        self.places = ConstructorPlaces(self.constructors, lambda: self.tree, lambda: self.generation, self.readers.here)
        self.control_loop = LoaderControlLoop(
            engine,
            self.job,
            units,
            fleet=self.fleet,
            loaders=loaders,
            planner=self.planner,
            constructors=self.constructors,
        )
        self._metrics = MetricsCollector(self.fleet, engine.recorder.events)

    def _spawn(self, loaders: Loaders, left: FleetState | None) -> None:
        job, engine = self.job, self.engine
        partition = make_partition(job, self.units, engine, loaders.partition) if left is None else left.partition
        self.fleet = loaders.start_fleet(engine, job, self.units, partition, left)
        self.routes = Routes(engine, tuple(job.sources))
        self.planner: Handle[Planner] = engine.spawn(PLANNER, self._planner_from(job, self.start, self.era))
        self.constructors: list[Handle[ServingConstructor]] = [
            self._spawn_constructor(job, group, self.generation) for group in range(job.mesh.dp)
        ]
        engine.wait_until_started()

    def _expect_groups(self, job: Job) -> None:
        self.engine.expect_groups(job.mesh.dp, are_light=only_reads(job, self.units, self.engine))

    def _take(self, left: LeftRun, loaders: Loaders) -> None:
        """Use the roles that another process has left."""
        job, engine = self.job, self.engine
        self.fleet = loaders.start_fleet(engine, job, left.units, left.fleet.partition, left.fleet)
        self.routes = Routes(engine, tuple(job.sources))
        self.planner = Handle(engine, PLANNER)
        self.constructors = [Handle(engine, constructor_name(group)) for group in range(job.mesh.dp)]

    def _snapshot_place(self) -> SnapshotPlace | None:
        """Where loaders save chunks; None if they save none."""
        log = None if self.era is None else self.era.log
        if isinstance(log, ClusterLog) or log is None or log.chunks_every_s is None:
            return None
        return SnapshotPlace.of(log.location, log.chunks_every_s, self.job, self.fingerprint)

    def _planner_from(self, job: Job, progress: Progress, era: Era | None) -> partial[Planner]:
        is_safe, is_served = are_decisions_safe(job, era, self.engine), self.readers.serving is not None
        return partial(
            make_planner,
            job,
            self.num_units,
            progress,
            steered=self.steered,
            routes=self.routes,
            era=era,
            is_safe=is_safe,
            is_served=is_served,
            skips=self._skips,
            plans_together=plans_together(self.engine),
            engine=self.engine if self.engine.shares_memory else None,
        )

    def _spawn_constructor(self, job: Job, group: int, generation: int) -> Handle[ServingConstructor]:
        make = partial(make_serving_constructor, job, group, self.planner, self.routes, generation=generation)
        return self.engine.spawn(constructor_name(group), make)

    def publish_record(self) -> None:
        """Record what the run is, for a process that takes it over."""
        if self.engine.roles_live_on:
            record = RunRecord(
                job=self.job,
                fingerprint=self.fingerprint,
                start=self.start,
                steered=self.steered,
                era=self.era,
                generation=self.generation,
                instance=self.instance,
                accept_changes=self.accept_changes,
                first=self.first,
                elastic_mesh=self.elastic_mesh,
            )
            self.engine.publish(RUN, record)

    def withdraw_record(self) -> None:
        """Leave no record: the roles are between two states, or told to stop, and nobody could go on with them."""
        if self.engine.roles_live_on:
            self.engine.publish(RUN, None)

    def publish_seats(self, seats: Seats) -> None:
        """Record who has which seat, for a process that takes the run over."""
        if self.engine.roles_live_on:
            self.engine.publish(SEATS, seats)

    def left_seats(self) -> Seats | None:
        """The seats that another process has given, if this one has taken the run over."""
        try:
            return None if self.is_new else self.engine.look_up(SEATS)
        except ClosedError:  # it has given none
            return None

    def replace_planner(self, progress: Progress) -> None:
        """Plan from another progress on, for the same mesh."""
        self.engine.spawn(_NEW_PLANNER, self._planner_from(self.job, progress, self.era))
        self.engine.rebind(PLANNER, _NEW_PLANNER)

    def replace_for(self, job: Job, progress: Progress, start: Progress, era: Era | None = None) -> None:
        """Make planner and constructors for another mesh or other sources, from a progress on. Trainers begin at `start`.
        `era` is that of the log, unless it is the next one of the same sources."""
        engine, old, new = self.engine, self.job.mesh.dp, job.mesh.dp
        if era is None and self.era is not None:
            era = self.era.next_era(progress.step, job.mesh)
        added: list[Handle[ServingConstructor]] = []
        self._expect_groups(job)
        self.metrics()  # what constructors have counted ends with them
        try:
            engine.spawn(_NEW_PLANNER, self._planner_from(job, progress, era))
            added = [self._spawn_constructor(job, group, self.generation + 1) for group in range(old, new)]
            engine.wait_until_started()
        except BaseException:  # nothing has changed yet
            self._expect_groups(self.job)
            for name in (_NEW_PLANNER, *(constructor.name for constructor in added)):
                engine.stop(name)
            raise
        with self.readers.lock:
            self.readers.forget_ended()
            self.generation += 1  # first, so that clients of the old mesh see that it is gone
            engine.rebind(PLANNER, _NEW_PLANNER)
            for constructor in self.constructors:
                engine.stop(constructor.name)
            kept = [self._spawn_constructor(job, group, self.generation) for group in range(min(old, new))]
            engine.wait_until_started()
            self.job, self.tree, self.start, self.era = job, ClientPlaceTree(job.mesh), start, era
            self.first = progress
            self.constructors[:] = kept + added
            self.readers.expect()

    def note(self, kind: str, text: str) -> None:
        """Note an event of this run."""
        self.engine.recorder.events.note(kind, text)

    def first_open_step(self) -> int:
        """The first step that no constructor has requested a plan for."""
        reached = [constructor.call(ServingConstructor.reached) for constructor in self.constructors]
        return max(self.start.step, *(answer.result() for answer in reached))

    def slowest(self) -> int:
        """The first step that not every reader has taken."""
        return self.readers.slowest(lambda: self.status().taken_to, lambda: self.start.step)

    def status(self) -> PlannerStatus:
        return self.planner.call(Planner.status).result(STATUS_WAIT_S)

    def status_lines(self) -> list[str]:
        """What the planner and the loaders are busy with, to explain a wait."""
        try:
            planner = self.planner.call(Planner.status_lines).result(_STATUS_LINES_S)
        except (WaitTimeoutError, WorkerDiedError):
            planner = ["the planner does not answer"]
        return [*planner, *self.routes.status_lines()]

    def wait(self, what: str, call: Callable[[], Reply[T]]) -> T:
        """Wait for a call that may have to draw steps first, with a warning where that takes long."""

        def describe() -> str:
            return what + "".join(f"\n  - {line}" for line in self.status_lines())

        with warn_if_long(describe):
            return call().result()

    def metrics(self) -> RunMetrics:
        self.readers.note_taken()
        view = RunView(
            job=self.job,
            tree=self.tree,
            generation=self.generation,
            step=self._known_slowest(),
            planner=self.planner,
            constructors=self.constructors,
            store=self.store_use,
        )
        return self._metrics.collect(view)

    def _known_slowest(self) -> int:
        """As `slowest`, also while a role does not answer."""
        try:
            return self.slowest()
        except (ClosedError, WaitTimeoutError, WorkerDiedError):
            return min(self.readers.here().values(), default=self.start.step)

    def store_use(self) -> StoreUse | None:
        """The shared memory of the run: the cluster's object store, or that of the constructors."""
        return self.engine.store_use() or self._shared_memory()

    def _shared_memory(self) -> StoreUse | None:
        found: dict[int, StoreUse] = {}  # by process: constructors of one process share its memory
        for answer in [constructor.call(ServingConstructor.store_use) for constructor in self.constructors]:
            with suppress(WaitTimeoutError, WorkerDiedError):
                process, use = answer.result(STATUS_WAIT_S)
                found[process] = use
        if not any(use.num_bytes for use in found.values()):
            return None
        return StoreUse(
            sum(use.num_bytes for use in found.values()),
            None,
            sum(use.lent_bytes for use in found.values()),
            sum(use.lent_limit_bytes or 0 for use in found.values()),
        )
