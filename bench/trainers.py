"""What users run: trainers in processes of their own, default settings, all cores, from a cold start.

    python -m bench trainers [--works text bpe images ready] [--trainers N ...] [--cores N] [--rounds N] [--seconds S]
        [--only NAME ...] [--data FOLDER] [--quick] [--json]

text     pre-tokenised Parquet, 8 and 64 sources, to packed batches of 8 x 8,192
bpe      raw text and a tokenizer.json to the same batches; Overlord with the library that the peers use, and by default
images   tars of JPEGs to batches of 64 pictures of 336 x 336
ready    text in steps of eight batches (8.9 MB): what `next` takes when its step is ready

Overlord is `overlord serve` and a process for each trainer; with one trainer the job runs in the trainer's process. torch's
DataLoader and SPDL's subprocesses have as many workers as there are cores, shared out over the trainers, at least one each.
Every trainer reads every byte of its batches once. `bench text` and `bench images` measure in one process instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench import corpus
from bench.measure import Competitor, Rounds, Setting, Spread, interleave
from bench.peers.packing import BATCH_TOKENS

MIB = 1 << 20
OVERLORD = "overlord"
ONE_PROCESS = "overlord, one process"
NO_THREADS = "overlord, no threads"
SAME_LIBRARY = "overlord, same library"


@dataclass(frozen=True, slots=True)
class Given:
    """The options that all benchmarks of trainers share."""

    works: tuple[str, ...]
    trainers: tuple[int, ...]
    cores: int
    rounds: int
    seconds: float
    pace: float
    only: tuple[str, ...]
    quick: bool
    json: bool
    save: Path | None

    def chosen(self, competitors: Sequence[Competitor]) -> list[Competitor]:
        return [each for each in competitors if not self.only or each.name in self.only]


def parser_of(
    description: str | None, seconds: float = 4.0, rounds: int = 3, works: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """`works` are the benchmark's own; those of this module unless given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    works = tuple(works or WORKS)
    parser.add_argument("--works", nargs="+", default=works, choices=works, help="all unless given")
    parser.add_argument("--trainers", type=int, nargs="+", help="numbers of trainers; 1 is one in the job's own process")
    parser.add_argument("--cores", type=int, default=cores, help=f"run everything on so many cores; {cores} unless given")
    parser.add_argument("--rounds", type=int, help=f"{rounds} unless given, 1 if quick")
    parser.add_argument("--seconds", type=float, default=seconds, help="measured time of a run at full speed")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="competitors to run")
    parser.add_argument("--data", metavar="FOLDER", help="where the data are made and kept; bench/.data unless given")
    parser.add_argument("--quick", action="store_true", help="one round, fewer settings")
    parser.add_argument("--json", action="store_true", help="every figure of every run, for machines")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write those figures to FILE besides")
    parser.set_defaults(usual_rounds=rounds)
    return parser


def given_by(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Given:
    found = parser.parse_args(argv)
    if found.data:
        corpus.keep_in(found.data)
    trainers = found.trainers or [max(4, found.cores // 2), 1]
    rounds = found.rounds or (1 if found.quick else found.usual_rounds)
    pace = 1.0 if found.quick else 2.0
    shared = (found.seconds, pace, tuple(found.only), found.quick, found.json, found.save)
    return Given(tuple(found.works), tuple(trainers), found.cores, rounds, *shared)


def workers_each(cores: int, ranks: int) -> int:
    return max(1, cores // ranks)


def overlords(ranks: int, **settings: Any) -> list[Competitor]:
    """Overlord as it starts by itself, and with all its work in one process, where a service would take more."""
    if ranks == 1:
        alone = {"in_process": True, **settings}
        return [Competitor(OVERLORD, "overlord", alone), Competitor(NO_THREADS, "overlord", {**alone, "workers": 0})]
    found = [Competitor(OVERLORD, "overlord", settings)]
    if serve_knows("--processes"):
        found.append(Competitor(ONE_PROCESS, "overlord", {"serve": ["--processes", "0"], **settings}))
    return found


def peers(ranks: int, cores: int) -> list[Competitor]:
    each = workers_each(cores, ranks)
    found = [
        Competitor("torch", "torch", {"workers": each}),
        Competitor("spdl", "spdl", {"subprocesses": each}),
        Competitor("spdl, arena", "spdl", {"subprocesses": each, "arena": True}),
    ]
    return [peer for peer in found if installed(peer.peer)]


@cache
def installed(library: str) -> bool:
    there = importlib.util.find_spec(library) is not None
    if not there:
        print(f"left out, because it is not installed here: {library}", file=sys.stderr)
    return there


@cache
def serve_knows(option: str) -> bool:
    command = [sys.executable, "-m", "overlord", "serve", "--help"]
    return option in subprocess.run(command, capture_output=True, text=True, check=False).stdout


def text(given: Given) -> list[tuple[Setting, list[Competitor]]]:
    found = []
    for sources in (8,) if given.quick else (8, 64):
        made = corpus.text_of("text", sources).make()
        for ranks in given.trainers:
            # The meter starts when every source is well into its second row group.
            warmup = max(8, 2 * made.row_group_tokens * sources // (BATCH_TOKENS * ranks))
            title = f"text, {sources} sources, {trainers(ranks)}"
            setting = setting_of(given, title, "text", ranks, ("--sources", sources, "--warmup", warmup))
            found.append((setting, [*overlords(ranks), *peers(ranks, given.cores)]))
    return found


def bpe(given: Given) -> list[tuple[Setting, list[Competitor]]]:
    found: list[tuple[Setting, list[Competitor]]] = []
    if not installed("tokenizers"):
        return found
    corpus.BPE.make()
    for ranks in given.trainers:
        setting = setting_of(given, f"BPE, {trainers(ranks)}", "bpe", ranks, ("--warmup", 4))
        fast, *_ = overlords(ranks)
        same = replace(fast, name=SAME_LIBRARY, settings={**fast.settings, "engine": "tokenizers"})
        found.append((setting, [fast, same, *peers(ranks, given.cores)]))
    return found


def images(given: Given) -> list[tuple[Setting, list[Competitor]]]:
    found: list[tuple[Setting, list[Competitor]]] = []
    if not installed("PIL"):
        return found
    corpus.IMAGES.make()
    for ranks in given.trainers:
        setting = setting_of(given, f"images, {trainers(ranks)}", "images", ranks, ("--warmup", 3))
        found.append((setting, [*overlords(ranks), *peers(ranks, given.cores)]))
    return found


def ready(given: Given) -> list[tuple[Setting, list[Competitor]]]:
    corpus.text_of("text", 8).make()
    found = []
    for ranks in given.trainers:
        title = f"steps of 8.9 MB that are ready, {trainers(ranks)}"
        setting = setting_of(given, title, "text", ranks, ("--warmup", 4, "--micros", 8))
        found.append((setting, [*overlords(ranks)[:1], *peers(ranks, given.cores)]))
    return found


WORKS = {"text": text, "bpe": bpe, "images": images, "ready": ready}


def trainers(ranks: int) -> str:
    return f"{ranks} trainers" if ranks > 1 else "one trainer in the job's process"


def setting_of(given: Given, title: str, benchmark: str, ranks: int, arguments: Sequence[object]) -> Setting:
    measured = ("--ranks", ranks, "--seconds", given.seconds, "--pace", given.pace, "--cores", given.cores)
    words = tuple(map(str, (*measured, *arguments)))
    return Setting(f"{title}, {given.cores} cores", benchmark, words, module="bench.run_trainers")


def show(result: Rounds) -> None:
    unit, scale = ("images", 1.0) if result.setting.benchmark == "images" else ("M tokens", 1e6)
    heads = f"{unit + '/s':>20}{unit + '/CPU s':>20}{'cores':>7}{'processes':>11}{'first s':>9}{'MiB':>8}"
    heads += f"{'next us: p50':>14}{'p99':>9}"
    print(f"\n{result.setting.title}\n  {'':<24}{heads}")
    for name in result.outcomes:
        print(f"  {name:<24}{_line(result, name, scale)}", flush=True)
    for baseline in (name for name in (OVERLORD, ONE_PROCESS, SAME_LIBRARY) if name in result.outcomes):
        for name in (name for name in result.outcomes if not name.startswith(OVERLORD)):
            per_s, per_cpu_s = (result.ratio(baseline, name, f"units_per_{per}") for per in ("s", "cpu_s"))
            if per_s is not None:
                print(f"  {f'{baseline} / {name}':<36}{per_s} per s, {per_cpu_s} per CPU s")
    for warning in doubts(result):
        print(f"  ! {warning}")


def _line(result: Rounds, name: str, scale: float) -> str:
    done = [outcome for outcome in result.outcomes[name] if isinstance(outcome, dict)]
    if not done:
        return f"failed: {result.error(name)}"
    speeds = "".join(f"{_shown(result.spread(name, f'units_per_{per}'), scale):>20}" for per in ("s", "cpu_s"))
    cores, processes, first, pss = (
        statistics.median(each[figure] for each in done)
        for figure in ("cores_used", "num_processes", "first_batch_s", "peak_pss")
    )
    times = [each["next_us"] for each in done if each["next_us"]]
    waits = "".join(
        f"{statistics.median(each[key] for each in times):>{width},.0f}" if times else f"{'':>{width}}"
        for key, width in (("p50", 14), ("p99", 9))
    )
    failures = len(result.outcomes[name]) - len(done)
    note = f"   {failures} of {len(result.outcomes[name])} runs failed: {result.error(name)}" if failures else ""
    return f"{speeds}{cores:>7.1f}{processes:>11.0f}{first:>9.1f}{pss / MIB:>8,.0f}{waits}{note}"


def _shown(spread: Spread | None, scale: float) -> str:
    if spread is None:
        return ""
    digits = 1 if spread.median / scale >= 10 else 2
    return f"{spread.median / scale:.{digits}f} ({spread.low / scale:.{digits}f}-{spread.high / scale:.{digits}f})"


def doubts(result: Rounds) -> list[str]:
    """What makes the figures of a setting worth less: streams that differ, trainers without data, processes that hung."""
    found = []
    firsts: dict[str, Any] = {}
    for name, outcomes in result.outcomes.items():
        for outcome in outcomes:
            if isinstance(outcome, str):
                continue
            if name.startswith(OVERLORD) and outcome["num_killed"]:
                found.append(f"{name}: {outcome['num_killed']} processes did not end by themselves")
            if len({tuple(each) for each in outcome["first_checksums"]}) < outcome["ranks"]:
                found.append(f"{name}: two trainers got the same steps")
            first = outcome["first_checksums"]
            if name.startswith(OVERLORD) and firsts.setdefault(OVERLORD, first) != first:
                found.append(f"{name}: its first steps differ from those of another run of Overlord")
    return sorted(set(found))


def main(argv: Sequence[str] | None = None) -> int:
    given = given_by(parser_of(__doc__), argv)
    results = []
    for work in given.works:
        for setting, competitors in WORKS[work](given):
            results.append(interleave(setting, given.chosen(competitors), given.rounds))
            if not given.json:
                show(results[-1])
    return report([result.to_dict() for result in results], given)


def report(results: Sequence[dict[str, Any]], given: Given) -> int:
    """Prints and saves every figure where that was asked for. Returns the exit status: 1 when a run failed."""
    if given.json:
        print(json.dumps(results, indent=1))
    if given.save is not None:
        given.save.write_text(json.dumps(results, indent=1))
    return int(any(isinstance(run, str) for result in results for runs in result["outcomes"].values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
