"""How much faster hybrid data parallelism is than a static mesh, predicted at 1,024 to 16,384 ranks for contexts of 256k to
2M tokens, beside the ratios that ByteScale (arXiv 2502.21231) published.

python -m bench.simulated_scale [--json] [--quick] [--figure FILE]

Two models: `llama-8b-like`, whose block was measured on an H200 (8 key-value heads), and `llama-7b-like`, the shape that
ByteScale's figures are for (32 key-value heads, so rings send four times as much), with the same measured speeds. 8,192
tokens a rank; the static mesh's cp is as wide as the context needs; 32,768 tokens a rank and step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import Series, line_chart
from bench.telling import parser_of
from overlord.arrange.cost import TransformerCost
from overlord.arrange.strategies import Strategy, hdp
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.simulate.presets import TABLES, LengthTable
from overlord.simulate.simulation import (
    Scenario,
    Summary,
    drawer_of,
    hdp_strategy,
    static_mesh,
)
from overlord.simulate.step_time import Links, ModelShape, TimeModel

CAPACITY = 8192
TOKENS_A_RANK = 32_768
SOURCES = 64
HOST_BYTES_PER_S = 25e9  # between device and host, half of PCIe 5

SHAPES = {"llama-8b-like": ModelShape(), "llama-7b-like": ModelShape(kv_heads=32, ffn=11008, vocab=32_000)}
CONTEXTS = tuple(size << 10 for size in (256, 512, 1024, 2048))
RANKS = (1024, 4096, 16_384)

PUBLISHED = {
    ("llama-7b-like", "github", 256 << 10): 1.7,
    ("llama-7b-like", "github", 512 << 10): 2.5,
    ("llama-7b-like", "github", 1 << 20): 4.6,
    ("llama-7b-like", "github", 2 << 20): 7.89,
    ("llama-7b-like", "byted", 2 << 20): 3.89,
}
"""What was said of the 7B model; those of GitHub below 2M are read from a figure. The best of any model on Byted is 4.26."""


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    lengths: str
    context: int
    ranks: int
    cp: int
    static_s: float
    hdp_s: float
    longest_alone_s: float
    """What the longest document takes on as many ranks as are best for it, and nothing else: no step is shorter."""
    ratio: float
    slowest_over_mean: float
    bubbles: float
    sending_before: float
    sending_after: float
    plan_ms: float
    published: float | None


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of a table that changes one thing at a time, at 1,024 ranks and 2M tokens."""

    what: str
    model: str
    lengths: str
    static_s: float
    after_s: float
    ratio: float


def row(model_name: str, table: LengthTable, context: int, ranks: int, steps: int) -> Row:
    shape = SHAPES[model_name]
    model = TimeModel(cost=shape.on_h200(), shape=shape, links=Links(), gradient_bytes=2)
    summary, cp = _summary(shape, table, context, ranks, steps)
    return Row(
        model=model_name,
        lengths=table.name,
        context=context,
        ranks=ranks,
        cp=cp,
        static_s=round(summary.mean(lambda step: step.before.step_s), 2),
        hdp_s=round(summary.mean(lambda step: step.after.step_s), 2),
        longest_alone_s=round(summary.mean(lambda step: _alone_s(step.longest, ranks, model)), 2),
        ratio=round(summary.ratio, 2),
        slowest_over_mean=round(summary.mean(lambda step: step.after.straggler), 3),
        bubbles=round(summary.mean(lambda step: step.after.bubbles), 3),
        sending_before=round(summary.mean(lambda step: step.before.sending), 3),
        sending_after=round(summary.mean(lambda step: step.after.sending), 3),
        plan_ms=round(summary.mean(lambda step: step.plan_s) * 1e3),
        published=PUBLISHED.get((model_name, table.name, context)),
    )


def _summary(
    shape: ModelShape,
    table: LengthTable,
    context: int,
    ranks: int,
    steps: int,
    *,
    strategy: Callable[[Mesh, TimeModel], Strategy] | None = None,
    links: Links | None = None,
    tokens_a_rank: int = TOKENS_A_RANK,
) -> tuple[Summary, int]:
    mesh = static_mesh(ranks, context=context, capacity=CAPACITY)
    batch = Batch(tokens=ranks * tokens_a_rank, sequence_length=context)
    model = TimeModel(cost=shape.on_h200(), shape=shape, links=links or Links(), gradient_bytes=2)
    scenario = Scenario(batch=batch, mesh=mesh, strategy=(strategy or balanced)(mesh, model), model=model)
    drawer = drawer_of(table, batch, SOURCES, seed=0)
    drawn = (step for _ in range(steps) if (step := drawer.next_step()) is not None)
    return Summary(tuple(scenario.steps(drawn, steps, time.process_time))), mesh.cp


def _alone_s(length: int, num_ranks: int, model: TimeModel) -> float:
    """By the best number of ranks, from those that hold it to all of them."""
    ranks = np.arange(-(-length // CAPACITY), num_ranks + 1, dtype=np.float64)
    squares = np.full(len(ranks), float(length) ** 2)
    attention_s = np.maximum(model.attention_s(squares, 1, ranks), length * model.ring_token_s(ranks))
    return float((model.matmul_s(np.full(len(ranks), float(length)), ranks) + attention_s).min()) + model.sync_s(num_ranks)


def balanced(mesh: Mesh, model: TimeModel) -> Strategy:
    return hdp_strategy(mesh, model, CAPACITY)


def offloading(mesh: Mesh, model: TimeModel) -> Strategy:
    return hdp_strategy(mesh, model, CAPACITY, model.offload(HOST_BYTES_PER_S))


def even_tokens(_: Mesh, __: TimeModel) -> Strategy:
    """ByteScale's naive form: ranks get even tokens, not even time."""
    return hdp(TransformerCost(1.0, 0.0), capacity=CAPACITY, widen=False)


def even_tokens_offloading(_: Mesh, model: TimeModel) -> Strategy:
    return hdp(TransformerCost(1.0, 0.0), capacity=CAPACITY, widen=False, offload=model.offload(HOST_BYTES_PER_S))


def variants(steps: int) -> list[Variant]:
    """What each part of the gain, and of the model, comes to at 1,024 ranks and 2M tokens."""
    tries: list[tuple[str, dict[str, Any]]] = [
        ("documents over as few ranks as hold them, even tokens", {"strategy": even_tokens}),
        ("even tokens, and activations moved to the host at 25 GB/s", {"strategy": even_tokens_offloading}),
        ("and even time", {"strategy": balanced}),
        ("and activations moved to the host at 25 GB/s", {"strategy": offloading}),
        ("even time, network of 25 GB/s a rank", {"links": Links(network_bytes_per_s=25e9)}),
        ("even time, network of 100 GB/s", {"links": Links(network_bytes_per_s=100e9)}),
        ("even time, sending costs nothing", {"links": _free()}),
        ("even time, steps four times as large", {"tokens_a_rank": 4 * TOKENS_A_RANK}),
    ]
    found = []
    for name, shape in SHAPES.items():
        for table in TABLES:
            for what, changes in tries:
                summary, _ = _summary(shape, table, 2 << 20, 1024, steps, **changes)
                before_s, after_s = (round(sum(times) / steps, 1) for times in _step_times(summary))
                found.append(Variant(what, name, table.name, before_s, after_s, round(summary.ratio, 2)))
    return found


def _step_times(summary: Summary) -> tuple[list[float], list[float]]:
    return [step.before.step_s for step in summary.steps], [step.after.step_s for step in summary.steps]


def _free() -> Links:
    return Links(node_bytes_per_s=1e18, network_bytes_per_s=1e18, hop_s=0.0)


def padding_of_static_mesh(table: LengthTable, context: int) -> float:
    """What padding documents to multiples of 2 x cp, as ring kernels want them, would add to the static mesh's tokens: not
    part of any ratio here."""
    lengths = table.documents(64 << 20, context, 0).astype(np.float64)
    multiple = 2 * (context // CAPACITY)
    return float((np.ceil(lengths / multiple) * multiple).sum() / lengths.sum()) - 1.0


def _short(context: int) -> str:
    return f"{context >> 20}M" if context >= 1 << 20 else f"{context >> 10}k"


def drawn_figure(rows: list[Row]) -> str:
    """Ratio by context at 1,024 ranks, with the published ones."""
    panels = []
    for lengths in ("github", "byted"):
        lines = [
            Series(
                model,
                [(_short(r.context), r.ratio) for r in rows if (r.model, r.lengths, r.ranks) == (model, lengths, 1024)],
            )
            for model in SHAPES
        ]
        published = [(_short(c), ratio) for (_, name, c), ratio in PUBLISHED.items() if name == lengths]
        panels.append((f"{lengths} lengths", [*lines, Series("ByteScale, 7B, as published", published, dots=True)]))
    return line_chart("Step time of the static mesh over that of HDP, predicted at 1,024 ranks", panels)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="1,024 ranks alone")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the figure here, as SVG")
    args = parser.parse_args()
    rows = [
        row(name, table, context, ranks, steps=max(2, 8 * 1024 // ranks))
        for name in SHAPES
        for table in TABLES
        for context in CONTEXTS
        for ranks in (RANKS[:1] if args.quick else RANKS)
    ]
    parts = variants(steps=8)
    padded = {t.name: {c >> 10: round(padding_of_static_mesh(t, c), 3) for c in CONTEXTS} for t in TABLES}
    if args.figure is not None:
        args.figure.write_text(drawn_figure(rows), "utf-8")
    if args.json:
        found = {"rows": [asdict(r) for r in rows], "variants": [asdict(v) for v in parts], "padding": padded}
        print(json.dumps(found, indent=1))
        return
    _print_table(rows)
    print("\nOne thing at a time, 1,024 ranks, 2M tokens")
    _print_table(parts)
    print(f"\nPadding to multiples of 2 x cp would add, by context in k: {padded}")


def _print_table(rows: list[Row] | list[Variant]) -> None:
    lines = [[str(value) for value in asdict(each).values()] for each in rows]
    names = list(asdict(rows[0]))
    widths = [max(len(line[i]) for line in [names, *lines]) for i in range(len(names))]
    for line in [names, *lines]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
