"""Overlord on Ray beside Ray Data on the same warm cluster, and beside Overlord's own worker processes without Ray.

    python -m bench ray_data [--works text-8 text-8-large text-64 text-64-large images] [--rounds N] [--seconds S]
        [--only NAME ...] [--quick] [--json]

text-8, text-64     pre-tokenised Parquet, 8 or 64 sources, 65,536 tokens a trainer and step
text-8-large, ...   the same in steps of 524,288 tokens
images              tars of JPEGs to batches of 64 pictures of 336 x 336

A cluster of one node with as many CPUs as this machine has cores is started and warm before the clock of a run starts; it
counts from then on, for both. Four trainers in processes of their own take steps as fast as they can and touch every byte.
CPU time is of all processes, Ray's own included; so is memory, the largest sum of proportional set sizes. The first batch is
timed from the start of the first process on the warm cluster until every trainer has one; the CPU time until then is shown
too, because other work on the machine changes it less. Ray Data reads whole files of 8.4 M tokens at a time, ahead of its
trainers, and keeps up to half of the object store: a short window may show what was read before it.

Ray Data streams one dataset to all trainers, as Ray Train does (`streaming_split`), in two ways. Its trainers pack with the
code that the other peers use.

Ray Data            the sources one after the other, in the order of their files and rows
Ray Data, shuffled  files in a random order, and a local shuffle in each trainer over as many rows as the other peers have
                    at hand: a row group of every source. No weights

Its dataset repeats files so that no window comes to its end, and it reads the footers of all of them. Whether that falls
into the window is chance: ratios are also shown without the CPU time of listing files and reading footers.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench import corpus
from bench.measure import Competitor, Rounds, Setting, Spread, interleave
from bench.peers.packing import BATCH_TOKENS
from bench.trainers import MIB, Given, doubts, given_by, installed, parser_of, report

RANKS = 4
LARGE = 8
"""Batches in a large step."""
STORE_BYTES = 4 << 30
"""Of the cluster's object store. With a tenth of it Ray Data spills to disk, which costs it a third of its CPU time."""
ON_RAY = "overlord on Ray"
PROCESSES = "overlord, processes"
RAY_DATA = "Ray Data"
SHUFFLED = "Ray Data, shuffled"
AIMS = {
    "text-8": {RAY_DATA: 1.5, SHUFFLED: 1.5},
    "text-64": {RAY_DATA: 1.5, SHUFFLED: 1.5},
    "text-8-large": {RAY_DATA: 3.0, SHUFFLED: 3.0, PROCESSES: 0.7},
    "text-64-large": {RAY_DATA: 3.0, SHUFFLED: 3.0, PROCESSES: 0.7},
    "images": {RAY_DATA: 1.5},
}
"""What Overlord on Ray is to reach against others, in units per CPU-second."""
FOOTERS = ("ray::FooterReader", "ray::ListFiles")
"""Processes of Ray Data."""


def competitors(work: str) -> list[Competitor]:
    cores = len(os.sched_getaffinity(0))
    cluster = {"ray": ["--cpus", str(cores), "--store", str(STORE_BYTES)]}
    found = [Competitor(ON_RAY, "overlord", cluster), Competitor(RAY_DATA, "ray_data", cluster)]
    if work != "images":
        found.append(Competitor(SHUFFLED, "ray_data", {**cluster, "shuffled": True}))
    return [*found, Competitor(PROCESSES, "overlord", {"serve": ["--processes", str(max(2, cores))]})]


def setting_of(work: str, given: Given) -> Setting:
    """The run of one competitor; its data are made where they are missing."""
    measured = ("--ranks", RANKS, "--seconds", given.seconds, "--cores", given.cores)
    if work == "images":
        corpus.IMAGES.make()
        return _setting(work, "images", "JPEG to 336 x 336", (*measured, "--warmup", 3))
    sources, micros = int(work.split("-")[1]), LARGE if work.endswith("-large") else 1
    made = corpus.text_of("text", sources).make()
    # The meter starts when every source is well into its second row group.
    warmup = max(4, 2 * made.row_group_tokens * sources // (BATCH_TOKENS * micros * RANKS))
    title = f"text, {sources} sources, {BATCH_TOKENS * micros:,} tokens a trainer and step"
    return _setting(work, "text", title, (*measured, "--sources", sources, "--micros", micros, "--warmup", warmup))


def _setting(work: str, benchmark: str, title: str, arguments: Sequence[object]) -> Setting:
    return Setting(f"{work}: {title}", benchmark, tuple(map(str, arguments)), module="bench.run_trainers")


def show(work: str, result: Rounds) -> None:
    unit, scale = ("images", 1.0) if work == "images" else ("M tokens", 1e6)
    heads = f"{unit + '/CPU s':>22}{unit + '/s':>22}{'cores':>7}{'processes':>11}{'first s':>9}{'CPU s':>7}{'MiB':>8}"
    print(f"\n{result.setting.title}\n  {'':<22}{heads}")
    for name in result.outcomes:
        print(f"  {name:<22}{_line(result, name, scale)}", flush=True)
    for other in (name for name in result.outcomes if name != ON_RAY and ON_RAY in result.outcomes):
        ratio, memory = (result.ratio(ON_RAY, other, figure) for figure in ("units_per_cpu_s", "peak_pss"))
        if ratio is not None and memory is not None:
            aim = AIMS[work].get(other)
            wanted = "" if aim is None else f" (aim {aim:g})"
            bare = Rounds(result.setting, {ON_RAY: result.outcomes[ON_RAY], other: _without_footers(result.outcomes[other])})
            without = bare.ratio(ON_RAY, other, "units_per_cpu_s") if other.startswith(RAY_DATA) else None
            noted = "" if without is None or without == ratio else f", {without} without footers"
            print(f"  {f'{ON_RAY} / {other}':<42}{ratio} per CPU s{wanted}{noted}, {memory} of its memory")
    for warning in doubts(result):
        if not warning.startswith(RAY_DATA):  # its trainers may get equal steps, because files are read several times
            print(f"  ! {warning}")


def _without_footers(outcomes: Sequence[dict[str, Any] | str]) -> list[dict[str, Any] | str]:
    """Outcomes as if listing files and reading their footers had taken no time in the window."""
    found: list[dict[str, Any] | str] = []
    for each in outcomes:
        if isinstance(each, dict):
            cpu_s = each["cpu_s"] - sum(each["cpu_by_process"].get(name, 0.0) for name in FOOTERS)
            each = {**each, "cpu_s": cpu_s, "units_per_cpu_s": each["units"] / cpu_s}
        found.append(each)
    return found


def _line(result: Rounds, name: str, scale: float) -> str:
    done = [outcome for outcome in result.outcomes[name] if isinstance(outcome, dict)]
    if not done:
        return f"failed: {result.error(name)}"
    speeds = [result.spread(name, f"units_per_{per}") for per in ("cpu_s", "s")]
    shown = "".join(
        f"{Spread(each.median / scale, each.low / scale, each.high / scale)!s:>22}" for each in speeds if each is not None
    )
    cores, processes, first, first_cpu, pss = (
        statistics.median(each[figure] for each in done)
        for figure in ("cores_used", "num_processes", "first_batch_s", "first_batch_cpu_s", "peak_pss")
    )
    failures = len(result.outcomes[name]) - len(done)
    note = f"   {failures} of {len(result.outcomes[name])} runs failed: {result.error(name)}" if failures else ""
    return f"{shown}{cores:>7.1f}{processes:>11.0f}{first:>9.1f}{first_cpu:>7.1f}{pss / MIB:>8,.0f}{note}"


def main(argv: Sequence[str] | None = None) -> int:
    given = given_by(parser_of(__doc__, seconds=20.0, rounds=3, works=tuple(AIMS)), argv)
    missing = [library for library in ("ray", "pandas", "aiohttp") if not installed(library)]
    if missing:
        print(f"Ray Data needs {', '.join(missing)}: install bench/requirements.txt", file=sys.stderr)
        return 2
    works = given.works[:1] if given.quick and given.works == tuple(AIMS) else given.works
    results = []
    for work in works:
        results.append(interleave(setting_of(work, given), given.chosen(competitors(work)), given.rounds))
        if not given.json:
            show(work, results[-1])
    return report([result.to_dict() for result in results], given)


if __name__ == "__main__":
    sys.exit(main())
