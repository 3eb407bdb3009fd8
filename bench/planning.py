"""How long it takes to plan a step, stage by stage, on one core.

python -m bench.planning [--json] [--repeats N]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from bench.length_tables import BYTED, GITHUB, LengthTable
from bench.pools import CP, pooled
from bench.telling import parser_of
from overlord.arrange.cost import TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.strategies import plain
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.declare.mixture import Mixture
from overlord.stream.drawing import ComputedFacts, Extent
from overlord.stream.facts import Ints, Samples
from overlord.stream.membership import StepDrawer
from overlord.stream.packing import best_fit
from overlord.stream.progress import Progress

T = TypeVar("T")

NUM_SOURCES = 64

# Milliseconds on one H200 for two Llama-8B-like blocks, forward and backward, fitted to measured times.
H200_COST = TransformerCost(per_token=0.00460315203602369, per_length_squared=1.736619437507047e-07)


@dataclass(frozen=True, slots=True)
class Setting:
    table: LengthTable
    context: int
    num_samples: int
    ranks: int
    limit_ms: float


SETTINGS = [
    Setting(table, context, num_samples, ranks, limit_ms)
    for num_samples, ranks, limit_ms in ((8_192, 512, 30.0), (65_536, 4_096, 300.0))
    for table in (BYTED, GITHUB)
    for context in (8_192, 131_072)
] + [Setting(GITHUB, 8_192, 130, 4, 0.4)]


@dataclass(frozen=True, slots=True)
class Result:
    """CPU milliseconds of one core (others share the machine), the median of the repeats."""

    lengths: str
    context: int
    samples: int
    ranks: int
    microbatches: int
    membership: float
    cost: float
    distribute: float
    balance: float
    plan: float
    total: float
    plain: float
    drawing: float
    """Of so many samples from 64 sources, by the mixture: comes before all the others and is not in `total`."""
    limit: float


def measured(setting: Setting, repeats: int) -> Result:
    lengths, batch = _step(setting)
    place = ClientPlaceTree(Mesh(dp=setting.ranks))
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        begin = time.process_time()
        out = work()
        times.setdefault(name, []).append((time.process_time() - begin) * 1e3)
        return out

    plan = None
    for _ in range(repeats):
        rows = timed("membership", lambda: best_fit(lengths, batch.num_rows or 1, batch.sequence_length))
        placed = rows >= 0
        graph = DGraph(Samples.of_lengths(lengths[placed]), batch, place, rows[placed])
        timed("plain", lambda: plain()(graph))  # noqa: B023 - called at once
        graph = timed("cost", lambda: graph.cost(H200_COST))  # noqa: B023
        graph = timed("distribute", lambda: graph.distribute("dp"))  # noqa: B023
        graph = timed("balance", lambda: graph.balance())  # noqa: B023
        plan = timed("plan", lambda: graph.plan())  # noqa: B023
    assert plan is not None
    stages = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return Result(
        lengths=setting.table.name,
        context=setting.context,
        samples=len(lengths),
        ranks=setting.ranks,
        microbatches=len(plan.offsets) - 1,
        total=round(sum(ms for name, ms in stages.items() if name != "plain"), 3),
        drawing=drawing_ms(setting, repeats),
        limit=setting.limit_ms,
        **stages,
    )


def drawing_ms(setting: Setting, repeats: int) -> float:
    """The median of drawing a step, once what the sources hold is known: loaders describe their chunks ahead of time."""
    known = [setting.table.facts(4096, setting.context, (source,)) for source in range(NUM_SOURCES)]
    names = tuple(f"source-{source}" for source in range(NUM_SOURCES))
    mixture = Mixture({name: 1.0 + source % 7 for source, name in enumerate(names)})
    batch = Batch(samples=setting.num_samples, sequence_length=setting.context)
    extents = [Extent(1 << 30, None)] * NUM_SOURCES
    drawer = StepDrawer(Progress.start(names), batch, mixture, extents, ComputedFacts(lambda source, _: known[source]))
    drawer.next_step()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        drawer.next_step()
        times.append((time.process_time() - begin) * 1e3)
    return round(statistics.median(times), 3)


def _step(setting: Setting) -> tuple[Ints, Batch]:
    """The lengths of a step of so many documents, and the batch that holds about so many tokens."""
    lengths = setting.table.first_documents(setting.num_samples, setting.context, seed=0)
    num_rows = max(1, round(int(lengths.sum()) / setting.context))
    return lengths, Batch(tokens=num_rows * setting.context, sequence_length=setting.context)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    results = [measured(setting, args.repeats) for setting in SETTINGS]
    in_pools = [
        pooled(setting.table.name, *_step(setting), ranks=setting.ranks, pp=pp, cost=H200_COST, repeats=args.repeats)
        for pp in (1, 4)
        for setting in SETTINGS
        if setting.ranks % CP == 0
    ]
    if args.json:
        print(json.dumps([asdict(result) for result in (*results, *in_pools)], indent=1))
        return
    print("CPU milliseconds, median; total = membership + cost + distribute + balance + plan")
    _print_table([asdict(result) for result in results])
    print("\nhdp: CPU milliseconds, median, of all stages; slowest and static_mesh are the costliest rank over the mean")
    _print_table([asdict(result) for result in in_pools])


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>12,}" if not isinstance(value, str) else f"{value:>12}" for value in row.values()))


if __name__ == "__main__":
    main()
