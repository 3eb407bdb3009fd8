"""Real forward and backward passes of every virtual rank's microbatches, for the same documents arranged in several ways.

    python -m bench.gpu [--quick] [--device cpu] [--out FILE] [--seed N] [--only REGEX] [--no-images]
    python -m bench.gpu --show FILE

A step lasts as long as its slowest rank. Ranks run one after the other on one GPU, arrangements in turn, so that a GPU that
slows down slows all of them. A Llama-8B-like block in bfloat16 with variable-length flash attention; times grow with the
number of blocks, which is checked first. What ranks send each other is not part of it: a rank that shares a document finds
the others' keys and values in its memory.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu import vlm
from bench.gpu.blocks import LLAMA_8B, TINY, VIT_2B, Bench, kernel_error
from bench.gpu.settings import ARRANGEMENTS, QUICK, SETTINGS, Setting
from bench.gpu.work import LENGTHS, Fit, Ranks, Work, predicted_times

K = 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    setting: str
    arrangement: str
    ranks_run: int
    slowest_ms: float
    mean_ms: float
    straggler: float
    """The slowest rank over the mean of all, as measured."""
    predicted_slowest_ms: float
    worst_error: float
    """The largest relative error of a rank's predicted time."""
    over_blind: float
    """How many times faster the step is than the blind one."""


def calibrated(bench: Bench, lengths: Sequence[int], tokens: int) -> Fit:
    """The time of a document of each length, out of microbatches of about `tokens` tokens of nothing else."""
    counts = [max(1, tokens // length) for length in lengths]
    works = [Work.of_documents(np.full(count, length)) for count, length in zip(counts, lengths, strict=True)]
    bench.timed(works)  # kernels are chosen and memory is found
    times = np.median([bench.timed(works) for _ in range(3)], axis=0)
    return Fit.of(lengths, (times / counts).tolist())


def per_block(device: str, tokens: int) -> list[float]:
    """Milliseconds a block, for stacks of 1, 2 and 4."""
    work = Work.of_documents(np.full(8, tokens // 8))
    found = []
    for blocks in (1, 2, 4):
        bench = Bench(LLAMA_8B if device == "cuda" else TINY, device, blocks)
        bench.timed([work] * 3)
        found.append(float(np.median(bench.timed([work] * 7))) / blocks)
    return found


def chosen(ranks: Ranks, fit: Fit, num: int) -> list[int]:
    """The ranks to run."""
    if not num or num >= len(ranks):
        return list(range(len(ranks)))
    order = np.argsort(-predicted_times(ranks, fit), kind="stable")
    rest = order[num // 2 :]
    spread = rest[np.linspace(0, len(rest) - 1, num - num // 2).astype(int)]
    return [*order[: num // 2].tolist(), *spread.tolist()]


def outcomes(setting: Setting, bench: Bench, fit: Fit, seed: int) -> list[Outcome]:
    graph = setting.graph(seed)
    arranged = {name: ARRANGEMENTS[name](graph, fit) for name in setting.arrangements}
    places = {name: chosen(ranks, fit, setting.sampled) for name, ranks in arranged.items()}
    largest = max((work for ranks in arranged.values() for works in ranks for work in works), key=lambda w: w.num_tokens)
    bench.timed([largest])  # takes the memory that the others will use
    same_as = {name: next(other for other in arranged if _same(arranged[other], arranged[name])) for name in arranged}
    times: dict[str, list[float]] = {name: [] for name in arranged}
    for turn in range(max(map(len, places.values()))):
        for name, ranks in arranged.items():
            if same_as[name] == name and turn < len(places[name]):
                works = ranks[places[name][turn]]
                times[name].append(min(sum(bench.timed(works)) for _ in range(setting.repeats)))
    times = {name: times[same_as[name]] for name in arranged}
    slowest_blind = max(times["blind"])
    found = []
    for name, ranks in arranged.items():
        predicted, measured = predicted_times(ranks, fit), np.array(times[name])
        of_run = predicted[places[name]]
        # Where only some ranks ran, the mean of all is the predicted one, corrected by how those that ran came out.
        mean = float(predicted.mean() * measured.sum() / of_run.sum())
        found.append(
            Outcome(
                setting=str(setting),
                arrangement=name,
                ranks_run=len(measured),
                slowest_ms=float(measured.max()),
                mean_ms=mean,
                straggler=float(measured.max()) / mean,
                predicted_slowest_ms=float(predicted.max()),
                worst_error=float(np.abs(of_run / measured - 1).max()),
                over_blind=slowest_blind / float(measured.max()),
            )
        )
    return found


def _same(a: Ranks, b: Ranks) -> bool:
    """Whether two arrangements are one: balance that has no freedom in the number of microbatches, say."""
    return list(map(len, a)) == list(map(len, b)) and all(
        np.array_equal(x.queries, y.queries) and np.array_equal(x.keys, y.keys)
        for xs, ys in zip(a, b, strict=True)
        for x, y in zip(xs, ys, strict=True)
    )


def show(path: Path) -> None:
    """The tables of a run that was written with `--out`."""
    run = json.loads(path.read_text())
    print(f"{run['device']}; milliseconds a block in stacks of 1, 2 and 4: {run['ms_per_block_of_1_2_4']}\n")
    print("| setting | arrangement | slowest rank, ms | slowest / mean | times blind | predicted | worst rank's error |")
    print("|---|---|---|---|---|---|---|")
    for row in run["rows"]:
        predicted = row["predicted_slowest_ms"] / row["slowest_ms"] - 1
        print(
            f"| {row['setting']} | {row['arrangement']} | {row['slowest_ms']:,.0f} | {row['straggler']:.3f} "
            f"| {row['over_blind']:.2f} | {predicted:+.1%} | {row['worst_error']:.1%} |"
        )
    print("\n| images and text | step, ms | encoder slowest / mean | backbone slowest / mean | times blind |")
    print("|---|---|---|---|---|")
    for row in run.get("vlm", []):
        stragglers = f"{row['encoder_straggler']:.3f} | {row['backbone_straggler']:.3f}"
        print(f"| {row['arrangement']} | {row['step_ms']:,.0f} | {stragglers} | {row['over_blind']:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small settings")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="settings whose name this matches")
    parser.add_argument("--no-images", action="store_true", help="leave out the encoder and backbone")
    parser.add_argument("--show", type=Path, help="print the tables of a run that was written with --out")
    given = parser.parse_args()
    if given.show:
        show(given.show)
        return 0
    bench = Bench(LLAMA_8B if given.device == "cuda" else TINY, given.device)
    report: dict[str, object] = {"device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu"}
    if given.device == "cuda":
        report["kernel_error"] = kernel_error("cuda")
        report["ms_per_block_of_1_2_4"] = per_block("cuda", 32 * K)
    fit = calibrated(bench, LENGTHS, 64 * K) if given.device == "cuda" else calibrated(bench, LENGTHS[:5], 2 * K)
    report["fit"] = asdict(fit)
    print(json.dumps(report), flush=True)
    rows: list[Outcome] = []
    for setting in [s for s in (QUICK if given.quick else SETTINGS) if re.search(given.only, str(s))]:
        for outcome in outcomes(setting, bench, fit, given.seed):
            rows.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
            if given.out:
                given.out.write_text(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1))
    if given.device == "cuda" and not given.no_images:
        encoder_fit = calibrated(Bench(VIT_2B, "cuda"), vlm.PATCHES, 16 * K)
        found = [asdict(outcome) for outcome in vlm.outcomes("cuda", fit, encoder_fit, given.seed)]
        report |= {"encoder_fit": asdict(encoder_fit), "vlm": found}
        print(json.dumps({"encoder_fit": asdict(encoder_fit), "vlm": found}), flush=True)
        if given.out:
            given.out.write_text(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
