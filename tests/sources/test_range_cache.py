"""Bytes of remote storage on disk: read once, whatever the format, fetched ahead, and never of another version."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from bench.slow_store import SlowStore
from overlord.caches.folder import _folders
from overlord.chunks import row_cache
from overlord.errors import SourceError
from overlord.sources.range_cache import FetchAhead, _range_caches
from overlord.sources.storage import Storage, join_ranges
from tests.full_disk import full_disk

ROWS = 120


def objects() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for i in range(3):
        table = pa.table({"tokens": [list(range(i * 1000 + row, i * 1000 + row + row % 9 + 1)) for row in range(ROWS)]})
        parquet, arrow = io.BytesIO(), io.BytesIO()
        pq.write_table(table, parquet, row_group_size=10)
        with pa.ipc.new_file(arrow, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
        found[f"{i}.parquet"], found[f"{i}.arrow"] = parquet.getvalue(), arrow.getvalue()
        found[f"{i}.jsonl"] = b"\n".join(map(orjson.dumps, table.to_pylist()))
        found[f"{i}.jsonl.gz"] = pa.compress(found[f"{i}.jsonl"], "gzip", asbytes=True)
    return found


@pytest.fixture
def store() -> Iterator[SlowStore]:
    made = SlowStore(objects())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _forget_folders():
    """Each run counts from zero, as in a process of its own."""
    forget()


def forget() -> None:
    _folders.clear()
    _range_caches.clear()


SOURCES: dict[str, Any] = {
    "parquet": (ol.Parquet, {}),
    "arrow": (ol.ArrowIpc, {"unit_bytes": 2000}),
    "jsonl": (ol.Jsonl, {"unit_bytes": 2000}),
    "jsonl.gz": (ol.Jsonl, {"unit_bytes": 2000}),
}


def job_of(store: SlowStore, kind: str, cache: ol.Cache | None, **options: Any) -> ol.Job:
    reader, own = SOURCES[kind]
    source = reader(f"s3://data/*.{kind}", storage_options=store.options, window=3, **own, **options)
    return ol.Job(sources={"a": source}, batch=ol.Batch(samples=30, sequence_length=64), cache=cache, num_workers=1)


def read(job: ol.Job, steps: int) -> tuple[list[Any], dict[str, Any]]:
    with ol.start(job) as loader:
        client = loader.client(0)
        found = [[micro["tokens"].tolist() for micro in next(client).microbatches] for _ in range(steps)]
        return found, loader.metrics().caches


def gets(store: SlowStore) -> list[str]:
    return [line for line in store.requests if line.startswith("GET") and "list-type" not in line]


@pytest.mark.parametrize("kind", SOURCES)
def test_remote_bytes_are_read_in_the_first_run_alone(store, tmp_path, kind):
    bare, _ = read(job_of(store, kind, None), 26)
    cache = ol.Cache(tmp_path / "kept", 1 << 26, files=True)
    first, _ = read(job_of(store, kind, cache), 26)
    requests = gets(store)[-1:]
    store.requests.clear()
    forget()
    second, used = read(job_of(store, kind, cache), 26)
    assert requests
    assert first == bare == second
    assert gets(store) == []
    assert used["files"].hits > 0
    assert used["files"].misses == 0


def test_an_object_that_was_replaced_is_read_anew(store, tmp_path):
    cache = ol.Cache(tmp_path / "kept", 1 << 26)
    read(job_of(store, "parquet", cache), 12)
    table = pa.table({"tokens": [[7_000_000 + row] * 3 for row in range(ROWS)]})
    new = io.BytesIO()
    pq.write_table(table, new, row_group_size=10)
    store.objects["1.parquet"] = new.getvalue()
    forget()
    found, _ = read(job_of(store, "parquet", cache), 12)
    bare, _ = read(job_of(store, "parquet", None), 12)
    assert found == bare
    assert any(token >= 7_000_000 for step in found for micro in step for token in micro)


def test_an_object_that_changes_during_a_run_is_an_error_where_it_is_not_kept(store, tmp_path):
    storage = Storage(tuple(store.options.items()), cache=ol.Cache(tmp_path, 1 << 26), keeps_data=True)
    (file,) = storage.list_files(["s3://data/0.jsonl"])
    kept = storage.read(file, 0, 100).to_pybytes()
    store.objects["0.jsonl"] = bytes(len(store.objects["0.jsonl"]))
    assert storage.read(file, 0, 100).to_pybytes() == kept  # the listed version
    with pytest.raises(SourceError, match=r"s3://data/0\.jsonl has changed since it was listed"):
        storage.read(file, 100, 200)


def test_without_files_only_what_listing_reads_is_kept(store, tmp_path, monkeypatch):
    monkeypatch.setattr(row_cache, "_KEEPING_SHARE", 1e6)  # these few rows cost less to make than to keep
    cache = ol.Cache(tmp_path / "kept", 1 << 26)
    job = job_of(store, "parquet", cache, transform=ol.Pick("tokens"))
    read(job, 5)
    read_first = len(gets(store))
    store.requests.clear()
    forget()
    _, used = read(job, 5)
    assert used["files"].hits == 3  # footers
    assert used["chunks"].hits > 0
    assert len(gets(store)) < read_first
    forget()
    _, used = read(job_of(store, "parquet", ol.Cache(tmp_path / "none", 1 << 26, files=False)), 5)
    assert "files" not in used


def test_a_full_disk_and_a_small_cache_change_nothing(store, tmp_path):
    bare, _ = read(job_of(store, "parquet", None), 12)
    with full_disk(2000):
        found, used = read(job_of(store, "parquet", ol.Cache(tmp_path / "full", 1 << 26)), 12)
    assert found == bare
    assert used["files"].failures >= 1
    found, _ = read(job_of(store, "parquet", ol.Cache(tmp_path / "small", 1 << 20)), 26)
    assert found[:12] == bare


def test_ranges_are_joined_over_small_gaps_and_read_side_by_side(store):
    assert join_ranges([(10, 20), (25, 30), (5 << 20, 6 << 20)]) == [(10, 30), (5 << 20, 6 << 20)]
    assert join_ranges([]) == []
    storage = Storage(tuple(store.options.items()))
    (file,) = storage.list_files(["s3://data/0.jsonl"])
    store.requests.clear()
    found = storage.read_ranges(file, [(10, 20), (300, 310)])
    assert found.keys() == {10}
    assert found[10].to_pybytes() == store.objects["0.jsonl"][10:310]
    assert gets(store) == ["GET 0.jsonl bytes=10-309"]


def test_the_next_chunks_are_fetched_while_the_first_is_used(store, tmp_path):
    storage = Storage(tuple(store.options.items()), cache=ol.Cache(tmp_path, 1 << 26), keeps_data=True)
    (file,) = storage.list_files(["s3://data/0.jsonl"])
    ahead = FetchAhead(storage, lambda chunk: [(file, chunk * 10, chunk * 10 + 10)] if chunk < 20 else None, 1 << 26)
    ahead.note(0)
    ahead.note(2)  # every second chunk is for another loader
    wanted = {f"GET 0.jsonl bytes={chunk * 10}-{chunk * 10 + 9}" for chunk in range(4, 20, 2)}
    wait_until(lambda: wanted <= set(gets(store)))
    wait_until(lambda: len(list(Path(tmp_path).rglob("files-*"))) >= len(wanted))
    ahead.close()
    store.requests.clear()
    assert storage.read(file, 40, 50).to_pybytes() == store.objects["0.jsonl"][40:50]
    assert "GET 0.jsonl bytes=40-49" not in gets(store)  # of others, a request may be on its way still


def test_no_more_is_fetched_ahead_than_a_quarter_of_the_cache(store, tmp_path):
    storage = Storage(tuple(store.options.items()), cache=ol.Cache(tmp_path, 1 << 26), keeps_data=True)
    (file,) = storage.list_files(["s3://data/0.jsonl"])
    ahead = FetchAhead(storage, lambda chunk: [(file, chunk % 50, chunk % 50 + 1000)], 4 * 5000)
    ahead.note(0)
    wait_until(lambda: len(gets(store)) >= 5)
    wait_until(lambda: ahead._num_running == 0)
    assert len(gets(store)) == 5
    ahead.note(3)
    wait_until(lambda: ahead._num_running == 0 and len(gets(store)) == 8)
    ahead.close()


def test_chunks_ahead_are_the_loaders_own_as_soon_as_it_is_known_which_those_are(store, tmp_path):
    storage = Storage(tuple(store.options.items()), cache=ol.Cache(tmp_path, 1 << 26), keeps_data=True)
    (file,) = storage.list_files(["s3://data/0.jsonl"])
    ahead = FetchAhead(storage, lambda chunk: [(file, chunk * 10, chunk * 10 + 10)], 4 * 40)
    ahead.note(0)
    wait_until(lambda: len(gets(store)) == 4 and ahead._num_running == 0)  # 1, 2, 3, 4
    ahead.note(2)
    wait_until(lambda: len(gets(store)) == 6 and ahead._num_running == 0)
    ahead.close()
    assert set(gets(store)[4:]) == {"GET 0.jsonl bytes=60-69", "GET 0.jsonl bytes=80-89"}


def wait_until(condition: Any) -> None:
    import time

    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends, "waited for 30 s"
        time.sleep(0.005)
