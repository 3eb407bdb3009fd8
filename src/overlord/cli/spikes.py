"""`overlord spikes`: the documents of the steps where the loss jumped, most suspicious first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.options import JOB_HELP, add_option, add_overrides, at_least, job_file, positive
from overlord.cli.output import console, table, write_json
from overlord.cli.trace import add_where, documents_json, read_texts, where_of
from overlord.errors import SpecError
from overlord.jobfile.loading import load_job
from overlord.lineage.obtaining import first_steps
from overlord.lineage.spikes import find_spikes, rank_suspects, read_losses

if TYPE_CHECKING:
    import argparse

    from overlord.declare.job import Job
    from overlord.lineage.obtaining import FoundRun

_TEXT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("losses", type=Path, help="a CSV file with the columns step and loss")
    parser.add_argument("--job", type=job_file, required=True, metavar="FILE", help=JOB_HELP)
    add_overrides(parser)
    add_where(parser)
    parser.add_argument(
        "--threshold", type=positive, default=6.0, metavar="Z", help="standard deviations above the usual loss (default: 6)"
    )
    parser.add_argument("--top", type=at_least(1), default=20, metavar="N", help="list N documents (default: 20)")
    add_option(parser, "--text")


def execute(options: argparse.Namespace) -> int:
    losses, job, where = read_losses(options.losses), load_job(options.job), where_of(options)
    num_steps = max(max(losses) + 1 - where.first_step(), 1)
    with first_steps(job, num_steps, where) as found:
        return _rank(options, job, losses, found)


def _rank(options: argparse.Namespace, job: Job, losses: dict[int, float], found: FoundRun) -> int:
    run = found.run
    recorded = {step: loss for step, loss in losses.items() if run.find(step) is not None}
    if not recorded:
        raise SpecError(
            f"{options.losses} has losses of steps {min(losses):,} to {max(losses):,}, and "
            f"{run.place if found.is_log else 'the run'} has the steps from {run.first:,} to {run.end - 1:,}: "
            "they are not of one run"
        )
    spikes = find_spikes(losses, threshold=options.threshold)
    spikes = [spike for spike in spikes if spike.step in recorded]
    suspects = rank_suspects(spikes, sorted(recorded), found.documents)[: options.top] if spikes else []
    documents = [suspect.document for suspect in suspects]
    texts = read_texts(job, documents) if options.text else None
    if options.json:
        listed = documents_json(documents, texts)
        entries = [
            {**one, "spikes": suspect.steps, "quiet_steps": suspect.quiet, "score": suspect.score}
            for one, suspect in zip(listed, suspects, strict=True)
        ]
        write_json({"spikes": [asdict(spike) for spike in spikes], "suspects": entries})
        return 0
    out = console()
    if not spikes:
        out.print(f"No step of {len(recorded):,} is {options.threshold:g} standard deviations above the loss before it.")
        return 0
    rows = [(f"{s.step:,}", f"{s.loss:.4g}", f"{s.usual:.4g}", f"{s.score:.1f}") for s in spikes[: options.top]]
    out.print(table("step", "loss", "usual", "deviations", rows=rows, title=f"{len(spikes):,} steps where the loss jumped"))
    rows = [
        (
            s.document.source,
            s.document.location,
            f"{s.document.row:,}",
            ", ".join(f"{step:,}" for step in s.steps[:6]) + (", ..." if len(s.steps) > 6 else ""),
            f"{s.quiet:,}",
            f"{s.score:.1f}",
            *(() if texts is None else (" ".join(texts[i].split())[:_TEXT],)),
        )
        for i, s in enumerate(suspects)
    ]
    columns = "source", "<file", "row", "<in the jumps at", "quiet steps", "score", *(() if texts is None else ("<text",))
    out.print(table(*columns, rows=rows, title="Their documents, most suspicious first"))
    return 0
