"""`overlord plan`: the plan of one step of a served run, in numbers."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from overlord.cli.options import add_option
from overlord.cli.output import console, printable, short, table, write_json
from overlord.cli.served import add_service_arguments, open_control
from overlord.errors import SpecError
from overlord.status import to_plain

if TYPE_CHECKING:
    import argparse

    from overlord.status import StepSummary

_MOST_GROUPS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    add_option(parser, "--step", help="the step (default: the next one of the slowest rank)")


def execute(options: argparse.Namespace) -> int:
    with open_control(options) as control:
        step = control.report().step if options.step is None else options.step
        plan = control.plan(step)
    if plan is None:
        raise SpecError(f"the run ends before step {step:,}: there is no plan for it")
    if options.json:
        write_json(to_plain(plan))
        return 0
    _show(plan)
    return 0


def _show(plan: StepSummary) -> None:
    out = console()
    num_samples, num_tokens = sum(plan.samples.values()), sum(plan.tokens.values())
    out.print(
        f"Step {plan.step:,}: {num_samples:,} samples, {num_tokens:,} tokens, loss over {plan.loss_tokens:,.10g} tokens, "
        f"{len(plan.num_microbatches):,} groups along {plan.axis}"
    )
    rows = [
        (name, f"{count:,}", f"{plan.tokens[name]:,}", f"{plan.tokens[name] / max(num_tokens, 1):.2%}")
        for name, count in plan.samples.items()
        if count
    ]
    out.print(table("source", "samples", "tokens", "of tokens", rows=rows))
    ends = list(accumulate(plan.num_microbatches, initial=0))
    groups = [
        (
            f"{group:,}",
            f"{plan.num_microbatches[group]:,}",
            f"{sum(plan.micro_samples[first:end]):,}",
            f"{sum(plan.micro_tokens[first:end]):,}",
            "" if plan.group_costs is None else short(plan.group_costs[group]),
        )
        for group, (first, end) in enumerate(pairwise(ends))
    ]
    out.print(table("group", "microbatches", "samples", "tokens", "cost", rows=groups[:_MOST_GROUPS]))
    if len(groups) > _MOST_GROUPS:
        out.print(f"and {len(groups) - _MOST_GROUPS:,} more groups; --json has all of them")
    for name, detail in plan.stages:
        out.print(printable(f"{name}: {detail}"), markup=False)
