"""How even the encoder's work and the backbone's are at once, on a LLaVA-like mixture: the slowest rank over the mean, the
worst of several seeds. 1.0 is perfect; 1.05 for both is the target.

python -m bench.multimodal_balance [--json] [--seeds N]

Rows by how a step is shared out: `plain` deals samples in turn, `long_short` balances the backbone alone, `hybrid` moves
whole samples so that both are even (ranks encode the images of their own samples), `exchange` places samples by the backbone
and images by the encoder. `encoder a round` is the mean over microbatches of the slowest rank of each, which is what counts
where ranks exchange images for every microbatch; `stays` is the share of image tokens that need not be sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from bench.telling import parser_of
from overlord.arrange.balancing import bin_sums, max_over_mean
from overlord.arrange.cost import TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import long_short, multimodal, plain
from overlord.arrange.vision.encoding import Encoding
from overlord.arrange.vision.images import PatchGrid, VisionTransformerCost, images_of
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.simulate.presets import LlavaLike
from overlord.stream.facts import Floats

TARGET = 1.05
CONTEXT = 8192
# A Llama-8B-like backbone and an encoder of 0.6 billion weights.
BACKBONE = TransformerCost.of(hidden=4096, layers=32, kv_heads=8, ffn=14336, vocab=128_256)
ENCODER = VisionTransformerCost.of(hidden=1280, layers=32)
GRIDS = {"native": PatchGrid(14, merge=2), "336 x 336": PatchGrid(14, merge=1, size=(336, 336))}


@dataclass(frozen=True, slots=True)
class Setting:
    images: str
    dp: int
    samples: int


@dataclass(frozen=True, slots=True)
class Figures:
    encoder: float
    encoder_a_round: float
    backbone: float
    both: float
    stays: float


SETTINGS = [
    Setting(images, dp, samples * dp) for images in GRIDS for dp, samples in ((8, 64), (64, 32), (64, 128), (512, 64))
]


def strategies(grid: PatchGrid) -> dict[str, Callable[[DGraph], Plan]]:
    return {
        "plain": plain(),
        "long_short": long_short(BACKBONE),
        "hybrid": multimodal(BACKBONE, ENCODER, grid=grid),
        "exchange": multimodal(BACKBONE, ENCODER, grid=grid, exchange="cp"),
    }


def figures(setting: Setting, name: str, seed: int) -> Figures:
    grid = GRIDS[setting.images]
    samples = LlavaLike(grid).samples(setting.samples, CONTEXT, seed)
    batch = Batch(samples=setting.samples, sequence_length=CONTEXT, micro_tokens=2 * CONTEXT)
    plan = strategies(grid)[name](DGraph(samples, batch, ClientPlaceTree(Mesh(dp=setting.dp))))
    assert np.array_equal(np.sort(plan.order), np.arange(setting.samples))
    encoder, stays = _encoder_costs(plan, grid)
    backbone = plan.group_costs(BACKBONE(plan.samples))
    both = encoder.sum(axis=0) + backbone
    rounds = encoder.max(axis=1).sum() / encoder.mean(axis=1).sum()
    return Figures(max_over_mean(encoder.sum(axis=0)), float(rounds), max_over_mean(backbone), max_over_mean(both), stays)


def _encoder_costs(plan: Plan, grid: PatchGrid) -> tuple[Floats, float]:
    """The encoder's cost of each round on each rank, and the share of image tokens that stay."""
    dp, rounds = plan.num_groups, int(plan.counts.max())
    first = np.cumsum(plan.counts) - plan.counts
    encoding = plan.part(Encoding)
    if encoding is None:
        micro = np.empty(len(plan.samples), np.int64)
        micro[plan.order] = plan.micro_of_order()
        images, stays = images_of(plan.samples, grid), 1.0
        micro_of_image = micro[images.sample]
        rank = np.repeat(np.arange(dp), plan.counts)[micro_of_image]
    else:
        images, micro_of_image, rank = encoding.images, encoding.micro, encoding.place
        home = np.repeat(np.arange(dp), plan.counts)[micro_of_image]
        stays = float(images.tokens[home == rank].sum() / images.tokens.sum())
    number = micro_of_image - np.repeat(first, plan.counts)[micro_of_image]
    return bin_sums(number * dp + rank, ENCODER(images), rounds * dp).reshape(rounds, dp), stays


def worst(setting: Setting, name: str, seeds: int) -> Figures:
    found = [asdict(figures(setting, name, seed)) for seed in range(seeds)]
    values = {key: max(each[key] for each in found) for key in found[0]}
    values["stays"] = min(each["stays"] for each in found)
    return Figures(**{key: round(value, 4) for key, value in values.items()})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    results = []
    if not args.json:
        print(f"{'images':>10} {'dp':>4} {'samples':>8} {'strategy':>11}  encoder  a round  backbone     both    stays")
    for setting in SETTINGS:
        for name in strategies(GRIDS[setting.images]):
            found = worst(setting, name, args.seeds)
            results.append({**asdict(setting), "strategy": name, **asdict(found)})
            if not args.json:
                ok = name in ("plain", "long_short") or max(found.encoder, found.backbone) <= TARGET
                numbers = "  ".join(f"{value:7.4f}" for value in asdict(found).values())
                where = f"{setting.images:>10} {setting.dp:>4} {setting.samples:>8} {name:>11}"
                print(f"{where}  {numbers}{'' if ok else '  missed'}")
    if args.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
