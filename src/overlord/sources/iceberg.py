"""The Parquet files of an Iceberg table at one of its snapshots. pyiceberg parses metadata and manifests; their bytes come
through the source's own storage, with its credentials and retries. The snapshot that is read is part of every state."""

from __future__ import annotations

import gzip
import io
import re
import struct
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from overlord.errors import SchemaError, SourceError, SpecError, StorageError
from overlord.sources.files import missing_column, needed_library
from overlord.sources.parquet import Parquet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.declare.source import Unit
    from overlord.sources.storage import StoredFile

_METADATA = ".metadata.json"
_MOST_NAMED = 8
# What pyiceberg raises for damaged files.
_DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, OSError, EOFError, MemoryError, SystemError)
_DAMAGE += (struct.error, zlib.error)


@dataclass(frozen=True)
class Iceberg(Parquet):
    """An Iceberg table at one of its snapshots; the current one unless given. `paths` is the table's folder, whose newest
    metadata file is taken, or a `.metadata.json` file; with `catalog`, the name of a catalog in pyiceberg's configuration,
    it is the table's name there. Its Parquet files are read like any others, by the
    columns that the table had then. Tables with deletes that are not yet merged
    into files are refused, and so are columns that were renamed, or dropped and added again.
    """

    snapshot: int | None = None
    catalog: str | None = None

    def units(self) -> list[Unit]:
        table = self._open()
        columns = self.columns or table.column_names
        self._check_columns(table, columns)
        return self.units_of(self._list_table(table), columns)

    def list_files(self) -> tuple[StoredFile, ...]:
        return self._list_table(self._open())

    def identity(self) -> str:
        snapshot = self._open().snapshot.snapshot_id if self.snapshot is None else self.snapshot
        return f"Iceberg({list(self.patterns)!r}, snapshot={snapshot}, columns={self.columns and list(self.columns)!r})"

    def _list_table(self, table: _TableSnapshot) -> tuple[StoredFile, ...]:
        manifest = needed_library("pyiceberg.manifest", "iceberg", "Iceberg")
        _use_checked_decoder()
        unlike = needed_library("pyiceberg.exceptions", "iceberg", "Iceberg").ResolveError
        storage = _ManifestIO(self)
        try:
            listed = list(manifest.read_manifest_list(storage.new_input(table.snapshot.manifest_list)))
            storage.lengths.update({each.manifest_path: each.manifest_length for each in listed})
            found = [(each, each.fetch_manifest_entry(storage)) for each in listed]
        except (unlike, *_DAMAGE) as error:
            if isinstance(error, (SourceError, StorageError)):
                raise
            raise SourceError(f"{table} has a manifest that cannot be read: {_one_line(error)}; restore it") from error
        if any(entries for each, entries in found if each.content == manifest.ManifestContent.DELETES):
            raise SourceError(
                f"{table} has deleted rows in files of their own: merge them into the data first (rewrite_data_files of "
                "Spark with delete-file-threshold 1, or OPTIMIZE of Trino), and name the snapshot after that"
            )
        files = [entry.data_file for _, entries in found for entry in entries]
        if other := [file for file in files if file.file_format != manifest.FileFormat.PARQUET]:
            raise SourceError(
                f"{table} has files of {other[0].file_format.value}, as {other[0].file_path}; only Parquet is read"
            )
        if not files:
            raise SourceError(f"{table} has no files")
        return self.list_beside(sorted(_stored_path(file.file_path) for file in files))

    def _check_columns(self, table: _TableSnapshot, columns: Sequence[str]) -> None:
        """Files are read by the names of their columns, and Iceberg knows columns by numbers: both must agree always."""
        for name in columns:
            if name not in table.column_names:
                raise missing_column(str(table), name, table.column_names)
        names: dict[int, set[str]] = {}
        numbers: dict[str, set[int]] = {}
        for schema in table.metadata.schemas:
            for name in schema.column_names:
                number = schema.find_field(name).field_id
                names.setdefault(number, set()).add(name)
                numbers.setdefault(name, set()).add(number)
        for name, found in numbers.items():
            if name.partition(".")[0] in columns and (len(found) > 1 or any(len(names[number]) > 1 for number in found)):
                raise SchemaError(
                    f"{table} has the column {name!r}, which was renamed, or dropped and added again: older files have "
                    "other data under this name; leave it out of columns, or write the table anew"
                )

    def _open(self) -> _TableSnapshot:
        needed_library("pyiceberg", "iceberg", "Iceberg")
        (path,) = self.patterns if len(self.patterns) == 1 else (None,)
        if path is None:
            raise SpecError(f"Iceberg reads one table, and paths names {len(self.patterns)}: make them sources of their own")
        location = self._newest_metadata(path) if self.catalog is None else self._look_up(self.catalog, path)
        metadata = self._read_metadata(location)
        found = metadata.current_snapshot() if self.snapshot is None else metadata.snapshot_by_id(self.snapshot)
        if found is None:
            known = [each.snapshot_id for each in metadata.snapshots]
            if not known:
                raise SourceError(f"{path} has no snapshot yet: nothing was written to it")
            more = f", and {len(known) - _MOST_NAMED:,} before them" if len(known) > _MOST_NAMED else ""
            raise SourceError(
                f"{path} has no snapshot {self.snapshot} (it has {', '.join(map(str, known[-_MOST_NAMED:]))}{more}): it has "
                "expired, or never was; name one that is there, or leave snapshot out for the current one"
            )
        schemas = {schema.schema_id: schema for schema in metadata.schemas}
        return _TableSnapshot(path, metadata, found, schemas.get(found.schema_id) or metadata.schema())

    def _newest_metadata(self, path: str) -> str:
        if path.endswith(_METADATA):
            return path
        folder = path.rstrip("/")
        try:
            files = self.storage.list_files([f"{folder}/metadata/*{_METADATA}"])
        except StorageError:
            raise
        except SourceError as error:
            raise SourceError(
                f"{path} cannot be opened as an Iceberg table: it has no metadata/*{_METADATA}; name the table's folder, "
                "one of these files, or with catalog= its name there"
            ) from error
        numbers = [_metadata_number(file.path) for file in files]
        newest = [file.path for file, number in zip(files, numbers, strict=True) if number == max(numbers)]
        if len(newest) > 1:
            raise SourceError(f"{path} has {len(newest)} newest metadata files: name one, as {newest[-1]}")
        return newest[0]

    def _look_up(self, catalog: str, name: str) -> str:
        catalogs = needed_library("pyiceberg.catalog", "iceberg", "Iceberg")
        errors = needed_library("pyiceberg.exceptions", "iceberg", "Iceberg")
        wrong = (errors.NoSuchTableError, errors.NoSuchNamespaceError, errors.NoSuchIdentifierError, ValueError, OSError)
        try:
            return catalogs.load_catalog(catalog).load_table(name).metadata_location
        except wrong as error:
            raise SourceError(f"{name} cannot be found in the catalog {catalog!r}: {_one_line(error)}") from error

    def _read_metadata(self, location: str) -> Any:
        parser = needed_library("pyiceberg.table.metadata", "iceberg", "Iceberg").TableMetadataUtil
        wrong = needed_library("pyiceberg.exceptions", "iceberg", "Iceberg").ValidationError
        (file,) = self.list_beside([_stored_path(location)])
        data = self.storage.read(file, 0, file.num_bytes).to_pybytes()
        try:
            return parser.parse_raw((gzip.decompress(data) if ".gz." in file.path else data).decode())
        except (wrong, AttributeError, *_DAMAGE) as error:  # pyiceberg's own validators assume what they have not checked
            raise SourceError(
                f"{file.path} is not the metadata of an Iceberg table: {_one_line(error)}; restore it, or name the file "
                "before it"
            ) from error


@dataclass(frozen=True, slots=True)
class _TableSnapshot:
    path: str
    metadata: Any
    snapshot: Any
    schema: Any

    def __str__(self) -> str:
        return f"snapshot {self.snapshot.snapshot_id} of {self.path}"

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.schema.fields)


def _use_checked_decoder() -> None:
    """Have pyiceberg read Avro with a plain decoder that takes a file for damaged if it ends in the middle of a block.

    Where a manifest is damaged, its fast decoder reads beyond the end of its buffer, and the process dies. Its plain one
    takes a block that is cut off for the end of the file, so that files of the table would be missing.
    """
    needed_library("pyiceberg.avro.file", "iceberg", "Iceberg").new_decoder = _checked_decoder()


@cache
def _checked_decoder() -> Any:
    plain = needed_library("pyiceberg.avro.decoder", "iceberg", "Iceberg").StreamingBinaryDecoder

    class CheckedDecoder(plain):
        def read(self, n: int) -> bytes:
            try:
                return super().read(n)
            except EOFError as error:
                if n == 1:  # nothing follows the last block
                    raise
                raise ValueError("it ends in the middle of a block") from error

    return CheckedDecoder


class _ManifestIO:
    """What pyiceberg reads manifests through."""

    def __init__(self, source: Iceberg) -> None:
        self._source = source
        self.lengths: dict[str, int] = {}
        """The bytes of manifests, by the list of them."""

    def new_input(self, location: str) -> _Manifest:
        return _Manifest(self._source, location, self.lengths.get(location))


class _Manifest:
    def __init__(self, source: Iceberg, location: str, length: int | None) -> None:
        self._source = source
        self.location = location
        self._length = length

    def open(self, seekable: bool = True) -> io.BytesIO:
        del seekable
        (file,) = self._source.list_beside([_stored_path(self.location)])
        if self._length is not None and file.num_bytes != self._length:
            raise SourceError(f"{file.path} has {file.num_bytes:,} bytes, and the list of manifests says {self._length:,}")
        return io.BytesIO(self._source.storage.read(file, 0, file.num_bytes).to_pybytes())


def _stored_path(location: str) -> str:
    """A location as Hadoop and Spark write it, as a path or URL of ours."""
    return re.sub(r"^s3[an]://", "s3://", re.sub(r"^file:(//)?(?=/)", "", location))


def _metadata_number(path: str) -> int:
    """The number that catalogs begin the names of metadata files with: v3.metadata.json, 00003-<uuid>.metadata.json."""
    found = re.match(r"v?(\d+)", path.rpartition("/")[2])
    return int(found[1]) if found else -1


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
