"""Lance datasets and Delta tables, written by their own libraries where these are installed (`make test-formats`)."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import SchemaError, SourceError, SpecError
from overlord.formats import Delta, Lance

TABLE = pa.table({"id": range(1000), "tokens": [list(range(1, 2 + i % 9)) for i in range(1000)], "text": ["x"] * 1000})
WHY = "make test-formats runs these"


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def test_without_their_libraries_tables_are_errors_that_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("overlord.sources.files.import_module", missing)
    with pytest.raises(SpecError, match=r"Lance needs the library lance.*'overlord-dataloader\[lance\]'"):
        Lance("a.lance").units()
    with pytest.raises(SpecError, match=r"Delta needs the library deltalake.*'overlord-dataloader\[delta\]'"):
        Delta("a").units()


@pytest.fixture
def lance() -> Any:
    return pytest.importorskip("lance", reason=WHY)


def test_a_version_of_a_lance_dataset_is_read_whole_and_in_order(lance: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "a.lance")
    dataset = lance.write_dataset(TABLE, uri, max_rows_per_file=400)
    source = Lance(uri, ["text", "id"], unit_rows=150)
    ol.testing.assert_source_keeps_its_promises(source, most_units=20)
    assert [unit.num_rows for unit in source.units()] == [150, 150, 100, 150, 150, 100, 150, 50]
    assert all(Path(unit.path).is_file() for unit in source.units())
    assert read_all(source)["id"].to_pylist() == list(range(1000))
    first = source.units()
    dataset.delete("id >= 100 AND id < 120")
    lance.write_dataset(TABLE.slice(0, 5), uri, mode="append")
    kept = [i for i in range(1000) if not 100 <= i < 120]
    assert read_all(Lance(uri, ["id"]))["id"].to_pylist() == [*kept, *range(5)]
    assert read_all(Lance(uri, ["id"], version=2))["id"].to_pylist() == kept
    assert pa.concat_tables([source.read(unit) for unit in first])["id"].to_pylist() == list(range(1000))
    assert [Lance(uri, version=v).identity() for v in (None, 3)] == [
        f"Lance({uri!r}, version=3, columns=None, unit_rows=8192)"
    ] * 2


def test_a_lance_version_that_is_gone_is_an_error_at_the_start_and_in_a_run(lance: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "a.lance")
    lance.write_dataset(TABLE, uri)
    old = Lance(uri, version=1)
    units = old.units()
    lance.write_dataset(TABLE, uri, mode="overwrite")
    lance.dataset(uri).cleanup_old_versions(datetime.timedelta(0))
    message = r"a\.lance has no version 1 \(it has 2\): it was cleaned up, or never was; name one that is there"
    with pytest.raises(SourceError, match=message):
        old.units()
    with pytest.raises(SourceError, match=message):
        old.read(units[0])
    with pytest.raises(SourceError, match=r"none\.lance cannot be opened as a Lance dataset"):
        Lance(tmp_path / "none.lance").units()
    with pytest.raises(SchemaError, match=r"version 2 of .*a\.lance has no column 'none'"):
        Lance(uri, ["none"]).units()


def test_a_run_of_a_lance_dataset_resumes_exactly_and_a_newer_version_is_refused(lance: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "a.lance")
    lance.write_dataset(TABLE, uri)

    def job(version: int | None = None) -> ol.Job:
        source = Lance(uri, ["tokens"], version, unit_rows=100)
        return ol.Job(sources={"a": source}, batch=ol.Batch(tokens=64, sequence_length=32))

    ol.testing.assert_resumes_exactly(job(), 8, 3)
    with ol.start(job()) as loader:
        state = loader.state_dict()
    lance.write_dataset(TABLE, uri, mode="append")
    with pytest.raises(ol.errors.StateError, match="'a'"), ol.start(job(), resume=state):
        pass
    with ol.start(job(version=1), resume=state) as loader:
        assert loader.start_step == 0


@pytest.fixture
def deltalake() -> Any:
    return pytest.importorskip("deltalake", reason=WHY)


def test_a_version_of_a_delta_table_is_the_files_of_its_log(deltalake: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    deltalake.write_deltalake(uri, TABLE.slice(0, 600))
    deltalake.write_deltalake(uri, TABLE.slice(600), mode="append")
    source = Delta(uri, ["id"])
    ol.testing.assert_source_keeps_its_promises(source)
    assert sorted(read_all(source)["id"].to_numpy().tolist()) == list(range(1000))
    assert read_all(Delta(uri, ["id"], 0))["id"].to_pylist() == list(range(600))
    assert "version=1" in source.identity()
    deltalake.DeltaTable(uri).delete("id < 10")
    assert sorted(read_all(Delta(uri, ["id"]))["id"].to_numpy().tolist()) == list(range(10, 1000))
    with pytest.raises(SourceError, match=r"version 9 of .*table cannot be opened as a Delta table.*leave version out"):
        Delta(uri, version=9).units()
    with pytest.raises(SourceError, match=r"none cannot be opened as a Delta table"):
        Delta(tmp_path / "none").units()
    with pytest.raises(SpecError, match="Delta reads one table, and paths names 2"):
        Delta(["a", "b"]).units()


def test_a_partition_of_a_delta_table_is_no_column_of_its_files(deltalake: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    deltalake.write_deltalake(uri, TABLE.append_column("day", pa.array([i % 2 for i in range(1000)])), partition_by=["day"])
    assert sorted(read_all(Delta(uri))["id"].to_numpy().tolist()) == list(range(1000))
    with pytest.raises(SchemaError, match="is partitioned by 'day', which its files do not have"):
        Delta(uri, ["day"]).units()
