"""Puts the metrics of a run together from the counters of its roles, when somebody asks.

What it promises: it never waits for a source, and at most some seconds for a role that does not answer; that role keeps what
it counted last. Totals never go down while the run goes on: what a role had counted when it was stopped, replaced or lost
is kept. Only the samples and tokens of sources go back, with the run itself, when it is moved to an earlier state.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from overlord.caches.folder import sum_uses
from overlord.errors import ClosedError, WaitTimeoutError, WorkerDiedError
from overlord.roles.planner import Planner
from overlord.runtime.events import EventHistory
from overlord.runtime.liveness import ROLE_BUSY
from overlord.service.constructor import ServingConstructor
from overlord.status import (
    BufferUse,
    CacheUse,
    ConstructorCounters,
    HostCounters,
    LoadedSource,
    PlannerCounters,
    ProcessUse,
    RankCounters,
    RankMetrics,
    RoleMetrics,
    RunMetrics,
    SourceMetrics,
    StorageUse,
    StoreUse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.declare.job import Job
    from overlord.fleet.hosts import Fleet
    from overlord.runtime.engine import Handle, Reply
    from overlord.runtime.events import EventRing

T = TypeVar("T")
C = TypeVar("C", HostCounters, ConstructorCounters, PlannerCounters)

_WAIT_S = ROLE_BUSY.after_s
_GONE = (ClosedError, WaitTimeoutError, WorkerDiedError)
_NO_BUFFER = BufferUse(0, 0, 0, 0, 0)


@dataclass(slots=True)
class _Known(Generic[C]):
    """The roles of one kind: what each counted last, and whether it has answered just now."""

    newest: dict[str, C] = field(default_factory=dict[str, C])
    answered: set[str] = field(default_factory=set[str])

    def update(self, found: Mapping[str, C], names: Iterable[str]) -> list[tuple[str, C]]:
        """Note the answers of the roles that there are now; returns what those had counted that are no more."""
        self.answered = set(found)
        names = set(names)
        gone = [
            (name, old)
            for name, old in self.newest.items()
            if name not in names or (name in found and found[name].instance != old.instance)
        ]
        for name, _ in gone:
            del self.newest[name]
        self.newest |= found
        return gone


@dataclass(frozen=True, slots=True)
class RunView:
    """What the run knows by itself, for its metrics."""

    job: Job
    tree: ClientPlaceTree
    generation: int
    step: int
    planner: Handle[Planner]
    constructors: Sequence[Handle[ServingConstructor]]
    store: Callable[[], StoreUse | None]


class MetricsCollector:
    """Collects the metrics of one run. Safe to call from several threads."""

    def __init__(self, fleet: Fleet, own: EventRing) -> None:
        """`own`: the events of the run in this process."""
        self._fleet = fleet
        self._own = own
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._events = EventHistory(time.time())
        self._hosts: _Known[HostCounters] = _Known()
        self._constructors: _Known[ConstructorCounters] = _Known()
        self._planners: _Known[PlannerCounters] = _Known()
        self._restarts: Counter[str] = Counter()
        self._past_sources: dict[str, LoadedSource] = {}
        self._past_ranks: dict[int, RankCounters] = {}
        self._past_storage: dict[str, StorageUse] = {}
        self._past_caches: dict[str, CacheUse] = {}
        self._past_planner = (0, 0.0, 0.0)
        self._num_bad_rows: dict[str, int] = {}

    def collect(self, view: RunView) -> RunMetrics:
        """Ask every role, and add up."""
        with self._lock:
            self._ask(view)
            uses = self._process_uses()
            self._events.add(self._own.recent())
            for use in uses.values():
                self._events.add(use.events)
            planner = next(iter(self._planners.newest.values()), None)
            num_planned, plan_s, facts_s = self._past_planner
            if planner is not None:
                num_planned, plan_s = num_planned + planner.num_planned, plan_s + planner.plan_s
                facts_s += planner.facts_s
            return RunMetrics(
                at_s=time.time(),
                up_s=time.monotonic() - self._began,
                step=view.step,
                generation=view.generation,
                mesh={axis: getattr(view.job.mesh, axis) for axis in view.job.mesh.order},
                unit=view.job.mix.unit,
                planner=None if planner is None else planner.status,
                num_planned=num_planned,
                plan_s=plan_s,
                facts_s=facts_s,
                straggler=None if planner is None else planner.straggler,
                sources=self._sources(view, planner),
                ranks=self._ranks(view.tree),
                roles=self._roles(planner),
                processes={name: replace(use, events=()) for name, use in uses.items()},
                storage=self._storage(uses),
                caches=sum_uses([self._past_caches, *(use.caches for use in uses.values())]),
                shadows=dict(self._fleet.table.shadows),
                store=view.store(),
                event_counts=dict(self._events.counts),
                events=self._events.newest(),
            )

    def _ask(self, view: RunView) -> None:
        """Ask all roles side by side, as far as the engine lets them answer so."""
        planner = _try_call(lambda: view.planner.call(Planner.counters, view.step))
        constructors = {
            handle.name: reply
            for handle in list(view.constructors)
            if (reply := _try_call(lambda handle=handle: handle.call(ServingConstructor.counters))) is not None
        }
        self._num_bad_rows |= self._fleet.num_bad_rows()
        hosts = self._fleet.counters()
        deadline = time.monotonic() + _WAIT_S
        found = {name: answer for name, reply in constructors.items() if (answer := _result(reply, deadline)) is not None}
        self._hosts.newest |= dict(self._fleet.take_stopped())  # these count as gone next
        self._note_gone_hosts(self._hosts.update(hosts, [handle.name for handle in self._fleet.hosts]))
        names = [handle.name for handle in view.constructors]
        self._note_gone_constructors(self._constructors.update(found, names))
        answer = None if planner is None else _result(planner, deadline)
        for name, old in self._planners.update({} if answer is None else {view.planner.name: answer}, [view.planner.name]):
            num_planned, plan_s, facts_s = self._past_planner
            self._past_planner = num_planned + old.num_planned, plan_s + old.plan_s, facts_s + old.facts_s
            self._restarts[name] += 1

    def _note_gone_hosts(self, gone: list[tuple[str, HostCounters]]) -> None:
        for name, old in gone:
            if name in self._hosts.newest:  # under its name there is another now
                self._restarts[name] += 1
            self._keep_storage(old.use)
            for source, loaded in old.sources.items():
                before = self._past_sources.get(source)
                self._past_sources[source] = loaded if before is None else _sum_loaded(before, loaded)

    def _note_gone_constructors(self, gone: list[tuple[str, ConstructorCounters]]) -> None:
        for name, old in gone:
            if name in self._constructors.newest:
                self._restarts[name] += 1
            for rank, counted in old.ranks.items():
                self._past_ranks[rank] = self._past_ranks.get(rank, RankCounters()).plus(counted)

    def _keep_storage(self, use: ProcessUse) -> None:
        """Keep what a process has read, unless other roles of it are there to tell."""
        if any(host.use.process == use.process for host in self._hosts.newest.values()):
            return
        for root, used in use.storage.items():
            before = self._past_storage.get(root, StorageUse(0, 0))
            self._past_storage[root] = StorageUse(before.num_bytes + used.num_bytes, before.num_retries + used.num_retries)
        self._past_caches = sum_uses([self._past_caches, use.caches])

    def _sources(self, view: RunView, planner: PlannerCounters | None) -> dict[str, SourceMetrics]:
        found: dict[str, SourceMetrics] = {}
        drawn = {} if planner is None else planner.mix
        total = sum(entry.tokens if view.job.mix.unit == "tokens" else entry.samples for entry in drawn.values())
        table = self._fleet.table
        for name in view.job.sources:
            mix = drawn.get(name)
            loaded = [host.sources[name] for host in self._hosts.newest.values() if name in host.sources]
            done = loaded if name not in self._past_sources else [*loaded, self._past_sources[name]]
            buffer = _NO_BUFFER
            for host in table.hosts:  # without shadows
                counted = self._hosts.newest.get(host)
                if counted is not None and name in counted.sources:
                    buffer = buffer.plus(counted.sources[name].buffer)
            amount = 0 if mix is None else mix.tokens if view.job.mix.unit == "tokens" else mix.samples
            found[name] = SourceMetrics(
                weight=0.0 if mix is None else mix.weight,
                share=amount / total if total else 0.0,
                samples=0 if mix is None else mix.samples,
                tokens=0 if mix is None else mix.tokens,
                epochs=0.0 if planner is None else planner.epochs.get(name, 0.0),
                bad_rows=self._num_bad_rows.get(name, 0),
                num_chunks=sum(one.num_chunks for one in done),
                num_bytes=sum(one.num_bytes for one in done),
                make_s=sum(one.make_s for one in done),
                waited_s=sum(one.waited_s for one in done),
                num_pending=sum(one.num_pending for one in loaded),
                buffer=buffer,
                loaders=len(table.stretches[name][-1].hosts),
                dropped=0 if planner is None else planner.documents.get(name, {}).get("dropped", 0),
                left_s=None if planner is None else planner.left_s.get(name),
                epoch_limit=view.job.sources[name].num_epochs,
            )
        return found

    def _ranks(self, tree: ClientPlaceTree) -> dict[int, RankMetrics]:
        counted = dict(self._past_ranks)
        reading: dict[int, int] = {}
        waiting: dict[int, float] = {}
        for constructor in self._constructors.newest.values():
            reading |= constructor.reading
            waiting |= constructor.waiting
            for rank, new in constructor.ranks.items():
                counted[rank] = counted.get(rank, RankCounters()).plus(new)
        found: dict[int, RankMetrics] = {}
        for rank in range(tree.world_size):
            done = counted.get(rank, RankCounters())
            found[rank] = RankMetrics(
                group=tree.coordinates(rank).dp,
                step=reading.get(rank),
                num_steps=done.num_steps,
                tokens=done.tokens,
                waited_s=done.waited_s,
                waits=done.waits,
                waiting_s=waiting.get(rank, 0.0),
            )
        return found

    def _roles(self, planner: PlannerCounters | None) -> dict[str, RoleMetrics]:
        found: dict[str, RoleMetrics] = {}
        if planner is not None:
            for name in self._planners.newest:
                busy_s = planner.plan_s + planner.facts_s
                found[name] = self._role(name, self._planners, planner.use, planner.status.num_kept, busy_s)
        for name, host in sorted(self._hosts.newest.items()):
            busy_s = sum(one.make_s for one in host.sources.values())
            found[name] = self._role(name, self._hosts, host.use, sum(s.num_pending for s in host.sources.values()), busy_s)
        for name, constructor in sorted(self._constructors.newest.items()):
            found[name] = self._role(name, self._constructors, constructor.use, constructor.num_ready, constructor.busy_s)
        return found

    def _role(self, name: str, known: _Known[C], use: ProcessUse, queue: int, busy_s: float) -> RoleMetrics:
        process = use.process if name in known.answered else None
        return RoleMetrics(process, use.node, self._restarts[name], queue, busy_s)

    def _process_uses(self) -> dict[str, ProcessUse]:
        """Each process once, by the first of its roles."""
        roles = [
            *self._planners.newest.items(),
            *sorted(self._hosts.newest.items()),
            *sorted(self._constructors.newest.items()),
        ]
        found: dict[tuple[str, int], tuple[str, ProcessUse]] = {}
        for name, role in roles:
            key = role.use.node, role.use.process
            if key not in found:
                found[key] = name, role.use
            elif role.use.storage or role.use.caches:  # only loader hosts know what was read
                found[key] = found[key][0], role.use
        return dict(found.values())

    def _storage(self, uses: Mapping[str, ProcessUse]) -> dict[str, StorageUse]:
        total = dict(self._past_storage)
        for use in uses.values():
            for root, used in use.storage.items():
                before = total.get(root, StorageUse(0, 0))
                total[root] = StorageUse(before.num_bytes + used.num_bytes, before.num_retries + used.num_retries)
        return total


def _sum_loaded(a: LoadedSource, b: LoadedSource) -> LoadedSource:
    return LoadedSource(
        num_chunks=a.num_chunks + b.num_chunks,
        rows=a.rows + b.rows,
        tokens=a.tokens + b.tokens,
        num_bytes=a.num_bytes + b.num_bytes,
        make_s=a.make_s + b.make_s,
        waited_s=a.waited_s + b.waited_s,
        num_pending=0,
        buffer=_NO_BUFFER,
    )


def _try_call(call: Callable[[], Reply[T]]) -> Reply[T] | None:
    with suppress(*_GONE):
        return call()
    return None


def _result(reply: Reply[T], deadline: float) -> T | None:
    with suppress(*_GONE):
        return reply.result(max(deadline - time.monotonic(), 0.0))
    return None
