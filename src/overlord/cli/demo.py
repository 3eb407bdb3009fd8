"""`overlord demo`: run the demo with a live view, then print its measurements."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli import FAILED
from overlord.cli.live import LiveView, mix_table
from overlord.cli.options import add_option, at_least
from overlord.cli.output import console, short, size, table, write_json
from overlord.demo.run import DemoResult, run_demo

if TYPE_CHECKING:
    import argparse

    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--steps", type=at_least(2), default=240, help="run N steps (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="keep the corpus and its job file in this folder (default: delete them)")


def execute(options: argparse.Namespace) -> int:
    return demo(options.steps, options.dir, options.json)


def demo(num_steps: int, folder: Path | None, as_json: bool) -> int:
    out = console(stderr=as_json)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory(prefix="overlord-demo-") as at:
        if not as_json:
            out.print("Overlord: making a corpus out of this machine's Python, then reading it on several meshes.")
        result = run_demo(Path(at), num_steps, lambda title, steps: LiveView(out, title, steps, "tokens"))
    if as_json:
        write_json(asdict(result))
    else:
        _print(out, result, folder)
    return 0 if result.resume.exact else FAILED


def _print(out: Console, result: DemoResult, folder: Path | None) -> None:
    out.print(mix_table(result.mix, "tokens", title="The mix"))
    out.print(table("measured in this run", "", "<", rows=_rows(result)))
    out.print("What to try next")
    where = folder or Path("demo")
    if folder is None:
        out.print("  overlord demo --dir demo                 keep the corpus and its job file", markup=False)
    for command, text in (
        (f"overlord check {where}/job.py", "list the sources and build the first step"),
        (f"overlord explain {where}/job.py --step 3", "show how a step was drawn and arranged"),
        (f"overlord run {where}/job.py --steps 500", "measure throughput without a trainer"),
    ):
        out.print(f"  {command:<41}{text}", markup=False, soft_wrap=True)
    out.print("  then point its sources at your own files, and iterate over `ol.start(job).client(rank)` in your trainer")


def _rows(result: DemoResult) -> list[tuple[str, str, str]]:
    first, second = result.legs
    long, resume = result.straggler, result.resume
    return [
        *(
            (
                "tokens per second",
                f"{short(leg.tokens_per_s)}",
                f"{leg.steps:,} steps on {leg.mesh} ranks, {leg.images:,} images decoded, every token checked",
            )
            for leg in (first, second)
        ),
        ("first batch", f"{first.first_batch_s:.2f} s", f"and {second.first_batch_s:.2f} s after resuming"),
        (
            "padding",
            f"{first.padding:.2%}",
            f"of token places in microbatches of variable length; {result.uncut.padding:.2%} in rows of fixed length",
        ),
        (
            "stopped and resumed",
            "exact" if resume.exact else "DIFFERS",
            f"stopped before step {resume.stopped_before:,}, resumed elsewhere from {size(resume.state_bytes)} of JSON: "
            + (
                f"samples and tokens of {resume.steps_compared:,} steps equal those of a run never stopped"
                if resume.difference is None
                else resume.difference
            ),
        ),
        (
            "slowest rank, dealt blindly",
            f"{long.blindly:.2f}x",
            f"the mean, at {long.context:,} tokens of context on dp {long.dp}, by the cost of a Llama 3 8B",
        ),
        ("slowest rank, balanced", f"{long.balanced:.2f}x", f"the mean: the same steps end {long.speedup:.2f}x as fast"),
        ("peak memory", size(result.peak_rss_bytes), "of this process, with every role and every rank in it"),
        ("in all", f"{result.total_s:.1f} s", f"of which {result.corpus_s:.1f} s made the corpus"),
    ]
