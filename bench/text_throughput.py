"""Pre-tokenised Parquet to packed 8 x 8,192 batches: million tokens per CPU-second of the whole process tree.

    python -m bench.text_throughput [--quick] [--json] [--rounds N] [--seconds S] [--only NAME ...]

8 sources (row groups of 2 MiB decoded) and 64 (0.5 MiB), 1 and 4 ranks, data in the page cache. Peers have a process
per rank, as trainers have; the bare loop and Overlord serve all ranks from one. Start-up is excluded. All mix the
sources by the same weights, shuffle row groups and rows, pack alike and deliver the same fields.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import corpus
from bench.measure import Competitor, Setting, Table, compare, options

COMPETITORS = (
    Competitor("overlord", "overlord"),
    Competitor("bare loop", "bare"),
    Competitor("torch", "torch"),
    Competitor("spdl", "spdl"),
    Competitor("grain", "grain"),
    Competitor("grain processes", "grain", {"workers": 2}),
)
TABLE = Table("units_per_cpu_s", 1e6, "M tokens / CPU s", baseline="overlord")


def main(argv: Sequence[str] | None = None) -> int:
    given = options(__doc__, argv)
    combinations = [(8, 1), (64, 4)] if given.quick else [(8, 1), (8, 4), (64, 1), (64, 4)]
    for sources, _ in combinations:
        corpus.text_of("text", sources).make()
    settings = [_setting(sources, ranks, given.seconds) for sources, ranks in combinations]
    return compare(settings, given.chosen(COMPETITORS), TABLE, given)


def _setting(sources: int, ranks: int, seconds: float) -> Setting:
    arguments = ("--sources", str(sources), "--ranks", str(ranks), "--seconds", str(seconds))
    return Setting(f"{sources} sources, {ranks} rank{'s' * (ranks > 1)}", "text", arguments)


if __name__ == "__main__":
    sys.exit(main())
