"""`overlord partition`: profile the sources of a job and choose loaders, workers and shadows for each, with reasons."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from overlord.cli import FAILED, describe_error
from overlord.cli.options import add_job_argument, add_options, at_least, option, positive, to_dataclass
from overlord.cli.output import console, size, table, write_json
from overlord.cli.run_options import BUDGET
from overlord.fleet.profile import Effort, SourceProfiles
from overlord.fleet.sizing import Sizing, profile_job, sizing_of
from overlord.jobfile.loading import JobFile, load_job
from overlord.loaders.model import Budget, duration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from overlord.declare.job import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a few chunks of each source to measure their cost, and chooses loaders, the hosts they share and shadows, so "
        "that trainers do not wait. Nothing is changed: the output says which settings to start the job with."
    )
    add_job_argument(parser)
    add_options(parser, PartitionOptions)


def execute(options: argparse.Namespace) -> int:
    return partition(to_dataclass(options, PartitionOptions), options.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """The budget and the effort. None stands for this machine's resources, or for a value derived from the others."""

    job: JobFile
    cpus: float | None = option(
        "--cpus", "give loaders N processors (default: those of this machine)", type=BUDGET["cpus"].read, metavar="N"
    )
    memory: int | None = option(
        "--memory",
        "give loaders this memory, as 8GiB (default: half of this machine's)",
        type=BUDGET["memory"].read,
        metavar="SIZE",
    )
    hosts: int | None = option(
        "--hosts",
        "start at most N loader processes; 1 is the embedded engine",
        type=BUDGET["hosts"].read,
        metavar="N",
    )
    workers: int | None = option(
        "--workers", "let a host make N chunks in parallel (default: 4)", type=BUDGET["workers"].read, metavar="N"
    )
    host_bandwidth: int | None = option(
        "--host-bandwidth",
        "let a host send at most this much a second to data constructors, as 1GiB (default: any)",
        type=BUDGET["host-bandwidth"].read,
        metavar="SIZE",
    )
    steps_per_second: float = option(
        "--steps-per-second",
        "assume that trainers take R steps a second (default: %(default)s)",
        default=1.0,
        type=positive,
        metavar="R",
    )
    chunks: int = option(
        "--chunks", "make N chunks of each source (default: %(default)s)", default=3, type=at_least(1), metavar="N"
    )
    seconds: float = option(
        "--seconds",
        "spend at most S seconds on each source (default: %(default)s)",
        default=10.0,
        type=positive,
        metavar="S",
    )


def partition(options: PartitionOptions, as_json: bool) -> int:
    job = load_job(options.job)
    budget = _budget(options)

    def announce(name: str) -> None:
        if sys.stderr.isatty():
            console(stderr=True).print(f"profiling source {name!r} ...", markup=False)

    found = profile_job(job, Effort(num_chunks=options.chunks, seconds=options.seconds, is_alone=True), announce)
    if found.failed:
        return _print_errors(found, as_json)
    sizing = sizing_of(job, found.profiles, budget, 1 / options.steps_per_second)
    if as_json:
        write_json(_as_json(sizing, budget))
    else:
        _print(job, sizing, options)
    return 0


def _budget(options: PartitionOptions) -> Budget:
    cpus = (os.cpu_count() or 1) if options.cpus is None else options.cpus
    memory_bytes = _half_of_memory() if options.memory is None else options.memory
    if options.hosts == 1 and options.workers is None:
        return Budget.in_one_process(cpus=cpus, memory_bytes=memory_bytes)
    given = {} if options.workers is None else {"workers_per_host": options.workers}
    bandwidth = options.host_bandwidth
    return Budget(cpus=cpus, memory_bytes=memory_bytes, num_hosts=options.hosts, host_bytes_per_s=bandwidth, **given)


def _print_errors(found: SourceProfiles, as_json: bool) -> int:
    errors = {name: describe_error(error) for name, error in found.failed.items()}
    if as_json:
        profiles = {name: asdict(profile) for name, profile in found.profiles.items()}
        write_json({"ok": False, "errors": errors, "profiles": profiles})
    else:
        for name, error in errors.items():
            console(stderr=True).print(f"error: source {name!r}: {error}", soft_wrap=True, markup=False)
    return FAILED


def _as_json(sizing: Sizing, budget: Budget) -> dict[str, Any]:
    found = sizing.partitioning
    return {
        "ok": True,
        "sources": {
            name: {
                **asdict(given),
                "chunks_per_second": sizing.rates[name],
                "hosts": list(found.partition.hosts_of(name)),
                "shadow": _has_shadow(sizing, name),
                "profile": asdict(sizing.profiles[name]),
            }
            for name, given in found.sources.items()
        },
        "hosts": [[asdict(share) for share in host] for host in found.partition.hosts],
        "shadows": [] if sizing.shadowing is None else [asdict(shadow) for shadow in sizing.shadowing.hosts],
        "workers_per_host": found.num_workers,
        "cpus": found.cpus,
        "needed_bytes": found.needed_bytes,
        "memory_bytes": found.memory_bytes,
        "budget": asdict(budget),
        "reasons": list(found.reasons),
    }


def _has_shadow(sizing: Sizing, name: str) -> bool:
    return sizing.shadowing is not None and name in sizing.shadowing.sources


def _print(job: Job, sizing: Sizing, options: PartitionOptions) -> None:
    out = console()
    found = sizing.partitioning
    shares = _largest_shares(job)
    rows = [
        (
            name,
            f"{shares.get(name, 0.0):.2%}",
            duration(sizing.profiles[name].chunk_s),
            f"{sizing.rates[name]:.3g}",
            str(given.loaders),
            f"{given.workers:.2g}",
            f"{given.cpus:.2g}",
            size(given.needed_bytes),
            size(given.buffer_bytes),
            "yes" if _has_shadow(sizing, name) else "no",
        )
        for name, given in found.sources.items()
    ]
    columns = (
        "source",
        f"share of {job.mix.unit}",
        "a chunk",
        "chunks/s",
        "loaders",
        "workers",
        "CPUs",
        "memory",
        "buffer",
        "shadow",
    )
    out.print(f"{options.job.name} at {options.steps_per_second:g} steps a second", markup=False)
    out.print(table(*columns, rows=rows))
    lines = [f"{name}: {given.reason}" for name, given in found.sources.items()]
    lines += found.reasons
    if sizing.shadowing is None:
        lines.append("no shadows: all loaders are in one process, which is lost as a whole")
    else:
        lines += [
            f"host {shadow.host}: {'a shadow' if shadow.is_kept else 'no shadow'}: {shadow.reason}"
            for shadow in sizing.shadowing.hosts
        ]
    for line in lines:
        out.print(f"- {line}", soft_wrap=True, markup=False)


def _largest_shares(job: Job) -> Mapping[str, float]:
    """The largest share that the mixture's schedule gives each source."""
    shares = [job.mix.at(step) for step, _ in job.mix.schedule]
    return {name: max(share.get(name, 0.0) for share in shares) for name in job.sources}


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
