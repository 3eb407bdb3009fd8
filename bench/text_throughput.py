"""Pre-tokenised Parquet to packed 8 x 8,192 batches: million tokens per CPU-second of the whole process tree.

    python -m bench.text_throughput [--quick] [--json] [--rounds N] [--seconds S] [--only NAME ...]

8 sources (row groups of 2 MiB decoded) and 64 (1 MiB), 1 and 4 ranks, data in the page cache. Peers have a process
per rank, as trainers have; the bare loop and Overlord serve all ranks from one. Start-up is excluded. All mix the
sources by the same weights, shuffle row groups and rows, pack alike and deliver the same fields. The bare loop does all
its work in the caller's thread when it is asked; so does Overlord without threads, which is the one to compare with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import corpus
from bench.measure import Competitor, Setting, Table, compare, options
from bench.peers.packing import BATCH_TOKENS

COMPETITORS = (
    Competitor("overlord", "overlord"),
    Competitor("overlord, no threads", "overlord", {"workers": 0}),
    Competitor("bare loop", "bare"),
    Competitor("torch", "torch"),
    Competitor("spdl", "spdl"),
    Competitor("spdl, in stages", "spdl", {"stages": True}),
    Competitor("grain", "grain"),
    Competitor("grain processes", "grain", {"workers": 2}),
    Competitor("grain, own packing", "grain", {"packing": "grain", "workers": 1}),
)
TABLE = Table("units_per_cpu_s", 1e6, "M tokens / CPU s", baselines=("overlord", "overlord, no threads"))


def main(argv: Sequence[str] | None = None) -> int:
    given = options(__doc__, argv)
    combinations = [(8, 1), (64, 4)] if given.quick else [(8, 1), (8, 4), (64, 1), (64, 4)]
    for sources, _ in combinations:
        corpus.text_of("text", sources).make()
    settings = [_setting(sources, ranks, given.seconds) for sources, ranks in combinations]
    return compare(settings, given.chosen(COMPETITORS), TABLE, given)


def _setting(sources: int, ranks: int, seconds: float) -> Setting:
    # The meter starts when every source is well into its second row group: the first come before it, paid by nobody.
    warmup = 2 * corpus.text_of("text", sources).row_group_tokens * sources // (BATCH_TOKENS * ranks)
    measured = ("--seconds", str(seconds), "--warmup", str(warmup))
    arguments = ("--sources", str(sources), "--ranks", str(ranks), *measured)
    return Setting(f"{sources} sources, {ranks} rank{'s' * (ranks > 1)}", "text", arguments)


if __name__ == "__main__":
    sys.exit(main())
