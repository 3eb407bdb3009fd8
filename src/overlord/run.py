"""`start`: put the roles of a job on an engine and hand out the iterators of its ranks."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from overlord.data.bad_rows import BadRowLog
from overlord.data.chunk_maker import ChunkMaker
from overlord.data.processes import ProcessPool
from overlord.engine import Handle
from overlord.engines.embedded import Embedded
from overlord.errors import SourceError, SpecError
from overlord.planning.drawing import Extent
from overlord.planning.order import chunks_per_epoch
from overlord.planning.place_tree import ClientPlaceTree
from overlord.planning.progress import Progress
from overlord.planning.strategies import plain
from overlord.roles.client import Client, RunHooks
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.loader_host import Held, LoaderHost
from overlord.roles.planner import Mix, Planned, Planner
from overlord.roles.routes import Routes
from overlord.roles.source_loader import BufferUse, SourceLoader
from overlord.roles.threads import Threads
from overlord.spec import Job, Source, Unit
from overlord.state import Fingerprint, State, from_state, to_state

_LISTING_THREADS = 16  # listing waits for storage, not for the processor


def start(
    job: Job,
    *,
    resume: Mapping[str, Any] | None = None,
    accept_changes: Collection[str] | bool = (),
    world_size: int | None = None,
) -> Loader:
    """Start a job in this process. Use it in a `with` block, or call `close`.

    `resume` is a state from `state_dict`; it may come from any mesh. `accept_changes` names differences between the job
    and the state to take all the same. `world_size`, where given, must fit the mesh.
    """
    if world_size is not None:
        job.mesh.check_world_size(world_size)
    units = list_units(job.sources)
    fingerprint = Fingerprint.of(job, units)
    progress = Progress.start(tuple(job.sources)) if resume is None else from_state(resume, job, fingerprint, accept_changes)
    return Loader(job, units, fingerprint, progress, accept_changes)


def list_units(sources: Mapping[str, Source]) -> dict[str, Sequence[Unit]]:
    """Every source's units, listed side by side. A source without any is an error."""
    with ThreadPoolExecutor(min(_LISTING_THREADS, len(sources)), thread_name_prefix="overlord-list") as threads:
        pending = {name: threads.submit(source.units) for name, source in sources.items()}
        listed: dict[str, Sequence[Unit]] = {}
        for name, future in pending.items():
            try:
                listed[name] = future.result()
            except Exception as error:
                error.add_note(f"while listing source {name!r}")
                raise
            if not listed[name]:
                raise SourceError(f"source {name!r} has no data: its files hold no rows; remove it or check its paths")
    return listed


@dataclass(frozen=True, slots=True)
class Report:
    """How a run stands: what each source was asked for and gave, what was set aside, and the buffers."""

    step: int
    mix: dict[str, Mix]
    documents: dict[str, dict[str, int]]
    bad_rows: dict[str, int]
    buffers: dict[str, BufferUse]


class Loader:
    """A running job. `client(rank)` gives the iterator of a rank."""

    def __init__(
        self,
        job: Job,
        units: Mapping[str, Sequence[Unit]],
        fingerprint: Fingerprint,
        progress: Progress,
        accept_changes: Collection[str] | bool = (),
    ) -> None:
        self.job = job
        self.tree = ClientPlaceTree(job.mesh)
        self._fingerprint = fingerprint
        self._saved_fingerprint = fingerprint.to_dict()
        self._accept_changes = accept_changes
        self._start = progress
        self._generation = 0
        self._lock = threading.Lock()
        self._closed = False
        self._clients: list[Client] = []
        num_workers = job.num_workers or os.cpu_count() or 1
        self._read_threads = Threads(num_workers, "overlord-read")
        self._build_threads = Threads(min(job.mesh.dp * (job.prefetch + 1), num_workers + 1), "overlord-build")
        self._processes = ProcessPool(job.num_processes or os.cpu_count() or 1)
        self._bad_rows = {name: BadRowLog(name, source.bad_rows) for name, source in job.sources.items()}
        self._engine = Embedded()
        self._hosts = self._spawn_hosts(units)
        self._extents = [
            Extent(chunks_per_epoch(len(units[name]), source.window), source.num_epochs)
            for name, source in job.sources.items()
        ]
        hosts_of_source = {name: range(source.loaders) for name, source in job.sources.items()}
        self._routes = Routes(self._hosts, hosts_of_source)
        self._planner = self._engine.spawn("planner", self._new_planner)
        self._constructors = [
            self._engine.spawn(f"constructor/{group}", self._constructor_maker(group)) for group in range(job.mesh.dp)
        ]
        atexit.register(self.close)

    def client(
        self,
        rank: int,
        *,
        torch: bool = False,
        pin_memory: bool = False,
        timeout: float | None = None,
    ) -> Client:
        """The iterator of one rank, from the step the run started at. `timeout` is the longest wait for one step."""
        place = self.tree.coordinates(rank)
        client = Client(rank, self._constructors[place.dp], self._hooks(), torch, pin_memory, timeout)
        with self._lock:
            self._clients = [other for other in self._clients if other.is_reading]
            self._clients.append(client)
        return client

    def state_dict(self) -> State:
        """The state before the first step that not every open client has taken. See `Client.state_dict`."""
        with self._lock:
            reading = [client.step for client in self._clients if client.is_reading]
            ended = [client.step for client in self._clients]
        return self._state_before(min(reading or ended or [self._start.step]))

    def plan(self, step: int) -> Planned | None:
        """The whole plan of a step, for looking at; None when the run ends before it."""
        return self._planner.ask(Planner.whole_plan, step).result()

    def report(self, step: int | None = None) -> Report:
        """How the run stood before a step (by default: where the slowest client is)."""
        with self._lock:
            steps = [client.step for client in self._clients]
        at = min(steps, default=self._start.step) if step is None else step
        return Report(
            step=at,
            mix=self._planner.ask(Planner.mix, at).result(),
            documents=self._planner.ask(Planner.counts).result(),
            bad_rows={name: log.num_dropped for name, log in self._bad_rows.items()},
            buffers=self._buffers(),
        )

    def close(self) -> None:
        """Stop everything. Safe to call twice, and from a signal handler's exit."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients = list(self._clients)
        atexit.unregister(self.close)
        for client in clients:
            client.abandon()
        self._engine.close()
        self._build_threads.shutdown()
        self._read_threads.shutdown()
        self._processes.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn_hosts(self, units: Mapping[str, Sequence[Unit]]) -> list[Handle[LoaderHost]]:
        makers = {
            name: ChunkMaker(
                name,
                source,
                units[name],
                self.job.seed,
                self.job.batch,
                self._bad_rows[name],
                self._processes,
            )
            for name, source in self.job.sources.items()
        }
        most = max(source.loaders for source in self.job.sources.values())
        return [self._engine.spawn(f"loaders/{index}", self._host_maker(makers, index)) for index in range(most)]

    def _host_maker(self, makers: Mapping[str, ChunkMaker], index: int) -> Callable[[], LoaderHost]:
        def held(name: str, source: Source, maker: ChunkMaker) -> Held:
            share = source.buffer_bytes // source.loaders
            loader = SourceLoader(name, maker.make, maker.expected_bytes, share, self._read_threads)
            return Held(loader, source.decode, maker.bad_decode)

        return lambda: LoaderHost(
            {name: held(name, source, makers[name]) for name, source in self.job.sources.items() if index < source.loaders},
            self.job.batch.columns,
            self._read_threads,
        )

    def _new_planner(self) -> Planner:
        return Planner(
            self._start,
            self.job.batch,
            self.job.mix,
            self.job.strategy or plain(),
            self.tree,
            self._extents,
            self._routes,
            masked=any(source.loss_mask is not None for source in self.job.sources.values()),
            max_lead=self.job.prefetch + 2,
        )

    def _constructor_maker(self, group: int) -> Callable[[], DataConstructor]:
        return lambda: DataConstructor(
            group,
            self.job.batch,
            self.tree,
            self._planner,
            self._routes,
            self.job.prefetch,
            self._build_threads,
        )

    def _hooks(self) -> RunHooks:
        return RunHooks(
            start=lambda: self._start.step,
            state_before=self._state_before,
            load_state=self._load_state,
            generation=lambda: self._generation,
            doing=self._doing,
        )

    def _state_before(self, step: int) -> State:
        progress = self._planner.ask(Planner.progress, step).result()
        return to_state(progress, self.job.mix.unit, self._saved_fingerprint)

    def _load_state(self, state: Mapping[str, Any], generation: int) -> int:
        """Move the run to a state, once, however many clients load it: one that is a generation behind only follows."""
        progress = from_state(state, self.job, self._fingerprint, self._accept_changes)
        unit = self.job.mix.unit
        with self._lock:
            follows = generation < self._generation and to_state(progress, unit, {}) == to_state(self._start, unit, {})
            if not follows:
                self._start = progress
                self._generation += 1
                self._engine.spawn("planner/new", self._new_planner)
                self._engine.rebind("planner", "planner/new")
                for constructor in self._constructors:
                    constructor.ask(DataConstructor.restart).result()
            return self._generation

    def _doing(self) -> list[str]:
        return [*self._planner.ask(Planner.doing).result(), *self._routes.doing()]

    def _buffers(self) -> dict[str, BufferUse]:
        uses: dict[str, BufferUse] = {}
        for host in self._hosts:
            for name, use in host.ask(LoaderHost.buffer_use).result().items():
                uses[name] = uses[name].plus(use) if name in uses else use
        return uses
