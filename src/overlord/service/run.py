"""`start` puts the roles of a job on an engine; the `Loader` that it returns is the running job."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import numpy as np

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.batches.tensors import Destination
from overlord.checkpoint.fingerprint import Fingerprint, warn_of_unseen
from overlord.checkpoint.state import from_state, to_state
from overlord.declare.arguments import seconds_or_none, seconds_to_wait, whole
from overlord.declare.mesh import Mesh
from overlord.errors import ClosedError, SpecError, WaitTimeoutError, WorkerDiedError
from overlord.fleet.control_loop import LoaderControlLoop, Loaders
from overlord.messages import Decision, Delivery, Later, State, StepReport, WeightChange
from overlord.planlog.plan_log import ClusterLog, Era, begin_run, saved_windows, steered_on_return
from overlord.roles.assembly import (
    PLANNER,
    are_decisions_safe,
    constructor_name,
    list_units,
    make_partition,
    make_planner,
    plans_together,
    with_windows,
)
from overlord.roles.planner import Mix, Planner, PlannerStatus
from overlord.roles.routes import Routes
from overlord.runtime.embedded import Embedded
from overlord.runtime.engine import Engine, Handle, Reply, StoreUse, WorkplaceSize
from overlord.runtime.exclusive import OneProcess
from overlord.runtime.liveness import RANK_SILENT, ROLE_BUSY, ROLE_REPORT
from overlord.runtime.long_waits import warn_if_long
from overlord.service.client import Client
from overlord.service.constructor import ServingConstructor, make_serving_constructor
from overlord.service.resizing import freeze_at, thaw_all
from overlord.service.run_api import MOVED, StepSource
from overlord.service.run_options import RunOptions, warn_of_small_store
from overlord.service.takeover import RUN, LeftRun, RunRecord, find_left_run
from overlord.service.taking import describe_stopped
from overlord.steering.decisions import Steered
from overlord.stream.outliers import Delay

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence
    from pathlib import Path

    from overlord.declare.job import Job
    from overlord.declare.policies import Log
    from overlord.declare.source import Unit
    from overlord.fleet.autoscaler import Autoscale
    from overlord.fleet.shadows import ShadowChange
    from overlord.loaders.autoscaling import ScalingDecision
    from overlord.loaders.model import Budget, Partition
    from overlord.roles.plan_window import Planned
    from overlord.roles.source_loader import BufferUse
    from overlord.runtime.ray.engine import Ray
    from overlord.service.auth import Address
    from overlord.service.serving import OneServer, ServerPerGroup
    from overlord.stream.progress import Progress


T = TypeVar("T")
_NEW_PLANNER = f"{PLANNER}/new"
_STATUS_LINES_S = ROLE_BUSY.after_s
_STATUS_WAIT_S = ROLE_REPORT.after_s
_LEAVE_S = ROLE_REPORT.after_s  # a constructor that hangs must not hold up a trainer that ends
_log = logging.getLogger(__name__)
_ONE_PROCESS = (
    "Start it in the process that uses it, or let others read with overlord.connect at the address of Loader.serve(), in "
    "processes that multiprocessing's 'spawn' started"
)


def start(  # noqa: PLR0913 - all but the job by name
    job: Job,
    *,
    engine: Engine | None = None,
    resume: Mapping[str, Any] | str | bytes | None = None,
    accept_changes: Collection[str] | bool = (),
    world_size: int | None = None,
    log: str | Path | Log | ClusterLog | None = None,
    partition: Partition | None = None,
    autoscale: Autoscale | Budget | None = None,
    shadows: Budget | None = None,
    near: Sequence[str] = (),
) -> Loader:
    """Start a job. Use the loader in a `with` block, or call `close`.

    `engine` is where roles run; by default in this process. `resume` is a state from `state_dict`, or its JSON text, from
    any mesh. `accept_changes` names differences between the job and the state to accept. `world_size`, where given, must fit
    the mesh; a mesh without `dp` takes its dp from it.

    `log` is where the planner records its decisions, so that a planner that is made again returns the same plans. On a
    cluster it always does so: by default in the cluster's own table, which ends with the run. A checkpoint belongs to a
    model, so `resume=state` decides where a run continues, whatever the log says. `resume="log"` is for a run whose trainers
    lived on: it continues with the first step that the log does not know to be taken by all of them, up to `prefetch` + 1
    steps before the first that was not.

    `partition` says which loaders share a process, on a cluster. With `autoscale`, loaders are added and removed during the
    run, within that budget. `shadows` is what Shadow Loaders may use in addition, on a cluster. `near` names, for each
    data-parallel group, the node of its trainers, on a cluster. None of them changes the contents of a step.
    """
    if world_size is not None:
        job = replace(job, mesh=job.mesh.for_world(whole(world_size, "world_size", least=1)))
    options = RunOptions(log=log, partition=partition, autoscale=autoscale, shadows=shadows, near=near)
    if resume == "log" and log is None:
        raise SpecError("resume='log' continues from a log: say where it is with log=...")
    engine = engine or Embedded()
    options.place(engine)
    engine.open(WorkplaceSize(job.num_workers, job.num_processes))  # first: its processes start while files are listed
    try:
        warn_of_small_store(engine, job)
        units = list_units(job.sources)
        log = options.log_on(engine)
        job = with_windows(job, units, saved_windows(resume, log, job.sources))
        fingerprint = Fingerprint.of(job, units)
        progress, steered, era = begin_run(job, fingerprint, resume, log, accept_changes)
        return Loader(
            job,
            engine,
            units,
            fingerprint,
            progress,
            accept_changes=accept_changes,
            era=era,
            loaders=options.loaders,
            steered=steered,
        )
    except BaseException:
        engine.close()
        raise


def take_over(job: Job, engine: Ray, options: RunOptions) -> Loader | None:
    """Go on with a run whose roles have outlived its process, in the namespace of the engine; None if they do not make a
    whole run, and everything there has ended."""
    engine.open(WorkplaceSize(job.num_workers, job.num_processes))
    try:
        left = find_left_run(engine)
        if left is None:
            engine.close()
            return None
        known = left.record
        return Loader(
            known.job,
            engine,
            left.units,
            known.fingerprint,
            known.start,
            accept_changes=known.accept_changes,
            era=known.era,
            loaders=options.loaders,
            steered=known.steered,
            left=left,
        )
    except BaseException:
        engine.close()
        raise


class Loader:
    """A running job, from `overlord.start`. `client(rank)` returns the iterator of a rank; `serve` lets trainers in other
    processes connect. It belongs to the process that started it. Safe to call from several threads."""

    def __init__(  # noqa: PLR0913 - `start` makes it
        self,
        job: Job,
        engine: Engine,
        units: Mapping[str, Sequence[Unit]],
        fingerprint: Fingerprint,
        progress: Progress,
        *,
        accept_changes: Collection[str] | bool = (),
        era: Era | None = None,
        loaders: Loaders | None = None,
        steered: Steered | None = None,
        left: LeftRun | None = None,
    ) -> None:
        """`left`: the roles run already, and another process had the run."""
        self.job = job
        self.tree = ClientPlaceTree(job.mesh)
        self._group_of: dict[int, int] = {}  # rank to its data-parallel group in this mesh
        self._engine = engine
        self._num_units = {name: len(listed) for name, listed in units.items()}
        self._fingerprint = fingerprint
        self._saved_fingerprint = fingerprint.to_dict()
        self._accept_changes = accept_changes
        self._has_saved = era is not None and era.is_wanted  # the first save warns of what no fingerprint sees
        self._start = progress
        self._steered = steered or Steered()
        self._era = era
        self._generation = 0 if left is None else left.record.generation
        self._instance = secrets.token_hex(8) if left is None else left.record.instance
        self._is_new = left is None
        self._move_lock = threading.Lock()  # held while the run is moved to another state or mesh; taken before _lock
        self._lock = threading.Lock()
        self._closed = False
        self._home = OneProcess("the loader", _ONE_PROCESS)
        self._clients: list[Client] = []
        self._serving: OneServer | ServerPerGroup | None = None
        loaders = (loaders or Loaders()).for_engine(engine, job)
        if left is None:
            self._spawn(units, progress, loaders)
        else:
            self._take_roles(left, loaders)
        self._control_loop = LoaderControlLoop(
            engine,
            job,
            units,
            fleet=self._fleet,
            loaders=loaders,
            planner=self._planner,
            constructors=self._constructors,
        )
        self._record()
        atexit.register(self.close)
        self._control_loop.start()

    def _spawn(self, units: Mapping[str, Sequence[Unit]], progress: Progress, loaders: Loaders) -> None:
        job, engine = self.job, self._engine
        partition = make_partition(job, units, engine, loaders.partition)
        self._fleet = loaders.start_fleet(engine, job, units, partition)
        self._routes = Routes(engine, tuple(job.sources))
        self._planner: Handle[Planner] = engine.spawn(PLANNER, self._planner_from(job, progress, self._era))
        self._constructors: list[Handle[ServingConstructor]] = [
            self._spawn_constructor(job, group, self._generation) for group in range(job.mesh.dp)
        ]
        engine.wait_until_started()

    def _take_roles(self, left: LeftRun, loaders: Loaders) -> None:
        """Use the roles that another process has left."""
        job, engine = self.job, self._engine
        self._fleet = loaders.start_fleet(engine, job, left.units, left.fleet.partition, left.fleet)
        self._routes = Routes(engine, tuple(job.sources))
        self._planner = Handle(engine, PLANNER)
        self._constructors = [Handle(engine, constructor_name(group)) for group in range(job.mesh.dp)]

    def _record(self) -> None:
        """Record what the run is, for a process that takes it over."""
        if self._engine.roles_live_on:
            record = RunRecord(
                job=self.job,
                fingerprint=self._fingerprint,
                start=self._start,
                steered=self._steered,
                era=self._era,
                generation=self._generation,
                instance=self._instance,
                accept_changes=self._accept_changes,
            )
            self._engine.publish(RUN, record)

    @contextmanager
    def _moving(self) -> Generator[None]:
        """Meanwhile the run has no record: roles are between two states, and nobody could go on with them."""
        if self._engine.roles_live_on:
            self._engine.publish(RUN, None)
        try:
            yield
        finally:
            self._record()

    def _spawn_constructor(self, job: Job, group: int, generation: int) -> Handle[ServingConstructor]:
        make = partial(make_serving_constructor, job, group, self._planner, self._routes, generation=generation)
        return self._engine.spawn(constructor_name(group), make)

    def client(
        self,
        rank: int,
        *,
        torch: bool = False,
        pin_memory: bool = False,
        device: Any = None,
        fetch_ahead: int | None = None,
        timeout_s: float | None = None,
    ) -> Client:
        """Returns the iterator of one rank, from the step the run started at. `timeout_s` is the longest wait for a step.

        With `torch`, arrays are tensors; with `pin_memory` in page-locked memory, with `device` on that device. A thread of
        the client keeps up to `fetch_ahead` steps there before the trainer takes them: by default 2 if they have to be
        copied, else none, because steps that are ready in this process cost nothing to hand over.
        """
        self._home.check()
        destination = Destination(torch, pin_memory, device)
        rank = whole(rank, "rank", least=None)
        self.tree.coordinates(rank)  # raises for a rank that the mesh does not have
        channel = LocalChannel(self, self._constructor_of)
        client = Client(rank, channel, destination=destination, fetch_ahead=fetch_ahead, timeout_s=timeout_s)
        with self._lock:
            self._clients = [other for other in self._clients if other.is_reading or other.is_stale]
            self._clients.append(client)
        return client

    def serve(
        self,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: tuple[str | Path, str | Path] | None = None,
        advertise: str | None = None,
        leave_after_s: float | None = RANK_SILENT.after_s,
    ) -> str:
        """Let trainers in other processes read this run with `overlord.connect`; returns the address for them.

        Off loopback a token is needed. `tls` are the PEM files of a certificate and its key. `advertise` is the host name
        for clients, where it is not the one listened on. A rank that is silent for `leave_after_s` (it died, or its
        machine did) no longer holds others back; None waits for it for ever.
        """
        from overlord.service.auth import Listen, Tls
        from overlord.service.serving import OneServer, ServerPerGroup
        from overlord.service.wire import job_id

        self._home.check()
        seconds_or_none(leave_after_s, "leave_after_s")
        if self._serving is not None:
            raise SpecError(f"this loader serves at {self._serving.address} already; clients of all ranks connect there")
        listen = Listen(address, token, None if tls is None else Tls(*tls), advertise)
        job, channel = job_id(self._saved_fingerprint), LocalChannel(self, self._constructor_of)
        kind = OneServer if self._is_served_here(listen.bound) else ServerPerGroup
        self._serving = kind(
            job,
            channel,
            lambda: self.tree,
            self._constructors,
            listen=listen,
            leave_after_s=leave_after_s,
            instance=self._instance,
            is_new=self._is_new,
        )
        return self._serving.address

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Stop handing out new steps to connected trainers. A step that one rank has taken is still handed to the others,
        for up to `timeout_s`; no later step is. False when some rank did not come for it."""
        timeout_s = seconds_to_wait(timeout_s, "timeout_s")
        if self._engine.roles_live_on:
            self._engine.publish(RUN, None)  # constructors that were told to stop are of no use to another process
        return self._serving is None or self._serving.drain(timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks of trainers in other processes has come and left again. False after
        `timeout_s`."""
        timeout_s = seconds_to_wait(timeout_s, "timeout_s")
        ranks = [self.tree.coordinates(whole(rank, "rank", least=None)).rank for rank in ranks]
        return self._serving is None or self._serving.wait_for_leave(ranks, timeout_s)

    def state_dict(self) -> State:
        """Returns the state before the first step that not every open client has taken. See `Client.state_dict`."""
        return self.state_before(self._slowest())

    def plan(self, step: int) -> Planned | None:
        """Returns the whole plan of a step, for inspection; None when the run ends before it. Steps that were not drawn yet
        are drawn, up to a million, while readers are served."""
        self._home.check()
        number = whole(step, "step")
        return self._wait(f"the plan of step {number}", lambda: self._planner.call(Planner.whole_plan, number))

    def documents(self, step: int) -> list[StepDocument] | None:
        """Returns every document of a step, by rank and microbatch, for inspection; None when the run ends before it. Chunks
        that are no longer in a buffer are read again."""
        planned = self.plan(step)
        if planned is None:
            return None
        plan = planned.plan
        samples = plan.samples.take(plan.order)
        sources: list[int] = samples.source.tolist()
        read: dict[int, tuple[str, int]] = {}
        of_chunks: dict[tuple[int, int], list[int]] = {}
        for place, key in enumerate(zip(sources, samples.chunk.tolist(), strict=True)):
            of_chunks.setdefault(key, []).append(place)
        for (source, chunk), places in of_chunks.items():
            found = self._routes.origins(source, chunk, samples.row[places].tolist())
            read.update(zip(places, found, strict=True))
        micro = plan.micro_of_order()
        first = np.cumsum(plan.counts) - plan.counts
        group = np.repeat(np.arange(plan.num_groups), plan.counts)[micro]
        groups: list[int] = group.tolist()
        numbers: list[int] = (micro - first[group]).tolist()
        ranks = [tuple(self.tree.ranks_of_group(plan.axis, number)) for number in range(plan.num_groups)]
        return [
            StepDocument(samples.source_names[source], *read[place], tokens, number, ranks[of])
            for place, (source, tokens, number, of) in enumerate(
                zip(sources, samples.tokens.tolist(), numbers, groups, strict=True)
            )
        ]

    @property
    def partition(self) -> Partition:
        """How sources are spread over loader hosts now."""
        return self._fleet.partition

    def is_read(self) -> bool:
        """True if some rank reads this run, here or in another process."""
        return bool(self._readers()) or (self._serving is not None and bool(self._serving.reading()))

    def report(self, step: int | None = None) -> Report:
        """Returns how the run stood before a step. By default that is the step of the slowest client, and the call returns
        at once, whatever the run waits for; a step that was not drawn yet is drawn, as for `plan`."""
        self._home.check()
        if step is None:
            at, mix = self._planner.call(Planner.known_mix, self._slowest()).result(_STATUS_WAIT_S)
        else:
            at = whole(step, "step")
            mix = self._wait(f"the mix before step {at}", lambda: self._planner.call(Planner.mix, at))
        table = self._fleet.table
        return Report(
            step=at,
            mix=mix,
            documents=self._planner.call(Planner.counts).result(_STATUS_WAIT_S),
            bad_rows=self._fleet.num_bad_rows(),
            buffers=self._fleet.buffer_use(),
            loaders={name: len(table.stretches[name][-1].hosts) for name in self.job.sources},
            shadows=dict(table.shadows),
            store=self._engine.store_use() or self._shared_memory(),
        )

    def scaling(self) -> tuple[ScalingDecision | ShadowChange, ...]:
        """Returns what the autoscaler decided, and which shadows came, left and took over, with reasons, the newest
        last."""
        return tuple(self._control_loop.history)

    def set_weights(self, weights: Mapping[str, float] | None, *, from_step: int | None = None) -> int:
        """Draw by other weights, whatever the job's schedule says, from a step on (by default the first that is not drawn
        yet); returns that step. None goes back to the schedule."""
        self._home.check()
        from_step = None if from_step is None else whole(from_step, "from_step")
        change = WeightChange(weights, from_step, uuid4().hex)
        return self.change_weights(change)

    def change_weights(self, change: WeightChange) -> int:
        """Apply a change once, however often the call is repeated. Use `set_weights`."""
        change.check(tuple(self.job.sources))
        with self._move_lock:
            reached = [constructor.call(ServingConstructor.reached) for constructor in self._constructors]
            first = max(self._start.step, *(answer.result() for answer in reached))
            return self._planner.call(Planner.change_weights, change, first).result()

    def decisions(self) -> tuple[Decision, ...]:
        """Returns what was decided while the run ran: by `set_weights`, by reported losses and by reported times."""
        return self._planner.call(Planner.decisions).result()

    def feedback(self, report: StepReport, generation: int) -> list[str]:
        """Count a rank's report of a step; returns what was not counted, and why. Use `Client.feedback`."""
        if generation != self._generation:
            return ["the run was moved to another state since"]
        return self._planner.call(Planner.report, report).result()

    def status(self) -> PlannerStatus:
        """Returns how far the planner is, and the state of its log."""
        self._home.check()
        return self._planner.call(Planner.status).result(_STATUS_WAIT_S)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the run to a state, with all of its clients in this process. Trainers in other processes must load it
        themselves."""
        self.load_state(state, self._generation)
        with self._lock:
            clients = [client for client in self._clients if client.is_stale]
        for client in clients:
            client.rejoin()

    def state_before(self, step: int) -> State:
        """Returns the state from which a run continues with `step`."""
        self._home.check()
        number = whole(step, "step")
        if not self._has_saved:
            self._has_saved = True
            warn_of_unseen(self._fingerprint)
        asked = f"the state before step {number}"
        progress, steered = self._wait(asked, lambda: self._planner.call(Planner.checkpoint, number))
        return to_state(progress, self.job.mix.unit, self._saved_fingerprint, steered)

    def load_state(self, state: Mapping[str, Any], generation: int) -> int:
        """Move the run to a state once, however many clients load it: a client that is a generation behind only follows.
        Returns the run's generation."""
        self._home.check()
        progress = from_state(state, self.job, self._fingerprint, self._accept_changes)
        unit = self.job.mix.unit
        with self._move_lock, self._lock:
            follows = generation < self._generation and to_state(progress, unit, {}) == to_state(self._start, unit, {})
            if follows:
                return self._generation
            with self._moving():
                known = self._planner.call(Planner.decisions).result()
                self._start, self._steered = progress, steered_on_return(state, self.job, known, progress.step)
                self._generation += 1
                self._era = None if self._era is None else self._era.next_era(progress.step, self.job.mesh)
                self._engine.spawn(_NEW_PLANNER, self._planner_from(self.job, progress, self._era))
                self._engine.rebind(PLANNER, _NEW_PLANNER)
                with self._takes_by_message():
                    for constructor in self._constructors:
                        constructor.call(ServingConstructor.restart, self._generation).result()
                self._expect_trainers()
            return self._generation

    def resize(self, mesh: Mesh, *, at: int | None = None, timeout_s: float = 0.0) -> int:
        """Continue the run for another mesh; returns the first step that is planned for it. The contents of steps stay the
        same.

        That is the first step that no rank has taken. Every rank that reads must have taken all steps before it; resize
        waits for the others for up to `timeout_s`. Where trainers lost a step (a rank died in it), pass it as `at`, and it
        is handed out again, for the new mesh. Clients of the old mesh end with ClosedError: make new ones, or call `rejoin`.
        """
        self._home.check()
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise SpecError(f"resize takes an overlord.Mesh, got {mesh!r}")
        timeout_s = seconds_to_wait(timeout_s, "timeout_s")
        at = None if at is None else whole(at, "at", least=None)
        with self._move_lock, self._moving(), self._takes_by_message() as undecided:
            if undecided:
                raise WaitTimeoutError(f"the mesh cannot change: {describe_stopped(undecided)}")
            try:
                taken_to = self._planner.call(Planner.status).result().taken_to
                step = freeze_at(
                    at,
                    self._constructors,
                    self._readers,
                    start=self._start.step,
                    taken_to=taken_to,
                    timeout_s=timeout_s,
                )
                progress, self._steered = self._planner.call(Planner.checkpoint, step).result()
                self._move_to_mesh(replace(self.job, mesh=mesh), progress)
            except BaseException:
                thaw_all(self._constructors)
                raise
            return step

    @property
    def start_step(self) -> int:
        """The step that clients begin at."""
        with self._lock:  # a move under way has changed the generation already, and not yet this
            return self._start.step

    @property
    def generation(self) -> int:
        """How often the run was moved to another state or mesh."""
        return self._generation

    def status_lines(self) -> list[str]:
        """Returns what the planner and the loaders are busy with, to explain a wait."""
        try:
            planner = self._planner.call(Planner.status_lines).result(_STATUS_LINES_S)
        except (WaitTimeoutError, WorkerDiedError):
            planner = ["the planner does not answer"]
        return [*planner, *self._routes.status_lines()]

    def close(self) -> None:
        """Stop everything. Safe to call twice. In a forked process it does nothing, since the run belongs to the parent."""
        if not self._home.is_this:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients = list(self._clients)
        atexit.unregister(self.close)
        self._control_loop.close()
        if self._serving is not None:
            self._serving.close()
        for client in clients:
            client.abandon()
        self._engine.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, what: str, call: Callable[[], Reply[T]]) -> T:
        """Wait for a call that may have to draw steps first, with a warning where that takes long."""

        def describe() -> str:
            return what + "".join(f"\n  - {line}" for line in self.status_lines())

        with warn_if_long(describe):
            return call().result()

    @contextmanager
    def _takes_by_message(self) -> Generator[list[int]]:
        """Meanwhile no trainer takes a step that the run does not know of; yields the ranks of which that is not certain."""
        serving = self._serving
        if serving is None:
            yield []
            return
        try:
            yield serving.pause_takes()
        finally:
            serving.resume_takes()

    def _is_served_here(self, address: Address) -> bool:
        """True if one server in this process serves all ranks. Also for worker processes of this machine where other
        machines are told a port: only that one may be open to them."""
        is_one_port = address.port != 0 and not address.is_loopback
        return self._engine.num_hosts is None or (self._engine.is_one_machine and is_one_port)

    def _slowest(self) -> int:
        reading, last = ({}, {}) if self._serving is None else (self._serving.reading(), self._serving.last())
        # A late rank may need any step that is not known to be taken by all.
        late = [] if self._serving is None or not self._serving.late() else [self.status().taken_to]
        with self._lock:
            here = [client.step for client in self._clients if client.is_reading] + list(reading.values())
            here = [*here, *late] if here else []
            ended = [client.step for client in self._clients if not client.is_stale] + list(last.values())
            return min(here or ended or [self._start.step])

    def _shared_memory(self) -> StoreUse | None:
        found: dict[int, int] = {}  # by process: constructors of one process share its memory
        for answer in [constructor.call(ServingConstructor.shared_bytes) for constructor in self._constructors]:
            with suppress(WaitTimeoutError, WorkerDiedError):
                process, num_bytes = answer.result(_STATUS_WAIT_S)
                found[process] = num_bytes
        return StoreUse(sum(found.values()), None) if any(found.values()) else None

    def _constructor_of(self, rank: int) -> Handle[ServingConstructor]:
        group = self._group_of.get(rank)
        if group is None:
            group = self._group_of[rank] = self.tree.coordinates(rank).dp
        return self._constructors[group]

    def _readers(self) -> dict[int, int]:
        """The ranks that read in this process, with the next step of each."""
        with self._lock:
            return {client.rank: client.step for client in self._clients if client.is_reading}

    def _planner_from(self, job: Job, progress: Progress, era: Era | None) -> partial[Planner]:
        is_safe, is_served = are_decisions_safe(job, era, self._engine), self._serving is not None
        return partial(
            make_planner,
            job,
            self._num_units,
            progress,
            steered=self._steered,
            routes=self._routes,
            era=era,
            is_safe=is_safe,
            is_served=is_served,
            plans_together=plans_together(self._engine),
            engine=self._engine if self._engine.shares_memory else None,
        )

    def _move_to_mesh(self, job: Job, progress: Progress) -> None:
        engine, old, new = self._engine, self.job.mesh.dp, job.mesh.dp
        era = None if self._era is None else self._era.next_era(progress.step, job.mesh)
        added: list[Handle[ServingConstructor]] = []
        try:
            engine.spawn(_NEW_PLANNER, self._planner_from(job, progress, era))
            added = [self._spawn_constructor(job, group, self._generation + 1) for group in range(old, new)]
            engine.wait_until_started()
        except BaseException:  # nothing has changed yet
            for name in (_NEW_PLANNER, *(constructor.name for constructor in added)):
                engine.stop(name)
            raise
        with self._lock:
            self._clients = [client for client in self._clients if client.is_reading]  # these may rejoin
            self._generation += 1  # first, so that clients of the old mesh see that it is gone
            engine.rebind(PLANNER, _NEW_PLANNER)
            for constructor in self._constructors:
                engine.stop(constructor.name)
            kept = [self._spawn_constructor(job, group, self._generation) for group in range(min(old, new))]
            engine.wait_until_started()
            self.job, self.tree, self._start, self._era = job, ClientPlaceTree(job.mesh), progress, era
            self._group_of = {}
            self._constructors[:] = kept + added
            self._expect_trainers()

    def _expect_trainers(self) -> None:
        if self._serving is not None:
            self._serving.expect()


class LocalChannel:
    """The channel of clients in the process of their loader. `constructor_of` returns the constructor of a rank; after a
    resize that is another one."""

    def __init__(self, run: Loader, constructor_of: Callable[[int], Handle[ServingConstructor]]) -> None:
        self.run = run
        self._constructor_of = constructor_of

    is_ahead_useful = has_pipeline = False

    def open_pipeline(self, rank: int) -> None:  # noqa: ARG002 - part of the protocol
        return None

    def start(self) -> int:
        return self.run.start_step

    def generation(self) -> int:
        return self.run.generation

    def origin(self) -> str:
        return str(self.run.generation)

    def fetch(
        self, step: int, rank: int, wait_s: float, ahead: bool = False, generation: int | None = None
    ) -> Delivery | Later | None:
        known = self.run.generation if generation is None else generation
        try:
            if known == self.run.generation:
                return self._constructor_of(rank).call(StepSource.fetch, step, rank, wait_s, ahead, known).result()
        except (ClosedError, SpecError):  # of a constructor that was replaced, or because the rank is no more
            if known == self.run.generation:
                raise
        return Later(MOVED)

    def take(
        self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None, origin: str | None = None
    ) -> Later | None:
        known = self.run.generation if generation is None else generation
        if origin not in (None, str(known)):
            return Later("the run was moved since the step was fetched")
        try:
            if known == self.run.generation:
                return self._constructor_of(rank).call(StepSource.take, step, rank, waited_s, known).result()
        except (ClosedError, SpecError):
            if known == self.run.generation:
                raise
        return Later(MOVED)

    def leave(self, rank: int, generation: int | None = None) -> None:
        # A client that has not followed the run to another state or mesh reads nothing there, and another client may read
        # as this rank.
        if generation in (None, self.run.generation):
            try:
                self._constructor_of(rank).call(ServingConstructor.leave, rank).result(_LEAVE_S)
            except (ClosedError, SpecError, WaitTimeoutError, WorkerDiedError) as error:
                _log.info("rank %d left without saying so: %s", rank, error)  # nobody is there to tell, so nobody waits


@dataclass(frozen=True, slots=True)
class StepDocument:
    """A document (or a piece of one) of a step: where it was read, and which ranks train on it."""

    source: str
    file: str
    """The file. Where it has several units, # and the number of the unit follow."""
    row: int
    """The row in that unit; -1 where a transform dropped the column `__origin__`."""
    tokens: int
    microbatch: int
    """The number of the microbatch on each of `ranks`."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """How a run stands: the mixture as declared and as drawn, bad rows, buffers and loaders, by source."""

    step: int
    mix: dict[str, Mix]
    documents: dict[str, dict[str, int]]
    bad_rows: dict[str, int]
    buffers: dict[str, BufferUse]
    loaders: dict[str, int]
    """How many loaders read each source now."""
    shadows: dict[str, str]
    """The loader hosts that have a shadow, with the shadow's name."""
    store: StoreUse | None
    """How full Ray's object store is. On other engines the shared memory of batches, which trainers on this host map; None
    where there is none."""

    @property
    def delay(self) -> Delay | None:
        """How much later documents came because of `Batch(outliers=...)`, in the steps planned so far; None without it."""
        return Delay.of(self.documents)
