"""ByteScale's ablation, predicted: static rings, then dynamic ones, offloading and balance, on the same documents.

    python -m bench.gpu.ablation [--seeds 5]

A pool of 256 ranks that hold 8,192 tokens each, Byted's lengths up to 512k, 32,768 tokens a rank and step. Compute comes
from the times that `bench/gpu/h200.json` has of one block; a ring sends over a modelled network of 50 GB/s a rank (keys and
values forward and backward, their gradients in single precision) and hides that behind compute as far as it can. Steps are
played with the waits inside rings. Activations may take 128 GB of each rank's host memory.

Offloading lets a document give up ranks only as far as its attention would not hide its messages (`Offload.sent_token_s`).
`on as few ranks as hold it` is what happens without that limit. Balanced steps are planned with and without the cost of
messages, and the quicker plan counts, as `overlord simulate` does.
"""

from __future__ import annotations

import json
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
"""Bytes a second that a rank receives where the network is modelled: 400 Gb/s."""
SETTING = Setting(BYTED, 512 * K, dp=4, cp=64, rows=4)
HEAD_BYTES = 2 * 2 * 128  # a key and a value of one head in bfloat16
TOKENS = TransformerCost(1.0, 0.0)


def step_ms(plan: Plan, cp: int, fit: Fit, kv_heads: int) -> float:
    """The time of a step of one block. Where the plan has no rings, every document is cut over `cp` ranks."""
    rings = plan.part(Rings)
    sent = 4 * HEAD_BYTES * kv_heads / NETWORK * 1e3  # milliseconds for each token received
    if rings is None:  # every microbatch passes all of its tokens around the ring of its group
        rank = [
            [max(fit.predicted(work), sent * work.num_tokens * (cp - 1)) for work in works] for works in of_plan(plan, cp)
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
    """The arrangements that are compared."""
    cp = graph.place.mesh.cp
    capacity = graph.batch.sequence_length // cp
    sent = 4 * HEAD_BYTES * kv_heads / NETWORK * 1e3

    third = TransformerCost(fit.per_token / 3e3, fit.per_area / 3.5e3)  # seconds of a forward pass
    limited = {"layers": 32, "time": third, "bytes_per_token": 167e3, "bytes_per_s": 54e9, "host_bytes": 128e9}
    selective, fewest = Offload(**limited, sent_token_s=HEAD_BYTES * kv_heads / NETWORK), Offload(**limited)

    def balanced(offload: Offload | None) -> Plan:
        def hidden(samples: Samples) -> Floats:
            """The cost of a document beside its messages, which attention hides where it takes longer."""
            tokens = samples.tokens.astype(np.float64)
            ranks = np.ceil(tokens / capacity) if offload is None else offload.fewest_ranks(samples.tokens, capacity)
            return np.maximum(fit.document_cost(samples) - sent * tokens * (ranks - 1), fit.per_token * tokens)

        plans = [
            hdp(fit.document_cost, capacity=capacity, offload=offload)(graph),
            hdp(hidden, capacity=capacity, communication=sent, offload=offload)(graph),
        ]
        return min(plans, key=lambda plan: step_ms(plan, cp, fit, kv_heads))

    blind = {"capacity": capacity, "widen": False}
    return {
        "static rings": plain()(graph),
        "dynamic rings": hdp(TOKENS, **blind)(graph),
        "+ offloading": hdp(TOKENS, **blind, offload=selective)(graph),
        "+ offloading, on as few ranks as hold it": hdp(TOKENS, **blind, offload=fewest)(graph),
        "balance without offloading": balanced(None),
        "+ balance": balanced(selective),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    table = json.loads((Path(__file__).parent / "h200.json").read_text())["fit"]["document_cost"]
    fit = Fit.of(table["lengths"], table["costs"])
    found: dict[tuple[str, int], list[float]] = {}
    for seed in range(given.seeds):
        for kv_heads in (32, 8):
            plans = ways(SETTING.graph(seed), fit, kv_heads)
            times = {name: step_ms(plan, SETTING.cp, fit, kv_heads) for name, plan in plans.items()}
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
