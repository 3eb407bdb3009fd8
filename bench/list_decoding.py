"""Pre-tokenised Parquet, decoding alone: million tokens per CPU-second by Arrow and by Overlord's reader, which takes the
lists' levels apart itself (`overlord.sources.parquet_lists`). One thread, files in the page cache, rounds in turn.

    python -m bench.list_decoding [--rounds N] [--json]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

import overlord as ol
from bench import corpus
from bench.measure import Spread
from bench.telling import parser_of, tell

SOURCES = 4


@dataclass(frozen=True, slots=True)
class Decoding:
    row_group_tokens: int
    arrow: Spread
    overlord: Spread
    ratio: Spread


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(argv)
    tell([decoding(text.make(), given.rounds) for text in (corpus.TEXT_8, corpus.TEXT_64)], _show, given.json)
    return 0


def decoding(text: corpus.TextCorpus, rounds: int) -> Decoding:
    paths = text.paths[:SOURCES]
    files = [pq.ParquetFile(path, pre_buffer=False) for path in paths]
    sources = [ol.Parquet(path) for path in paths]
    readers = [(source.open_reader(release_gil=False), source.units()) for source in sources]
    tokens = SOURCES * text.row_groups * text.row_group_tokens / 1e6

    def by_arrow() -> None:
        for file in files:
            for group in range(file.num_row_groups):
                file.read_row_group(group, use_threads=False)

    def by_overlord() -> None:
        for reader, units in readers:
            for unit in units:
                reader.read_rows(unit)

    by_arrow()
    by_overlord()
    pairs = [(tokens / _cpu_seconds(by_arrow), tokens / _cpu_seconds(by_overlord)) for _ in range(rounds)]
    arrow, overlord = zip(*pairs, strict=True)
    return Decoding(text.row_group_tokens, Spread.of(arrow), Spread.of(overlord), Spread.of([b / a for a, b in pairs]))


def _cpu_seconds(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _show(result: Decoding) -> None:
    speeds = f"Arrow {result.arrow}, Overlord {result.overlord} M tokens / CPU s, ratio {result.ratio}"
    print(f"row groups of {result.row_group_tokens:,} tokens: {speeds}")


if __name__ == "__main__":
    sys.exit(main())
