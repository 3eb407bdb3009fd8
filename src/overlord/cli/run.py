"""`overlord run`: read a job without a trainer, measure its throughput, and save a state to resume from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from overlord.cli import INTERRUPTED
from overlord.cli.files import check_writable, read_state, write_state
from overlord.cli.live import LiveView, WaitNotes, mix_table
from overlord.cli.options import add_job_argument, add_option, at_least
from overlord.cli.output import console, short, size, write_json
from overlord.cli.run_view import summary_line
from overlord.jobfile.loading import JobFile, load_job
from overlord.runtime.memory import peak_rss_bytes
from overlord.service.dry_run import SourceShare, Throughput, read_steps, shares_of
from overlord.service.run import Loader, start
from overlord.status import CacheUse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    add_option(parser, "--steps", type=at_least(1), help="stop after N steps (default: at the end of the data)")
    add_option(parser, "--rank", help="read rank R only (default: every rank)")
    add_option(parser, "--state", help="write the state to FILE when the run stops, also after Ctrl-C")
    add_option(parser, "--resume", help="resume from the state in FILE")
    add_option(parser, "--profile")


def execute(options: argparse.Namespace) -> int:
    return run(
        options.job,
        num_steps=options.steps,
        rank=options.rank,
        state=options.state,
        resume=options.resume,
        profile=options.profile,
        as_json=options.json,
    )


def run(
    path: JobFile,
    *,
    num_steps: int | None,
    rank: int | None,
    state: Path | None,
    resume: Path | None,
    profile: Path | None,
    as_json: bool,
) -> int:
    job = load_job(path)
    if state is not None:
        check_writable(state)
    saved = None if resume is None else read_state(resume)
    meter = Throughput()
    with WaitNotes(console(stderr=True), f"starting: listing the files of {len(job.sources):,} sources"):
        loader = start(job, resume=saved, profile=profile)
    try:
        interrupted = not _read_steps(loader, meter, rank, num_steps, path.name)
        state_now = loader.state_dict()
        if state is not None:
            write_state(state, state_now)
        summary = _summary(loader, meter, state_now, interrupted)
    except (Exception, KeyboardInterrupt):
        # Keep the progress made before the error.
        if state is not None:
            write_state(state, loader.state_dict())
        raise
    finally:
        loader.close()
    if as_json:
        write_json(summary)
    else:
        _print(summary, meter, state)
    return INTERRUPTED if interrupted else 0


def _read_steps(loader: Loader, meter: Throughput, rank: int | None, num_steps: int | None, title: str) -> bool:
    """Read steps until the end; False if Ctrl-C interrupted it."""

    def shares() -> Mapping[str, SourceShare]:
        return shares_of(loader.report().mix, loader.job.mix.unit)

    try:
        with LiveView(console(stderr=True), title, num_steps, loader.job.mix.unit) as view:
            view.explain_wait(loader.status_lines)
            for taken in read_steps(loader, None if rank is None else [rank], num_steps):
                meter.add(taken)
                view.show(meter, shares)
    except KeyboardInterrupt:
        return False
    return True


def _summary(loader: Loader, meter: Throughput, state: Mapping[str, Any], interrupted: bool) -> dict[str, Any]:
    summary = {
        "steps": meter.num_steps,
        "next_step": state["step"],
        "interrupted": interrupted,
        "tokens": meter.tokens,
        "images": meter.images,
        "padding": meter.padding,
        "seconds": meter.seconds,
        "tokens_per_s": meter.tokens_per_s,
        "first_batch_s": meter.first_batch_s,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if interrupted:  # a role may be waiting for storage that hangs, so send no more requests
        return summary
    report = loader.report(state["step"])
    metrics = loader.metrics()
    has_cache = any(source.cache is not None for source in loader.job.sources.values())
    return summary | {
        "mix_unit": loader.job.mix.unit,
        "mix": {name: asdict(share) for name, share in shares_of(report.mix, loader.job.mix.unit).items()},
        "documents": report.documents,
        "bad_rows": report.bad_rows,
        "summary": summary_line(metrics),
        "caches": {kind: asdict(use) for kind, use in metrics.caches.items()} if has_cache else None,
        "buffers": {name: asdict(use) for name, use in report.buffers.items()},
    }


def _print(summary: Mapping[str, Any], meter: Throughput, state: Path | None) -> None:
    out = console()
    if "mix" in summary:
        out.print(mix_table({name: SourceShare(**share) for name, share in summary["mix"].items()}, summary["mix_unit"]))
    first = "" if meter.first_batch_s is None else f", first after {meter.first_batch_s:.2f} s"
    out.print(
        f"{meter.num_steps:,} steps in {meter.seconds:.1f} s{first}: {short(meter.tokens_per_s)} tokens/s, "
        f"{meter.padding:.2%} padding, peak memory {size(summary['peak_rss_bytes'])}"
    )
    if "summary" in summary:
        out.print(f"in all: {summary['summary']}", markup=False, soft_wrap=True)
    if summary.get("caches") is not None:
        out.print(_cache_line({kind: CacheUse(**use) for kind, use in summary["caches"].items()}))
    for name, counts in summary.get("documents", {}).items():
        if counts:
            out.print(f"documents of {name}: " + ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    for name, dropped in summary.get("bad_rows", {}).items():
        if dropped:
            out.print(f"bad rows of {name}: {dropped:,} dropped")
    stopped = "stopped" if summary["interrupted"] else "done"
    kept = "" if state is None else f"; state saved to {state}, resume with --resume {state}"
    out.print(f"{stopped} before step {summary['next_step']:,}{kept}")


def _cache_line(uses: Mapping[str, CacheUse]) -> str:
    """What the caches of a run saved it."""
    parts = [
        f"{use.hits:,} of {use.hits + use.misses:,} entries of {_ENTRIES[kind]} found ({size(use.read_bytes)}), "
        f"{size(use.written_bytes)} written"
        for kind, use in uses.items()
        if use != CacheUse()
    ]
    return f"cache: {'; '.join(parts) or 'nothing was looked up or written'}"


_ENTRIES = {"chunks": "transformed rows", "files": "files"}
