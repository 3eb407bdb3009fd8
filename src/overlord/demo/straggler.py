"""How uneven the ranks are with long documents, dealt round-robin and balanced. Planning needs only facts: no batch is
built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.balancing import least_possible_cost, max_over_mean
from overlord.arrange.graph import DGraph
from overlord.arrange.strategies import long_short, plain
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.service.run import start

if TYPE_CHECKING:
    from overlord.arrange.cost import TransformerCost
    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.declare.job import Job
    from overlord.roles.plan_window import Planned
    from overlord.stream.facts import Floats

CONTEXT = 131_072
DP = 8
ROWS_PER_RANK = 4
NUM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Straggler:
    """The costliest rank over the mean rank, averaged over the same steps, arranged in two ways."""

    context: int
    dp: int
    tokens_per_step: int
    steps: int
    longest: int
    """Tokens of the longest document seen."""
    blindly: float
    """With rows dealt round-robin."""
    balanced: float
    """With `strategies.long_short`."""
    possible: float
    """A lower bound over all arrangements of whole documents."""
    speedup: float
    """The cost of the slowest rank dealt round-robin over its cost when balanced."""


def measure_straggler(job: Job, cost: TransformerCost) -> Straggler:
    """Plan some steps of long documents from the job's sources, and compare the two arrangements of each."""
    batch = Batch(tokens=CONTEXT * ROWS_PER_RANK * DP, sequence_length=CONTEXT)
    with start(replace(job, batch=batch, mesh=Mesh(dp=DP))) as loader:
        plans = [loader.plan(step) for step in range(NUM_STEPS)]
        planned = [plan for plan in plans if plan is not None]
        pairs = [_both_ways(step, batch, loader.tree, cost) for step in planned]
    blindly, balanced = ([pair[way] for pair in pairs] for way in (0, 1))
    of_samples = [cost(step.step.samples) for step in planned]
    return Straggler(
        context=CONTEXT,
        dp=DP,
        tokens_per_step=CONTEXT * ROWS_PER_RANK * DP,
        steps=len(planned),
        longest=max(int(step.step.samples.tokens.max()) for step in planned),
        blindly=float(np.mean([max_over_mean(costs) for costs in blindly])),
        balanced=float(np.mean([max_over_mean(costs) for costs in balanced])),
        possible=float(np.mean([least_possible_cost(costs, DP) / costs.sum() * DP for costs in of_samples])),
        speedup=sum(float(costs.max()) for costs in blindly) / sum(float(costs.max()) for costs in balanced),
    )


def _both_ways(planned: Planned, batch: Batch, tree: ClientPlaceTree, cost: TransformerCost) -> tuple[Floats, Floats]:
    """The cost of each rank in a step, dealt round-robin and balanced."""
    drawn = planned.step
    graph = DGraph(drawn.samples, batch, tree, drawn.rows, drawn.in_rows)
    blindly, balanced = plain()(graph), long_short(cost)(graph)
    return blindly.group_costs(cost(blindly.samples)), balanced.group_costs(cost(balanced.samples))
