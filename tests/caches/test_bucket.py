"""A cache in an object store, against an S3 server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

import overlord as ol
from overlord.caches import bucket as bucket_module
from overlord.caches.bucket import CacheBucket, _buckets, open_cache
from overlord.caches.folder import _folders, digest_key
from overlord.chunks import row_cache
from overlord.errors import SpecError
from overlord.sources.object_store import Retry
from tests.buckets import s3_bucket

CREDENTIALS: dict[str, Any] = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_bucket("kept") as options:
        yield options["endpoint"]


def cache_at(endpoint: str, folder: str, max_bytes: int = 1 << 26) -> ol.Cache:
    return ol.Cache(f"s3://kept/{folder}", max_bytes, storage_options={**CREDENTIALS, "endpoint": endpoint})


def client(endpoint: str) -> S3Store:
    return S3Store("kept", endpoint=endpoint, client_options={"allow_http": True}, **CREDENTIALS)


def test_what_is_put_is_got_and_a_damaged_object_is_deleted(endpoint):
    cache = CacheBucket(cache_at(endpoint, "one"))
    key = digest_key("chunks", "a")
    assert cache.get(key) is None
    assert cache.put(key, [b"hello ", b"world"], 1.0)
    assert cache.put(key, [b"hello ", b"world"], 1.0)
    found = cache.get(key)
    assert found is not None
    assert found.to_pybytes() == b"hello world"
    (path,) = [meta["path"] for page in obstore.list(client(endpoint), "one") for meta in page]
    obstore.put(client(endpoint), path, b"damaged")
    assert cache.get(key) is None
    assert cache.get(key) is None
    use = cache.use()["chunks"]
    assert (use.hits, use.misses, use.damaged) == (1, 3, 1)
    assert cache.put(key, [b"hello"], 1.0)


def test_the_oldest_objects_make_room(endpoint):
    cache = CacheBucket(cache_at(endpoint, "two", 1 << 20))
    for number in range(30):
        assert cache.put(digest_key("chunks", str(number)), [bytes(100_000)], 1.0)
    sizes = [meta["size"] for page in obstore.list(client(endpoint), "two") for meta in page]
    assert 500_000 < sum(sizes) <= 1 << 20
    assert cache.get(digest_key("chunks", "29")) is not None
    assert cache.get(digest_key("chunks", "0")) is None
    assert cache.use()["chunks"].evicted_bytes > 0


def test_a_run_takes_its_rows_from_the_store(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(row_cache, "_KEEPING_SHARE", 1e6)  # these few rows cost less to make than to keep
    texts = [f"{row} " * (1 + row % 5) for row in range(64)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=8)
    transform = ol.Tokenize("text", encoding=ol.ByteTokenizer())
    source = ol.Parquet(str(tmp_path / "a.parquet"), transform=transform, window=2)

    def read(cache: ol.Cache | None) -> tuple[list[Any], Any]:
        _buckets.clear()
        _folders.clear()  # counters are of the process
        job = ol.Job(sources={"a": source}, batch=ol.Batch(samples=8, sequence_length=64), cache=cache, num_workers=0)
        with ol.start(job) as loader:
            steps = islice(loader.client(0), 12)
            found = [[micro["tokens"].tolist() for micro in step.microbatches] for step in steps]
            return found, loader.metrics().caches.get("chunks")

    bare, _ = read(None)
    first, _ = read(cache_at(endpoint, "run"))
    second, used = read(cache_at(endpoint, "run"))
    assert first == bare == second
    assert used.misses == 0
    assert used.hits > 8


def test_a_store_that_does_not_answer_costs_little_and_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(bucket_module, "_RETRY", Retry(deadline_s=0.05, first_wait_s=0.01, max_wait_s=0.02))
    cache = CacheBucket(cache_at("http://127.0.0.1:9", "gone"))
    key = digest_key("chunks", "a")
    for _ in range(3):
        assert cache.get(key) is None
        assert not cache.put(key, [b"x"], 1.0)
    told = [text for text in caplog.messages if text.startswith("the cache s3://kept/gone cannot be used, and the run")]
    assert len(told) == 1
    assert cache.use()["chunks"].failures == 1


def test_a_url_without_a_bucket_is_refused():
    with pytest.raises(SpecError, match="the cache s3:// names no bucket: write s3://bucket/folder"):
        open_cache(ol.Cache("s3://", 1 << 30))
