"""What delaying outliers brings and what it costs: the time of a step (its slowest rank) over the mean of all ranks, summed
over steps, without and with the policy; and how late documents and tokens come.

python -m bench.outlier_delay [--json] [--steps N]

`plain` deals rows as drawn, `long_short` balances with microbatches of up to 1.5 times the mean. Both see the same draws.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np

from bench.balance import H200_COST
from bench.length_tables import TABLES, LengthTable
from bench.telling import parser_of
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.strategies import Strategy, long_short, plain
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.declare.policies import OutlierDelay
from overlord.simulate.simulation import drawer_of
from overlord.stream.outliers import Delay, count_delays

DP = 32


@dataclass(frozen=True, slots=True)
class Figures:
    lengths: str
    context: int
    delayed: bool
    plain: float
    long_short: float
    mean_steps: float
    """That a delayed document waited."""
    mean_steps_per_token: float


def figures(table: LengthTable, context: int, num_steps: int, policy: OutlierDelay | None) -> Figures:
    batch = Batch(tokens=DP * context, sequence_length=context, outliers=policy)
    drawer = drawer_of(table, batch, num_sources=1, seed=0)
    place, counts = ClientPlaceTree(Mesh(dp=DP)), {"source-0000": Counter()}
    slowest: dict[str, list[tuple[float, float]]] = {"plain": [], "long_short": []}
    ways: dict[str, Strategy] = {"plain": plain(), "long_short": long_short(H200_COST)}
    for _ in range(num_steps):
        step = drawer.next_step()
        assert step is not None
        count_delays(step.samples, counts)
        for name, strategy in ways.items():
            costs = strategy(DGraph(step.samples, batch, place, step.rows)).group_costs(H200_COST(step.samples))
            slowest[name].append((float(costs.max()), float(costs.mean())))
    over_mean = {name: np.sum(each, axis=0) for name, each in slowest.items()}
    delay = Delay.of(counts) or Delay()
    return Figures(
        lengths=table.name,
        context=context,
        delayed=policy is not None,
        **{name: round(float(most / mean), 3) for name, (most, mean) in over_mean.items()},
        mean_steps=round(delay.mean_steps, 2),
        mean_steps_per_token=round(delay.mean_steps_per_token, 2),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    results = []
    for table in TABLES:
        for context in (32_768, 131_072):
            lengths = (context // 2, context * 3 // 4)
            for policy in (None, OutlierDelay(lengths, together=DP, most_steps=16)):
                results.append(figures(table, context, args.steps, policy))
                if not args.json:
                    print(results[-1])
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
