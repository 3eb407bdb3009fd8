"""The demo: run half of the steps on one mesh and resume on another, compare both with an uninterrupted run, then show the
balance of long documents."""

from __future__ import annotations

import runpy
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from overlord.arrange.strategies import plain
from overlord.declare.mesh import Mesh
from overlord.demo import job as job_module
from overlord.demo.corpus import make_corpus
from overlord.demo.straggler import Straggler, measure_straggler
from overlord.demo.stream import StepRecord, first_difference, step_record
from overlord.runtime.memory import peak_rss_bytes
from overlord.service.dry_run import (
    SourceShare,
    StepParts,
    Throughput,
    read_steps,
    shares_of,
)
from overlord.service.run import Loader, start

if TYPE_CHECKING:
    from pathlib import Path

    from overlord.declare.job import Job

FIRST_MESH = Mesh(dp=2, cp=2)
SECOND_MESH = Mesh(dp=4, cp=1)
UNCUT_MESH = Mesh(dp=1, cp=1)


class ProgressView(Protocol):
    """Displays the progress of a run."""

    def explain_wait(self, describe: Callable[[], Sequence[str]]) -> None: ...

    def show(self, meter: Throughput, shares: Callable[[], Mapping[str, SourceShare]]) -> None: ...


OpenView = Callable[[str, int], AbstractContextManager[ProgressView]]
"""A function (title, number of steps) that opens a `ProgressView`."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One part of the run, on one mesh. The rates include checking every token that was delivered."""

    mesh: str
    steps: int
    tokens: int
    images: int
    seconds: float
    tokens_per_s: float
    first_batch_s: float
    padding: float


@dataclass(frozen=True, slots=True)
class Resume:
    """The comparison of the stopped and resumed run with the uninterrupted one."""

    stopped_before: int
    state_bytes: int
    steps_compared: int
    exact: bool
    difference: str | None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All figures of the demo."""

    corpus_s: float
    mix: dict[str, SourceShare]
    legs: tuple[Leg, Leg]
    """Before the run was stopped, and after it was resumed on another mesh."""
    uncut: Leg
    """The uninterrupted run. It deals rows of fixed length round-robin: another arrangement of the same stream."""
    resume: Resume
    straggler: Straggler
    peak_rss_bytes: int
    total_s: float


def run_demo(folder: Path, num_steps: int, open_view: OpenView) -> DemoResult:
    """Make the corpus and its job file in `folder`, and run the demo on them."""
    began = time.monotonic()
    make_corpus(folder)
    shutil.copyfile(job_module.__file__, folder / "job.py")
    job: Job = runpy.run_path(str(folder / "job.py"))["job"]
    corpus_s = time.monotonic() - began
    cut = num_steps // 2
    first = _leg(replace(job, mesh=FIRST_MESH), cut, open_view)
    saved = orjson.dumps(first.state)  # a checkpoint is plain JSON
    second = _leg(replace(job, mesh=SECOND_MESH), num_steps - cut, open_view, orjson.loads(saved))
    uncut = _leg(replace(job, mesh=UNCUT_MESH, strategy=plain()), num_steps, open_view)
    difference = first_difference(uncut.records, [*first.records, *second.records])
    straggler = measure_straggler(job, job_module.llama_8b)
    return DemoResult(
        corpus_s=corpus_s,
        mix=second.mix,
        legs=(first.leg, second.leg),
        uncut=uncut.leg,
        resume=Resume(cut, len(saved), len(uncut.records), difference is None, difference),
        straggler=straggler,
        peak_rss_bytes=peak_rss_bytes(),
        total_s=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _LegRun:
    leg: Leg
    records: list[StepRecord]
    state: dict[str, Any]
    mix: dict[str, SourceShare]


def _leg(job: Job, num_steps: int, open_view: OpenView, resume: Mapping[str, Any] | None = None) -> _LegRun:
    mesh = f"dp {job.mesh.dp} x cp {job.mesh.cp}"
    title = f"on {mesh}" if resume is None else f"resumed on {mesh}"
    meter, records = Throughput(), []
    with start(job, resume=resume) as loader, open_view(title, num_steps) as view:
        view.explain_wait(loader.status_lines)
        for taken in read_steps(loader, num_steps=num_steps):
            meter.add(taken)
            records.append(_record(loader, taken))
            view.show(meter, lambda: _shares(loader))
        state, mix = loader.state_dict(), _shares(loader)
    leg = Leg(
        mesh=mesh,
        steps=meter.num_steps,
        tokens=meter.tokens,
        images=meter.images,
        seconds=meter.seconds,
        tokens_per_s=meter.tokens_per_s,
        first_batch_s=meter.first_batch_s or 0.0,
        padding=meter.padding,
    )
    return _LegRun(leg, records, state, mix)


def _record(loader: Loader, taken: StepParts) -> StepRecord:
    planned = loader.plan(taken.number)
    assert planned is not None  # it was just delivered
    return step_record(planned.plan.samples, taken, loader.tree, loader.job.batch.pad_token)


def _shares(loader: Loader) -> dict[str, SourceShare]:
    return shares_of(loader.report().mix, loader.job.mix.unit)
