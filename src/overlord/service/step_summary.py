"""The plan of a step in numbers, for callers in other processes: a whole plan has arrays for every sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from overlord.status import StepSummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.arrange.plan import Plan
    from overlord.stream.facts import Floats


_MOST_STAGES = 64


def summarise(step: int, plan: Plan) -> StepSummary:
    samples, num_micro = plan.samples, len(plan.offsets) - 1
    num_sources = len(samples.source_names)
    micro_tokens = np.bincount(plan.micro_of_order(), samples.tokens[plan.order], num_micro).astype(np.int64)
    of_source = np.bincount(samples.source, minlength=num_sources).tolist()
    tokens = np.bincount(samples.source, samples.tokens, num_sources).astype(np.int64).tolist()
    return StepSummary(
        step=step,
        axis=plan.axis,
        loss_tokens=float(plan.loss_tokens),
        samples=dict(zip(samples.source_names, of_source, strict=True)),
        tokens=dict(zip(samples.source_names, tokens, strict=True)),
        num_microbatches=plan.counts.tolist(),
        micro_samples=np.diff(plan.offsets).tolist(),
        micro_tokens=micro_tokens.tolist(),
        micro_costs=_last([stage.micro_costs for stage in plan.stages]),
        group_costs=_last([stage.bucket_costs for stage in plan.stages]),
        stages=[(stage.name, stage.detail) for stage in plan.stages[:_MOST_STAGES]],
    )


def _last(costs: Sequence[Floats | None]) -> list[float] | None:
    """The costs after the last primitive that knows them."""
    found = [each for each in costs if each is not None]
    return found[-1].tolist() if found else None
