"""Seconds from the start of the first process to the first batch on the last trainer.

    python -m bench first [--works text bpe images large] [--trainers N ...] [--rounds N] [--only NAME ...] [--data FOLDER]
        [--json]

large    as bpe, from files of one row group of 63 MB each; also with window=1, where a chunk is a whole row group

Processes are fresh, data are in the page cache. One trainer runs the job in its own process; several have processes of
their own beside `overlord serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from bench import corpus
from bench.measure import Competitor, Rounds, Setting, interleave
from bench.trainers import OVERLORD, WORKS, Given, bpe, given_by, parser_of, report

WHOLE = "overlord, window=1"


def large(given: Given) -> list[tuple[Setting, list[Competitor]]]:
    """The BPE job over large row groups."""
    found: list[tuple[Setting, list[Competitor]]] = []
    for setting, competitors in bpe(given):
        corpus.LARGE_BPE.make()
        same = [replace(each, settings={**each.settings, "large_row_groups": True}) for each in competitors]
        first = next(each for each in same if each.name == OVERLORD)
        whole = replace(first, name=WHOLE, settings={**first.settings, "window": 1})
        found.append((replace(setting, title=f"large row groups, {setting.title}"), [first, whole, *same[1:]]))
    return found


FIRST_WORKS = {**WORKS, "large": large}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seconds=0.3, rounds=5, works=tuple(FIRST_WORKS))
    parser.set_defaults(works=("text", "bpe", "images", "large"))
    given = replace(given_by(parser, argv), pace=0.0)
    results = []
    for work in given.works:
        for setting, competitors in FIRST_WORKS[work](given):
            cold = replace(setting, arguments=(*setting.arguments, "--warmup", "1"))
            results.append(interleave(cold, given.chosen(competitors), given.rounds))
            if not given.json:
                show(results[-1])
    return report([result.to_dict() for result in results], given)


def show(result: Rounds) -> None:
    print(f"\n{result.setting.title}: first batch after s")
    for name in result.outcomes:
        found = result.spread(name, "first_batch_s")
        print(f"  {name:<24}{found or f'failed: {result.error(name)}'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
