"""`overlord explain`: show how one step was drawn and arranged, stage by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.arrange.balancing import max_over_mean
from overlord.arrange.explain import explain as explain_plan
from overlord.cli.options import add_job_argument, add_option
from overlord.cli.output import console, table, write_json
from overlord.cli.trace import add_where, document_table, documents_json, where_of
from overlord.jobfile.loading import JobFile, load_job
from overlord.lineage.obtaining import step_of

if TYPE_CHECKING:
    import argparse

    from overlord.arrange.plan import Plan
    from overlord.declare.job import Job
    from overlord.lineage.obtaining import KnownFrom
    from overlord.roles.plan_window import Planned
    from overlord.stream.facts import Floats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    add_option(parser, "--step", help="explain step N (default: the first)")
    add_where(parser)
    parser.add_argument(
        "--documents", action="store_true", help="list the step's documents: source, file, row, microbatch and ranks"
    )


def execute(options: argparse.Namespace) -> int:
    return explain(options.job, options.step, where_of(options), documents=options.documents, as_json=options.json)


def explain(path: JobFile, step: int | None, where: KnownFrom, *, documents: bool, as_json: bool) -> int:
    job = load_job(path)
    number = where.first_step() if step is None else step
    with step_of(job, number, where) as found:
        planned = found.planned(number)
        listed = found.documents(number) if documents else None
    drawn = _drawn_by_source(job, planned)
    if as_json:
        entries = {} if listed is None else {"documents": documents_json(listed)}
        write_json({"step": number, "sources": drawn, **_plan_summary(planned.plan), **entries})
        return 0
    out = console()
    rows = [
        (name, f"{d['asked']:.2%}", f"{d['share']:.2%}", f"{d['samples']:,}", f"{d['tokens']:,}", f"{d['longest']:,}")
        for name, d in drawn.items()
    ]
    out.print(f"Step {number:,}: samples drawn")
    unit = job.mix.unit
    columns = "source", f"{unit} asked", f"{unit} drawn", "samples", "tokens", "longest"
    out.print(table(*columns, rows=rows))
    out.print("How it was arranged")
    out.print(explain_plan(planned.plan), soft_wrap=True, markup=False)
    if all(stage.bucket_costs is None for stage in planned.plan.stages):
        out.print("\nNo costs: with a strategy that knows them (strategies.plain(cost=...)) this shows the slowest group.")
    if listed is not None:
        out.print("\nIts documents")
        out.print(document_table(listed))
    return 0


def _drawn_by_source(job: Job, planned: Planned) -> dict[str, dict[str, Any]]:
    samples = planned.plan.samples
    num_sources = len(samples.source_names)
    counts = np.bincount(samples.source, minlength=num_sources)
    tokens = np.bincount(samples.source, samples.tokens, num_sources).astype(np.int64)
    drawn = tokens if job.mix.unit == "tokens" else counts
    return {
        name: {
            "asked": float(planned.step.weights[i]),
            "share": float(drawn[i] / max(drawn.sum(), 1)),
            "samples": int(counts[i]),
            "tokens": int(tokens[i]),
            "longest": int(samples.tokens[samples.source == i].max(initial=0)),
        }
        for i, name in enumerate(samples.source_names)
    }


def _plan_summary(plan: Plan) -> dict[str, Any]:
    return {
        "samples": len(plan.samples),
        "tokens": int(plan.samples.tokens.sum()),
        "loss_tokens": plan.loss_tokens,
        "groups": plan.num_groups,
        "microbatches": plan.counts.tolist(),
        "stages": [
            {
                "name": stage.name,
                "detail": stage.detail,
                "slowest_group": _straggler(stage.bucket_costs),
                "slowest_microbatch": _straggler(stage.micro_costs),
            }
            for stage in plan.stages
        ],
    }


def _straggler(costs: Floats | None) -> float | None:
    return None if costs is None else max_over_mean(costs)
