"""Lance datasets and Delta tables, written by their own libraries where these are installed (`make test-formats`)."""

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import SchemaError, SourceError, SpecError, StorageError
from overlord.formats import Delta, Lance
from overlord.lineage.obtaining import open_log
from tests.buckets import s3_bucket
from tests.sources.recording import RECORDED, lake_table
from tests.sources.test_s3 import Proxy

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


def test_files_of_a_delta_table_may_have_texts_as_views_of_strings(deltalake: Any) -> None:
    assert (
        read_all(Delta(RECORDED / "delta"))
        .sort_by("id")
        .equals(lake_table(5).cast(read_all(Delta(RECORDED / "delta")).schema))
    )
    assert read_all(Delta(RECORDED / "delta")).schema.field("text").type == pa.string()


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Tables in a bucket behind a proxy that fails on demand, and the options that reach them."""
    lance, deltalake = (pytest.importorskip(name, reason=WHY) for name in ("lance", "deltalake"))
    with s3_bucket("lake") as options:
        keys = {f"aws_{name}": value for name, value in options.items()}
        written = {**keys, "aws_allow_http": "true", "aws_s3_allow_unsafe_rename": "true"}
        lance.write_dataset(TABLE, "s3://lake/web.lance", storage_options=written, max_rows_per_file=400)
        deltalake.write_deltalake("s3://lake/web", TABLE, storage_options=written)
        proxy = Proxy(options["endpoint"].removeprefix("http://"))
        proxy.start()
        yield proxy, {**options, "endpoint": f"http://127.0.0.1:{proxy.port}"}
        proxy.stop()


@pytest.mark.parametrize("kind", [Lance, Delta])
def test_tables_in_a_bucket_are_read_though_requests_fail(far: Any, kind: Any) -> None:
    proxy, options = far
    source = kind("s3://lake/web.lance" if kind is Lance else "s3://lake/web", ["id"], storage_options=options)
    ol.testing.assert_source_keeps_its_promises(source)
    proxy.faults.extend([503, "drop", 500])
    assert sorted(read_all(source)["id"].to_numpy().tolist()) == list(range(1000))
    assert not proxy.faults
    units = source.units()
    proxy.faults.extend([503, "drop", 500])
    assert source.read(units[0]).num_rows == units[0].num_rows
    assert not proxy.faults
    assert all(unit.path.startswith("s3://lake/web") for unit in units)


def test_a_bucket_without_the_table_is_a_source_error(far: Any) -> None:
    _, options = far
    with pytest.raises(SourceError, match=r"s3://lake/none\.lance cannot be opened as a Lance dataset"):
        Lance("s3://lake/none.lance", storage_options=options).units()
    with pytest.raises(SourceError, match=r"s3://lake/none cannot be opened as a Delta table"):
        Delta("s3://lake/none", storage_options=options).units()


def test_storage_that_stays_silent_is_a_storage_error(lance: Any, deltalake: Any) -> None:
    nobody = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1", "endpoint": "http://127.0.0.1:9"}
    retries = {"client_max_retries": "0", "client_retry_timeout": "1"}
    with pytest.raises(StorageError, match=r"s3://lake/web\.lance cannot be opened .* storage did not answer"):
        Lance("s3://lake/web.lance", storage_options={**nobody, **retries}).units()
    with pytest.raises(StorageError, match=r"s3://lake/web cannot be opened .* storage did not answer"):
        Delta("s3://lake/web", storage_options=nobody, retry=ol.policies.Retry(deadline_s=0)).units()


@pytest.mark.parametrize("kind", ["lance", "delta"])
def test_lineage_names_the_file_and_the_row(lance: Any, deltalake: Any, tmp_path: Path, kind: str) -> None:
    if kind == "lance":
        lance.write_dataset(TABLE, str(tmp_path / "web"), max_rows_per_file=400)
        source: Any = Lance(tmp_path / "web", ["id", "tokens"], unit_rows=150)
    else:
        deltalake.write_deltalake(str(tmp_path / "web"), TABLE)
        source = Delta(tmp_path / "web", ["id", "tokens"])
    job = ol.Job(sources={"web": source}, batch=ol.Batch(tokens=64, sequence_length=32, columns=("id",)))
    with ol.start(job, log=tmp_path / "log") as loader:
        client = loader.client(0, timeout_s=60)
        steps = [[list(map(int, micro["tokens"].ravel())) for micro in next(client)] for _ in range(4)]
    firsts = {unit.path: [each for each in source.units() if each.path == unit.path] for unit in source.units()}
    found = open_log(job, tmp_path / "log")
    for number, micros in enumerate(steps):
        for document in found.documents(number, 0):
            assert Path(document.file).is_file()
            assert document.file_row is not None
            rows: Any = pa.concat_tables([source.read(unit) for unit in firsts[document.file]])["tokens"].to_pylist()
            tokens = micros[document.microbatch][document.place : document.place + document.tokens]
            assert tokens == rows[document.file_row][document.start : document.stop]


def test_damaged_manifests_of_lance_are_errors_that_name_the_dataset(lance: Any, tmp_path: Path) -> None:
    assert read_all(Lance(RECORDED / "lance"))["id"].to_pylist() == list(range(5, 60))
    newest = min((RECORDED / "lance" / "_versions").glob("*.manifest"))
    data = newest.read_bytes()
    name = next((RECORDED / "lance" / "data").iterdir()).name.encode()
    damages = {
        "cut": data[:344],
        "empty": b"",
        "length": data[:-16] + (1 << 40).to_bytes(8, "little") + data[-8:],  # its library panics
        "file": data.replace(name, b"x" * len(name)),
    }
    for damage, content in damages.items():
        folder = tmp_path / damage
        shutil.copytree(RECORDED / "lance", folder)
        (folder / "_versions" / newest.name).write_bytes(content)
        with pytest.raises(SourceError, match=rf"{damage} cannot be (opened as a Lance dataset|listed by Lance)"):
            Lance(folder).units()


def test_damaged_lists_of_deleted_rows_are_errors_that_name_them(lance: Any, tmp_path: Path) -> None:
    (whole,) = (RECORDED / "lance" / "_deletions").iterdir()
    data = whole.read_bytes()
    first = data.index(b"".join(row.to_bytes(4, "little") for row in (1, 3, 0, 4, 2)))
    damages = {
        "twice": data[:first] + bytes([3]) + data[first + 1 :],
        "beyond": data[:first] + bytes([40]) + data[first + 1 :],
        "cut": data[:-20],
        "huge": data[:664] + bytes([196]) + data[665:],  # its library allocates a TiB, and ends the process
    }
    for damage, content in damages.items():
        folder = tmp_path / damage
        shutil.copytree(RECORDED / "lance", folder)
        (folder / "_deletions" / whole.name).write_bytes(content)
        with pytest.raises(SourceError, match=rf"{damage}/_deletions/{whole.name} .* restore it from a copy"):
            Lance(folder).units()


def test_zero_bytes_in_column_names_of_lance_are_errors(lance: Any, tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(RECORDED / "lance", folder)
    for manifest in (folder / "_versions").iterdir():
        manifest.write_bytes(manifest.read_bytes().replace(b"tokens", b"tok\0ns"))
    with pytest.raises(SourceError, match=r"the column 'tok\\x00ns' in the manifest of .*dataset has a zero byte"):
        Lance(folder).units()


def test_columns_that_are_not_used_are_neither_read_nor_checked(lance: Any, deltalake: Any, tmp_path: Path) -> None:
    """Other types and damaged pages of a column matter only where it is read."""
    changed = TABLE.set_column(2, "text", pa.array(range(1000)))
    deltalake.write_deltalake(str(tmp_path / "web"), TABLE)
    deltalake.write_deltalake(str(tmp_path / "web"), changed, mode="overwrite", schema_mode="overwrite")
    assert read_all(Delta(tmp_path / "web", ["id"])).num_rows == 1000
    assert read_all(Delta(tmp_path / "web", ["id"], 0)).column_names == ["id"]
    wide = TABLE.append_column("wide", pa.array(["y" * 5000] * 1000))
    lance.write_dataset(wide, str(tmp_path / "a.lance"))
    source = Lance(tmp_path / "a.lance", ["id"])
    assert source.units()[0].num_bytes < 100_000
    assert read_all(source).column_names == ["id"]
