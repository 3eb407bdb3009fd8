"""Schemes that fsspec reads: every format, versions checked on every read, retries, and schemes that are not there."""

import io
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import overlord as ol
from overlord.errors import SourceError, SpecError, StorageError
from overlord.sources import object_store
from overlord.sources.object_store import Retry
from overlord.sources.storage import Storage, storage_use

QUICK = Retry(deadline_s=20, first_wait_s=0.001, max_wait_s=0.002)
TABLE = pa.table({"tokens": [list(range(row % 9 + 1)) for row in range(60)]})


class Shaky(MemoryFileSystem):
    """Fails as often as `faults` says, and counts its reads."""

    protocol = "shaky"
    faults: ClassVar[list[Exception]] = []
    num_reads = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("shaky://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        type(self).num_reads += 1
        if self.faults:
            raise self.faults.pop()
        return super().cat_file(path, start=start, end=end, **options)


@pytest.fixture(autouse=True)
def files() -> Iterator[MemoryFileSystem]:
    fsspec.register_implementation("shaky", Shaky, clobber=True)
    object_store._stores.clear()
    memory = MemoryFileSystem()
    Shaky.faults = list[Exception]()
    Shaky.num_reads = 0
    for i in range(3):
        parquet, arrow = io.BytesIO(), io.BytesIO()
        pq.write_table(TABLE, parquet, row_group_size=10)
        with pa.ipc.new_file(arrow, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=10)
        memory.pipe_file(f"/corpus/deep/{i}.parquet", parquet.getvalue())
        memory.pipe_file(f"/corpus/deep/{i}.arrow", arrow.getvalue())
        memory.pipe_file(f"/corpus/deep/{i}.jsonl", b'{"tokens": [1, 2]}\n' * 20)
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("reader", [ol.Parquet, ol.ArrowIpc, ol.Jsonl])
@pytest.mark.parametrize("pattern", ["deep/*", "**/*", "de*/{0,1,2}"])
def test_every_format_is_read_by_any_pattern(reader, pattern):
    ending = {"Parquet": "parquet", "ArrowIpc": "arrow", "Jsonl": "jsonl"}[reader.__name__]
    source = reader(f"memory://corpus/{pattern}.{ending}")
    units = source.units()
    assert sorted({unit.path for unit in units}) == [f"memory://corpus/deep/{i}.{ending}" for i in range(3)]
    assert all(unit.version for unit in units)
    assert sum(source.read(unit).num_rows for unit in units) == (60 if ending == "jsonl" else 180)


def test_a_run_over_such_a_scheme_keeps_its_promises(tmp_path):
    source = ol.Parquet("memory://corpus/deep/*.parquet", window=2)
    ol.testing.assert_source_keeps_its_promises(source)
    job = ol.Job(sources={"a": source}, batch=ol.Batch(samples=8, sequence_length=16), cache=ol.Cache(tmp_path, 1 << 26))
    with ol.start(job) as loader:
        steps = [next(loader.client(0)) for _ in range(3)]
    assert len(steps) == 3
    assert storage_use()["memory://corpus"].num_bytes > 0


def test_a_file_that_was_replaced_is_noticed_by_every_read(files):
    storage = Storage(retry=QUICK)
    (file,) = storage.list_files(["memory://corpus/deep/0.jsonl"])
    assert storage.read(file, 0, 5).to_pybytes() == b'{"tok'
    files.pipe_file("/corpus/deep/0.jsonl", b"x" * file.num_bytes)
    with pytest.raises(
        SourceError, match=r"memory://corpus/deep/0\.jsonl has changed since it was listed: it has 380 bytes"
    ):
        storage.read(file, 0, 5)


def test_passing_faults_are_retried_and_others_are_not(caplog):
    storage = Storage(retry=QUICK)
    (file,) = storage.list_files(["shaky://corpus/deep/0.jsonl"])
    Shaky.faults = list[Exception]((TimeoutError("slow"), ConnectionResetError("gone")))
    assert storage.read(file, 0, 5).to_pybytes() == b'{"tok'
    assert "shaky://corpus/deep/0.jsonl: attempt 2 failed, again in 0.0 s: TimeoutError: slow" in caplog.text
    assert storage_use()["shaky://corpus"].num_retries == 2
    Shaky.faults = list[Exception]((PermissionError("no"),))
    Shaky.num_reads = 0
    with pytest.raises(
        SourceError, match=r"0\.jsonl may not be read with these credentials: give others in storage_options"
    ):
        storage.read(file, 0, 5)
    assert Shaky.num_reads == 1
    Shaky.faults = list[Exception]([TimeoutError("slow")] * 10)
    with pytest.raises(
        StorageError, match=r"did not answer in 1 attempts .*deadline_s=0\); the last error was: TimeoutError"
    ):
        Storage(retry=Retry(deadline_s=0)).read(file, 0, 5)


def test_what_is_not_there_is_named():
    with pytest.raises(SourceError, match=r"memory://corpus/none\.jsonl does not exist: check the name"):
        Storage(retry=QUICK).list_files(["memory://corpus/none.jsonl"])
    with pytest.raises(SourceError, match=r"nothing matches memory://corpus/deep/\*\.tar"):
        Storage(retry=QUICK).list_files(["memory://corpus/deep/*.tar"])
    with pytest.raises(
        SourceError, match="memory://corpus/deep is a folder: name the files in it, as in memory://corpus/deep/"
    ):
        Storage(retry=QUICK).list_files(["memory://corpus/deep"])


def test_schemes_that_are_unknown_or_not_installed_are_refused():
    with pytest.raises(SpecError, match=r"nowhere:// is not a known scheme; use a path, .* \(hf, msc, hdfs, "):
        Storage().list_files(["nowhere://bucket/file"])
    with pytest.raises(SpecError, match=r"gcs:// needs a package that is not installed"):
        Storage().list_files(["gcs://bucket/file"])
    with pytest.raises(SpecError, match=r"hdfs://127\.0\.0\.1:9 (are not understood, or it cannot|: hdfs:// needs)|hdfs"):
        Storage().list_files(["hdfs://127.0.0.1:9/file"])


def test_waits_of_retries_are_random_in_part():
    waits = [next(Retry(first_wait_s=1.0).waits()) for _ in range(50)]
    assert len(set(waits)) > 10
    assert all(0.5 <= wait <= 1.0 for wait in waits)
    assert [next(Retry(first_wait_s=1.0, jitter=0.0).waits()) for _ in range(3)] == [1.0] * 3
    with pytest.raises(SpecError, match="jitter is a part of each wait, from 0 to 1, got 2"):
        Retry(jitter=2)


def test_a_scheme_of_the_multi_storage_client_is_read_by_its_own_library(tmp_path, monkeypatch):
    """Over its storage provider for files, where it is installed: `make test-formats`."""
    pytest.importorskip("multistorageclient", reason="make test-formats runs this")
    data, config = tmp_path / "data", tmp_path / "msc.json"
    (data / "deep").mkdir(parents=True)
    for i in range(3):
        pq.write_table(pa.table({"id": range(20 * i, 20 * i + 20)}), data / "deep" / f"{i}.parquet")
    provider = {"type": "file", "options": {"base_path": str(data)}}
    config.write_text(json.dumps({"profiles": {"corpus": {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    source = ol.Parquet("msc://corpus/deep/*.parquet")
    ol.testing.assert_source_keeps_its_promises(source)
    units = source.units()
    assert [unit.path for unit in units] == [f"msc://corpus/deep/{i}.parquet" for i in range(3)]
    assert pa.concat_tables([source.read(unit) for unit in units])["id"].to_pylist() == list(range(60))
    pq.write_table(pa.table({"id": range(30)}), data / "deep" / "1.parquet")
    with pytest.raises(SourceError, match=r"msc://corpus/deep/1\.parquet has changed since it was listed"):
        source.read(units[1])
    with pytest.raises(SourceError, match=r"nothing matches msc://corpus/none/\*\.parquet"):
        ol.Parquet("msc://corpus/none/*.parquet").units()
