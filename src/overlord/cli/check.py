"""`overlord check`: list the sources of a job and their contents, then plan and build its first step."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

from overlord.chunks.transforms.apply import InProcesses
from overlord.chunks.transforms.tokenize import Tokenize
from overlord.cli import FAILED, describe_error
from overlord.cli.files import load_job
from overlord.cli.options import add_job_argument
from overlord.cli.output import console, size, table, write_json
from overlord.errors import OverlordError
from overlord.roles.assembly import list_units, with_windows
from overlord.service.dry_run import read_steps
from overlord.service.run import start

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)


def execute(options: argparse.Namespace) -> int:
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
class FirstStep:
    """The first step of a job, and the time it took to plan and build it for every rank."""

    number: int
    samples: int
    tokens: int
    microbatches: int
    padding: float
    seconds: float


def check(path: Path, as_json: bool) -> int:
    job = load_job(path)
    units, errors = _list_sources(job)
    listed: dict[str, SourceListing] = {}
    for name, found in units.items():
        try:
            listed[name] = _listing(job, name, found)
        except OverlordError as error:  # an encoding that cannot be loaded
            errors.append(f"source {name!r}: {error}")
    first: FirstStep | None = None
    if not errors:
        try:
            first = _build_first_step(job)
        except OverlordError as error:
            errors.append(describe_error(error))
    warnings = _warnings(with_windows(job, units), units)
    if as_json:
        write_json(
            {
                "ok": not errors,
                "sources": {name: asdict(entry) for name, entry in listed.items()},
                "first_step": None if first is None else asdict(first),
                "warnings": warnings,
                "errors": errors,
            }
        )
    else:
        _print(job, path, listed, first, warnings=warnings, errors=errors)
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


def _listing(job: Job, name: str, units: Sequence[Unit]) -> SourceListing:
    rows = [unit.num_rows for unit in units]
    return SourceListing(
        reader=type(job.sources[name]).__name__,
        weight=job.mix.at(0).get(name, 0.0),
        files=len({unit.path for unit in units}),
        units=len(units),
        rows=None if None in rows else sum(row for row in rows if row is not None),
        num_bytes=sum(unit.num_bytes for unit in units),
        engines=tuple(fn.engine_used for fn in map(_inner, job.sources[name].transforms) if isinstance(fn, Tokenize)),
    )


def _inner(transform: object) -> object:
    return transform.fn if isinstance(transform, InProcesses) else transform


def _build_first_step(job: Job) -> FirstStep:
    """Draw, plan and build step 0 on every rank. This reads, transforms and decodes the rows that the step needs."""
    began = time.monotonic()
    with start(job) as loader:
        planned = loader.plan(0)
        taken = next(islice(read_steps(loader, num_steps=1), 1), None)
    if planned is None or taken is None:
        raise OverlordError("the run ends before its first step: the sources hold too little for one")
    return FirstStep(
        number=taken.number,
        samples=len(planned.plan.samples),
        tokens=taken.tokens,
        microbatches=int(planned.plan.counts.sum()),
        padding=1 - taken.tokens / taken.places if taken.places else 0.0,
        seconds=time.monotonic() - began,
    )


def _warnings(job: Job, units: Mapping[str, Sequence[Unit]]) -> list[str]:
    found = [
        f"source {name!r} has weight 0 at every step: it is never read"
        for name in job.sources
        if not any(weights.get(name) for _, weights in job.mix.schedule)
    ]
    found += [text for name in units if (text := _buffer_warning(name, job.sources[name], units[name]))]
    rows, dp = job.batch.num_rows, job.mesh.dp
    if rows is not None and rows % dp:
        found.append(
            f"a step has {rows} rows of {job.batch.sequence_length:,} tokens, which dp={dp} does not divide: some groups "
            f"get less; make batch.tokens a multiple of {dp * job.batch.sequence_length:,}"
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
    path: Path,
    listed: Mapping[str, SourceListing],
    first: FirstStep | None,
    *,
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
    for name, entry in listed.items():
        for engine in entry.engines:
            out.print(f"source {name!r}: tokenising engine: {engine}", soft_wrap=True, markup=False)
    if first is not None:
        out.print(
            f"step {first.number}: {first.samples:,} samples, {first.tokens:,} tokens, {first.padding:.1%} padding, "
            f"{first.microbatches:,} microbatches over {job.mesh.dp} groups; "
            f"built for {job.mesh.world_size:,} ranks in {first.seconds:.2f} s",
            soft_wrap=True,
        )
    for warning in warnings:
        out.print(f"warning: {warning}", soft_wrap=True, markup=False)
    if errors:
        problems = console(stderr=True)
        for error in errors:
            problems.print(f"error: {error}", soft_wrap=True, markup=False)
    else:
        out.print(f"{path} is sound" + (f", with {len(warnings)} warning(s)" if warnings else ""), markup=False)
