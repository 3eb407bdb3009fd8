"""`overlord check`: list the sources of a job and their contents, then plan and build its first step."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

from overlord.chunks.transforms.apply import engines_used
from overlord.cli import FAILED, describe_error
from overlord.cli.live import WaitNotes
from overlord.cli.options import add_job_argument
from overlord.cli.output import console, size, table, write_json
from overlord.errors import OverlordError
from overlord.jobfile.loading import load_job
from overlord.jobfile.printing import as_python, as_yaml
from overlord.roles.assembly import cut_units, list_units, with_windows
from overlord.service.dry_run import read_steps
from overlord.service.run import start

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from overlord.declare.batch import Batch
    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit
    from overlord.jobfile.loading import JobFile
    from overlord.status import Mix, StepCount

_COUNT_S = 30.0  # the most that counting the steps of a run may take
_COUNTED_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    parser.add_argument(
        "--print",
        dest="form",
        choices=("yaml", "python"),
        help="print the job, with what FIELD=VALUE changed, as a file of this form instead of checking it",
    )


def execute(options: argparse.Namespace) -> int:
    if options.form is not None:
        job = load_job(options.job)
        sys.stdout.write(as_yaml(job) if options.form == "yaml" else as_python(job))
        return 0
    return check(options.job, options.json)


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The contents of a source, as far as listing its files shows them."""

    reader: str
    weight: float
    files: int
    units: int
    rows: int | None
    """None if the rows are counted only when the source is read."""
    num_bytes: int
    engines: tuple[str, ...]
    """What encodes the texts of each `Tokenize`, by `Tokenize.engine_used`."""


@dataclass(frozen=True, slots=True)
class SourceLength:
    """How much a run reads of a source. What is not counted is estimated from the first step."""

    tokens: int | None
    """Of the whole run; None where it was not counted."""
    epochs: float | None
    """Likewise."""
    epoch_tokens: int | None
    """About the tokens of an epoch; None where its rows are not known, or the first step has none of it."""
    epoch_steps: int | None
    """About the steps that an epoch lasts at the weights of the first step; likewise."""
    epoch_limit: int | None
    """The epochs after which it ends; None where it repeats for ever."""
    limit_steps: int | None
    """About the steps that all of them last; None where that is not known, or it repeats for ever."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run is."""

    steps: int | None
    """None where it never ends, or where that was not counted."""
    reason: str
    """Why it is not known."""
    sources: dict[str, SourceLength]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a job, and the time it took to plan and build it for every rank."""

    number: int
    samples: int
    tokens: int
    microbatches: int
    padding: float
    seconds: float


def check(path: Path | JobFile, as_json: bool) -> int:
    job = load_job(path)
    with WaitNotes(console(stderr=True), f"listing the files of {len(job.sources):,} sources"):
        units, errors = _list_sources(job)
    listed: dict[str, SourceListing] = {}
    weights = job.mix.at(0)
    for name, found in units.items():
        try:
            listed[name] = _listing(job, name, found, weights)
        except OverlordError as error:  # an encoding that cannot be loaded
            errors.append(f"source {name!r}: {error}")
    first: FirstStep | None = None
    length: RunLength | None = None
    if not errors:
        try:
            first, length = _build_first_step(job, {name: entry.rows for name, entry in listed.items()})
        except OverlordError as error:
            errors.append(describe_error(error))
    units = cut_units(job, units)
    warnings = _warnings(with_windows(job, units), units)
    if as_json:
        write_json(
            {
                "ok": not errors,
                "sources": {name: asdict(entry) for name, entry in listed.items()},
                "first_step": None if first is None else asdict(first),
                "length": None if length is None else asdict(length),
                "warnings": warnings,
                "errors": errors,
            }
        )
    else:
        _print(job, path, listed, first, length=length, warnings=warnings, errors=errors)
    return FAILED if errors else 0


def _list_sources(job: Job) -> tuple[dict[str, Sequence[Unit]], list[str]]:
    """The units of each source that can be listed, and an error for each source that cannot."""
    units: dict[str, Sequence[Unit]] = {}
    errors: list[str] = []
    for name, source in job.sources.items():
        try:
            units |= list_units({name: source})
        except OverlordError as error:
            errors.append(f"source {name!r}: {error}")
    return units, errors


def _listing(job: Job, name: str, units: Sequence[Unit], weights: Mapping[str, float]) -> SourceListing:
    rows = [unit.num_rows for unit in units]
    return SourceListing(
        reader=type(job.sources[name]).__name__,
        weight=weights.get(name, 0.0),
        files=len({unit.path for unit in units}),
        units=len(units),
        rows=None if None in rows else sum(row for row in rows if row is not None),
        num_bytes=sum(unit.num_bytes for unit in units),
        engines=engines_used(job.sources[name].transforms),
    )


def _build_first_step(job: Job, rows: Mapping[str, int | None]) -> tuple[FirstStep, RunLength]:
    """Draw, plan and build step 0 on every rank. This reads, transforms and decodes the rows that the step needs. Then count
    the steps of the run, where that takes little, or estimate how long its sources last; they have so many `rows`."""
    began = time.monotonic()
    with (
        WaitNotes(console(stderr=True), "building the first step") as notes,
        start(job) as loader,
    ):
        notes.describe = loader.status_lines
        planned = loader.plan(0)
        taken = next(islice(read_steps(loader, num_steps=1), 1), None)
        seconds = time.monotonic() - began
        if planned is None or taken is None:
            raise OverlordError("the run ends before its first step: the sources hold too little for one")
        notes.doing = "counting the steps of the run"
        length = _measure(loader.count_steps(_COUNT_S, _COUNTED_BYTES), loader.report(1).mix, rows, job)
    first = FirstStep(
        number=taken.number,
        samples=len(planned.plan.samples),
        tokens=taken.tokens,
        microbatches=int(planned.plan.counts.sum()),
        padding=1 - taken.tokens / taken.places if taken.places else 0.0,
        seconds=seconds,
    )
    return first, length


def _measure(count: StepCount, first: Mapping[str, Mix], rows: Mapping[str, int | None], job: Job) -> RunLength:
    """How long a run is, from its count, and from what its `first` step has of each source."""
    found: dict[str, SourceLength] = {}
    for name, drawn in first.items():
        num_rows, total = rows[name], count.sources.get(name)
        steps = None if num_rows is None or not drawn.samples else num_rows / drawn.samples
        found[name] = SourceLength(
            tokens=None if total is None else total.tokens,
            epochs=None if total is None else total.epochs,
            epoch_tokens=None if steps is None else round(steps * drawn.tokens),
            epoch_steps=None if steps is None else _num_steps(job.batch, steps),
            epoch_limit=(limit := job.sources[name].num_epochs),
            limit_steps=None if steps is None or limit is None else _num_steps(job.batch, limit * steps),
        )
    unread = f"{size(count.num_bytes)} have to be read to count its steps: loader.count_steps() does so"
    return RunLength(count.steps, count.endless or ("" if count.steps is not None else unread), found)


def _num_steps(batch: Batch, steps: float) -> int:
    """About the steps that hold as much as `steps` steps of the first one's size: fewer, where steps grow."""
    phases = batch.phases
    if phases is None:
        return round(steps)
    amount = steps * phases.size[0]
    at = bisect_right(phases.before, amount) - 1
    return round(phases.first[at] + (amount - phases.before[at]) / phases.size[at])


def _warnings(job: Job, units: Mapping[str, Sequence[Unit]]) -> list[str]:
    schedule = job.mix.schedule
    found = [
        f"source {name!r} has weight 0 at every step: it is never read"
        for name in job.sources
        if not any(weights.get(name) for _, weights in schedule)
    ]
    found += [text for name in units if (text := _buffer_warning(name, job.sources[name], units[name]))]
    batch, dp = job.batch, job.mesh.dp
    if batch.num_rows is not None and batch.num_rows % dp:
        found.append(
            f"a step has {batch.num_rows} rows of {batch.sequence_length:,} tokens, which dp={dp} does not divide: some "
            f"groups get less; make batch.tokens a multiple of {dp * batch.sequence_length:,}"
        )
    elif batch.phases is not None:
        even = dp * batch.sequence_length if batch.tokens is not None else dp
        uneven = [size for size in batch.phases.size if size % even]
        if uneven:
            found.append(
                f"{len(uneven)} of the {len(batch.phases.size)} sizes of the warm-up, {uneven[0]:,} for one, are no "
                f"multiples of {even:,}: some of the dp={dp} groups get less then; declare WarmUp(multiple={even})"
            )
    return found


def _buffer_warning(name: str, source: Source, units: Sequence[Unit]) -> str:
    largest = sum(sorted((unit.num_bytes for unit in units), reverse=True)[: source.units_per_chunk])
    if 2 * largest <= source.buffer_bytes // source.loaders:
        return ""
    return (
        f"source {name!r} reads chunks of up to {size(largest)} through buffers of "
        f"{size(source.buffer_bytes // source.loaders)}: two do not fit, so reading ahead is slow; raise buffer_bytes, "
        "or write smaller units"
    )


def _print(
    job: Job,
    path: Path | JobFile,
    listed: Mapping[str, SourceListing],
    first: FirstStep | None,
    *,
    length: RunLength | None,
    warnings: Sequence[str],
    errors: Sequence[str],
) -> None:
    out = console()
    rows = [
        (
            name,
            entry.reader,
            f"{entry.weight:.2%}",
            f"{entry.files:,}",
            f"{entry.units:,}",
            "?" if entry.rows is None else f"{entry.rows:,}",
            size(entry.num_bytes),
        )
        for name, entry in listed.items()
    ]
    if rows:
        out.print(table("source", "<reader", f"share of {job.mix.unit}", "files", "units", "rows", "bytes", rows=rows))
    by_engine: dict[str, list[str]] = {}
    for name, entry in listed.items():
        for engine in entry.engines:
            by_engine.setdefault(engine, []).append(name)
    for engine, (first_name, *others) in by_engine.items():
        whose = f"source {first_name!r}" + (f" and {len(others):,} more" if others else "")
        out.print(f"{whose}: tokenising engine: {engine}", soft_wrap=True, markup=False)
    if first is not None:
        out.print(
            f"step {first.number}: {first.samples:,} samples, {first.tokens:,} tokens, {first.padding:.1%} padding, "
            f"{first.microbatches:,} microbatches over {job.mesh.dp} groups; "
            f"built for {job.mesh.world_size:,} ranks in {first.seconds:.2f} s",
            soft_wrap=True,
        )
    if (phases := job.batch.phases) is not None:
        unit = "samples" if job.batch.tokens is None else "tokens"
        out.print(
            f"steps grow from {phases.size[0]:,} {unit} to {phases.size[-1]:,}, which they have from step "
            f"{phases.first[-1]:,} on, after {phases.before[-1]:,} {unit}; sizes: {len(phases.size):,}",
            soft_wrap=True,
        )
    if length is not None:
        _print_length(length)
    for warning in warnings:
        out.print(f"warning: {warning}", soft_wrap=True, markup=False)
    if errors:
        problems = console(stderr=True)
        for error in errors:
            problems.print(f"error: {error}", soft_wrap=True, markup=False)
    else:
        out.print(f"{path} is sound" + (f", with {len(warnings)} warning(s)" if warnings else ""), markup=False)


def _print_length(length: RunLength) -> None:
    out = console()
    if length.steps is not None:
        out.print(f"the run has {length.steps:,} steps", soft_wrap=True)
    else:
        out.print(f"the number of steps is not known: {length.reason}", soft_wrap=True, markup=False)
    for name, source in length.sources.items():
        if source.tokens is not None and source.epochs is not None:
            text = f"{source.tokens:,} tokens in {source.epochs:g} epoch{'s' * (source.epochs != 1)}"
        elif source.epoch_tokens is not None and source.epoch_steps is not None:
            text = f"an epoch is about {source.epoch_tokens:,} tokens, and lasts about {max(source.epoch_steps, 1):,} steps"
            if source.limit_steps is not None and source.epoch_limit != 1:
                text += f"; it ends after {source.epoch_limit} epochs, about {source.limit_steps:,} steps"
        else:
            continue
        out.print(f"source {name!r}: {text}", soft_wrap=True, markup=False)
