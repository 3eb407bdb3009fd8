"""How even the groups of a step are, over two length tables: the costliest group's cost over the lower bound
max(mean, costliest document), the worst of several seeds. 1.0 is perfect; 1.02 is the target.

python -m bench.balance [--json] [--seeds N]

Columns: `equal` and `unequal` are `long_short` with microbatches of up to 1.5 x the mean tokens, in equal and
in unequal numbers; `tokens` is the same greedy balance when every group must hold the same number of tokens;
`plain` is the `plain` strategy, which deals rows in the order their first documents were drawn, as loaders do
that pack as they go. `possible` is what no arrangement of whole documents can be below: above 1,
some group must hold two documents that cost more than the mean together.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from bench.length_tables import TABLES, LengthTable
from bench.planning import H200_COST
from bench.telling import parser_of
from overlord.arrange.balancing import greedy, least_possible_cost
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import long_short, plain
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.stream.facts import Floats, Ints, Samples
from overlord.stream.packing import best_fit, in_drawn_order

TARGET = 1.02
LEAST_TOKENS = 4 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    table: LengthTable
    context: int
    dp: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    equal: float
    unequal: float
    tokens: float
    plain: float
    possible: float


def settings() -> list[Setting]:
    """Each with the least tokens that give every group a microbatch of a full context, and with 2 and 4 times
    that."""
    return [
        Setting(table, context, dp, factor * max(LEAST_TOKENS, dp * context))
        for table in TABLES
        for context in (8_192, 131_072)
        for dp in (8, 64, 512)
        for factor in (1, 2, 4)
    ]


def figures(setting: Setting, seed: int) -> Figures:
    graph = _graph(setting, seed)
    costs, lengths = H200_COST(graph.samples), graph.samples.tokens
    bound = max(float(costs.sum()) / setting.dp, float(costs.max()))
    cap = setting.context * 3 // 2

    def over_bound(group: Ints) -> float:
        return float(np.bincount(group, costs, setting.dp).max()) / bound

    return Figures(
        equal=_balanced(long_short(H200_COST, max_tokens=cap)(graph), costs, cap) / bound,
        unequal=_balanced(long_short(H200_COST, max_tokens=cap, equal_counts=False)(graph), costs, cap) / bound,
        tokens=over_bound(greedy(costs, setting.dp, lengths, setting.tokens // setting.dp)),
        plain=float(plain()(graph).group_costs(costs).max()) / bound,
        possible=least_possible_cost(costs, setting.dp) / bound,
    )


def _graph(setting: Setting, seed: int) -> DGraph:
    lengths = setting.table.documents(setting.tokens, setting.context, seed)
    batch = Batch(tokens=setting.tokens, sequence_length=setting.context)
    rows = in_drawn_order(best_fit(lengths, batch.num_rows or 1, batch.sequence_length))
    placed = rows >= 0
    place = ClientPlaceTree(Mesh(dp=setting.dp))
    return DGraph(Samples.of_lengths(lengths[placed]), batch, place, rows[placed])


def _balanced(plan: Plan, costs: Floats, cap: int) -> float:
    """The cost of the costliest group, once the plan is seen to hold every sample once and to keep to its
    cap."""
    assert np.array_equal(np.sort(plan.order), np.arange(len(costs)))
    assert plan.micro_costs(plan.samples.tokens.astype(np.float64)).max() <= cap
    return float(plan.group_costs(costs).max())


def worst(setting: Setting, seeds: int) -> Figures:
    found = [asdict(figures(setting, seed)) for seed in range(seeds)]
    return Figures(**{name: round(max(each[name] for each in found), 4) for name in found[0]})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    results = []
    if not args.json:
        print(f"{'lengths':>8} {'context':>8} {'dp':>4} {'Mtokens':>8}   equal  unequal   tokens    plain  possible")
    for setting in settings():
        found = worst(setting, args.seeds)
        at = {"lengths": setting.table.name, "context": setting.context, "dp": setting.dp}
        results.append({**at, "step_tokens": setting.tokens, **asdict(found)})
        if not args.json:
            ok = max(found.equal, found.unequal) <= max(TARGET, found.possible * 1.001)
            numbers = "  ".join(f"{value:7.4f}" for value in asdict(found).values())
            where = f"{setting.table.name:>8} {setting.context:>8} {setting.dp:>4} {setting.tokens >> 20:>8}"
            print(f"{where} {numbers}{'' if ok else '  missed'}")
    if args.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
