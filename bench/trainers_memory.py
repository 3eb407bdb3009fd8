"""Peak memory with trainers in processes of their own: the proportional set size of all processes together.

    python -m bench trainers_memory [--trainers 4 16] [--rounds N] [--only NAME ...] [--data FOLDER] [--quick] [--json]

256 Parquet sources of 4 and of 16 files with nine columns, row groups of 1.6 MiB decoded, and images, Overlord with default
settings. torch has 4 workers a trainer and, as another line, 1: each opens every source. A run ends when every worker of
every trainer has had its turn at every source. Competitors that would not fit into the memory that is free are left out.
The loader's memory is all but what trainer processes have for themselves (Python, numpy, batches in memory of their own).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from bench import corpus
from bench.many_sources_memory import BATCHES_A_READER, GIB, MIB, available_bytes
from bench.measure import Competitor, Rounds, Setting, interleave
from bench.trainers import OVERLORD, Given, given_by, images, overlords, parser_of, peers, report, setting_of, trainers

SOURCES = 256
WORKER_BYTES = 1.1 * GIB
"""What a torch worker takes that has 256 sources open."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seconds=0.5, rounds=1)
    parser.set_defaults(trainers=[4, 16])
    given = replace(given_by(parser, argv), pace=0.0)
    cases = [case for files in ((16,) if given.quick else (4, 16)) for case in _texts(given, files)]
    four = [case for case in images(replace(given, trainers=(4,)))]
    results = []
    for setting, competitors in (*cases, *four):
        results.append(interleave(setting, given.chosen(competitors), given.rounds))
        if not given.json:
            show(results[-1])
    return report([result.to_dict() for result in results], given)


def _texts(given: Given, files: int) -> list[tuple[Setting, list[Competitor]]]:
    corpus.memory_text(SOURCES, files).make()
    found = []
    for ranks in given.trainers:
        title = f"{SOURCES} sources of {files} files, {trainers(ranks)}"
        # Four workers feed a trainer, and each must have had its turn at every source.
        arguments = ("--sources", SOURCES, "--files", files, "--warmup", 4 * BATCHES_A_READER)
        competitors = [*overlords(ranks), *_torches(ranks)]
        found.append((setting_of(given, title, "memory", ranks, arguments), competitors))
    return found


def _torches(ranks: int) -> list[Competitor]:
    found = []
    for workers in (4, 1):
        needed = ranks * workers * WORKER_BYTES
        if needed > available_bytes():
            print(f"left out: torch with {ranks} x {workers} workers needs {needed / GIB:.0f} GiB", file=sys.stderr)
        elif any(peer.peer == "torch" for peer in peers(ranks, ranks)):
            found.append(Competitor(f"torch, {workers} worker{'s' * (workers > 1)} each", "torch", {"workers": workers}))
    return found


def show(result: Rounds) -> None:
    print(f"\n{result.setting.title}: peak MiB")
    for name in result.outcomes:
        found = result.spread(name, "peak_pss")
        loader = result.spread(name, "peak_loader")
        both = None if found is None or loader is None else (found.median / MIB, loader.median / MIB)
        shown = "{:8,.0f}, the loader {:,.0f}".format(*both) if both else f"failed: {result.error(name)}"
        ratio = result.ratio(name, OVERLORD, "peak_pss") if OVERLORD in result.outcomes and name != OVERLORD else None
        print(f"  {name:<24}{shown}{f'   {ratio} times overlord' if ratio else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
