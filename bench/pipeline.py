"""What knowing the pipeline brings: the step's time by the simulator over the time without any waiting, and the share of all
ranks' time that is spent waiting; the mean of several seeds.

python -m bench.pipeline [--json] [--seeds N]

Columns: `plain` deals rows as drawn; `equal` and `unequal` are `long_short` in equal and in unequal numbers of
microbatches; with `+ pp` it knows the pipeline: microbatches are ordered and, in unequal numbers, shared out by levels where
that is quicker. `virtual` > 1 is interleaved 1F1B.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from bench.balance import H200_COST
from bench.length_tables import TABLES, LengthTable
from bench.telling import parser_of
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.simulator import Pipeline, simulate
from overlord.arrange.strategies import long_short, plain
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.stream.facts import Samples
from overlord.stream.packing import best_fit, in_drawn_order

DP = 16
MICROBATCHES = 16


@dataclass(frozen=True, slots=True)
class Setting:
    table: LengthTable
    context: int
    stages: int
    virtual: int


SETTINGS = [
    Setting(table, context, stages, virtual)
    for table in TABLES
    for context in (32_768, 131_072)
    for stages, virtual in ((4, 1), (8, 1), (4, 2))
]


def times(setting: Setting, seed: int) -> dict[str, tuple[float, float]]:
    """(time over the time without waiting, share of waiting) of each way to share out the same step."""
    tokens = setting.context * DP * MICROBATCHES
    lengths = setting.table.documents(tokens, setting.context, seed)
    batch = Batch(tokens=tokens, sequence_length=setting.context)
    rows = in_drawn_order(best_fit(lengths, batch.num_rows or 1, batch.sequence_length))
    place = ClientPlaceTree(Mesh(dp=DP, pp=setting.stages))
    graph = DGraph(Samples.of_lengths(lengths[rows >= 0]), batch, place, rows[rows >= 0])
    pipeline = Pipeline(setting.stages, setting.virtual)
    costs = H200_COST(graph.samples)
    ways = {
        "plain": plain(),
        "equal": long_short(H200_COST),
        "equal + pp": long_short(H200_COST, pipeline=pipeline),
        "unequal": long_short(H200_COST, equal_counts=False),
        "unequal + pp": long_short(H200_COST, equal_counts=False, pipeline=pipeline),
    }
    found = {}
    for name, strategy in ways.items():
        plan = strategy(graph)
        assert np.array_equal(np.sort(plan.order), np.arange(len(costs)))
        timing = simulate(plan.micro_costs(costs), plan.counts, pipeline)
        found[name] = timing.step_time / (float(costs.sum()) / DP / setting.stages), timing.bubble
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    results = []
    for setting in SETTINGS:
        found = [times(setting, seed) for seed in range(args.seeds)]
        mean = {name: np.mean([each[name] for each in found], axis=0).round(3).tolist() for name in found[0]}
        at = {**asdict(setting), "table": setting.table.name}
        results.append({**at, **mean})
        if not args.json:
            shown = "  ".join(f"{name} {time:.2f} ({bubble:.0%})" for name, (time, bubble) in mean.items())
            print(f"{setting.table.name:>7} {setting.context:>7} pp {setting.stages} x {setting.virtual}: {shown}")
    if args.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
