"""Counts the steps of a run before they are read: how many there are, and what they hold of each source.

Where a run ends depends on every row, so all of them are read once, by a copy of the run beside it: with the same job, from
the same state and decisions, for one rank, and with the plainest strategy, because none of that changes which samples make a
step. The run itself is not touched, and takes no notice but of the processor time.
"""

from __future__ import annotations

import atexit
import copy
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from overlord.declare.mesh import Mesh, StageFields
from overlord.declare.source import BadRows
from overlord.errors import ClosedError
from overlord.fleet.control_loop import Loaders
from overlord.roles.planner import Planner
from overlord.runtime.embedded import Embedded
from overlord.runtime.engine import WorkplaceSize
from overlord.service.run_roles import STATUS_WAIT_S, RunRoles
from overlord.service.takeover import RunRecord
from overlord.status import Mix, SourceTotal, StepCount
from overlord.steering.decisions import WEIGHTS
from overlord.stream.weights import mixture_in_force

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit
    from overlord.messages import Decision
    from overlord.runtime.engine import Handle

_FAR = 1 << 52  # a step that no run gets to


def find_endless(job: Job, decisions: Sequence[Decision]) -> str:
    """Why the number of steps of a run cannot be known; empty where it can."""
    if job.mix.feedback is not None:
        return "it depends on the losses that trainers report (Mixture(feedback=...))"
    endless = [name for name, source in job.sources.items() if source.num_epochs is None]
    if not endless:
        return ""
    if job.mix.function is not None:
        return f"source {endless[0]!r} repeats for ever, and the weights are a function; set repeat=False, or repeat=2"
    changes = [(decision.step, decision.value["weights"]) for decision in decisions if decision.name == WEIGHTS]
    weights = mixture_in_force(job.mix, changes).at(_FAR)
    read = [name for name in job.sources if weights.get(name, 0.0) > 0]
    if all(name in endless for name in read) or (job.mix.stop != "first_exhausted" and any(n in endless for n in read)):
        name = next(name for name in read if name in endless)
        return f"source {name!r} repeats for ever; set repeat=False, or a number of epochs, for a run that ends"
    return ""


def bytes_to_read(job: Job, units: Mapping[str, Sequence[Unit]]) -> int:
    """About the bytes, decoded, of all epochs of the sources that end."""
    finite = {name: source.num_epochs for name, source in job.sources.items() if source.num_epochs is not None}
    return sum(epochs * sum(unit.num_bytes for unit in units[name]) for name, epochs in finite.items())


def job_to_count(job: Job) -> Job:
    """The same stream for one rank, with the plainest strategy. Bad rows are quarantined by the run alone."""
    sources = {name: _without_quarantine(source.without_warnings()) for name, source in job.sources.items()}
    return replace(job, sources=sources, mesh=Mesh(dp=1), strategy=None, stage_fields=StageFields())


def _without_quarantine(source: Source) -> Source:
    bad_rows = source.bad_rows
    if bad_rows.policy != "quarantine":
        return source
    copied = copy.copy(source)  # subclasses may have constructors of their own, so none is called
    object.__setattr__(copied, "on_bad_row", BadRows("skip", budget=bad_rows.budget))
    return copied


def totals_of(mix: Mapping[str, Mix], epochs: Mapping[str, float]) -> dict[str, SourceTotal]:
    return {name: SourceTotal(entry.samples, entry.tokens, epochs[name]) for name, entry in mix.items()}


class StepCounter:
    """Counts the steps of one run, in a thread. `result` may be called from any thread, any number of times."""

    def __init__(self, roles: RunRoles, num_bytes: int) -> None:
        self._roles = roles
        self._num_bytes = num_bytes
        self._reached = roles.start.step
        self._done = threading.Event()
        self._closed = threading.Event()
        self._found: StepCount | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._count, name="overlord-count", daemon=True).start()

    def result(self, wait_s: float) -> StepCount:
        """The count if it is known after `wait_s`, else how far it is. Raises what the run would raise on its way."""
        self._done.wait(wait_s)
        if self._error is not None:
            raise self._error
        return self._found or StepCount(None, self._reached, {}, self._num_bytes, "")

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def close(self) -> None:
        """Count no further."""
        self._closed.set()

    def _count(self) -> None:
        try:
            with _open_copy(self._roles, self._reached) as planner:
                self._found = self._read_to_end(planner)
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        finally:
            self._done.set()

    def _read_to_end(self, planner: Handle[Planner]) -> StepCount:
        """Request plan after plan, as a group that reads does: what it is past is released."""
        while planner.call(Planner.plan, self._reached, 0, self._reached).result() is not None:
            self._reached += 1
            if self._closed.is_set():
                raise ClosedError("the run was closed, or changed, while its steps were counted")
        at_end = planner.call(Planner.counters, self._reached).result()
        return StepCount(self._reached, self._reached, totals_of(at_end.mix, at_end.epochs), self._num_bytes, "")


@contextmanager
def _open_copy(roles: RunRoles, step: int) -> Generator[Handle[Planner]]:
    """Start a run once more from one of its steps, in this process, to count its steps."""
    job, engine = job_to_count(roles.job), Embedded()
    progress, steered = roles.planner.call(Planner.checkpoint, step).result()
    record = RunRecord(
        job=job,
        fingerprint=roles.fingerprint,
        start=progress,
        steered=steered,
        era=None,
        generation=0,
        instance="",
        accept_changes=(),
    )
    engine.open(WorkplaceSize(job.num_workers, job.num_processes))
    atexit.register(engine.close)
    try:
        yield RunRoles(engine, record, roles.units, Loaders()).planner
    finally:
        atexit.unregister(engine.close)
        engine.close()


class StepCounting:
    """The count of the steps of one run, begun when it is first asked for, and anew when what it depends on has changed.
    Safe to call from several threads."""

    def __init__(self, roles: RunRoles) -> None:
        self._roles = roles
        self._lock = threading.Lock()
        self._closed = False
        self._counter: tuple[object, StepCounter] | None = None  # with what the count depends on

    def count(self, wait_s: float, most_bytes: int | None) -> StepCount:
        """What is known after `wait_s`; nothing is counted if more than `most_bytes` would be read for it."""
        roles = self._roles
        decisions = roles.planner.call(Planner.decisions).result(STATUS_WAIT_S)
        num_bytes, endless = bytes_to_read(roles.job, roles.units), find_endless(roles.job, decisions)
        counters = roles.planner.call(Planner.counters, _FAR).result(STATUS_WAIT_S)
        end = counters.status.end
        if end is not None:  # the run has come to it
            known = totals_of(counters.mix, counters.epochs) if counters.step == end else {}
            return StepCount(end, end, known, num_bytes, "")
        with self._lock:
            if self._closed:
                raise ClosedError("the loader is closed; call overlord.start again")
            depends_on = roles.generation, decisions
            if self._counter is not None and (self._counter[0] != depends_on or self._counter[1].has_failed):
                self._counter[1].close()
                self._counter = None
            if endless or (self._counter is None and most_bytes is not None and num_bytes > most_bytes):
                return StepCount(None, roles.start.step, {}, num_bytes, endless)
            if self._counter is None:
                self._counter = depends_on, StepCounter(roles, num_bytes)
            counter = self._counter[1]
        return counter.result(wait_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._counter is not None:
                self._counter[1].close()
