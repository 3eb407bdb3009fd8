"""`explain`: describes how a strategy arranged a step, as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.balancing import max_over_mean
from overlord.stream.outliers import WAITED

if TYPE_CHECKING:
    from overlord.arrange.plan import Plan, PlanStage
    from overlord.stream.facts import Floats


def explain(plan: Plan) -> str:
    """Describe how a strategy came to a plan, as text for people.

    First one line per primitive that the strategy called, with the cost of the costliest group and microbatch over the mean
    after that call. Then the plan in numbers: samples, tokens, groups, microbatches, padding, and the speedup of the
    step over samples dealt round-robin.
    """
    lines = [
        "stage         slowest group  slowest microbatch   what was done",
        *(_stage_line(stage) for stage in plan.stages),
        "",
        *(f"{name:<14}{value}" for name, value in _facts(plan)),
    ]
    return "\n".join(lines)


def _stage_line(stage: PlanStage) -> str:
    groups, microbatches = _straggler(stage.bucket_costs), _straggler(stage.micro_costs)
    return f"{stage.name:<14}{groups:>13}  {microbatches:>18}   {stage.detail}"


def _straggler(costs: Floats | None) -> str:
    return "" if costs is None else f"{max_over_mean(costs):.3f}x mean"


def _loss(plan: Plan) -> str:
    count, weight = int(plan.samples.loss_tokens.sum()), plan.loss_tokens
    text = f"of which {count:,} with loss"
    return text if isinstance(weight, int) else f"{text}; their weights add up to {weight:,.3f}"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    num_micro = len(plan.offsets) - 1
    tokens = plan.samples.tokens
    per_micro = np.bincount(plan.micro_of_order(), tokens[plan.order], num_micro)
    total = int(tokens.sum())
    slots = int(plan.micro_places().sum())
    counts = _range(plan.counts)
    facts = [
        ("samples", f"{len(plan.samples):,}"),
        ("tokens", f"{total:,}, {_loss(plan)}"),
        (
            "groups",
            f"{plan.num_groups:,} along {plan.axis}" + (f", {plan.group_size} together" if plan.group_size > 1 else ""),
        ),
        ("microbatches", f"{num_micro:,}: {counts} a group, {_range(np.diff(plan.offsets))} samples each"),
        (
            "their tokens",
            f"min {per_micro.min():,.0f}, mean {per_micro.mean():,.0f}, max {per_micro.max():,.0f}",
        ),
        ("padding", f"{(slots - total) / slots if slots else 0.0:.1%} of {slots:,} tokens"),
        ("broadcast", ", ".join(sorted(plan.broadcast)) or "none: every rank fetches its own"),
    ]
    waited = plan.samples.sizes.get(WAITED)
    if waited is not None:
        late = waited[waited > 0]
        delays = f"{len(late):,} documents, by {late.mean():.1f} steps on average" if len(late) else "no document"
        facts.append(("delayed", f"{delays}; {np.average(waited, weights=tokens) if total else 0.0:.2f} steps per token"))
    seen = [stage.bucket_costs for stage in plan.stages if stage.bucket_costs is not None]
    if seen:
        before, after = seen[0], seen[-1]
        facts.append(("slowest group", f"{_cost_line(before)} dealt blindly, {_cost_line(after)} now"))
        if after.max() > 0:
            facts.append(("the step is", f"{before.max() / after.max():.2f}x as fast, by cost of its slowest group"))
    return facts


def _cost_line(costs: Floats) -> str:
    return f"{costs.max():.6g} ({max_over_mean(costs):.3f}x mean)"


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
