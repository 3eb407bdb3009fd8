"""How long strategies with more to decide than `long_short` take for the largest step, on one core.

python -m bench.planning_strategies [--json] [--repeats N]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.length_tables import BYTED
from bench.multimodal_balance import BACKBONE, ENCODER
from bench.planning import H200_COST
from bench.telling import parser_of
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import hdp, long_short, multimodal
from overlord.arrange.vision.images import PatchGrid
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.simulate.presets import LlavaLike
from overlord.stream.facts import Samples
from overlord.stream.packing import best_fit

NUM_SAMPLES, RANKS, LIMIT_MS = 65_536, 4_096, 500.0
GRID = PatchGrid(14, merge=2)


@dataclass(frozen=True, slots=True)
class Result:
    """CPU milliseconds from a step's samples to its plan, the median of the repeats."""

    strategy: str
    samples: int
    ranks: int
    microbatches: int
    total: float
    limit: float


def cases() -> list[tuple[str, DGraph, Callable[[DGraph], Plan]]]:
    pictures, text, small = _pictures(), _text(), _text(ranks=256, num_samples=4_096)
    pipeline, interleaved = Pipeline(stages=8), Pipeline(stages=8, virtual=2)
    return [
        ("multimodal", pictures, multimodal(BACKBONE, ENCODER, grid=GRID)),
        ("multimodal, exchange", pictures, multimodal(BACKBONE, ENCODER, grid=GRID, exchange="cp")),
        ("long_short, pp 8", text, long_short(H200_COST, pipeline=pipeline)),
        ("long_short, pp 8, unequal", text, long_short(H200_COST, equal_counts=False, pipeline=pipeline)),
        ("hdp, pp 8", text, hdp(H200_COST, capacity=32_768)),
        ("hdp, pp 8", small, hdp(H200_COST, capacity=32_768)),
        (
            "hdp, pp 8 interleaved",
            _text(ranks=256, num_samples=4_096),
            hdp(H200_COST, capacity=32_768, pipeline=interleaved),
        ),
    ]


def _pictures() -> DGraph:
    samples = LlavaLike(GRID).samples(NUM_SAMPLES, 8_192, seed=0)
    return DGraph(samples, Batch(samples=NUM_SAMPLES, sequence_length=8_192), ClientPlaceTree(Mesh(dp=RANKS)))


def _text(ranks: int = RANKS, num_samples: int = NUM_SAMPLES) -> DGraph:
    lengths = BYTED.first_documents(num_samples, 131_072, seed=0)
    batch = Batch(tokens=round(int(lengths.sum()) / 131_072) * 131_072, sequence_length=131_072)
    rows = best_fit(lengths, batch.num_rows or 1, batch.sequence_length)
    place = ClientPlaceTree(Mesh(dp=ranks // 8, pp=8))
    return DGraph(Samples.of_lengths(lengths[rows >= 0]), batch, place, rows[rows >= 0])


def measured(name: str, graph: DGraph, strategy: Callable[[DGraph], Plan], repeats: int) -> Result:
    times, plan = [], strategy(graph)
    for _ in range(repeats):
        begin = time.process_time()
        plan = strategy(graph)
        times.append((time.process_time() - begin) * 1e3)
    ranks, microbatches = graph.place.world_size, len(plan.offsets) - 1
    return Result(name, len(graph.samples), ranks, microbatches, round(statistics.median(times), 1), LIMIT_MS)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results = [measured(*case, args.repeats) for case in cases()]
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    for result in results:
        held = f"{result.samples:,} samples, {result.ranks:,} ranks, {result.microbatches:,} microbatches"
        print(f"{result.strategy:>26}: {held}: {result.total:.0f} ms of CPU (limit {result.limit:.0f})")


if __name__ == "__main__":
    main()
