"""Changes the loader hosts of a run while it runs: adds and stops hosts, moves shares, promotes shadows.

What it promises: every change publishes a routing table in which each chunk belongs to a running host. Callers need not be
notified, because a stale table is still correct, only slower. A host is stopped when no step can name one of its chunks any
more, which frees its buffers (on a cluster, its process). Changes are serialised; the Autoscaler and the ShadowKeeper decide
them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from overlord.errors import ClosedError, OverlordError, WaitTimeoutError, WorkerDiedError
from overlord.loaders.model import Partition, Share
from overlord.loaders.routing import RoutingTable
from overlord.roles.assembly import SOURCES, make_loader_host, publish_units, turns_of
from overlord.roles.loader_host import HostStatus, LoaderHost
from overlord.roles.routes import TABLE
from overlord.runtime import liveness
from overlord.runtime.engine import Engine, Handle, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from overlord.chunks.bad_rows import BadRowKey
    from overlord.declare.job import Job
    from overlord.declare.source import Unit
    from overlord.roles.chunk_snapshots import SnapshotPlace
    from overlord.roles.planner import Cursor
    from overlord.status import BufferUse, HostCounters

T = TypeVar("T")

FLEET = "fleet"
"""The key under which the state of the hosts is published, where roles outlive the process that started the run."""
_START_S = 3.0  # estimated start time of a host on a cluster, until one is measured
_ANSWER_S = liveness.HOST_LOST.after_s
_MOST_STOPPED = 256


@dataclass(frozen=True, slots=True)
class _Host:
    """The arguments that a host is made with."""

    shares: tuple[Share, ...]
    num_threads: int | None


@dataclass(frozen=True, slots=True)
class FleetState:
    """The hosts of a fleet, for a process that takes it over."""

    partition: Partition
    names: tuple[str, ...]
    hosts: Mapping[str, _Host]
    num_spawned: int
    table: RoutingTable

    def without_lost_shadows(self, running: Collection[str]) -> FleetState | None:
        """The state of the hosts that run. None if one is lost that no other stands in for."""
        table = self.table
        for host, shadow in table.shadows.items():
            if shadow not in running:
                table = table.with_shadow(host, None)
        if not {*filter(None, self.names), *table.hosts} <= set(running):
            return None
        hosts = {name: host for name, host in self.hosts.items() if name in running}
        return replace(self, hosts=hosts, table=table)


class Fleet:
    """The loader hosts and shadows of a run, and the routing table that names them. Thread-safe."""

    def __init__(  # noqa: PLR0913 - all but four by name
        self,
        engine: Engine,
        job: Job,
        units: Mapping[str, Sequence[Unit]],
        partition: Partition,
        *,
        num_threads: int | None = None,
        num_added_threads: int | None = None,
        longest_start_s: float | None = None,
        snapshots: SnapshotPlace | None = None,
        row_keys: Mapping[str, str] | None = None,
        taken_over: FleetState | None = None,
    ) -> None:
        """Each host has `num_threads` threads, each host added later `num_added_threads`; None shares the threads of the
        process. A host that is added must start within `longest_start_s`. Hosts save chunks in
        `snapshots`; `row_keys` are for caches. With `taken_over` the hosts run already."""
        self._engine = engine
        self._job = job
        self._num_added_threads = num_added_threads
        self._longest_start_s = longest_start_s
        self._snapshots = snapshots
        self._row_keys = row_keys
        self._start_s = 0.0 if engine.num_hosts is None else _START_S
        self._lock = threading.RLock()
        self._past_bad_rows: dict[str, frozenset[BadRowKey]] = {}
        self._stopped: deque[tuple[str, HostCounters]] = deque(maxlen=_MOST_STOPPED)
        if taken_over is not None:
            self._num_spawned, self._hosts = taken_over.num_spawned, dict(taken_over.hosts)
            self._partition, self._names = taken_over.partition, list(taken_over.names)
            self._publish(taken_over.table)
            return
        self._num_spawned = 0
        self._hosts: dict[str, _Host] = {}
        publish_units(engine, units)
        self._partition = partition
        self._names: list[str] = [self._spawn_host(_Host(shares, num_threads)) for shares in partition.hosts]
        turns = {name: found for name in job.sources if (found := turns_of(job, name, units[name])) is not None}
        self._publish(RoutingTable.of(partition, self._names, turns))

    @property
    def table(self) -> RoutingTable:
        return self._table

    @property
    def most_hosts(self) -> int | None:
        """How many hosts there is room for; None where nothing limits them."""
        return self._engine.most_hosts

    @property
    def start_s(self) -> float:
        """How long the last host took to start."""
        return self._start_s

    @property
    def partition(self) -> Partition:
        """The newest partition, which applies to chunks that are drawn from now on."""
        return self._partition

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each host of the partition; "" for a host that is empty and was stopped."""
        return tuple(self._names)

    @property
    def hosts(self) -> list[Handle[LoaderHost]]:
        """Every running host, including shadows."""
        return [Handle(self._engine, name) for name in list(self._hosts)]

    def repartition(self, to: Partition, cursors: Mapping[str, Cursor]) -> None:
        """Move to another partition, whose host i is host i of the current one. If a host cannot be started, this raises and
        changes nothing."""
        with self._lock:
            names = [self._names[i] if i < len(self._names) else "" for i in range(len(to.hosts))]
            added = [i for i, shares in enumerate(to.hosts) if shares and not names[i]]
            for i in added:
                names[i] = self._spawn_host(_Host(to.hosts[i], self._num_added_threads))
            self._wait_until_started([names[i] for i in added])
            table = self._table
            hosts_of = {source: [names[i] for i in to.hosts_of(source)] for source in self._job.sources}
            moved = [source for source, hosts in hosts_of.items() if hosts != list(table.stretches[source][-1].hosts)]
            statuses = self.statuses() if moved else {}
            for source in moved:
                # Chunks that a host has, or may be making by now, stay with it.
                announced = cursors[source].next + len(table.stretches[source][-1].hosts)
                held = [max(status.holding.get(source, ()), default=0) for status in statuses.values()]
                table = table.with_hosts(source, hosts_of[source], max(announced, *held) + 1)
            self._partition = to
            self._names = [name if shares else "" for name, shares in zip(names, to.hosts, strict=True)]
            self._publish(table)

    def add_source(self, job: Job, name: str, units: Sequence[Unit]) -> None:
        """Spread one source more, which `job` has, over the hosts that there are: each opens it at the first request."""
        with self._lock:
            self._engine.publish(f"{SOURCES}/{name}", job.sources[name])
            publish_units(self._engine, {name: units})
            self._job = job
            if name in self._table.stretches:
                return  # of an attempt that failed
            running = [i for i, host in enumerate(self._names) if host]
            fewest = sorted(running, key=lambda i: (len(self._partition.hosts[i]), i))
            num_shares = min(job.sources[name].loaders, len(fewest))
            hosts = [list(shares) for shares in self._partition.hosts]
            for index, i in enumerate(fewest[:num_shares]):
                hosts[i].append(Share(name, index, num_shares))
            self._partition = Partition(tuple(tuple(shares) for shares in hosts))
            names = [self._names[i] for i in fewest[:num_shares]]
            self._publish(self._table.with_source(name, names, turns_of(job, name, units)))

    def tidy(self, cursors: Mapping[str, Cursor], active: Collection[str] | None = None) -> list[str]:
        """Stop hosts, and close sources in hosts, that no step can name any more. Also frees the buffers of sources that are
        not `active`. Returns the hosts that were stopped."""
        with self._lock:
            needed = {source: cursor.needed for source, cursor in cursors.items()}
            if active is not None:  # the cursor of a source that no step draws from may never move again
                needed |= {source: sys.maxsize for source in cursors if source not in active}
            table = self._table.since(needed)
            unused = set(self._hosts) - set(table.hosts) - set(table.shadows.values())
            for host in unused & set(table.shadows):
                unused.add(table.shadows[host])
                table = table.with_shadow(host, None)
            if table is not self._table:
                self._publish(table)
            for name in unused:
                self._stop(name)
            for host in table.hosts:
                kept = [name for name in table.sources_of(host) if active is None or name in active]
                # Not waited for: a host that does not answer keeps its memory until it is restarted.
                Handle[LoaderHost](self._engine, host).tell(LoaderHost.keep, kept)
            return sorted(unused)

    def warm(self, source: str, cursor: Cursor) -> None:
        """Prefetch the next chunks of a source that no step draws from yet."""
        table = self._table
        last = cursor.next + len(table.stretches[source][-1].hosts)
        for chunk in range(cursor.next, last if cursor.end is None else min(last, cursor.end)):
            Handle[LoaderHost](self._engine, table.host_of(source, chunk)).tell(LoaderHost.prefetch, source, [chunk])

    def save_chunks(self) -> None:
        """Let every host save the chunks that are expensive to make again. Shadows hold the same."""
        for host in self._table.hosts:
            Handle[LoaderHost](self._engine, host).tell(LoaderHost.save_chunks)

    def add_shadow(self, host: str) -> str:
        """Start a shadow for a host, and return its name."""
        with self._lock:
            shadow = self._spawn_host(self._hosts[host], apart_from=host)
            self._wait_until_started([shadow])
            self._publish(self._table.with_shadow(host, shadow))
            return shadow

    def remove_shadow(self, host: str) -> None:
        with self._lock:
            shadow = self._table.shadows.get(host)
            if shadow is not None:
                self._publish(self._table.with_shadow(host, None))
                self._stop(shadow)

    def exchange(self, host: str) -> bool:
        """Swap a host and its shadow; False when it has none. For a host that was restarted and is empty: it becomes the
        shadow, and no new process has to start."""
        with self._lock:
            shadow = self._table.shadows.get(host)
            if shadow is None:
                return False
            self._names = [shadow if name == host else name for name in self._names]
            self._publish(self._table.with_shadow_in_place_of(host))
            return True

    def promote(self, host: str) -> bool:
        """Bind the name of a host to its shadow, which kills the host; False when it has none."""
        with self._lock:
            shadow = self._table.shadows.get(host)
            if shadow is None:
                return False
            self._engine.rebind(host, shadow)
            del self._hosts[shadow]
            self._publish(self._table.with_shadow(host, None))
            return True

    def statuses(self) -> dict[str, HostStatus]:
        """Return the status of each host that answers in time."""
        return _collect_in_time(_call_each(self.hosts, lambda host: host.call(LoaderHost.status)))

    def counters(self) -> dict[str, HostCounters]:
        """Return what each host has counted, shadows too, without hosts that do not answer in time."""
        return _collect_in_time(_call_each(self.hosts, lambda host: host.call(LoaderHost.counters)))

    def take_stopped(self) -> list[tuple[str, HostCounters]]:
        """Return what the hosts had counted that were stopped since the last call."""
        stopped: list[tuple[str, HostCounters]] = []
        while self._stopped:  # without the lock, which is held while hosts start
            stopped.append(self._stopped.popleft())
        return stopped

    def buffer_use(self) -> dict[str, BufferUse]:
        """Return the buffers of each source over all its loaders, without shadows and without hosts that do not answer."""
        found: dict[str, BufferUse] = {}
        table = self._table
        hosts = [Handle[LoaderHost](self._engine, name) for name in table.hosts]
        replies = _call_each(hosts, lambda host: host.call(LoaderHost.buffer_use, table.sources_of(host.name)))
        for uses in _collect_in_time(replies).values():
            for name, use in uses.items():
                found[name] = found[name].plus(use) if name in found else use
        return {name: found[name] for name in self._job.sources if name in found}

    def num_bad_rows(self) -> dict[str, int]:
        """Return how many rows of each source were dropped. A row that several hosts dropped counts once."""
        found = {name: set(self._past_bad_rows.get(name, ())) for name in self._job.sources}
        replies = _call_each(self.hosts, lambda host: host.call(LoaderHost.bad_rows))
        for dropped in _collect_in_time(replies).values():
            for name, rows in dropped.items():
                found[name] |= rows
        return {name: len(rows) for name, rows in found.items()}

    def _spawn_host(self, host: _Host, apart_from: str = "") -> str:
        name = f"loaders/{self._num_spawned}"
        self._num_spawned += 1
        make = partial(
            make_loader_host,
            self._job,
            self._engine,
            host.shares,
            host.num_threads,
            place=self._snapshots,
            row_keys=self._row_keys,
        )
        self._engine.spawn(name, make, apart_from=apart_from)
        self._hosts[name] = host
        return name

    def _wait_until_started(self, names: Sequence[str]) -> None:
        began = time.monotonic()
        try:
            self._engine.wait_until_started(names, self._longest_start_s)
        except OverlordError:
            for name in names:
                del self._hosts[name]
                self._engine.stop(name)
            raise
        if names:
            self._start_s = time.monotonic() - began

    def _publish(self, table: RoutingTable) -> None:
        if self._engine.roles_live_on:  # first: whoever takes the fleet over publishes the table
            state = FleetState(self._partition, tuple(self._names), dict(self._hosts), self._num_spawned, table)
            self._engine.publish(FLEET, state)
        self._table = table
        self._engine.publish(TABLE, table)

    def _stop(self, name: str) -> None:
        host = Handle[LoaderHost](self._engine, name)
        reply, counters = {name: host.call(LoaderHost.bad_rows)}, {name: host.call(LoaderHost.counters)}
        for source, rows in _collect_in_time(reply).get(name, {}).items():
            self._past_bad_rows[source] = self._past_bad_rows.get(source, frozenset()) | rows
        self._stopped.extend(_collect_in_time(counters).items())
        del self._hosts[name]
        self._engine.stop(name)


def _call_each(hosts: Sequence[Handle[LoaderHost]], call: Callable[[Handle[LoaderHost]], Reply[T]]) -> dict[str, Reply[T]]:
    """Call hosts side by side, without one that is stopped meanwhile by the control loop."""
    replies: dict[str, Reply[T]] = {}
    for host in hosts:
        with suppress(ClosedError):
            replies[host.name] = call(host)
    return replies


def _collect_in_time(replies: Mapping[str, Reply[T]]) -> dict[str, T]:
    """Return the results that arrive before one deadline for all of them."""
    deadline = time.monotonic() + _ANSWER_S
    found = {}
    for name, reply in replies.items():
        try:
            found[name] = reply.result(max(deadline - time.monotonic(), 0.0))
        except (ClosedError, WaitTimeoutError, WorkerDiedError):
            continue
    return found
