"""The same job on 2, 4, 8, 16 cores, as many as the machine has: trainers in processes of their own, Overlord and torch.

    python -m bench scaling [--works text images] [--trainers N] [--rounds N] [--seconds S] [--only NAME ...] [--data FOLDER]
        [--quick] [--json]

Every number of cores is a set that the whole tree of processes is bound to. The number of trainers stays the same; torch has
as many workers as cores, at least one a trainer. Growth is within a round, over the fewest cores.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.measure import Competitor, Rounds, Setting, Spread, run
from bench.trainers import WORKS, Given, given_by, parser_of, report

_COMPARED = ("overlord", "overlord, same library", "torch")
Job = list[tuple[Setting, list[Competitor]]]
"""One work's setting and competitors, by the number of cores."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seconds=3.0, rounds=2)
    parser.set_defaults(works=("text",))
    given = given_by(parser, argv)
    given = replace(given, trainers=given.trainers[:1], pace=0.0, quick=True, only=given.only or _COMPARED)
    counts = [cores for cores in (2, 4, 8, 16, 32, 64) if cores <= given.cores]
    results = []
    for work in given.works:
        jobs = [_of_cores(given, work, cores) for cores in counts]
        for kind in range(len(jobs[0])):
            results.append(_interleave([job[kind] for job in jobs], given.rounds))
            if not given.json:
                show(results[-1], counts)
    return report([rounds.to_dict() for result in results for rounds in result], given)


def _of_cores(given: Given, work: str, cores: int) -> Job:
    limited = replace(given, cores=cores)
    return [(setting, limited.chosen(competitors)) for setting, competitors in WORKS[work](limited)]


def _interleave(jobs: Job, rounds: int) -> list[Rounds]:
    """All numbers of cores in every round, because growth is a ratio too."""
    found = [Rounds(setting, {each.name: [] for each in competitors}) for setting, competitors in jobs]
    for _ in range(rounds):
        for result, (setting, competitors) in zip(found, jobs, strict=True):
            for competitor in competitors:
                result.outcomes[competitor.name].append(run(setting, competitor))
    return found


def show(results: Sequence[Rounds], counts: Sequence[int]) -> None:
    unit, scale = ("images", 1.0) if results[0].setting.benchmark == "images" else ("M tokens", 1e6)
    print(f"\n{results[0].setting.title.rpartition(', ')[0]}")
    print(f"  {'':<24}{'cores':>6}{unit + '/s':>14}{unit + '/CPU s':>18}{'cores used':>12}   growth")
    for name in results[0].outcomes:
        for result, cores in zip(results, counts, strict=True):
            if (speed := result.spread(name, "units_per_s")) is None:
                print(f"  {name:<24}{cores:>6}   failed: {result.error(name)}")
                continue
            per_cpu, used = (result.spread(name, figure) for figure in ("units_per_cpu_s", "cores_used"))
            assert per_cpu is not None
            assert used is not None
            figures = f"{speed.median / scale:>14.2f}{per_cpu.median / scale:>18.2f}{used.median:>12.1f}"
            print(f"  {name:<24}{cores:>6}{figures}   {_growth(result, results[0], name)}", flush=True)


def _growth(result: Rounds, first: Rounds, name: str) -> Spread | str:
    pairs = zip(result.outcomes[name], first.outcomes[name], strict=True)
    found = [a["units_per_s"] / b["units_per_s"] for a, b in pairs if isinstance(a, dict) and isinstance(b, dict)]
    return Spread.of(found) if found else ""


if __name__ == "__main__":
    sys.exit(main())
