"""Caches on every engine: the same stream, with what was made taken from the cache in the next run."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol


def costly(row: dict[str, Any]) -> dict[str, Any]:
    """Rows that cost little to make are not kept."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 5000)
    return row


def job_of(place: Path, cache: ol.Cache | None) -> ol.Job:
    transform = (ol.per_row(costly), ol.Tokenize("text", encoding=ol.ByteTokenizer()))
    sources = {name: ol.Parquet(str(place / f"{name}*.parquet"), transform=transform, window=2) for name in "ab"}
    return ol.Job(sources=sources, batch=ol.Batch(tokens=512, sequence_length=64), mesh=ol.Mesh(dp=2), cache=cache)


def read(start: Any, job: ol.Job, steps: int = 25) -> tuple[list[Any], dict[str, Any]]:
    with start(job) as loader:
        clients = [loader.client(rank) for rank in range(2)]
        found = [[next(client) for client in clients] for _ in range(steps)]
        return found, loader.metrics().caches


def tokens_of(steps: list[Any]) -> list[list[int]]:
    return [[int(t) for step in ranks for micro in step.microbatches for t in micro["tokens"]] for ranks in steps]


def test_a_cache_changes_no_step_and_saves_the_work_of_the_next_run(start, tmp_path):
    for name in "ab":
        for i in range(3):
            texts = [f"{name} {i} {row} " * (1 + row % 5) for row in range(40)]
            pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}{i}.parquet", row_group_size=8)
    cache = ol.Cache(tmp_path / "kept", 1 << 26)
    bare, _ = read(ol.start, job_of(tmp_path, None))
    first, before = read(start, job_of(tmp_path, cache))
    second, used = read(start, job_of(tmp_path, cache))
    assert tokens_of(first) == tokens_of(bare)
    assert tokens_of(second) == tokens_of(bare)
    assert len(list((tmp_path / "kept").rglob("chunks-*"))) == 30  # each unit once
    assert used["chunks"].hits > 15 + (before["chunks"].hits if start is ol.start else 0)


def test_steps_have_the_same_samples_with_a_cache_that_evicts(tmp_path):
    for name in "ab":
        texts = [f"{name} {row} " * (1 + row % 5) for row in range(400)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=1)
    bare, _ = read(ol.start, job_of(tmp_path, None))
    for _ in range(2):
        found, _ = read(ol.start, job_of(tmp_path, ol.Cache(tmp_path / "kept", 1 << 20)))
        assert tokens_of(found) == tokens_of(bare)
    assert sum(path.stat().st_size for path in (tmp_path / "kept").rglob("*") if path.is_file()) <= 1 << 20
