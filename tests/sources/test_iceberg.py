"""Iceberg tables, written by pyiceberg where it is installed (`make test-formats`)."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import SchemaError, SourceError, SpecError
from overlord.formats import Iceberg

TABLE = pa.table({"id": range(1000), "tokens": [list(range(1, 2 + i % 9)) for i in range(1000)], "text": ["x"] * 1000})


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def ids(source: ol.Source) -> list[int]:
    return sorted(read_all(source)["id"].to_numpy().tolist())


def test_without_its_library_a_table_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("overlord.sources.files.import_module", missing)
    with pytest.raises(SpecError, match=r"Iceberg needs the library pyiceberg.*'overlord-dataloader\[iceberg\]'"):
        Iceberg("a").units()


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    reason = "make test-formats runs these"
    pytest.importorskip("pyiceberg", reason=reason)
    pytest.importorskip("sqlalchemy", reason=reason)
    monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__WAREHOUSE", f"file://{tmp_path}")
    from pyiceberg.catalog.sql import SqlCatalog  # pyright: ignore[reportMissingImports]

    found = SqlCatalog("local", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    found.create_namespace("db")
    yield found
    found.close()


def make_table(catalog: Any, name: str = "db.web") -> tuple[Any, str]:
    table = catalog.create_table(name, TABLE.schema)
    return table, table.location().removeprefix("file://")


def test_a_snapshot_is_the_files_of_its_manifests(catalog: Any) -> None:
    table, path = make_table(catalog)
    table.append(TABLE.slice(0, 600))
    first = table.current_snapshot().snapshot_id
    table.append(TABLE.slice(600))
    source = Iceberg(path, ["id", "tokens"])
    ol.testing.assert_source_keeps_its_promises(source)
    assert ids(source) == list(range(1000))
    assert ids(Iceberg(path, ["id"], snapshot=first)) == list(range(600))
    assert ids(Iceberg(table.metadata_location.removeprefix("file://"))) == list(range(1000))
    assert ids(Iceberg("db.web", catalog="local")) == list(range(1000))
    assert f"snapshot={table.current_snapshot().snapshot_id}" in source.identity()
    assert all(Path(unit.path).is_file() for unit in source.units())
    table.delete("id < 10")  # writes the files anew
    assert ids(Iceberg(path)) == list(range(10, 1000))


def test_a_run_resumes_exactly_and_a_newer_snapshot_is_refused(catalog: Any) -> None:
    table, path = make_table(catalog)
    table.append(TABLE)
    first = table.current_snapshot().snapshot_id

    def job(snapshot: int | None = None) -> ol.Job:
        source = Iceberg(path, ["tokens"], snapshot)
        return ol.Job(sources={"a": source}, batch=ol.Batch(tokens=64, sequence_length=32))

    ol.testing.assert_resumes_exactly(job(), 8, 3)
    with ol.start(job()) as loader:
        state = loader.state_dict()
    table.append(TABLE)
    with pytest.raises(ol.errors.StateError, match="'a'"), ol.start(job(), resume=state):
        pass
    with ol.start(job(first), resume=state) as loader:
        assert loader.start_step == 0


def test_a_snapshot_that_is_gone_is_an_error_that_names_those_that_are_left(catalog: Any) -> None:
    table, path = make_table(catalog)
    with pytest.raises(SourceError, match=r"has no snapshot yet: nothing was written to it"):
        Iceberg(path).units()
    table.append(TABLE.slice(0, 500))
    first = table.current_snapshot().snapshot_id
    old = Iceberg(path, snapshot=first)
    units = old.units()
    table.overwrite(TABLE.slice(500))
    table.maintenance.expire_snapshots().by_id(first).commit()
    kept = [each.snapshot_id for each in table.metadata.snapshots]
    message = rf"has no snapshot {first} \(it has {', '.join(map(str, kept))}\): it has expired, or never was; name one"
    with pytest.raises(SourceError, match=message):
        old.units()
    os.unlink(units[0].path)  # as those do that clean up after snapshots have expired
    with pytest.raises(SourceError, match=r"\.parquet does not exist"):
        old.read(units[0])


def test_columns_that_mean_other_things_in_older_files_are_refused(catalog: Any) -> None:
    table, path = make_table(catalog)
    table.append(TABLE)
    with table.update_schema() as update:
        update.rename_column("text", "body")
    table.append(TABLE.rename_columns(["id", "tokens", "body"]))
    assert ids(Iceberg(path, ["id"])) == sorted([*range(1000)] * 2)
    with pytest.raises(SchemaError, match=r"snapshot \d+ of .* has the column 'body', which was renamed.*leave it out"):
        Iceberg(path, ["id", "body"]).units()
    with pytest.raises(SchemaError, match="which was renamed, or dropped and added again"):
        Iceberg(path).units()
    with pytest.raises(SchemaError, match=r"has no column 'none'; it has \('id', 'tokens', 'body'\)"):
        Iceberg(path, ["none"]).units()
    with table.update_schema() as update:
        update.delete_column("body")
    table.append(TABLE.drop_columns("text"))
    assert read_all(Iceberg(path)).column_names == ["id", "tokens"]  # files have it, the table does not


def test_deleted_rows_in_files_of_their_own_are_refused(catalog: Any) -> None:
    table, path = make_table(catalog)
    table.append(TABLE)
    add_position_deletes(table)
    with pytest.raises(SourceError, match=r"snapshot \d+ of .* has deleted rows in files of their own: merge them"):
        Iceberg(path).units()


def add_position_deletes(table: Any) -> None:
    """Adds a manifest of deletes to the current snapshot, which pyiceberg does not write itself."""
    from pyiceberg import manifest  # pyright: ignore[reportMissingImports]

    class DeletesWriter(manifest.ManifestWriterV2):
        def content(self) -> Any:
            return manifest.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    snapshot = table.current_snapshot()
    (data,) = (entry for each in snapshot.manifests(table.io) for entry in each.fetch_manifest_entry(table.io))
    deleted = manifest.DataFile.from_args(
        content=manifest.DataFileContent.POSITION_DELETES,
        file_path=f"{table.location()}/data/deletes.parquet",
        file_format=manifest.FileFormat.PARQUET,
        partition=data.data_file.partition,
        record_count=1,
        file_size_in_bytes=100,
    )
    output = table.io.new_output(f"{table.location()}/metadata/deletes.avro")
    with DeletesWriter(table.spec(), table.schema(), output, snapshot.snapshot_id, "deflate") as writer:
        writer.add(
            manifest.ManifestEntry.from_args(
                status=manifest.ManifestEntryStatus.ADDED, snapshot_id=snapshot.snapshot_id, data_file=deleted
            )
        )
    with manifest.write_manifest_list(
        2,
        table.io.new_output(f"{table.location()}/metadata/with-deletes.avro"),
        snapshot.snapshot_id,
        snapshot.parent_snapshot_id,
        snapshot.sequence_number,
        "deflate",
    ) as listed:
        listed.add_manifests([*snapshot.manifests(table.io), writer.to_manifest_file()])
    path = Path(table.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    metadata["snapshots"][-1]["manifest-list"] = f"{table.location()}/metadata/with-deletes.avro"
    path.write_text(json.dumps(metadata))


def test_damaged_metadata_and_manifests_are_errors_that_name_them(catalog: Any, tmp_path: Path) -> None:
    table, path = make_table(catalog)
    table.append(TABLE)
    metadata = Path(table.metadata_location.removeprefix("file://"))
    text = metadata.read_text()
    metadata.write_text(text[:-20])
    with pytest.raises(SourceError, match=rf"{metadata.name} is not the metadata of an Iceberg table"):
        Iceberg(path).units()
    metadata.write_text(text)
    listed = Path(table.current_snapshot().manifest_list.removeprefix("file://"))
    data = listed.read_bytes()
    for damaged in (data[:-30], b"Obj" + data[4:], b""):
        listed.write_bytes(damaged)
        with pytest.raises(SourceError, match=r"snapshot \d+ of .* has a manifest that cannot be read"):
            Iceberg(path).units()
    listed.write_bytes(data)
    (manifest,) = (path for path in metadata.parent.glob("*.avro") if path != listed)
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-40])
    with pytest.raises(SourceError, match=rf"{manifest.name} has .* bytes, and the list of manifests says {len(whole):,}"):
        Iceberg(path).units()
    manifest.write_bytes(whole)
    listed.unlink()
    with pytest.raises(SourceError, match=rf"{listed.name} does not exist"):
        Iceberg(path).units()
    shutil.copy(metadata, metadata.with_name(f"00001-{'0' * 8}.metadata.json"))
    with pytest.raises(SourceError, match="has 2 newest metadata files: name one"):
        Iceberg(path).units()
    with pytest.raises(SourceError, match=r"none cannot be opened as an Iceberg table: it has no metadata/\*"):
        Iceberg(tmp_path / "none").units()
    with pytest.raises(SourceError, match=r"db\.none cannot be found in the catalog 'local'"):
        Iceberg("db.none", catalog="local").units()
    with pytest.raises(SpecError, match="Iceberg reads one table, and paths names 2"):
        Iceberg(["a", "b"]).units()


def test_a_table_in_a_bucket_is_read_through_our_own_storage(catalog: Any, tmp_path: Path) -> None:
    moto = pytest.importorskip("moto.server")
    import urllib.request

    import obstore
    from obstore.store import S3Store

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/lake", method="PUT")).close()
        keys: dict[str, Any] = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}
        properties = {
            "s3.endpoint": endpoint,
            "s3.access-key-id": "x",
            "s3.secret-access-key": "y",
            "s3.region": "us-east-1",
        }
        from pyiceberg.catalog.sql import SqlCatalog  # pyright: ignore[reportMissingImports]

        remote = SqlCatalog("far", uri=f"sqlite:///{tmp_path}/far.db", warehouse="s3a://lake/warehouse", **properties)
        remote.create_namespace("db")
        table = remote.create_table("db.web", TABLE.schema)
        table.append(TABLE)
        remote.close()
        store = S3Store("lake", endpoint=endpoint, client_options={"allow_http": True}, **keys)
        assert any(each["path"].endswith(".parquet") for batch in obstore.list(store) for each in batch)
        options = {**keys, "endpoint": endpoint}
        path = table.location().replace("s3a://", "s3://")
        source = Iceberg(path, ["id", "tokens"], storage_options=options)
        ol.testing.assert_source_keeps_its_promises(source)
        assert ids(source) == list(range(1000))
        with pytest.raises(SourceError, match=r"s3://lake/none cannot be opened as an Iceberg table"):
            Iceberg("s3://lake/none", storage_options=options).units()
    finally:
        server.stop()
