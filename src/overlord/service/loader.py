"""The `Loader`: a running job, as its user and the trainers in other processes see it."""

from __future__ import annotations

import atexit
import os
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from overlord.batches.tensors import Destination
from overlord.checkpoint.fingerprint import warn_of_unseen
from overlord.checkpoint.state import to_state
from overlord.declare.arguments import seconds_or_none, seconds_to_wait, switch, whole
from overlord.declare.mesh import Mesh
from overlord.declare.policies import Skip
from overlord.errors import SpecError
from overlord.messages import (
    Decision,
    EvalTerms,
    MeshChange,
    Seat,
    SeatRequest,
    SkipChange,
    SourceChange,
    State,
    StepReport,
    WeightChange,
    document_ids,
)
from overlord.planlog.lineage_run import skip_value
from overlord.roles.planner import Planner
from overlord.runtime.exclusive import OneProcess
from overlord.runtime.liveness import RANK_SILENT
from overlord.runtime.whereabouts import node_names
from overlord.service.client import Client
from overlord.service.elastic import Elastic, ElasticMesh
from overlord.service.evaluation import Evaluations
from overlord.service.handle import skip_change
from overlord.service.local_channel import LocalChannel
from overlord.service.moving import RunMoves
from overlord.service.run_api import ADD_SOURCE_S, Channel
from overlord.service.run_roles import STATUS_WAIT_S, RunRoles
from overlord.service.step_count import StepCounting
from overlord.service.step_documents import StepHistory, find_documents, find_origins
from overlord.status import Report, StepCount
from overlord.steering.decisions import Steered
from overlord.stream.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.declare.job import Job
    from overlord.declare.source import Source
    from overlord.fleet.shadows import ShadowChange
    from overlord.lineage.recorded import RecordedRun
    from overlord.loaders.autoscaling import ScalingDecision
    from overlord.loaders.model import Partition
    from overlord.messages import DocumentIds, DocumentOrigin
    from overlord.planlog.log_lock import LogLock
    from overlord.roles.plan_window import Planned
    from overlord.service.auth import Address, Listen
    from overlord.service.metrics_http import MetricsServer
    from overlord.service.page.server import PageServer
    from overlord.service.profile import Profiler
    from overlord.service.step_documents import StepDocument
    from overlord.status import PlannerStatus, RunMetrics, StepSummary


_DRAWN_AT_ONCE = 64  # steps between two releases of chunks
_ONE_PROCESS = (
    "Start it in the process that uses it, or let others read with overlord.connect at the address of Loader.serve(), in "
    "processes that multiprocessing's 'spawn' started"
)


class Loader:
    """A running job, from `overlord.start`. `client(rank)` returns the iterator of a rank; `serve` lets trainers in other
    processes connect. It belongs to the process that started it. Safe to call from several threads."""

    def __init__(
        self,
        roles: RunRoles,
        start: Callable[[Job], Loader],
        *,
        profile: str | Path | None = None,
        lock: LogLock | None = None,
    ) -> None:
        """`start` starts a run of its own for an evaluation. `lock` is released when the run has ended."""
        self._roles = roles
        self._lock = lock
        self._readers = roles.readers
        self._moves = RunMoves(roles)
        self._has_saved = roles.era is not None and roles.era.is_wanted  # the first save warns of what no fingerprint sees
        self._elastic: Elastic | None = None
        self.reload_job: Callable[[], Job] | None = None
        """Reads the job again from where it is declared, if that is known: `overlord serve` sets it."""
        self._closed = False
        self._home = OneProcess("the loader", _ONE_PROCESS)
        self._listen: Listen | None = None
        self._evaluations = Evaluations(start)
        self._metrics_server: MetricsServer | None = None
        self._page_server: PageServer | None = None
        self._counting = StepCounting(roles)
        self._profiler = None if profile is None else self._start_profiler(profile)
        roles.publish_record()
        atexit.register(self.close)
        roles.control_loop.start()

    @property
    def job(self) -> Job:
        """The job, for the mesh and the sources that the run has now."""
        return self._roles.job

    @property
    def tree(self) -> ClientPlaceTree:
        """The mesh that the run has now, and what each of its ranks needs."""
        return self._roles.tree

    def _start_profiler(self, path: str | Path) -> Profiler:
        from overlord.service.profile import Profiler, writer_to

        roles, events = self._roles, self._roles.engine.recorder.events
        return Profiler(writer_to(path), roles.planner, roles.constructors, lambda: roles.fleet.hosts, events)

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
        channel = self.local_channel()
        if not self._roles.engine.is_one_machine:
            self._roles.places.bring_near(rank, node_names())
        client = Client(rank, channel, destination=destination, fetch_ahead=fetch_ahead, timeout_s=timeout_s)
        self._readers.add(client)
        return client

    def serve(
        self,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: tuple[str | Path, str | Path] | None = None,
        advertise: str | None = None,
        leave_after_s: float | None = RANK_SILENT.after_s,
        wait_for_all: bool = False,
        resize_on_leave: bool = False,
    ) -> str:
        """Let trainers in other processes read this run with `overlord.connect`; returns the address for them.

        Off loopback a token is needed. `tls` are the PEM files of a certificate and its key. `advertise` is the host name
        for clients, where it is not the one listened on. A rank that is silent for `leave_after_s` (it died, or its
        machine did) no longer holds others back; None waits for it for ever.

        With `wait_for_all` a rank that has never read holds the others back as one does that has stopped reading: they get
        the first few steps, and then an error after their own timeout that names the rank. Without it, a rank counts from
        its first step on.

        With `resize_on_leave` the data-parallel group of a silent rank leaves the mesh, and joins it again when its ranks
        are back: trainers read with `overlord.join` then.
        """
        from overlord.service.auth import Listen, Tls
        from overlord.service.serving import OneServer, ServedGroups, ServerPerGroup
        from overlord.service.wire import job_id

        self._home.check()
        seconds_or_none(leave_after_s, "leave_after_s")
        if resize_on_leave and leave_after_s is None:
            raise SpecError("resize_on_leave goes on without ranks that are silent for leave_after_s: give it in seconds")
        if self._readers.serving is not None:
            raise SpecError(
                f"this loader serves at {self._readers.serving.address} already; clients of all ranks connect there"
            )
        listen = Listen(address, token, None if tls is None else Tls(*tls), advertise)
        job, channel = job_id(self._roles.saved_fingerprint), self.local_channel()
        kind = OneServer if self._is_served_here(listen.bound) else ServerPerGroup
        with self._roles.engine.recorder.current():
            self._readers.serving = kind(
                job,
                channel,
                ServedGroups(lambda: self.tree, self._roles.constructors, self._roles.places.bring_near),
                listen=listen,
                leave_after_s=leave_after_s,
                instance=self._roles.instance,
                is_new=self._roles.is_new,
                wait_for_all=switch(wait_for_all, "wait_for_all"),
            )
        if resize_on_leave:
            assert leave_after_s is not None  # checked above
            self._elastic = Elastic(
                self,
                self._readers.serving,
                self._roles.elastic_mesh or ElasticMesh.whole(self.job.mesh),
                instance=self._roles.instance,
                leave_after_s=leave_after_s,
                seats=self._roles.left_seats(),
                keep_seats=self._roles.publish_seats,
            )
            self._elastic.start()
        self._listen = listen
        self._roles.note("serving", f"at {self._readers.serving.address}")
        return self._readers.serving.address

    def serve_metrics(
        self,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: tuple[str | Path, str | Path] | None = None,
        advertise: str | None = None,
    ) -> str:
        """Let Prometheus scrape this run; returns the URL. Needs the extra `metrics`. The rules are those of `serve`: off
        loopback a token is needed, and whoever asks must send it (`Authorization: Bearer ...`). docs/metrics.md lists the
        names."""
        from overlord.service.auth import Listen, Tls
        from overlord.service.metrics_http import MetricsServer

        self._home.check()
        if self._metrics_server is not None:
            raise SpecError(f"this loader serves its metrics at {self._metrics_server.url} already")
        listen = Listen(address, token, None if tls is None else Tls(*tls), advertise)
        self._metrics_server = MetricsServer(listen, self.metrics)
        return self._metrics_server.url

    def page(
        self,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: tuple[str | Path, str | Path] | None = None,
        advertise: str | None = None,
    ) -> str:
        """Serve a live page of this run to browsers; returns its URL. Needs the extra `page`. The rules are those of
        `serve`: off loopback a token is needed, for which the page asks."""
        from overlord.service.auth import Listen, Tls
        from overlord.service.page.server import PageServer

        self._home.check()
        if self._page_server is not None:
            raise SpecError(f"this loader serves its page at {self._page_server.url} already")
        listen = Listen(address, token, None if tls is None else Tls(*tls), advertise)
        self._page_server = PageServer(listen, self, self._step_history())
        return self._page_server.url

    def _step_history(self) -> StepHistory:
        era = self._roles.era
        recorded = None
        if era is not None and era.has_lineage:
            place, options = os.fspath(era.log.location), getattr(era.log, "storage_options", None)
            recorded = partial(_open_recorded, place, options)
        return StepHistory(self._roles.planner, self._roles.routes, lambda: self.job, lambda: self.tree, recorded)

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Stop handing out new steps to connected trainers. A step that one rank has taken is still handed to the others,
        for up to `timeout_s`; no later step is. False when some rank did not come for it."""
        timeout_s = seconds_to_wait(timeout_s, "timeout_s")
        self._roles.note(
            "draining", f"waits up to {timeout_s:g} s for every rank to take the last step that one of them has"
        )
        self._roles.places.pause()
        self._roles.withdraw_record()  # constructors that were told to stop are of no use to another process
        return self._readers.serving is None or self._readers.serving.drain(timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks of trainers in other processes has come and left again. False after
        `timeout_s`."""
        timeout_s = seconds_to_wait(timeout_s, "timeout_s")
        ranks = [self.tree.coordinates(whole(rank, "rank", least=None)).rank for rank in ranks]
        return self._readers.serving is None or self._readers.serving.wait_for_leave(ranks, timeout_s)

    def state_dict(self) -> State:
        """Returns the state before the first step that not every open client has taken. See `Client.state_dict`."""
        return self.state_before(self._roles.slowest())

    def plan(self, step: int) -> Planned | None:
        """Returns the whole plan of a step, for inspection; None when the run ends before it. Steps that were not drawn yet
        are drawn, up to a million, while readers are served."""
        self._home.check()
        number = whole(step, "step")
        return self._roles.wait(f"the plan of step {number}", lambda: self._roles.planner.call(Planner.whole_plan, number))

    def draw_to(self, step: int) -> Planned | None:
        """As `plan`, for a run that nobody reads: chunks are released on the way, as if a rank had taken the steps."""
        for number in range(self.start_step, step, _DRAWN_AT_ONCE):
            if self.plan(number) is None:
                break
            self._roles.planner.call(Planner.plan, number, 0, number).result()
        self._roles.planner.call(Planner.group_left, 0).result()
        return self.plan(step)

    def documents(self, step: int) -> list[StepDocument] | None:
        """Returns every document of a step, by rank and microbatch, for inspection; None when the run ends before it. Chunks
        that are no longer in a buffer are read again."""
        planned = self.plan(step)
        return None if planned is None else find_documents(planned.plan, self.tree, self._roles.routes)

    def evaluations(self) -> list[EvalTerms]:
        """Returns the evaluations that the job declares."""
        return [EvalTerms(name, declared.every, declared.limit) for name, declared in self.job.evals.items()]

    def open_eval(self, name: str) -> str:
        """Start the run of an evaluation, if it does not run yet; returns the address at which it is served."""
        self._home.check()
        if self._listen is None:
            raise SpecError("only a run that is served serves its evaluations: call serve() first")
        return self._evaluations.address(self.job, name, self._listen)

    def eval_channel(self, name: str, known: Channel | None) -> Channel:
        """The channel of clients in this process to the run of an evaluation: the known one, if it still leads there."""
        self._home.check()
        loader = self._evaluations.loader(self.job, name)
        if isinstance(known, LocalChannel) and known.run is loader:
            return known
        return loader.local_channel()

    def local_channel(self) -> LocalChannel:
        """A channel for clients in this process."""
        return LocalChannel(self, self._roles)

    def locate(self, documents: DocumentIds) -> list[DocumentOrigin]:
        """Returns the source, file and row of documents: of a microbatch, or of (source, chunk, row) each as a microbatch
        names them. A chunk that is no longer in a buffer is read again."""
        self._home.check()
        return find_origins(document_ids(documents), tuple(self.job.sources), self._roles.routes)

    @property
    def partition(self) -> Partition:
        """How sources are spread over loader hosts now."""
        return self._roles.fleet.partition

    def is_read(self) -> bool:
        """True if some rank reads this run, here or in another process."""
        return self._readers.is_any()

    def report(self, step: int | None = None) -> Report:
        """Returns how the run stood before a step. By default that is the step of the slowest client, and the call returns
        at once, whatever the run waits for; a step that was not drawn yet is drawn, as for `plan`."""
        self._home.check()
        if step is None:
            at, mix = self._roles.planner.call(Planner.known_mix, self._roles.slowest()).result(STATUS_WAIT_S)
        else:
            at = whole(step, "step")
            mix = self._roles.wait(f"the mix before step {at}", lambda: self._roles.planner.call(Planner.mix, at))
        table = self._roles.fleet.table
        return Report(
            step=at,
            mix=mix,
            documents=self._roles.planner.call(Planner.counts).result(STATUS_WAIT_S),
            bad_rows=self._roles.fleet.num_bad_rows(),
            buffers=self._roles.fleet.buffer_use(),
            loaders={name: len(table.stretches[name][-1].hosts) for name in self.job.sources},
            shadows=dict(table.shadows),
            store=self._roles.store_use(),
        )

    def metrics(self) -> RunMetrics:
        """Returns the run at this moment as plain values: sources, ranks, roles, storage and events. Waits for no source,
        and at most some seconds for a role that does not answer."""
        self._home.check()
        return self._roles.metrics()

    def plan_summary(self, step: int) -> StepSummary | None:
        """Returns the plan of a step in numbers; None when the run ends before it. As `plan`, for callers over the wire."""
        from overlord.service.step_summary import summarise

        planned = self.plan(step)
        return None if planned is None else summarise(step, planned.plan)

    def count_steps(self, wait_s: float = 0.0, most_bytes: int | None = None) -> StepCount:
        """Count the steps of a run that ends, and what they hold of each source; returns what is known after `wait_s`. All
        data is read once for it, beside the run, unless that is more than `most_bytes`. Counting goes on in a thread, and a
        later call returns more. Weights that are set meanwhile begin it anew."""
        self._home.check()
        seconds_to_wait(wait_s, "wait_s")
        return self._counting.count(wait_s, most_bytes)

    def scaling(self) -> tuple[ScalingDecision | ShadowChange, ...]:
        """Returns what the autoscaler decided, and which shadows came, left and took over, with reasons, the newest
        last."""
        return tuple(self._roles.control_loop.history)

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
        with self._moves.lock:
            step = self._roles.planner.call(Planner.change_weights, change, self._roles.first_open_step()).result()
        self._roles.note("weights", f"from step {step:,} on: {_describe_weights(change.weights)}")
        return step

    def skip(
        self,
        source: str,
        file: str | Path | None = None,
        rows: Sequence[int] | None = None,
        *,
        from_step: int | None = None,
    ) -> int:
        """Leave out rows, a file or a whole source from a step on (by default the first that is not drawn yet); returns that
        step. Everything else comes in the same order. It is part of every later state, and of the log."""
        return self.leave_out(skip_change(source, file, rows, from_step))

    def leave_out(self, change: SkipChange) -> int:
        """Apply a change once, however often the call is repeated. Use `skip`."""
        self._home.check()
        source = change.source
        if source not in self._roles.units:
            raise SpecError(
                f"there is no source {source!r}; the job's sources are {', '.join(map(repr, self._roles.units))}"
            )
        value = skip_value(Skip(source, change.file, change.rows), self._roles.units[source]) | {"id": change.id}
        with self._moves.lock:
            step = self._roles.planner.call(Planner.skip, value, change.from_step, self._roles.first_open_step()).result()
        self._roles.note("skip", f"from step {step:,} on: {_describe_skip(change)}")
        return step

    def add_source(
        self, name: str, source: Source, share: float, *, from_step: int | None = None, timeout_s: float = ADD_SOURCE_S
    ) -> int:
        """Draw from one source more, which gets `share` of the mixture while the others keep their proportions, from a step
        on (by default the first that no rank has taken); returns that step. It is part of every later state, and of the log:
        a job that resumes them declares the source too, and leaves its mixture as it was.

        The run begins anew at the first step that no rank has taken, and ranks that are behind it are waited for, for up to
        `timeout_s`. Trainers notice nothing."""
        from_step = None if from_step is None else whole(from_step, "from_step")
        change = SourceChange(name, share, from_step, uuid4().hex)
        self._home.check()
        return self._moves.add_source(change, source, seconds_to_wait(timeout_s, "timeout_s"))

    def add_declared_source(self, change: SourceChange) -> int:
        """Add a source that the job file declares by now. Use `Control.add_source`."""
        known = self._find_added(change.id)
        if known is not None:
            return known
        if self.reload_job is None:
            raise SpecError(
                "this run was not started from a job file, so a source cannot be named from elsewhere: nothing but plain "
                "values travels over the wire. Whoever started it calls Loader.add_source"
            )
        declared = self.reload_job().sources
        if change.source not in declared:
            listed = ", ".join(map(repr, declared))
            raise SpecError(
                f"the job file declares no source {change.source!r}; it has {listed}: add it there, and ask again"
            )
        self._home.check()
        return self._moves.add_source(change, declared[change.source], ADD_SOURCE_S)

    def remove_source(self, name: str, *, from_step: int | None = None) -> int:
        """Draw no more from a source from a step on; returns that step. The others share its weight. As `skip`, for all of
        it: the name stays taken."""
        return self.skip(name, from_step=from_step)

    def may_follow(self, generation: int) -> bool:
        """Returns True if a client of a generation goes on with its next step."""
        return self._moves.may_follow(generation)

    def _find_added(self, change_id: str) -> int | None:
        return next((d.step for d in self.decisions() if d.value.get("id") == change_id), None)

    def decisions(self) -> tuple[Decision, ...]:
        """Returns what was decided while the run ran: by `set_weights`, by reported losses and by reported times."""
        return self._roles.planner.call(Planner.decisions).result()

    def seat_of(self, request: SeatRequest) -> Seat | None:
        """Returns which rank a trainer is now; None while there is no place for it. Use `overlord.join`."""
        if self._elastic is None:
            raise SpecError(
                "this run gives no seats: its mesh does not follow its trainers; serve it with resize_on_leave=True "
                "(overlord serve --resize-on-leave), or read with overlord.connect"
            )
        return self._elastic.seat_of(request)

    def feedback(self, report: StepReport, generation: int) -> list[str]:
        """Count a rank's report of a step; returns what was not counted, and why. Use `Client.feedback`."""
        if generation != self._roles.generation:
            return ["the run was moved to another state since"]
        return self._roles.planner.call(Planner.report, report).result()

    def status(self) -> PlannerStatus:
        """Returns how far the planner is, and the state of its log."""
        self._home.check()
        return self._roles.status()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the run to a state, with all of its clients in this process. Trainers in other processes must load it
        themselves."""
        self.load_state(state, self._roles.generation)
        with self._readers.lock:
            clients = [client for client in self._readers.clients if client.is_stale]
        for client in clients:
            client.rejoin()

    def state_before(self, step: int) -> State:
        """Returns the state from which a run continues with `step`."""
        self._home.check()
        number = whole(step, "step")
        if not self._has_saved:
            self._has_saved = True
            warn_of_unseen(self._roles.fingerprint)
        if number == 0 < self._roles.start.step:  # of a run that was resumed: the planner knows nothing before its start
            _, steered = self._roles.planner.call(Planner.checkpoint, self._roles.start.step).result()
            first = Progress.start(tuple(self.job.sources))
            return to_state(first, self.job.mix.unit, self._roles.saved_fingerprint, Steered(steered.decisions))
        asked = f"the state before step {number}"
        progress, steered = self._roles.wait(asked, lambda: self._roles.planner.call(Planner.checkpoint, number))
        return to_state(progress, self.job.mix.unit, self._roles.saved_fingerprint, steered)

    def load_state(self, state: Mapping[str, Any], generation: int) -> int:
        """Move the run to a state once, however many clients load it: a client that is a generation behind only follows.
        Returns the run's generation."""
        self._home.check()
        return self._moves.load_state(state, generation)

    def change_mesh(self, change: MeshChange) -> int:
        """Apply a change once, however often the call is repeated. Use `resize`."""
        return self._moves.change_mesh_once(
            change, lambda change: self.resize(change.mesh, at=change.at, timeout_s=change.timeout_s)
        )

    def resize(self, mesh: Mesh, *, at: int | None = None, timeout_s: float = 0.0, near: Sequence[str] | None = None) -> int:
        """Continue the run for another mesh; returns the first step that is planned for it. The contents of steps stay the
        same.

        That is the first step that no rank has taken. Every rank that reads must have taken all steps before it; resize
        waits for the others for up to `timeout_s`. Where trainers lost a step (a rank died in it), pass it as `at`, and it
        is handed out again, for the new mesh. Clients of the old mesh end with ClosedError: make new ones, or call `rejoin`.
        A mesh that stays the same keeps the steps that are built.

        `near` names the nodes of the new groups, on a cluster; otherwise each group keeps the node that `start` named.
        """
        self._home.check()
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise SpecError(f"resize takes an overlord.Mesh, got {mesh!r}")
        timeout_s = seconds_to_wait(timeout_s, "timeout_s")
        at = None if at is None else whole(at, "at", least=None)
        step = self._moves.change_mesh(mesh, at, timeout_s, near)
        if self._elastic is not None:
            self._elastic.reset(mesh)
        return step

    def reshape(self, wanted: ElasticMesh, at: int | None, timeout_s: float) -> int:
        """As `resize`, to some groups of the mesh that the run was served with. For `resize_on_leave`."""
        return self._moves.change_groups(wanted, at, timeout_s)

    @property
    def start_step(self) -> int:
        """The step that clients begin at."""
        with self._readers.lock:  # a move under way has changed the generation already, and not yet this
            return self._roles.start.step

    @property
    def generation(self) -> int:
        """How often the run was moved to another state or mesh."""
        return self._roles.generation

    def status_lines(self) -> list[str]:
        """Returns what the planner and the loaders are busy with, to explain a wait."""
        return self._roles.status_lines()

    def close(self) -> None:
        """Stop everything. Safe to call twice. In a forked process it does nothing, since the run belongs to the parent."""
        if not self._home.is_this:
            return
        with self._readers.lock:
            if self._closed:
                return
            self._closed = True
            clients = list(self._readers.clients)
        atexit.unregister(self.close)
        if self._elastic is not None:
            self._elastic.close()
        self._roles.control_loop.close()
        for server in (self._metrics_server, self._page_server):
            if server is not None:
                server.close()
        self._counting.close()
        if self._readers.serving is not None:
            self._readers.serving.close()
        for client in clients:
            client.abandon()
        if self._profiler is not None:
            self._profiler.close()
        self._evaluations.close()
        self._roles.engine.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_served_here(self, address: Address) -> bool:
        """True if one server in this process serves all ranks. Also for worker processes of this machine where other
        machines are told a port: only that one may be open to them."""
        is_one_port = address.port != 0 and not address.is_loopback
        return self._roles.engine.num_hosts is None or (self._roles.engine.is_one_machine and is_one_port)


def _open_recorded(location: str, options: Mapping[str, str] | None) -> RecordedRun:
    from overlord.lineage.recorded import RecordedRun  # few runs have a page

    return RecordedRun.at(location, options)


def _describe_weights(weights: Mapping[str, float] | None) -> str:
    return "as the job declares" if weights is None else ", ".join(f"{name} {weight:g}" for name, weight in weights.items())


def _describe_skip(change: SkipChange) -> str:
    if change.file is None:
        return f"all of {change.source}"
    count = "" if change.rows is None else f"{len(change.rows):,} rows of "
    return f"{count}{change.file} of {change.source}"
