"""Seconds from the start of the first process to the first batch on the last trainer.

    python -m bench first [--works text bpe images] [--trainers N ...] [--rounds N] [--only NAME ...] [--data FOLDER]
        [--json]

Processes are fresh, data are in the page cache. One trainer runs the job in its own process; several have processes of
their own beside `overlord serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.measure import Rounds, interleave
from bench.trainers import WORKS, given_by, parser_of, report


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seconds=0.3, rounds=5)
    parser.set_defaults(works=("text", "bpe", "images"))
    given = replace(given_by(parser, argv), pace=0.0)
    results = []
    for work in given.works:
        for setting, competitors in WORKS[work](given):
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
