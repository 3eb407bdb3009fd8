"""ByteScale's ablation, predicted: static rings, then dynamic ones, offloading and balance, on the same documents.

    python -m bench.gpu.ablation [--seeds 5]

A pool of 64 ranks that hold 16,384 tokens each, Byted's lengths up to 512k. Compute comes from the times that
`bench/gpu/h200.json` has of one block; a ring sends over a modelled network of 50 GB/s a rank (keys and values forward and
backward, their gradients in single precision) and hides that behind compute as far as it can. Steps are played with the
waits inside rings. Offloading needs a place on the host: with 128 GB a rank a document may take less than half as many ranks
as without; without a limit (`host memory without end`) a document of 512k may stay on two ranks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from bench.gpu.learning import play
from bench.gpu.settings import Setting
from bench.gpu.work import Fit, of_hdp_plan, of_plan
from bench.length_tables import BYTED
from bench.telling import parser_of
from overlord.arrange.cost import TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.offload import Offload
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import hdp, plain
from overlord.stream.facts import Floats, Samples

K = 1024
NETWORK = 50e9
CP, CAPACITY = 32, 16 * K
HEAD_BYTES = 2 * 2 * 128  # a key and a value of one head in bfloat16
TOKENS = TransformerCost(1.0, 0.0)


def step_ms(plan: Plan, fit: Fit, kv_heads: int) -> float:
    """The time of a step of one block."""
    rings = plan.part(Rings)
    sent = 4 * HEAD_BYTES * kv_heads / NETWORK * 1e3  # milliseconds for each token received
    if rings is None:  # every microbatch passes all of its tokens around the ring of its group
        rank = [
            [max(fit.predicted(work), sent * work.num_tokens * (CP - 1)) for work in works] for works in of_plan(plan, CP)
        ]
        return max(map(sum, rank))
    own = [[fit.predicted(work) for work in works] for works in of_hdp_plan(plan)]
    micro = 0
    for times in own:
        for i in range(len(times)):
            ring = int(rings.of_micro[micro])
            if ring >= 0:
                size = int(rings.bounds[ring + 1] - rings.bounds[ring])
                whole = int(rings.whole[plan.order[plan.offsets[micro]]])
                times[i] = max(times[i], sent * whole * (size - 1) / size)
            micro += 1
    return play(plan, own).step_ms


def ways(graph: DGraph, fit: Fit, kv_heads: int) -> dict[str, Plan]:
    sent = 4 * HEAD_BYTES * kv_heads / NETWORK * 1e3

    def hidden(samples: Samples) -> Floats:
        """The cost of a document beside its messages, which attention hides where it takes longer."""
        tokens = samples.tokens.astype(np.float64)
        ranks = np.maximum(1.0, np.ceil(tokens / CAPACITY))
        return np.maximum(fit.document_cost(samples) - sent * tokens * (ranks - 1), fit.per_token * tokens)

    third = TransformerCost(fit.per_token / 3e3, fit.per_area / 3e3)  # seconds of a forward pass

    def offload(host_bytes: float) -> Offload:
        return Offload(layers=32, time=third, bytes_per_token=167e3, bytes_per_s=54e9, host_bytes=host_bytes)

    blind = {"capacity": CAPACITY, "widen": False}
    return {
        "static rings": plain()(graph),
        "dynamic rings": hdp(TOKENS, **blind)(graph),
        "+ offloading, 128 GB of host memory": hdp(TOKENS, **blind, offload=offload(128e9))(graph),
        "+ offloading, host memory without end": hdp(TOKENS, **blind, offload=offload(math.inf))(graph),
        "balance without offloading": hdp(hidden, capacity=CAPACITY, communication=sent)(graph),
        "+ balance, 128 GB": hdp(hidden, capacity=CAPACITY, communication=sent, offload=offload(128e9))(graph),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    table = json.loads((Path(__file__).parent / "h200.json").read_text())["fit"]["document_cost"]
    fit = Fit.of(table["lengths"], table["costs"])
    setting = Setting(BYTED, 512 * K, dp=2, cp=CP, rows=8)
    found: dict[tuple[str, int], list[float]] = {}
    for seed in range(given.seeds):
        for kv_heads in (32, 8):
            plans = ways(setting.graph(seed), fit, kv_heads)
            times = {name: step_ms(plan, fit, kv_heads) for name, plan in plans.items()}
            for name, ms in times.items():
                found.setdefault((name, kv_heads), []).append(times["static rings"] / ms)
    rows = [
        {"arrangement": name, "kv_heads": heads, "over_static": float(np.mean(v)), "least": min(v), "most": max(v)}
        for (name, heads), v in found.items()
    ]
    for row in rows:
        print(
            json.dumps(row)
            if given.json
            else f"{row['arrangement']:>40} {row['kv_heads']:>3} {row['over_static']:.2f}"
            f" ({row['least']:.2f} to {row['most']:.2f})"
        )


if __name__ == "__main__":
    main()
