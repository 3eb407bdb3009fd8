"""Looks after the loaders of a run, from a thread of the process that started it: only that one can start roles.

What it promises: nothing that trainers depend on. A look that fails, because a role is just being made anew, is told to the
log and the next one goes on from what it finds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from overlord.engine import Engine, Handle
from overlord.errors import ClosedError, OverlordError, SpecError
from overlord.planning.learning.mixture_in_force import mixture_in_force
from overlord.planning.loaders.autoscaling import Decision
from overlord.planning.loaders.scaling import Budget, Partition
from overlord.planning.recovery import WEIGHTS
from overlord.roles.autoscaler import Autoscale, Autoscaler
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.fleet import Fleet
from overlord.roles.meter import Meter
from overlord.roles.planner import Planner
from overlord.roles.shadow import ShadowChange, ShadowKeeper
from overlord.spec import Job, Unit

C = TypeVar("C", bound=DataConstructor)

_log = logging.getLogger("overlord.scaling")

_EVERY_S = 0.5
_ANSWER_S = 5.0
_LONGEST_START_S = 30.0
_REMEMBERED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """How sources are spread over loaders, now and later; each part as `overlord.start` takes it."""

    partition: Partition | None = None
    autoscale: Autoscale | None = None
    shadows: Budget | None = None

    @staticmethod
    def given(partition: Partition | None, autoscale: Autoscale | Budget | None, shadows: Budget | None) -> Loaders:
        if isinstance(autoscale, Budget):
            autoscale = Autoscale(budget=autoscale)
        return Loaders(partition=partition, autoscale=autoscale, shadows=shadows)

    def on(self, engine: Engine, job: Job) -> Loaders:
        """As they can be on an engine."""
        if (self.autoscale or self.shadows) and job.num_workers == 0:
            raise SpecError("num_workers=0 makes every chunk when it is asked for; autoscale and shadows need threads")
        if engine.num_hosts is not None:
            return self
        if self.shadows is not None:
            raise SpecError(
                "shadows take over from loaders that die by themselves; on the embedded engine all live in one process and "
                "end with it: leave shadows out, or run the job with engine=ol.Ray()"
            )
        return self if self.autoscale is None else replace(self, autoscale=self.autoscale.for_one_process())

    def fleet(self, engine: Engine, job: Job, units: Mapping[str, Sequence[Unit]], partition: Partition) -> Fleet:
        if self.autoscale is None:
            return Fleet(engine, job, units, partition, longest_start_s=_LONGEST_START_S)
        num_threads = self.autoscale.budget.workers_per_host
        own_threads = None if engine.num_hosts is None else num_threads
        return Fleet(engine, job, units, partition, own_threads, num_threads, _LONGEST_START_S)


class Upkeep:
    """See the module's docstring. `history` has what was changed, the newest last."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        units: Mapping[str, Sequence[Unit]],
        fleet: Fleet,
        loaders: Loaders,
        planner: Handle[Planner],
        constructors: Sequence[Handle[C]],
    ) -> None:
        """`constructors` may change while the run goes on."""
        self.history: deque[Decision | ShadowChange] = deque(maxlen=_REMEMBERED)
        self._fleet = fleet
        self._planner = planner
        self._constructors = constructors
        self._meter = Meter(job, units)
        self._mixture = job.mix
        self._autoscaler = self._shadows = None
        self._every_s = _EVERY_S
        if loaders.autoscale is not None:
            self._autoscaler = Autoscaler(fleet, loaders.autoscale, job.batch)
            self._every_s = loaders.autoscale.every_s
        if loaders.shadows is not None:
            self._shadows = ShadowKeeper(engine, fleet, loaders.shadows, job.batch, job.prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlord-upkeep", daemon=True)

    def start(self) -> None:
        if self._autoscaler is not None or self._shadows is not None:
            self._thread.start()

    def look(self) -> None:
        """One look at the run, and what follows from it."""
        hosts = self._fleet.standing()
        asked = [constructor.ask(DataConstructor.pace) for constructor in list(self._constructors)]
        status = self._planner.ask(Planner.status).result(_ANSWER_S)
        cursors = self._planner.ask(Planner.cursors).result(_ANSWER_S)
        decided = self._planner.ask(Planner.decisions).result(_ANSWER_S)
        mixture = mixture_in_force(self._mixture, [(d.step, d.value["weights"]) for d in decided if d.name == WEIGHTS])
        observed = self._meter.look(status.taken_to, hosts, [pace.result(_ANSWER_S) for pace in asked])
        if self._shadows is not None:
            self.history += self._shadows.look(status.taken_to, hosts, observed, mixture)
        if self._autoscaler is not None and observed is not None:
            self.history += self._autoscaler.look(observed, mixture, status.oldest_needed, cursors)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.look()
            except ClosedError:
                if not self._closed.is_set():
                    _log.info("a role was closed while loaders were looked after")
            except OverlordError as error:
                _log.warning("loaders could not be looked after this time: %s", error)
