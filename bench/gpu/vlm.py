"""An encoder and a backbone: the same image-text samples dealt blindly, and with both models' work evened out.

A step of 64 data-parallel ranks with four packed microbatches each, images at native resolution. Blocks of both models
run for real; a rank's time is the encoder's blocks and the backbone's. Where images are exchanged, every round of
microbatches waits for the slowest encoder before the backbone begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.gpu.blocks import LLAMA_8B, VIT_2B, Bench
from bench.gpu.work import Fit, Ranks, Work, of_plan
from overlord.arrange.graph import CostFunction, DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import multimodal, plain
from overlord.arrange.vision.encoding import Encoding
from overlord.arrange.vision.images import ImageCost, images_of
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.simulate.presets import LlavaLike
from overlord.stream.facts import Floats
from overlord.stream.packing import best_fit, in_drawn_order

ENCODER_BLOCKS, BACKBONE_BLOCKS = 40, 32
CONTEXT, DP, ROWS = 8192, 64, 4
PATCHES = (64, 256, 576, 1024, 2048, 3072, 5120)
MIX = LlavaLike()


@dataclass(frozen=True, slots=True)
class VlmOutcome:
    arrangement: str
    step_ms: float
    encoder_straggler: float
    backbone_straggler: float
    share_of_encoder: float
    over_blind: float


def graph(dp: int, seed: int) -> DGraph:
    tokens = dp * ROWS * CONTEXT
    samples = MIX.samples(tokens // 200, CONTEXT, seed)
    within = np.cumsum(samples.tokens) <= tokens
    samples = samples.take(np.flatnonzero(within))
    rows = in_drawn_order(best_fit(samples.tokens, dp * ROWS, CONTEXT))
    kept = np.flatnonzero(rows >= 0)
    batch = Batch(tokens=tokens, sequence_length=CONTEXT)
    return DGraph(samples.take(kept), batch, ClientPlaceTree(Mesh(dp=dp)), rows[kept])


def _work_of_images(patches: np.ndarray) -> list[Work]:
    return [Work.of_documents(patches)] if len(patches) else []


def local_encoder(plan: Plan) -> Ranks:
    """Each rank encodes the images of its own microbatches, one after the other."""
    images = images_of(plan.samples, MIX.grid)
    micro_of = np.empty(len(plan.samples), np.int64)
    micro_of[plan.order] = plan.micro_of_order()
    of_micro = micro_of[images.sample]
    first = np.cumsum(plan.counts) - plan.counts
    return [
        [w for m in range(begin, begin + count) for w in _work_of_images(images.patches[of_micro == m])]
        for begin, count in zip(first.tolist(), plan.counts.tolist(), strict=True)
    ]


def exchanged_encoder(plan: Plan) -> list[list[list[Work]]]:
    """Round by round, what each place encodes."""
    encoding = plan.part(Encoding)
    assert encoding is not None
    num_rounds = (len(encoding.bounds) - 1) // encoding.num_places
    pieces = [
        _work_of_images(encoding.images.patches[encoding.by_place[begin:end]])
        for begin, end in zip(encoding.bounds[:-1].tolist(), encoding.bounds[1:].tolist(), strict=True)
    ]
    return [pieces[k * encoding.num_places : (k + 1) * encoding.num_places] for k in range(num_rounds)]


def costs(backbone: Fit, encoder: Fit) -> tuple[CostFunction, ImageCost]:
    """Milliseconds of all blocks: of each sample in the backbone, of each image in the encoder."""
    return (
        lambda samples: BACKBONE_BLOCKS * backbone.document_cost(samples),
        lambda images: ENCODER_BLOCKS * encoder.document_cost.of(images.patches),
    )


def outcomes(device: str, backbone_fit: Fit, encoder_fit: Fit, seed: int, dp: int = DP) -> list[VlmOutcome]:
    backbone, encoder = Bench(LLAMA_8B, device), Bench(VIT_2B, device)
    step = graph(dp, seed)
    tokens_cost, image_cost = costs(backbone_fit, encoder_fit)
    blind = plain()(step)
    local = multimodal(tokens_cost, image_cost, grid=MIX.grid)(step)
    moved = multimodal(tokens_cost, image_cost, grid=MIX.grid, exchange="cp")(step)
    found: list[VlmOutcome] = []
    for name, plan in (("blind", blind), ("both evened, images stay", local)):
        enc, bb = _times(encoder, local_encoder(plan)) * ENCODER_BLOCKS, _times(backbone, of_plan(plan)) * BACKBONE_BLOCKS
        found.append(_outcome(name, float((enc + bb).max()), enc, bb, found))
    bb = _times(backbone, of_plan(moved)) * BACKBONE_BLOCKS
    rounds = [_times(encoder, places) * ENCODER_BLOCKS for places in exchanged_encoder(moved)]
    waiting = sum(float(places.max()) for places in rounds)
    found.append(_outcome("both evened, images move", waiting + float(bb.max()), np.sum(rounds, axis=0), bb, found))
    return found


def _times(bench: Bench, ranks: Ranks) -> Floats:
    longest = max((w for works in ranks for w in works), key=lambda w: w.num_tokens)
    bench.timed([longest, longest])
    return np.array([sum(bench.timed(works)) for works in ranks])


def _outcome(name: str, step_ms: float, encoder: Floats, backbone: Floats, before: list[VlmOutcome]) -> VlmOutcome:
    return VlmOutcome(
        arrangement=name,
        step_ms=step_ms,
        encoder_straggler=float(encoder.max() / encoder.mean()),
        backbone_straggler=float(backbone.max() / backbone.mean()),
        share_of_encoder=float(encoder.sum() / (encoder.sum() + backbone.sum())),
        over_blind=before[0].step_ms / step_ms if before else 1.0,
    )
