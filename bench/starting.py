"""What many sources cost: the time of `start` and of the first step, and memory for each source.

    python -m bench starting [--sources 1000] [--work parquet jsonl] [--engine embedded processes] [--data FOLDER] [--json]

Each source has a file of its own. `parquet` has token ids; `jsonl` has texts that a transform makes tokens of. Sources and
weights come from a table, as `ol.mixtures.read_table` reads it. The CPU time of `start` is that of all processes. Memory is
that of the process and, with worker processes, of those too, less what the same job takes with 1 source; after 20 steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

_STEPS = 20
_ROWS = 200


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench starting", description=__doc__)
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--work", nargs="+", choices=("parquet", "jsonl"), default=("parquet", "jsonl"))
    parser.add_argument("--engine", nargs="+", choices=("embedded", "processes"), default=("embedded", "processes"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(measure(given.data, given.work[0], given.sources, given.engine[0])))
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = given.data or Path(made)
        found = []
        for work in given.work:
            write(folder, work, given.sources)
            for engine in given.engine:
                base, many = (_in_process(folder, work, count, engine) for count in (1, given.sources))
                found.append({"work": work, "engine": engine, "sources": given.sources, **many})
                found[-1]["mb_a_source"] = (many["rss_bytes"] - base["rss_bytes"]) / 1e6 / given.sources
                if not given.json:
                    print(
                        f"{given.sources:,} {work} sources, {engine}: start {many['start_s']:.2f} s "
                        f"({many['start_cpu_s']:.2f} CPU s), first step after {many['first_s']:.2f} s more, "
                        f"{found[-1]['mb_a_source']:.2f} MB a source",
                        flush=True,
                    )
    if given.json:
        print(json.dumps(found))
    return 0


def write(folder: Path, work: str, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["name,path,weight"]
    for number in range(count):
        path = folder / f"{number:05d}.{work}"
        rows.append(f"source-{number:05d},{path},{1 + number % 7}")
        if path.exists():
            continue
        rng = np.random.default_rng(number)
        lengths = rng.integers(50, 400, _ROWS)
        if work == "parquet":
            tokens = [rng.integers(0, 50_000, length).astype(np.int32) for length in lengths]
            pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}), path, row_group_size=50)
        else:
            path.write_text("".join(json.dumps({"text": "word " * int(length // 5)}) + "\n" for length in lengths))
    (folder / f"{work}.csv").write_text("\n".join(rows) + "\n")


def _in_process(folder: Path, work: str, count: int, engine: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.starting", "--one", "--data", str(folder)]
    done = subprocess.run(
        [*command, "--work", work, "--sources", str(count), "--engine", engine], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, work: str, count: int, engine: str) -> dict[str, float]:
    import overlord as ol

    began = time.perf_counter()
    table = csv.read_csv(folder / f"{work}.csv").slice(0, count)
    transform = ol.Tokenize(encoding=ol.ByteTokenizer()) if work == "jsonl" else None
    job = ol.mixtures.read_table(table, transform=transform).job(batch=ol.Batch(sequence_length=4096, tokens=64 * 4096))
    declared = time.perf_counter()
    process, began_cpu = psutil.Process(), time.process_time()
    with ol.start(job, engine=ol.Embedded() if engine == "embedded" else ol.Processes(2)) as loader:
        started, start_cpu_s = time.perf_counter(), time.process_time() - began_cpu
        times = [each.cpu_times() for each in process.children(recursive=True)]
        start_cpu_s += sum(each.user + each.system for each in times)
        client = loader.client(0)
        next(client)
        first = time.perf_counter()
        for _ in range(_STEPS - 1):
            next(client)
        rss_bytes = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    return {
        "declare_s": declared - began,
        "start_s": started - declared,
        "start_cpu_s": start_cpu_s,
        "first_s": first - started,
        "rss_bytes": rss_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
