"""Finds the lineage of a step: in the log of a run, or in a cache of steps that were drawn before.

A step that nobody has recorded is drawn from the data, from the nearest state before it. That reads every chunk on the way,
as the run itself does; what was drawn stays in the cache, so the next question about the same job is answered from there.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.checkpoint.form import contents_of
from overlord.checkpoint.state import to_state
from overlord.declare.policies import Log
from overlord.errors import SpecError, StateError
from overlord.lineage.documents import TracedDocument, trace_step
from overlord.lineage.recorded import RecordedRun, RecordedSteps, check_rank
from overlord.planlog.plan_log import open_segments, read_newest
from overlord.roles.plan_window import Planned
from overlord.steering.decisions import MESH, Steered, mixture_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from overlord.declare.job import Job
    from overlord.messages import Decision
    from overlord.planlog.lineage import RecordedStep


@dataclass(frozen=True, slots=True)
class KnownFrom:
    """Where the steps of a job are known from. With none of them, from the job's beginning."""

    log: str | os.PathLike[str] | None = None
    state: Mapping[str, Any] | None = None
    cache: Path | None = None
    tell: Callable[[str], None] | None = None
    """Called with a line about work that takes long."""

    def first_step(self) -> int:
        """The first step that is known from there."""
        if self.log is not None:
            run = RecordedRun.at(os.fspath(self.log))
            return 0 if run.is_empty else run.first
        return 0 if self.state is None else contents_of(self.state)["step"]

    def say(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)


@dataclass(frozen=True)
class FoundRun:
    """Recorded steps of a job, a certain one among them."""

    job: Job
    """With the windows that the recorded run had."""
    run: RecordedRun
    is_log: bool
    """Whether a run has recorded it, on the mesh that it had then. Otherwise the job's own mesh counts."""
    log: str | os.PathLike[str]
    """The log beside which the steps are recorded."""

    def decisions(self) -> tuple[Decision, ...]:
        """What was decided while the run ran."""
        newest = read_newest(open_segments(Log(self.log)))
        return () if newest is None else newest.recovered.decisions

    def tree(self, stretch: RecordedSteps) -> ClientPlaceTree:
        return self.run.tree(stretch) if self.is_log else ClientPlaceTree(self.job.mesh)

    def planned(self, step: int) -> Planned:
        """The plan of a step that is recorded."""
        stretch, recorded = self._get(step)
        return Planned(recorded.drawn, self.run.plan(self.job, recorded, self.tree(stretch)))

    def documents(self, step: int, rank: int | None = None) -> list[TracedDocument]:
        """The documents of a step that is recorded."""
        stretch, recorded = self._get(step)
        tree = self.tree(stretch)
        check_rank(tree, rank)
        plan = self.run.plan(self.job, recorded, tree)
        units = self.run.units
        return trace_step(recorded, plan, tree, self.job.batch, units=lambda name: units(stretch, name), rank=rank)

    def _get(self, step: int) -> tuple[RecordedSteps, RecordedStep]:
        stretch, recorded = self.run.find(step), self.run.step(step)
        if stretch is None or recorded is None:
            raise StateError(self.run.missing_text(step))
        return stretch, recorded


def open_log(job: Job, log: str | os.PathLike[str]) -> FoundRun:
    """The lineage of the run with this log. Raises StateError for one of another job, or without lineage."""
    run = RecordedRun.at(os.fspath(log))
    if run.is_empty:
        is_there = bool(open_segments(Log(log)).numbers())
        raise StateError(
            run.missing_text(0)
            if is_there
            else f"there is no log at {os.fspath(log)}; give the place that the run was started with as log=..."
        )
    return FoundRun(run.check_job(job), run, is_log=True, log=log)


@contextmanager
def step_of(job: Job, step: int, where: KnownFrom) -> Generator[FoundRun]:
    """The lineage of a run with this step in it. A step that is not recorded is drawn."""
    if where.log is None:
        with _from_data(job, step, where) as found:
            yield found
        return
    found = open_log(job, where.log)
    if found.run.find(step) is not None:
        yield found
        return
    if step < found.run.first:
        raise StateError(found.run.missing_text(step))
    with tempfile.TemporaryDirectory(prefix="overlord-trace-") as folder:
        state = _state_from_log(found, step)
        where.say(f"{found.run.missing_text(step)}; it is drawn from step {state['step']:,} on, which reads the data")
        drawn = _draw(job, step, Path(folder), state)
        # The mesh of a step that is yet to come is the one of the last recorded step.
        stretch = drawn.stretches[-1]
        last = found.tree(found.run.stretches[-1])
        yield _OnMesh(found.job, drawn, is_log=True, log=folder, mesh_tree=last if stretch.first >= found.run.end else None)


@contextmanager
def first_steps(job: Job, num_steps: int, where: KnownFrom) -> Generator[FoundRun]:
    """The lineage of a log; without one, of so many steps from the state or the beginning on, or of all that the run has."""
    if where.log is not None:
        yield open_log(job, where.log)
        return
    with _from_data(job, where.first_step() + num_steps - 1, where, may_end=True) as found:
        yield found


@dataclass(frozen=True)
class _OnMesh(FoundRun):
    """Steps that were drawn now, arranged for the mesh of another run."""

    mesh_tree: ClientPlaceTree | None = None

    def tree(self, stretch: RecordedSteps) -> ClientPlaceTree:
        return self.mesh_tree or super().tree(stretch)


@contextmanager
def _from_data(job: Job, step: int, where: KnownFrom, *, may_end: bool = False) -> Generator[FoundRun]:
    """Steps of a job up to a certain one; up to its last where `may_end` allows that it has fewer."""
    from overlord.checkpoint.fingerprint import Fingerprint
    from overlord.planlog.plan_log import chunks_of_saved
    from overlord.roles.assembly import cut_units, list_units, with_windows

    state = where.state
    begin = where.first_step()
    if step < begin:
        raise SpecError(f"the state is of step {begin:,}; it cannot tell of step {step:,}, which came before")
    if step - begin < _WORTH_KEEPING:
        with tempfile.TemporaryDirectory(prefix="overlord-trace-") as folder:
            run = _draw(job, step, Path(folder), state, may_end=may_end)
            yield FoundRun(job, run, is_log=False, log=folder)
        return
    saved = chunks_of_saved(state, None, job.sources)
    units = cut_units(job, list_units(job.sources), saved)
    declared, job = job, with_windows(job, units, saved)
    fingerprint = Fingerprint.of(job, units).to_dict()
    folder = (where.cache or default_cache()) / _cache_key(job, fingerprint, state)
    run = RecordedRun.at(folder)
    if run.find(step) is None:
        before = None if run.is_empty or _is_steered(job) else run.progress_before(step)
        if before is not None:
            state, begin = to_state(before, job.mix.unit, fingerprint), before.step
        where.say(
            f"nobody has recorded step {step:,} of this job: the steps from {begin:,} on are drawn, which reads their data. "
            "They are kept for the next time; a run with log=... records them as it goes"
        )
        run = _draw(declared, step, folder, state, may_end=may_end)
    yield FoundRun(job, run, is_log=False, log=folder)


_WORTH_KEEPING = 64
"""Steps: fewer are drawn again, which takes no longer than listing the sources of a large job."""


def _draw(job: Job, step: int, folder: Path, state: Mapping[str, Any] | None, *, may_end: bool = False) -> RecordedRun:
    """Draw up to a step, and record the steps in a folder."""
    from overlord.service.run import start

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"steps cannot be kept in {folder}: {error.strerror}; name another folder with --cache") from error
    with start(job, resume=state, log=Log(folder, sync_s=60)) as loader:
        planned = loader.draw_to(step)
        end = loader.status().end
    if planned is None and not (may_end and end):
        raise SpecError(f"the run of this job ends before step {step:,}: it has {end or 0:,} steps; ask for an earlier one")
    run = RecordedRun.at(folder)
    if run.is_empty or run.find(step if planned is not None else run.end - 1) is None:
        raise StateError(f"steps cannot be kept in {folder}; name another folder with --cache")
    return run


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "overlord" / "lineage"


def _is_steered(job: Job) -> bool:
    """Whether weights follow from more than the declaration."""
    return job.mix.function is not None or job.mix.feedback is not None


def _cache_key(job: Job, fingerprint: Mapping[str, Any], state: Mapping[str, Any] | None) -> str:
    """Everything that decides which samples a step has."""
    ends = [source.num_epochs for source in job.sources.values()]
    parts = [fingerprint, mixture_digest(job.mix), job.mix.stop, ends, job.batch.drop_last]
    parts += [[asdict(skip) for skip in job.skip], None if state is None else contents_of(state)]
    plain = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return hashlib.blake2b(plain, digest_size=12).hexdigest()


def _state_from_log(found: FoundRun, step: int) -> dict[str, Any]:
    """The state nearest before a step that the log can tell, with what was decided about the run."""
    progress = found.run.progress_before(step)
    if progress is None:
        raise StateError(f"{found.run.missing_text(step)}, and no earlier step was kept whole either")
    decisions = tuple(d for d in found.decisions() if d.name != MESH)
    saved = found.run.recorded_units(found.run.stretches[-1]).fingerprint
    return to_state(progress, found.job.mix.unit, saved, Steered(decisions))
