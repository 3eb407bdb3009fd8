"""Pipelines of a pool of ranks, played with the measured times of their stages.

    python -m bench.gpu.pipelines [--device cpu|model] [--lengths github] [--contexts 128] [--noise SHARE] [--out FILE]

Every microbatch of every pipeline runs forward and backward through one block on one GPU, one after the other: a stage. The
1F1B or interleaved schedule of all pipelines is then played with these times; a ring begins on a stage when all of its
pipelines are ready for it, and takes as long as on the slowest. What stages and rings send each other is not part of it.

Times are over those without any waiting. `alike` is what filling and draining would cost if all microbatches of a pipeline
were alike; `least` is what no order of these microbatches goes below (`bench.gpu.bubbles`). `over_allowed` is what was
played over the larger of both: over what bubbles allow. `least_played` is `least` with the times that were played, a
backward pass taken to be twice as long as a forward one, and a ring as long as on the slowest of its ranks.

With `--device model` times come from a table. `--noise` multiplies that of each microbatch on each rank by a random number
of that standard deviation: orders are searched with times that are off, as they are for real kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.blocks import LLAMA_8B, TINY, Bench
from bench.gpu.bubbles import least_of_pipelines
from bench.gpu.settings import Setting
from bench.gpu.work import LENGTHS, Fit, Work, of_hdp_plan
from bench.length_tables import BYTED, GITHUB
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.reordering import Grid
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.simulator import Pipeline, play, simulate
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import hdp
from overlord.declare.mesh import Mesh
from overlord.stream.facts import Floats, Ints

K = 1024


@dataclass(frozen=True)
class PipelineOutcome:
    setting: str
    stages: int
    virtual: int
    microbatches: float
    """The mean of all pipelines."""
    predicted: float
    played: float
    alike: float
    least: float
    over_allowed: float
    least_played: float


def passes(bench: Bench, works: list[Work]) -> tuple[list[float], list[float]]:
    """Milliseconds of the forward and of the backward pass of each microbatch."""
    if bench.device != "cuda":
        both, forward = bench.timed(works), bench.timed(works, backward=False)
        return forward, [max(0.0, all_ - f) for all_, f in zip(both, forward, strict=True)]
    found = bench.settled(works, runs=2)
    return [forward for forward, _ in found], [backward for _, backward in found]


def outcome(
    setting: Setting, pipeline: Pipeline, fit: Fit, timed: Callable[[list[Work]], Any], seed: int = 0
) -> PipelineOutcome:
    graph = setting.graph(seed)
    place = ClientPlaceTree(Mesh(dp=setting.dp, cp=setting.cp, pp=pipeline.stages))
    graph = DGraph(graph.samples, graph.batch, place, graph.reference_rows)
    capacity = max(setting.context // setting.cp, 1)
    plan: Plan = hdp(fit.document_cost, capacity=capacity, pipeline=pipeline)(graph)
    rings = plan.part(Rings)
    assert rings is not None
    micro = plan.micro_costs(rings.cost)
    busy = float(rings.cost.sum()) / len(plan.counts) / pipeline.stages
    predicted = simulate(micro, plan.counts, pipeline, rings.of_micro).step_time / busy
    works = [work for rank in of_hdp_plan(plan) for work in rank]
    filled = [i for i, work in enumerate(works) if work.num_tokens]
    forward, backward = np.zeros(len(works)), np.zeros(len(works))
    forward[filled], backward[filled] = timed([works[i] for i in filled])
    times = play(forward, backward, plan.counts, pipeline, rings.of_micro)
    measured_busy = float((forward + backward).sum()) / len(plan.counts) * pipeline.virtual
    counts = plan.counts.astype(np.float64)
    played = float(times.max()) / measured_busy
    alike = 1 + (pipeline.stages - 1) / pipeline.virtual / float(counts.mean())
    grids = [grid_of(plan, times, rings.of_micro) for times in (micro, forward + backward)]
    least, least_played = (least_of_pipelines(each, pipeline) / float(each.times.sum()) * len(plan.counts) for each in grids)
    return PipelineOutcome(
        setting=str(setting),
        stages=pipeline.stages,
        virtual=pipeline.virtual,
        microbatches=float(counts.mean()),
        predicted=predicted,
        played=played,
        alike=alike,
        least=least,
        over_allowed=played / max(alike, least),
        least_played=least_played,
    )


def grid_of(plan: Plan, times: Floats, rings: Ints) -> Grid:
    rank = np.repeat(np.arange(len(plan.counts)), plan.counts)
    index = np.arange(len(times)) - np.repeat(np.cumsum(plan.counts) - plan.counts, plan.counts)
    shape = int(plan.counts.max(initial=0)), len(plan.counts)
    found = Grid(np.zeros(shape), np.full(shape, -1), plan.counts)
    found.times[index, rank], found.rings[index, rank] = times, rings
    return found


def off_by(noise: float, seed: int, num: int) -> Floats:
    return np.exp(np.random.default_rng([seed, 1]).normal(0.0, noise, num))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "model"])
    parser.add_argument("--lengths", default="byted,github")
    parser.add_argument("--contexts", default="128,32", help="in units of 1,024 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="with --device model: how far times are off the table")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if given.device == "cuda" else given.device}
    run = json.loads((Path(__file__).parent / "h200.json").read_text())
    table = run["fit"]["document_cost"]
    fit = Fit.of(table["lengths"], table["costs"])
    tables = [each for each in (BYTED, GITHUB) if each.name in given.lengths.split(",")]
    meshes = {"128": {"dp": 8, "cp": 4, "rows": 4}, "32": {"dp": 4, "rows": 16}}
    settings = [Setting(each, int(at) * K, **meshes[at]) for at in given.contexts.split(",") for each in tables]
    if given.device == "model":
        drawn = lambda works: np.array([fit.predicted(w) for w in works]) * off_by(given.noise, given.seed, len(works))  # noqa: E731
        timed = lambda works: np.outer([1 / 3, 2 / 3], drawn(works))  # noqa: E731
    else:
        bench = Bench(LLAMA_8B if given.device == "cuda" else TINY, given.device)
        if given.device == "cpu":
            settings = [Setting(GITHUB, 4 * K, dp=2, cp=2, rows=2)]
            fit = Fit.of(LENGTHS[:6], [2e-3 * n + 9e-8 * n * n for n in LENGTHS[:6]])
        timed = lambda works: passes(bench, works)  # noqa: E731
        timed([Work.of_documents(np.full(4, (16 if given.device == "cuda" else 1) * K))] * 2)
    rows = []
    for setting in settings:
        for pipeline in (Pipeline(4), Pipeline(8), Pipeline(8, 2)):
            rows.append(asdict(outcome(setting, pipeline, fit, timed, given.seed)))
            print(json.dumps(rows[-1]), flush=True)
            if given.out:
                given.out.write_text(json.dumps({**report, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
