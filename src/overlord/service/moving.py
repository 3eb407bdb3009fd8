"""Moves a running job: to a saved state, to another mesh, or on with one source more.

A move begins at a step that no rank has taken and that no rank is behind (`service/resizing.py`). Planner and constructors
are made for it, the generation of the run goes up, and clients of the generation before rejoin or end.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overlord.checkpoint.fingerprint import Fingerprint
from overlord.checkpoint.state import from_state, to_state
from overlord.errors import SpecError, WaitTimeoutError
from overlord.messages import Decision, MeshChange, SourceChange
from overlord.planlog.lineage_run import record_units
from overlord.planlog.plan_log import steered_on_return, write_first_segment
from overlord.roles.assembly import are_decisions_safe, cut_units, list_units, with_windows
from overlord.roles.planner import Planner
from overlord.roles.routes import Routes
from overlord.service.constructor import ServingConstructor
from overlord.service.resizing import freeze_at, thaw_all
from overlord.service.taking import describe_stopped
from overlord.steering.decisions import SOURCE, mixture_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.mesh import Mesh
    from overlord.declare.source import Source, Unit
    from overlord.service.elastic import ElasticMesh
    from overlord.service.run_roles import RunRoles

_REMEMBERED_CHANGES = 16  # of the mesh


class RunMoves:
    """Moves one run, one move at a time. Every call may be repeated."""

    def __init__(self, roles: RunRoles) -> None:
        self._roles = roles
        self._near = roles.engine.near
        if self._near and roles.elastic_mesh is not None:  # taken over while some groups are not there
            roles.engine.place_near(self._near_of(roles.elastic_mesh))
        self.lock = threading.Lock()
        """Held while the run is moved; taken before the lock of its readers."""
        self._mesh_lock = threading.Lock()
        self._mesh_changes: dict[str, int] = {}  # the newest, with the steps from which they hold
        self._continued: set[int] = set()  # generations whose clients go on: a source was added after them

    def may_follow(self, generation: int) -> bool:
        """True if a client of a generation goes on with its next step."""
        return all(each in self._continued for each in range(generation, self._roles.generation))

    def load_state(self, state: Mapping[str, Any], generation: int) -> int:
        """Move the run to a state once, however many clients load it: a client that is a generation behind only follows.
        Returns the run's generation."""
        roles = self._roles
        progress = from_state(state, roles.job, roles.fingerprint, roles.accept_changes)
        unit = roles.job.mix.unit
        with self.lock, roles.readers.lock:
            follows = generation < roles.generation and to_state(progress, unit, {}) == to_state(roles.start, unit, {})
            if follows:
                return roles.generation
            with self._moving():
                known = roles.planner.call(Planner.decisions).result()
                roles.start = roles.first = progress
                roles.steered = steered_on_return(state, roles.job, known, progress.step)
                roles.generation += 1
                roles.era = None if roles.era is None else roles.era.next_era(progress.step, roles.job.mesh)
                roles.replace_planner(progress)
                with roles.readers.take_by_message():
                    for constructor in roles.constructors:
                        constructor.call(ServingConstructor.restart, roles.generation).result()
                roles.readers.expect()
            roles.note("moved", f"the run goes on from step {progress.step:,}")
            return roles.generation

    def change_mesh_once(self, change: MeshChange, resize: Callable[[MeshChange], int]) -> int:
        """Apply a change once, however often it is asked for; returns the first step of its mesh."""
        with self._mesh_lock:  # trainers that ask for the same change at once wait for it
            if change.id not in self._mesh_changes:
                step = resize(change)
                self._mesh_changes = {**dict(list(self._mesh_changes.items())[-_REMEMBERED_CHANGES:]), change.id: step}
            return self._mesh_changes[change.id]

    def change_groups(self, wanted: ElasticMesh, at: int | None, timeout_s: float) -> int:
        """Change the mesh to some groups of the one that the run was served with; returns its first step."""
        near = self._near_of(wanted)
        return self._change_mesh(wanted.present, at, timeout_s, None if near == self._roles.engine.near else near, wanted)

    def change_mesh(self, mesh: Mesh, at: int | None, timeout_s: float, near: Sequence[str] | None = None) -> int:
        """Change the mesh; returns its first step."""
        return self._change_mesh(mesh, at, timeout_s, near, None)

    def _near_of(self, mesh: ElasticMesh) -> tuple[str, ...]:
        return tuple(self._near[group] for group in mesh.groups) if self._near else ()

    def _change_mesh(
        self, mesh: Mesh, at: int | None, timeout_s: float, near: Sequence[str] | None, elastic: ElasticMesh | None
    ) -> int:
        with self._frozen(at, timeout_s, "the mesh cannot change") as (step, taken_to):
            if mesh == self._roles.job.mesh and step >= taken_to and near is None:
                self._hand_out_again(step)
            else:
                # Trainers that come and go may need the step before it again.
                self._begin_mesh(mesh, step, 0 if elastic is None else 1, near)
            self._roles.elastic_mesh = elastic
            self._roles.note("resize", f"from step {step:,} on: dp={mesh.dp} cp={mesh.cp} tp={mesh.tp} pp={mesh.pp}")
            return step

    def _hand_out_again(self, step: int) -> None:
        """Go on at a step for the same mesh: what constructors have built of it stays."""
        roles = self._roles
        progress = roles.planner.call(Planner.progress, step).result()
        with roles.readers.lock:
            roles.readers.forget_ended()
            roles.generation += 1
            for constructor in roles.constructors:
                constructor.call(ServingConstructor.restart, roles.generation, step).result()
            roles.start = progress
            roles.readers.expect()

    def _begin_mesh(self, mesh: Mesh, step: int, num_spare: int, near: Sequence[str] | None) -> None:
        """Go on at a step for another mesh, with a planner from a few steps before it."""
        roles = self._roles
        if near and len(near) < mesh.dp:
            raise SpecError(
                f"near names the nodes of {len(near)} data-parallel groups, and the mesh has {mesh.dp}: name a node for each"
            )
        first = max(roles.first.step, step - num_spare)
        start, steered = roles.planner.call(Planner.checkpoint, step).result()
        if first < step:
            progress, steered = roles.planner.call(Planner.checkpoint, first).result()
        else:
            progress = start
        before, roles.steered = roles.steered, steered
        placed = roles.engine.near
        try:
            if near is not None:
                roles.engine.place_near(near)
            roles.replace_for(replace(roles.job, mesh=mesh), progress, start)
        except BaseException:
            roles.steered = before
            if near is not None:
                roles.engine.place_near(placed)
            raise

    def add_source(self, change: SourceChange, source: Source, timeout_s: float) -> int:
        """Draw from one source more; returns the first step that does."""
        roles, name = self._roles, change.source
        if name in roles.job.sources:
            raise SpecError(
                f"there is a source {name!r} already (one that was removed keeps its name); the job's sources are "
                f"{', '.join(map(repr, roles.job.sources))}"
            )
        if not are_decisions_safe(roles.job, roles.era, roles.engine):
            raise SpecError("a source is added while a job runs on a cluster only with a log: give start(log=...)")
        job = replace(roles.job, sources={**roles.job.sources, name: source})  # checks it
        listed = cut_units(job, list_units({name: source}))
        job = with_windows(job, listed)
        units = {**roles.units, **listed}
        added = _AddedSource(job, units, Fingerprint.of(job, units), change)
        with self._frozen(None, timeout_s, f"source {name!r} cannot be added now") as (step, _):
            since = self._begin_with_source(added, step)
        roles.control_loop.add_source(name, listed[name], job.sources[name].units_per_chunk)
        roles.note("source", f"from step {since:,} on {change.share:.2%} of the mixture comes from {name}")
        return since

    def _begin_with_source(self, added: _AddedSource, step: int) -> int:
        """Go on at a step with one source more; returns the first step that draws from it."""
        roles, change, job = self._roles, added.change, added.job
        since = step if change.from_step is None else change.from_step
        if since < step:
            raise SpecError(f"step {since} is drawn already; a source can be added from step {step} on")
        progress, steered = roles.planner.call(Planner.checkpoint, step).result()
        value = {
            "source": change.source,
            "share": float(change.share),
            "of": mixture_digest(job.mix),
            "by": "user",
            "id": change.id,
        }
        steered = replace(steered, decisions=(*steered.decisions, Decision(since, SOURCE, value)))
        progress = progress.for_sources(tuple(job.sources))
        era = None if roles.era is None else roles.era.next_era(step, job.mesh, added.fingerprint)
        if era is not None:
            write_first_segment(era, progress, steered)  # before anything follows from it
            if era.has_lineage:
                record_units(era, added.units)
        roles.fleet.add_source(job, change.source, added.units[change.source])
        known = roles.steered, roles.routes, roles.num_units
        roles.steered, roles.routes = steered, Routes(roles.engine, tuple(job.sources))
        roles.num_units = {name: len(listed) for name, listed in added.units.items()}
        self._continued.add(roles.generation)
        try:
            roles.replace_for(job, progress, progress, era)
        except BaseException:
            roles.steered, roles.routes, roles.num_units = known
            self._continued.discard(roles.generation)
            raise
        roles.units, roles.fingerprint = added.units, added.fingerprint
        roles.saved_fingerprint = added.fingerprint.to_dict()
        return since

    @contextmanager
    def _frozen(self, at: int | None, timeout_s: float, refusal: str) -> Generator[tuple[int, int]]:
        """Hand out no step from one on while the run is moved, so that it can begin there anew. Gives that step, and the
        first that no rank has taken. After an error, steps are handed out as before."""
        roles = self._roles
        with self.lock, self._moving(), roles.readers.take_by_message() as undecided:
            if undecided:
                raise WaitTimeoutError(f"{refusal}: {describe_stopped(undecided)}")
            try:
                taken_to = roles.planner.call(Planner.status).result().taken_to
                step = freeze_at(
                    at,
                    roles.constructors,
                    roles.readers.here,
                    start=roles.first.step,
                    taken_to=max(taken_to, roles.start.step),
                    timeout_s=timeout_s,
                )
                yield step, taken_to
            except BaseException:
                thaw_all(roles.constructors)
                raise

    @contextmanager
    def _moving(self) -> Generator[None]:
        """Meanwhile constructors stay on their nodes, and the run has no record for another process."""
        with self._roles.places.paused():
            self._roles.withdraw_record()
            try:
                yield
            finally:
                self._roles.publish_record()


@dataclass(frozen=True, slots=True)
class _AddedSource:
    """A run with one source more: its job, units and fingerprint, and the request."""

    job: Job
    units: Mapping[str, Sequence[Unit]]
    fingerprint: Fingerprint
    change: SourceChange
