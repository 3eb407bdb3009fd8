"""What a run is seen to do: what chunks cost, how long a step takes its trainers, and which sources they wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from overlord.planning.loaders.autoscaling import Observed
from overlord.planning.loaders.scaling import Profile
from overlord.roles.loader_host import Standing
from overlord.roles.pace import Pace
from overlord.roles.source_loader import Work
from overlord.spec import Job, Unit

_LEAST_STEP_S = 1e-3  # of a trainer that only reads
_SLOW_CHANGE = 0.3  # what the newest look counts for in the time of a step
_BYTES_PER_TOKEN = 4


class Meter:
    """Looked through now and then; each look tells what happened since the one before."""

    def __init__(self, job: Job, units: Mapping[str, Sequence[Unit]], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._profiles = {name: _guess(name, units[name], source.window) for name, source in job.sources.items()}
        self._work: dict[tuple[str, str], dict[str, Work]] = {}
        self._paces: list[Pace] = []
        self._step_s: float | None = None

    def look(self, step: int, hosts: Mapping[str, Standing], paces: Sequence[Pace]) -> Observed | None:
        """None until a trainer has taken a step."""
        done = self._done(hosts)
        for name, work in done.items():
            if work.num_chunks and work.rows:
                self._profiles[name] = self._profiles[name].learned(_profile(name, work))
        waiting = self._waiting(paces)
        if self._step_s is None:
            return None
        waited_s = sum(work.waited_s for work in done.values())
        waited = {name: waiting * work.waited_s / waited_s for name, work in done.items()} if waited_s else {}
        return Observed(step=step, at_s=self._clock(), step_s=self._step_s, profiles=dict(self._profiles), waited=waited)

    def _done(self, hosts: Mapping[str, Standing]) -> dict[str, Work]:
        """What was done for each source since the last look, over all hosts. One that was made anew begins at nothing."""
        before, self._work = self._work, {(name, host.instance): host.work for name, host in hosts.items()}
        done: dict[str, Work] = {}
        for key, work_of in self._work.items():
            for source, work in work_of.items():
                new = work.minus(before.get(key, {}).get(source, Work()))
                done[source] = done.get(source, Work()).plus(new)
        return done

    def _waiting(self, paces: Sequence[Pace]) -> float:
        """The part of the time that the ranks of the group that waits most spent waiting for a step."""
        known = self._paces if len(self._paces) == len(paces) else [Pace()] * len(paces)
        # A constructor that was made anew has counted less than before.
        new = [now.minus(was) if now.num_waits >= was.num_waits else now for now, was in zip(paces, known, strict=True)]
        self._paces = list(paces)
        # Trainers wait for each other: the group that is busy for the shortest time waits for nobody.
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
    )


def _guess(source: str, units: Sequence[Unit], window: int) -> Profile:
    """What the list of units promises, until a chunk was made."""
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
