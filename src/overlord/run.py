"""`start`: put the roles of a job on an engine and hand out the iterators of its ranks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from overlord.engine import Engine, Handle
from overlord.engines.embedded import Embedded
from overlord.errors import SourceError
from overlord.planning.place_tree import ClientPlaceTree
from overlord.planning.progress import Progress
from overlord.roles.assembly import make_constructor, make_loader_host, make_planner, make_routes, num_hosts
from overlord.roles.client import Client
from overlord.roles.data_constructor import DataConstructor, Delivery
from overlord.roles.loader_host import LoaderHost
from overlord.roles.planner import Later, Mix, Planned, Planner
from overlord.roles.source_loader import BufferUse
from overlord.spec import Job, Source, Unit
from overlord.state import Fingerprint, State, from_state, to_state
from overlord.workplace import WorkplaceSize

_LISTING_THREADS = 16  # listing waits for storage, not for the processor


def start(
    job: Job,
    *,
    engine: Engine | None = None,
    resume: Mapping[str, Any] | None = None,
    accept_changes: Collection[str] | bool = (),
    world_size: int | None = None,
) -> Loader:
    """Start a job. Use it in a `with` block, or call `close`.

    `engine` says where roles run; in this process unless given. `resume` is a state from `state_dict`; it may come from any
    mesh. `accept_changes` names differences between the job and the state to take all the same. `world_size`, where given,
    must fit the mesh.
    """
    if world_size is not None:
        job.mesh.check_world_size(world_size)
    units = list_units(job.sources)
    fingerprint = Fingerprint.of(job, units)
    progress = Progress.start(tuple(job.sources)) if resume is None else from_state(resume, job, fingerprint, accept_changes)
    return Loader(job, engine or Embedded(), units, fingerprint, progress, accept_changes)


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
        engine: Engine,
        units: Mapping[str, Sequence[Unit]],
        fingerprint: Fingerprint,
        progress: Progress,
        accept_changes: Collection[str] | bool = (),
    ) -> None:
        self.job = job
        self.tree = ClientPlaceTree(job.mesh)
        self._engine = engine
        self._num_units = {name: len(listed) for name, listed in units.items()}
        self._fingerprint = fingerprint
        self._saved_fingerprint = fingerprint.to_dict()
        self._accept_changes = accept_changes
        self._start = progress
        self._generation = 0
        self._lock = threading.Lock()
        self._closed = False
        self._clients: list[Client] = []
        engine.open(WorkplaceSize(job.num_workers, job.num_processes))
        self._hosts: list[Handle[LoaderHost]] = [
            engine.spawn(f"loaders/{index}", partial(make_loader_host, job, units, index)) for index in range(num_hosts(job))
        ]
        self._routes = make_routes(job, self._hosts)
        self._planner: Handle[Planner] = engine.spawn("planner", self._planner_from(progress))
        self._constructors: list[Handle[DataConstructor]] = [
            engine.spawn(f"constructor/{group}", partial(make_constructor, job, group, self._planner, self._routes))
            for group in range(job.mesh.dp)
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
        constructor = self._constructors[self.tree.coordinates(rank).dp]
        client = Client(rank, _InProcess(self, constructor), torch, pin_memory, timeout)
        with self._lock:
            self._clients = [other for other in self._clients if other.is_reading]
            self._clients.append(client)
        return client

    def state_dict(self) -> State:
        """The state before the first step that not every open client has taken. See `Client.state_dict`."""
        return self.state_before(self._slowest())

    def plan(self, step: int) -> Planned | None:
        """The whole plan of a step, for looking at; None when the run ends before it."""
        return self._planner.ask(Planner.whole_plan, step).result()

    def report(self, step: int | None = None) -> Report:
        """How the run stood before a step (by default: where the slowest client is)."""
        at = self._slowest() if step is None else step
        buffers: dict[str, BufferUse] = {}
        bad_rows = dict.fromkeys(self.job.sources, 0)
        for host in self._hosts:
            for name, use in host.ask(LoaderHost.buffer_use).result().items():
                buffers[name] = buffers[name].plus(use) if name in buffers else use
            for name, count in host.ask(LoaderHost.num_bad_rows).result().items():
                bad_rows[name] += count
        return Report(
            step=at,
            mix=self._planner.ask(Planner.mix, at).result(),
            documents=self._planner.ask(Planner.counts).result(),
            bad_rows=bad_rows,
            buffers=buffers,
        )

    def state_before(self, step: int) -> State:
        """The state from which a run goes on with `step`."""
        progress = self._planner.ask(Planner.progress, step).result()
        return to_state(progress, self.job.mix.unit, self._saved_fingerprint)

    def load_state(self, state: Mapping[str, Any], generation: int) -> int:
        """Move the run to a state, once, however many clients load it: one that is a generation behind only follows."""
        progress = from_state(state, self.job, self._fingerprint, self._accept_changes)
        unit = self.job.mix.unit
        with self._lock:
            follows = generation < self._generation and to_state(progress, unit, {}) == to_state(self._start, unit, {})
            if not follows:
                self._start = progress
                self._generation += 1
                self._engine.spawn("planner/new", self._planner_from(progress))
                self._engine.rebind("planner", "planner/new")
                for constructor in self._constructors:
                    constructor.ask(DataConstructor.restart).result()
            return self._generation

    @property
    def start_step(self) -> int:
        """The step that clients begin at."""
        return self._start.step

    @property
    def generation(self) -> int:
        """How often the run was moved to another state."""
        return self._generation

    def doing(self) -> list[str]:
        """What the planner and the loaders are busy with."""
        return [*self._planner.ask(Planner.doing).result(), *self._routes.doing()]

    def close(self) -> None:
        """Stop everything. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients = list(self._clients)
        atexit.unregister(self.close)
        for client in clients:
            client.abandon()
        self._engine.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slowest(self) -> int:
        with self._lock:
            reading = [client.step for client in self._clients if client.is_reading]
            return min(reading or [client.step for client in self._clients] or [self._start.step])

    def _planner_from(self, progress: Progress) -> partial[Planner]:
        return partial(make_planner, self.job, self._num_units, progress, self._routes)


class _InProcess:
    """The channel of a client that lives beside its loader."""

    def __init__(self, loader: Loader, constructor: Handle[DataConstructor]) -> None:
        self._loader = loader
        self._constructor = constructor
        self.state_before = loader.state_before
        self.load_state = loader.load_state
        self.doing = loader.doing

    def start(self) -> int:
        return self._loader.start_step

    def generation(self) -> int:
        return self._loader.generation

    def fetch(self, step: int, rank: int, wait_s: float) -> Delivery | Later | None:
        return self._constructor.ask(DataConstructor.fetch, step, rank, wait_s).result()

    def leave(self, rank: int) -> None:
        self._constructor.ask(DataConstructor.leaves, rank).result()
