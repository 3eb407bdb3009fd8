"""Costs that are learned from the times of real kernels: from a cost that is ten times wrong, on ranks of which one is slow.

    python -m bench.gpu.learning [--device cpu|model] [--plans hdp,...] [--steps 50] [--out FILE]

Every virtual rank's microbatches run forward and backward on one GPU, one rank after the other. The times of one rank count
1.2 times as long. Ranks report their microbatches as trainers do, the wait inside rings included, and the planner's
`Learning` fits costs and speeds to them every five steps. Plans are made four steps ahead, so a fit arranges steps from the
fourth after it on. The step is then played: a ring begins when the last of its ranks is free and takes as long as on the
slowest.

`straggler` is the time of the step over the mean rank's work. `--device model` takes the times from a table with 1 % of
noise instead, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.gpu import vlm
from bench.gpu.blocks import LLAMA_8B, TINY, VIT_2B, Bench
from bench.gpu.settings import Setting
from bench.gpu.work import LENGTHS, Fit, Ranks, Work, of_hdp_plan, of_plan
from bench.length_tables import GITHUB
from overlord.arrange.cost import MeasuredCost, TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.learned_cost import CostsInForce, LearnedCost
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import Strategy, hdp, long_short, multimodal
from overlord.arrange.vision.images import VisionTransformerCost
from overlord.messages import StepReport
from overlord.steering.learning import Learning

K = 1024
SLOW_RANK, SLOW = 3, 1.2
EVERY, AHEAD = 5, 4
TEN_TIMES = TransformerCost.of(hidden=4096, layers=1, heads=32, kv_heads=8, ffn=14336, attention_slowdown=17.0)
"""Attention counts ten times as much as it does, relative to matrix products."""
ENCODER = VisionTransformerCost.of(hidden=2048, layers=vlm.ENCODER_BLOCKS)
WRONG_ENCODER = VisionTransformerCost(ENCODER.per_patch / 10, ENCODER.per_patches_squared)
"""Matrix products of the encoder count a tenth of what they do."""


class Clock(Protocol):
    """Milliseconds of microbatches of one model."""

    def times(self, works: list[Work]) -> list[float]: ...


@dataclass
class KernelClock:
    bench: Bench
    blocks: int = 1
    runs: int = 3

    def times(self, works: list[Work]) -> list[float]:
        if not works:
            return []
        if self.bench.device != "cuda":
            return [ms * self.blocks for ms in self.bench.timed(works)]
        return [sum(passes) * self.blocks for passes in self.bench.settled(works, self.runs)]


@dataclass
class ModelClock:
    """A table of times, each off by 1 %."""

    fit: Fit
    blocks: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def times(self, works: list[Work]) -> list[float]:
        return [self.fit.predicted(work) * self.blocks * float(np.exp(0.01 * self.rng.normal())) for work in works]


Times = list[list[float]]
"""The microbatches of each rank."""


@dataclass(frozen=True)
class Played:
    """A step as its ranks saw it."""

    step_ms: float
    mean_ms: float
    reported: Times

    @property
    def straggler(self) -> float:
        return self.step_ms / self.mean_ms


def play(plan: Plan, own: Times) -> Played:
    """The microbatches of every rank in order. A rank waits for the others of a ring before and, at the pace of the slowest,
    inside it; the time that it reports has both."""
    rings = plan.part(Rings)
    of_micro = [-1] * sum(map(len, own)) if rings is None else rings.of_micro.tolist()
    first = np.cumsum([0, *map(len, own)]).tolist()
    free, at = [0.0] * len(own), [0] * len(own)
    reported: Times = [[] for _ in own]

    def ring_at(rank: int) -> int:
        return of_micro[first[rank] + at[rank]] if at[rank] < len(own[rank]) else -2

    while any(at[rank] < len(own[rank]) for rank in range(len(own))):
        for rank in range(len(own)):
            while ring_at(rank) == -1:
                reported[rank].append(own[rank][at[rank]])
                free[rank] += own[rank][at[rank]]
                at[rank] += 1
        waiting = [ring_at(rank) for rank in range(len(own)) if ring_at(rank) >= 0]
        if not waiting:
            continue
        assert rings is not None
        ring = min(waiting)  # the one with the lowest number can always run
        ranks = rings.members[rings.bounds[ring] : rings.bounds[ring + 1]].tolist()
        end = max(free[rank] for rank in ranks) + max(own[rank][at[rank]] for rank in ranks)
        for rank in ranks:
            reported[rank].append(end - free[rank])
            free[rank] = end
            at[rank] += 1
    return Played(max(free), float(np.mean([sum(times) for times in own])), reported)


@dataclass(frozen=True)
class Case:
    """A kind of plan: its steps, its strategy, and the times of a plan's microbatches."""

    graph: Callable[[int], DGraph]
    strategy: Strategy
    times: Callable[[Plan], Times]


def slowed(times: Times) -> Times:
    return [[ms * (SLOW if rank == SLOW_RANK else 1.0) for ms in of_rank] for rank, of_rank in enumerate(times)]


def learned_straggler(case: Case, steps: int) -> list[dict[str, Any]]:
    """The straggler of each step, from the first, while costs are learned."""
    learning: Learning | None = None
    known: dict[int, CostsInForce | None] = {0: None}
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        graph = case.graph(step)
        learning = Learning(graph.place, is_safe=True) if learning is None else learning
        in_force = known[max(number for number in known if number <= step)]
        plan = case.strategy(DGraph(graph.samples, graph.batch, graph.place, graph.reference_rows, in_force=in_force))
        learning.note_plan(step, plan)
        played = play(plan, slowed(case.times(plan)))
        for rank, seconds in enumerate(played.reported):
            refused = learning.report(StepReport.of(step, rank, None, None, [ms / 1e3 for ms in seconds]))
            assert not refused, refused
        rows.append({"step": step, "straggler": played.straggler, "step_ms": played.step_ms})
        if learning.is_due(step + 1):
            latest = known[max(known)]
            found = learning.fit_costs(step + 1, latest)
            if found is not None:
                known[step + AHEAD] = learning.in_force(found)
                rows[-1] |= {"slow": found["slow"], "fit_error": found["error"]}
        print(json.dumps(rows[-1]), flush=True)
    return rows


def cases(backbone: Clock, encoder: Clock, small: bool) -> dict[str, Case]:
    context = 4 * K if small else 64 * K
    setting = Setting(GITHUB, context, dp=2, cp=4, rows=2)
    lengths = LENGTHS[:6] if small else LENGTHS[1:10]
    cost = LearnedCost(MeasuredCost.like(TEN_TIMES, lengths), every=EVERY)
    of_images = LearnedCost(MeasuredCost.like(TEN_TIMES, lengths[:5]), every=EVERY)
    whole = Setting(GITHUB, context // 4, dp=8, rows=2)

    def both(plan: Plan, encoded: Ranks) -> Times:
        """Of each microbatch, the encoder's time and the backbone's."""
        return [
            [a + b for a, b in zip(padded(encoder, enc), backbone.times(works), strict=True)]
            for enc, works in zip(encoded, of_plan(plan), strict=True)
        ]

    def exchanged(plan: Plan) -> Times:
        rounds = vlm.exchanged_encoder(plan)
        return both(plan, [[_one(places[rank]) for places in rounds] for rank in range(len(rounds[0]))])

    images = lambda step: vlm.graph(8, step)  # noqa: E731
    grid = vlm.MIX.grid
    return {
        "hdp": Case(setting.graph, hdp(cost, capacity=context // 4), lambda plan: _timed(backbone, of_hdp_plan(plan))),
        "long_short": Case(whole.graph, long_short(cost), lambda plan: _timed(backbone, of_plan(plan))),
        "images stay": Case(
            images,
            multimodal(of_images, WRONG_ENCODER, grid=grid),
            lambda plan: both(plan, [[_one(w) for w in ws] for ws in local_rounds(plan)]),
        ),
        "images move": Case(images, multimodal(of_images, WRONG_ENCODER, grid=grid, exchange="cp"), exchanged),
    }


def local_rounds(plan: Plan) -> list[list[list[Work]]]:
    """For each rank and microbatch, the images of the microbatch."""
    images = vlm.images_of(plan.samples, vlm.MIX.grid)
    micro_of = np.empty(len(plan.samples), np.int64)
    micro_of[plan.order] = plan.micro_of_order()
    of_micro = micro_of[images.sample]
    first = np.cumsum(plan.counts) - plan.counts
    return [
        [[Work.of_documents(images.patches[of_micro == m])] for m in range(begin, begin + count)]
        for begin, count in zip(first.tolist(), plan.counts.tolist(), strict=True)
    ]


def _one(works: list[Work]) -> Work:
    return works[0] if works else Work.of_documents(np.zeros(0, np.int64))


def padded(clock: Clock, works: list[Work]) -> list[float]:
    """Times, 0 for microbatches without images."""
    times = iter(clock.times([work for work in works if work.num_tokens]))
    return [next(times) if work.num_tokens else 0.0 for work in works]


def _timed(clock: Clock, ranks: Ranks) -> Times:
    return [clock.times(works) for works in ranks]


def clocks(device: str) -> tuple[Clock, Clock]:
    if device == "model":
        run = json.loads((Path(__file__).parent / "h200.json").read_text())
        fits = []
        for name in ("fit", "encoder_fit"):
            table = run[name]["document_cost"]
            fits.append(Fit.of(table["lengths"], table["costs"]))
        return ModelClock(fits[0], vlm.BACKBONE_BLOCKS), ModelClock(fits[1], vlm.ENCODER_BLOCKS)
    shapes = (LLAMA_8B, VIT_2B) if device == "cuda" else (TINY, TINY)
    benches = [Bench(shape, device) for shape in shapes]
    for bench in benches:  # memory is found, kernels are chosen
        bench.timed([Work.of_documents(np.full(4, (16 if device == "cuda" else 1) * K))] * 2)
    return KernelClock(benches[0], vlm.BACKBONE_BLOCKS), KernelClock(benches[1], vlm.ENCODER_BLOCKS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "model"])
    parser.add_argument("--plans", default="hdp,long_short,images stay,images move")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if given.device == "cuda" else given.device}
    backbone, encoder = clocks(given.device)
    made = cases(backbone, encoder, given.device == "cpu")
    for name in given.plans.split(","):
        rows = learned_straggler(made[name], given.steps)
        stragglers = np.array([row["straggler"] for row in rows])
        report[name] = {
            "first_steps": float(stragglers[: EVERY + AHEAD - 1].mean()),
            "last_10_steps": float(stragglers[-10:].mean()),
            "worst_of_last_10": float(stragglers[-10:].max()),
            "rows": rows,
        }
        print(json.dumps({"plan": name, **{k: v for k, v in report[name].items() if k != "rows"}}), flush=True)
        if given.out:
            given.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
