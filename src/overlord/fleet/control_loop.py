"""The control loop over the loaders of a run: a thread of the process that started the run, because only that process can
start roles.

What it promises: nothing that trainers depend on. A round that fails, for example because a role is being restarted, is
logged, and the next round starts from the current state.

`Meter` turns the counters of hosts and constructors into measurements: the cost of chunks, the step time of trainers, and
the sources that they wait for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from overlord.errors import ClosedError, OverlordError, SpecError
from overlord.fleet.hosts import Fleet, FleetState
from overlord.fleet.shadows import ShadowChange, ShadowKeeper
from overlord.loaders.model import Budget, Partition, Profile
from overlord.roles.planner import Planner
from overlord.roles.rank_pace import Pace
from overlord.roles.source_loader import Work
from overlord.runtime import liveness
from overlord.runtime.recorder import current_recorder
from overlord.steering.decisions import SOURCE, WEIGHTS
from overlord.stream.weights import mixture_in_force

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Unit
    from overlord.fleet.autoscaler import Autoscale
    from overlord.loaders.autoscaling import Observed, ScalingDecision
    from overlord.roles.chunk_snapshots import SnapshotPlace
    from overlord.roles.loader_host import HostStatus
    from overlord.runtime.engine import Engine, Handle


class Paced(Protocol):
    """A role that measures the pace of its ranks: a Data Constructor, or a role that contains one."""

    def pace(self) -> Pace: ...


C = TypeVar("C", bound=Paced)

_log = logging.getLogger("overlord.scaling")

_ANSWER_S = liveness.ROLE_OF_LOOP.after_s
_REMEMBERED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """How sources are spread over loaders: the options of `overlord.start`."""

    partition: Partition | None = None
    autoscale: Autoscale | None = None
    shadows: Budget | None = None
    snapshots: SnapshotPlace | None = None
    row_keys: Mapping[str, str] | None = None

    @staticmethod
    def of(partition: Partition | None, autoscale: Autoscale | Budget | None, shadows: Budget | None) -> Loaders:
        if isinstance(autoscale, Budget):
            from overlord.fleet.autoscaler import Autoscale  # most runs are not scaled, and need none of this to start

            autoscale = Autoscale(budget=autoscale)
        return Loaders(partition=partition, autoscale=autoscale, shadows=shadows)

    def for_engine(self, engine: Engine, job: Job) -> Loaders:
        """A copy of the options for this engine; SpecError for an option that it does not support."""
        if (self.autoscale or self.shadows) and job.num_workers == 0:
            raise SpecError("num_workers=0 makes every chunk when it is requested; autoscale and shadows need threads")
        if self.shadows is not None and engine.is_one_machine and engine.num_hosts == 1:
            raise SpecError(
                "a shadow and its loader must be in different processes, and this engine has one: leave shadows out, or run "
                "the job with engine=ol.Processes(num_processes=2)"
            )
        if engine.num_hosts is not None:
            return self
        if self.autoscale is not None and self.autoscale.budget.host_bytes_per_s is not None:
            raise SpecError(
                "host_bytes_per_s (host-bandwidth=) is what a loader host can send to other processes, and here all are in "
                "one process: leave it out, or run the job with engine=ol.Processes() or ol.Ray()"
            )
        if self.shadows is not None:
            raise SpecError(
                "shadows take over from loaders that die by themselves; on the embedded engine all live in one process and "
                "end with it: leave shadows out, or run the job with engine=ol.Ray()"
            )
        return self if self.autoscale is None else replace(self, autoscale=self.autoscale.for_one_process())

    def start_fleet(
        self,
        engine: Engine,
        job: Job,
        units: Mapping[str, Sequence[Unit]],
        partition: Partition,
        taken_over: FleetState | None = None,
    ) -> Fleet:
        longest_start_s = liveness.HOST_STARTING.after_s
        if self.autoscale is None:
            return Fleet(
                engine,
                job,
                units,
                partition,
                longest_start_s=longest_start_s,
                snapshots=self.snapshots,
                row_keys=self.row_keys,
                taken_over=taken_over,
            )
        num_threads = self.autoscale.budget.workers_per_host
        own_threads = None if engine.num_hosts is None else num_threads
        return Fleet(
            engine,
            job,
            units,
            partition,
            num_threads=own_threads,
            num_added_threads=num_threads,
            longest_start_s=longest_start_s,
            snapshots=self.snapshots,
            row_keys=self.row_keys,
            taken_over=taken_over,
        )


class LoaderControlLoop:
    """Adds, removes and replaces loader hosts and shadows during a run. `history` has the changes, the newest last."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        units: Mapping[str, Sequence[Unit]],
        *,
        fleet: Fleet,
        loaders: Loaders,
        planner: Handle[Planner],
        constructors: Sequence[Handle[C]],
    ) -> None:
        """`constructors` is read in every round, so that it may change during the run."""
        self.history: deque[ScalingDecision | ShadowChange] = deque(maxlen=_REMEMBERED)
        self._fleet = fleet
        self._planner = planner
        self._constructors = constructors
        self._meter = Meter(job, units)
        self._mixture = job.mix
        self._autoscaler = self._shadows = None
        self._every_s = liveness.STATUS_EVERY_S
        if loaders.autoscale is not None:
            from overlord.fleet.autoscaler import Autoscaler

            self._autoscaler = Autoscaler(fleet, loaders.autoscale, job.batch)
            self._every_s = loaders.autoscale.every_s
        self._save_every_s = math.inf if loaders.snapshots is None else loaders.snapshots.every_s
        if loaders.shadows is not None:
            self._shadows = ShadowKeeper(engine, fleet, loaders.shadows, job.batch, job.prefetch)
        self._closed = threading.Event()
        self._events = current_recorder().events
        self._thread = threading.Thread(target=self._run, name="overlord-loader-control", daemon=True)

    def add_source(self, name: str, units: Sequence[Unit], units_per_chunk: int) -> None:
        """Know a source that was added to the run."""
        self._meter.add_source(name, units, units_per_chunk)

    def start(self) -> None:
        if self._changes_loaders or math.isfinite(self._save_every_s):
            self._thread.start()

    @property
    def _changes_loaders(self) -> bool:
        return self._autoscaler is not None or self._shadows is not None

    def reconcile(self) -> None:
        """Run one round: measure the run, and change loaders and shadows accordingly."""
        hosts = self._fleet.statuses()
        paces = [constructor.call(Paced.pace) for constructor in list(self._constructors)]
        status = self._planner.call(Planner.status).result(_ANSWER_S)
        cursors = self._planner.call(Planner.cursors).result(_ANSWER_S)
        decided = self._planner.call(Planner.decisions).result(_ANSWER_S)
        mixture = mixture_in_force(
            self._mixture,
            [(d.step, d.value["weights"]) for d in decided if d.name == WEIGHTS],
            [(d.step, d.value["source"], d.value["share"]) for d in decided if d.name == SOURCE],
        )
        observed = self._meter.observe(status.taken_to, hosts, [pace.result(_ANSWER_S) for pace in paces])
        if self._shadows is not None:
            self._remember("shadow", self._shadows.reconcile(status.taken_to, hosts, observed, mixture))
        if self._autoscaler is not None and observed is not None:
            self._remember("scaling", self._autoscaler.reconcile(observed, mixture, status.oldest_needed, cursors))

    def _remember(self, kind: str, changes: Sequence[ScalingDecision | ShadowChange]) -> None:
        self.history += changes
        for change in changes:
            self._events.note(kind, str(change))

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        save_at = time.monotonic() + self._save_every_s
        while not self._closed.wait(self._every_s if self._changes_loaders else save_at - time.monotonic()):
            try:
                if time.monotonic() >= save_at:
                    save_at = time.monotonic() + self._save_every_s
                    self._fleet.save_chunks()
                if self._changes_loaders:
                    self.reconcile()
            except ClosedError:
                if not self._closed.is_set():
                    _log.info("a role was closed during a round of the loader control loop")
            except OverlordError as error:
                _log.warning("this round of the loader control loop failed: %s", error)


_LEAST_STEP_S = 1e-3  # for a trainer that only reads
_SLOW_CHANGE = 0.3  # the weight of the newest measurement in the moving mean of step_s
_BYTES_PER_TOKEN = 4


class Meter:
    """Measures a run from its counters: each call of `observe` covers the time since the call before."""

    def __init__(self, job: Job, units: Mapping[str, Sequence[Unit]], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._profiles = {name: _guess(name, units[name], source.units_per_chunk) for name, source in job.sources.items()}
        self._work: dict[tuple[str, str], dict[str, Work]] = {}
        self._paces: list[Pace] = []
        self._step_s: float | None = None

    def add_source(self, name: str, units: Sequence[Unit], units_per_chunk: int) -> None:
        self._profiles = {**self._profiles, name: _guess(name, units, units_per_chunk)}

    def observe(self, step: int, hosts: Mapping[str, HostStatus], paces: Sequence[Pace]) -> Observed | None:
        """Return the measurements; None until a trainer has taken a step."""
        done = self._take_new_work(hosts)
        for name, work in done.items():
            if work.num_chunks and work.rows:
                self._profiles[name] = self._profiles[name].with_measured(_profile(name, work))
        waiting = self._update_pace(paces)
        if self._step_s is None:
            return None
        waited_s = sum(work.waited_s for work in done.values())
        waited = {name: waiting * work.waited_s / waited_s for name, work in done.items()} if waited_s else {}
        from overlord.loaders.autoscaling import Observed

        return Observed(step=step, at_s=self._clock(), step_s=self._step_s, profiles=dict(self._profiles), waited=waited)

    def _take_new_work(self, hosts: Mapping[str, HostStatus]) -> dict[str, Work]:
        """Return the work done for each source since the last call, over all hosts. A restarted host counts from zero."""
        before, self._work = self._work, {(name, host.instance): host.work for name, host in hosts.items()}
        done: dict[str, Work] = {}
        for key, work_of in self._work.items():
            for source, work in work_of.items():
                new = work.minus(before.get(key, {}).get(source, Work()))
                done[source] = done.get(source, Work()).plus(new)
        return done

    def _update_pace(self, paces: Sequence[Pace]) -> float:
        """Update the time of a step, and return the largest fraction of the time that a group spent waiting."""
        known = self._paces if len(self._paces) == len(paces) else [Pace()] * len(paces)
        # A constructor that was restarted has counted less than before.
        new = [now.minus(was) if now.num_waits >= was.num_waits else now for now, was in zip(paces, known, strict=True)]
        self._paces = list(paces)
        # Trainers wait for each other inside a step, which counts as busy: the shortest time has the least of that.
        busy = [pace.busy_s / pace.num_steps for pace in new if pace.num_steps]
        if busy:
            step_s = max(min(busy), _LEAST_STEP_S)
            self._step_s = step_s if self._step_s is None else self._step_s + _SLOW_CHANGE * (step_s - self._step_s)
        totals = [(pace.waited_s, pace.waited_s + pace.busy_s) for pace in new]
        return max((waited / total for waited, total in totals if total > 0), default=0.0)


def _profile(source: str, work: Work) -> Profile:
    n = work.num_chunks
    return Profile(
        source=source,
        cpu_s=work.cpu_s / n,
        wait_s=work.wait_s / n,
        rows=work.rows / n,
        tokens=work.tokens / n,
        chunk_bytes=math.ceil(work.num_bytes / n),
        num_chunks=n,
        sent_bytes=work.num_bytes / n,
    )


def _guess(source: str, units: Sequence[Unit], window: int) -> Profile:
    """An estimate from the list of units, for the time before the first chunk is measured."""
    num_chunks = max(math.ceil(len(units) / window), 1)
    num_bytes = sum(unit.num_bytes for unit in units) / num_chunks
    rows = max(sum(unit.num_rows or 0 for unit in units) / num_chunks, 1.0)
    return Profile(
        source=source,
        cpu_s=0.0,
        wait_s=0.0,
        rows=rows,
        tokens=max(num_bytes / _BYTES_PER_TOKEN, rows),
        chunk_bytes=math.ceil(num_bytes),
    )
