"""The state: how long `state_dict()` takes and how large it is with 300 sources, how soon the first batch comes after
resuming far into a run, and what `import overlord` costs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from bench.measure import Spread
from overlord.checkpoint.form import contents_of, with_checksum

SOURCES = 300
STEPS_BEFORE = 200
FAR = 100_000


def job_in(folder: Path) -> ol.Job:
    rng = np.random.default_rng(0)
    for i in range(SOURCES):
        lengths = np.clip(rng.lognormal(5, 1, 200).astype(int), 8, 2048)
        tokens = [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]
        table = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"source-{i:03}.parquet", row_group_size=50, compression="zstd")
    sources = {f"source-{i:03}": ol.Parquet(str(folder / f"source-{i:03}.parquet")) for i in range(SOURCES)}
    mixture = ol.Mixture({name: 1 + i % 7 for i, name in enumerate(sources)}, unit="tokens")
    return ol.Job(sources=sources, mixture=mixture, batch=ol.Batch(tokens=32 * 2048, sequence_length=2048))


def state_costs(job: ol.Job) -> tuple[Spread, int, dict[str, Any]]:
    """Milliseconds of `state_dict()`, its size as JSON, and a state."""
    with ol.start(job) as loader:
        client = loader.client(0)
        taken: list[float] = []
        state: dict[str, Any] = {}
        for _ in range(STEPS_BEFORE):
            next(client)
            begun = time.perf_counter()
            state = client.state_dict()
            taken.append((time.perf_counter() - begun) * 1000)
        return Spread.of(taken), len(json.dumps(state)), state


def far_along(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that went on at the same rate up to step FAR: a cursor is only a number."""
    state = contents_of(state)
    factor = FAR / state["step"]
    moved = {
        name: [int(chunk * factor), row, int(samples * factor), int(tokens * factor), *rest]
        for name, (chunk, row, samples, tokens, *rest) in state["sources"].items()
    }
    return with_checksum({**state, "step": FAR, "sources": moved, "carried": None})


def first_batch_s(job: ol.Job, resume: dict[str, Any] | None) -> float:
    begun = time.perf_counter()
    with ol.start(job, resume=resume) as loader:
        next(loader.client(0))
        return time.perf_counter() - begun


def import_s() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import overlord"], check=True)
    whole = time.perf_counter() - begun
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return whole - (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.state", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = job_in(Path(folder))
        taken, size, state = state_costs(job)
        far = far_along(state)
        pairs = [(first_batch_s(job, None), first_batch_s(job, far)) for _ in range(given.rounds)]
        imports = Spread.of([import_s() for _ in range(given.rounds)])
    result = {
        "state_dict_ms": taken,
        "state_bytes": size,
        "first_batch_s": Spread.of([first for first, _ in pairs]),
        "first_batch_after_resume_s": Spread.of([after for _, after in pairs]),
        "resume_over_start": Spread.of([after / first for first, after in pairs]),
        "import_s": imports,
    }
    if given.json:
        print(json.dumps({k: v if isinstance(v, int) else [v.median, v.low, v.high] for k, v in result.items()}))
        return
    print(f"{SOURCES} sources; median (smallest-largest)")
    print(f"  state_dict()                      {taken} ms, {size:,} bytes as JSON")
    print(f"  first batch at step 0             {result['first_batch_s']} s")
    print(f"  first batch resumed at {FAR:,}    {result['first_batch_after_resume_s']} s")
    print(f"  the ratio of the two              {result['resume_over_start']}")
    print(f"  import overlord                   {imports} s")


if __name__ == "__main__":
    main()
