"""The `hdp` strategy on steps of some setting: how long it plans, and how even the ranks are. A part of `bench.planning`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from overlord.arrange.cost import TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import hdp
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.stream.facts import Ints, Samples
from overlord.stream.packing import best_fit

CP = 8


@dataclass(frozen=True, slots=True)
class Pooled:
    """CPU milliseconds of all stages, the median of the repeats; the slowest rank over the mean, in this plan (filling and
    draining its pipeline counted, where there are stages) and on a static mesh that deals rows blindly."""

    lengths: str
    context: int
    samples: int
    ranks: int
    pp: int
    capacity: int
    microbatches: int
    cut: int
    total: float
    slowest: float
    static_mesh: float


def pooled(name: str, lengths: Ints, batch: Batch, *, ranks: int, pp: int, cost: TransformerCost, repeats: int) -> Pooled:
    """A step over `ranks` pipelines of `pp` stages: dp x cp with cp = 8, each holding an eighth of the context."""
    rows = best_fit(lengths, batch.num_rows or 1, batch.sequence_length)
    samples, rows = Samples.of_lengths(lengths[rows >= 0]), rows[rows >= 0]
    place = ClientPlaceTree(Mesh(dp=ranks // CP, cp=CP, pp=pp))
    capacity = max(batch.sequence_length // CP, 8_192)
    strategy = hdp(cost, capacity=capacity)
    times: list[float] = []
    plan: Plan | None = None
    for _ in range(repeats):
        begin = time.process_time()
        plan = strategy(DGraph(samples, batch, place, rows))
        times.append((time.process_time() - begin) * 1e3)
    assert plan is not None
    rings = plan.part(Rings)
    assert rings is not None
    static = next(stage.bucket_costs for stage in plan.stages if stage.name == "distribute")
    assert static is not None
    return Pooled(
        lengths=name,
        context=batch.sequence_length,
        samples=len(samples),
        ranks=ranks,
        pp=pp,
        capacity=capacity,
        microbatches=len(plan.offsets) - 1,
        cut=len(rings.bounds) - 1,
        total=round(statistics.median(times), 3),
        slowest=round(_slowest(plan, pp), 4),
        static_mesh=round(float(static.max() / static.mean()), 4),
    )


def _slowest(plan: Plan, pp: int) -> float:
    rings = plan.part(Rings)
    assert rings is not None
    work, micro = plan.group_costs(rings.cost), plan.micro_costs(rings.cost)
    costliest = np.zeros(plan.num_groups)
    np.maximum.at(costliest, np.repeat(np.arange(plan.num_groups), plan.counts), micro)
    return float((work + (pp - 1) * costliest).max() / work.mean())
