"""Peak memory of the process tree with many Parquet sources and many ranks.

    python -m bench.many_sources_memory [--quick] [--json] [--rounds N] [--only NAME ...]

The sum of the proportional set size (PSS) over all processes, sampled every 100 ms by another process, from the start
to the end of a run long enough that every worker has every source open. Row groups take 1.6 MiB decoded. Overlord is
measured for 8, 64 and 256 sources and 1, 4 and 16 ranks; torch's DataLoader with 4 ranks x 4 workers at 256 sources,
as each worker of each rank opens every source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import corpus
from bench.measure import Competitor, Options, Rounds, Setting, interleave, options

OVERLORD = Competitor("overlord", "overlord")
TORCH = Competitor("torch 4 workers", "torch", {"workers": 4})
MIB = 1 << 20
GIB = 1 << 30
TORCH_NEEDS = 18 * GIB
# A source of weight 1 among 256 of mean weight 2.5 is drawn once in 640 documents, ten batches: after 60 batches
# hardly any is unopened.
BATCHES_A_READER = 60


def main(argv: Sequence[str] | None = None) -> int:
    given = options(__doc__, argv, rounds=1)
    combinations = [(8, 1), (256, 4)] if given.quick else [(s, r) for s in (8, 64, 256) for r in (1, 4, 16)]
    results = [
        interleave(_setting(sources, ranks), _competitors(sources, ranks, given), given.rounds)
        for sources, ranks in combinations
    ]
    return _report(results, given)


def _competitors(sources: int, ranks: int, given: Options) -> list[Competitor]:
    against_torch = (sources, ranks) == (256, 4)
    if against_torch and available_bytes() < TORCH_NEEDS:
        print(f"left out: torch needs {TORCH_NEEDS / GIB:.0f} GiB of free memory", file=sys.stderr)
        against_torch = False
    return given.chosen([OVERLORD, TORCH] if against_torch else [OVERLORD])


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _setting(sources: int, ranks: int) -> Setting:
    corpus.memory_text(sources).make()
    # Four torch workers feed a rank, and each must have had its turn at every source.
    batches = BATCHES_A_READER * (4 if (sources, ranks) == (256, 4) else 1)
    arguments = ("--sources", str(sources), "--ranks", str(ranks), "--batches", str(batches), "--warmup", "1", "--pss")
    return Setting(f"{sources} sources, {ranks} rank{'s' * (ranks > 1)}", "memory", arguments)


def _report(results: Sequence[Rounds], given: Options) -> int:
    if given.json:
        print(json.dumps([result.to_dict() for result in results], indent=1))
    else:
        print(f"  {'':<24}{'':<18}peak PSS, MiB")
        for result in results:
            for name in result.outcomes:
                found = result.spread(name, "peak_pss")
                shown = f"{found.median / MIB:8,.0f}" if found else f"failed: {result.error(name)}"
                ratio = result.ratio(name, OVERLORD.name, "peak_pss") if OVERLORD.name in result.outcomes else None
                against = f"   {ratio} times overlord's" if ratio and name != OVERLORD.name else ""
                print(f"  {result.setting.title:<24}{name:<18}{shown}{against}")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
