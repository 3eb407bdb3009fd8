"""Tables with versions: Lance datasets, and the Parquet files of Delta tables. Their libraries read manifests, and Lance
its own files. The version that is read is part of every state."""

from __future__ import annotations

import re
import struct
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from overlord.declare.source import Source, Unit
from overlord.errors import OverlordError, SchemaError, SourceError, SpecError, StorageError
from overlord.sources.arrow_ipc import decode_table
from overlord.sources.files import check_columns, missing_column, needed_library
from overlord.sources.parquet import Parquet
from overlord.sources.reading import ReadResult, UnitReader, validate
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from overlord.sources.storage import StoredFile

_SIZED_ROWS = 64
_MOST_DELETED_BYTES = 1 << 30
"""Decompressed, of the list of one fragment: 256 M rows; the library writes longer lists as bitmaps."""
_PLAIN: dict[pa.DataType, pa.DataType] = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_SILENT = re.compile(r"after \d+ retries|error sending request")
_COLOURS = re.compile(r"\x1b\[\d*m(↳)?")
_FAILED = (ValueError, OSError, RuntimeError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class FragmentRange:
    version: int
    fragment: int
    start: int
    stop: int


@dataclass(frozen=True)
class Lance(Source):
    """A Lance dataset at one of its versions; the newest unless given. A unit is `unit_rows` rows of a fragment, in the
    order of the dataset, without deleted rows. `storage_options` are those of Lance.
    """

    uri: str | os.PathLike[str]
    columns: Sequence[str] | None = None
    version: int | None = None
    unit_rows: int = 8192
    storage_options: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "uri", str(self.uri))
        object.__setattr__(self, "columns", check_columns(self.columns))
        if self.unit_rows < 1:
            raise SpecError(f"unit_rows must be positive, got {self.unit_rows}")

    def units(self) -> list[Unit]:
        dataset = self.open_version(self.version)
        for name in self.columns or ():
            if name not in dataset.schema.names:
                raise missing_column(f"version {dataset.version} of {self.uri}", name, dataset.schema.names)
        with told(f"version {dataset.version} of {self.uri} cannot be listed by Lance", "restore its files"):
            units = self._list_units(dataset)
        if not units:
            raise SourceError(f"version {dataset.version} of {self.uri} has no rows")
        return units

    def _list_units(self, dataset: Any) -> list[Unit]:
        version = dataset.version
        row_bytes = _row_bytes(dataset, dataset.get_fragments(), self.wanted_columns())
        units: list[Unit] = []
        for fragment in dataset.get_fragments():
            path = f"{self.uri}/data/{fragment.data_files()[0].path}"
            num_rows = fragment.count_rows()
            for index, start in enumerate(range(0, num_rows, self.unit_rows)):
                stop = min(start + self.unit_rows, num_rows)
                detail = FragmentRange(version, fragment.fragment_id, start, stop)
                units.append(Unit(path, index, stop - start, row_bytes * (stop - start), detail, str(version)))
        return units

    def read(self, unit: Unit) -> pa.Table:
        return self.read_rows(unit).strict()

    def read_rows(self, unit: Unit) -> ReadResult:
        return LanceReader(self).read_rows(unit)

    def open_reader(self, *, release_gil: bool) -> UnitReader:
        del release_gil
        return LanceReader(self)

    def identity(self) -> str:
        version = self.open_version(self.version).version if self.version is None else self.version
        columns = self.columns and list(self.columns)
        return f"Lance({self.uri!r}, version={version}, columns={columns!r}, unit_rows={self.unit_rows})"

    def open_version(self, version: int | None) -> Any:
        lance = needed_library("lance", "lance", "Lance")
        options = library_options(self.storage_options) or None
        try:
            with told(f"{self.uri} cannot be opened as a Lance dataset", "name its folder, or restore its manifests"):
                dataset = lance.dataset(self.uri, version=version, storage_options=options)
                _check_names(dataset.lance_schema.fields(), str(self.uri))
                return dataset
        except SourceError as error:
            if version is None:
                raise
            with told(str(error), "the newest version cannot be opened either"):
                known = [each["version"] for each in lance.dataset(self.uri, storage_options=options).versions()]
            if version in known:
                raise
            raise SourceError(
                f"{self.uri} has no version {version} (it has {_span(known)}): it was cleaned up, or never was; name one "
                "that is there, or leave version out for the newest"
            ) from error

    def wanted_columns(self) -> list[str] | None:
        return None if self.columns is None else list(self.columns)


class LanceReader:
    """Keeps the version open that it read last."""

    def __init__(self, source: Lance) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._opened: tuple[int, Any] | None = None
        self._checked: set[int] = set()

    def read_rows(self, unit: Unit) -> ReadResult:
        detail: FragmentRange = unit.detail
        with self._lock:
            if self._opened is None or self._opened[0] != detail.version:
                self._opened = detail.version, self._source.open_version(detail.version)
                self._checked.clear()
            dataset = self._opened[1]
        with told(f"{unit} of version {detail.version} cannot be read by Lance", "was it cleaned up?"):
            fragment = dataset.get_fragment(detail.fragment)
            if detail.fragment not in self._checked:
                _row_bytes(dataset, [fragment], self._source.wanted_columns())
                self._checked.add(detail.fragment)
            table = fragment.to_table(
                columns=self._source.wanted_columns(), offset=detail.start, limit=detail.stop - detail.start
            )
        if table.num_rows != unit.num_rows:
            raise SourceError(f"{unit} has {table.num_rows} rows and had {unit.num_rows} when it was listed")
        return validate(table.replace_schema_metadata(None), str(unit))

    def close(self) -> None:
        with self._lock:
            self._opened = None


def _check_names(fields: Sequence[Any], uri: str) -> None:
    """Raises ValueError for a zero byte in the name of a column, which would end the process in Arrow."""
    for each in fields:
        if "\0" in each.name():
            raise ValueError(f"the column {each.name()!r} in the manifest of {uri} has a zero byte in its name")
        _check_names(each.children(), uri)


def _row_bytes(dataset: Any, fragments: Sequence[Any], columns: list[str] | None) -> int:
    """Reads a few rows by their numbers, before any are scanned: the stream of a scan ends the process where a damaged file
    makes the library write an error with a zero byte in it, and rows that are taken by number raise the same error."""
    num_bytes = num_rows = 0
    for fragment in fragments:
        _check_deletions(dataset, fragment)
        few = fragment.take(list(range(min(_SIZED_ROWS - num_rows, fragment.count_rows()))), columns)
        num_bytes, num_rows = num_bytes + few.nbytes, num_rows + few.num_rows
        if num_rows >= _SIZED_ROWS:
            break
    return num_bytes // max(num_rows, 1)


def _check_deletions(dataset: Any, fragment: Any) -> None:
    """Raises SourceError where a list of deleted rows contradicts the manifest: the library would leave out other rows, or
    allocate what a damaged number asks for. Bitmaps, and lists of cloned datasets, are left to the library."""
    deletion = fragment.metadata.deletion_file
    if deletion is None or deletion.file_type != "array" or deletion.base_id is not None:
        return
    where = f"{dataset.uri}/{fragment.deletion_file()}"
    with tempfile.TemporaryDirectory() as folder:
        dataset.new_file_session().download_file(fragment.deletion_file(), f"{folder}/deleted.arrow")
        data = pa.py_buffer(Path(folder, "deleted.arrow").read_bytes())
    try:
        rows = decode_table(where, data, _MOST_DELETED_BYTES)["row_id"]
    except (pa.ArrowException, OverlordError, LookupError, ValueError, struct.error) as error:
        raise SourceError(f"{where} is no whole list of deleted rows: {error}; restore it from a copy") from error
    if rows.type != pa.uint32() or rows.null_count:
        raise SourceError(f"{where} is no list of deleted rows: its row_id is {rows.type}; restore it from a copy")
    num_distinct, last = len(pc.unique(rows)), pc.max(rows).as_py() if len(rows) else 0
    if not len(rows) == num_distinct == deletion.num_deleted_rows or last >= fragment.physical_rows:
        raise SourceError(
            f"{where} lists {len(rows)} deleted rows ({num_distinct} different, the last {last}), and the manifest says "
            f"{deletion.num_deleted_rows} of {fragment.physical_rows}: it is damaged; restore it from a copy"
        )


@dataclass(frozen=True)
class Delta(Parquet):
    """A Delta table at one of its versions; the newest unless given. `paths` is the table's folder. Its Parquet files are
    read like any others; the library reads the log. Tables with deletion vectors or column mapping are refused.
    """

    version: int | None = None

    def list_files(self) -> tuple[StoredFile, ...]:
        table = self._open()
        where = f"version {table.version()} of {self.patterns[0]}"
        configuration = table.metadata().configuration
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            raise SourceError(f"{where} maps the names of its columns, and its files have others; write it without that")
        actions = pa.table(table.get_add_actions(flatten=True))
        deleted = [name for name in actions.column_names if name.startswith("deletion_vector")]
        if any(actions.column(name).null_count < actions.num_rows for name in deleted):
            raise SourceError(f"{where} has deletion vectors: rewrite its files (REORG TABLE ... APPLY (PURGE))")
        if parts := [name for name in table.metadata().partition_columns if name in (self.columns or ())]:
            raise SchemaError(
                f"{where} is partitioned by {parts[0]!r}, which its files do not have; leave it out of columns, and make "
                "each partition a source if it matters"
            )
        paths = sorted(table.file_uris())
        if not paths:
            raise SourceError(f"{where} has no files")
        return self.list_beside([path.removeprefix("file://") for path in paths])

    def types_read(self, schema: pa.Schema) -> pa.Schema:
        """Texts as strings: writers of one table write views in some files and strings in others."""
        return pa.schema([pa.field(field.name, _PLAIN.get(field.type) or field.type, field.nullable) for field in schema])

    def identity(self) -> str:
        version = self._open().version() if self.version is None else self.version
        return f"Delta({list(self.patterns)!r}, version={version}, columns={self.columns and list(self.columns)!r})"

    def _retry_options(self) -> dict[str, str]:
        return {
            "retry_timeout": f"{max(round(self.retry.deadline_s), 1)}s",
            "max_retries": "100" if self.retry.deadline_s else "0",
        }

    def _open(self) -> Any:
        deltalake = needed_library("deltalake", "delta", "Delta")
        (path,) = self.patterns if len(self.patterns) == 1 else (None,)
        if path is None:
            raise SpecError(f"Delta reads one table, and paths names {len(self.patterns)}: make them sources of their own")
        options = {**self._retry_options(), **library_options(self.storage_options)} if is_remote(path) else None
        what = path if self.version is None else f"version {self.version} of {path}"
        way_out = "name a version whose log is there, or leave version out for the newest"
        with told(f"{what} cannot be opened as a Delta table", way_out, deltalake.exceptions.DeltaError):
            return deltalake.DeltaTable(path, version=self.version, storage_options=options)


@contextmanager
def told(what: str, way_out: str, *others: type[Exception]) -> Iterator[None]:
    """Errors of a library that is written in Rust, as ours. Its panics are not even Exceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, (*_FAILED, *others)) and type(error).__name__ != "PanicException":
            raise
        if _SILENT.search(str(error)):
            raise StorageError(f"{what}: storage did not answer: {_one_line(error)}") from error
        raise SourceError(f"{what}: {_one_line(error)}; {way_out}") from error


def library_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Storage options as these libraries take them: unlike ours, they must be told that an endpoint may be plain HTTP."""
    found = {name: str(value) for name, value in options.items()}
    is_plain = any(value.startswith("http://") for value in found.values())
    if is_plain and not any(name.lower().endswith("allow_http") for name in found):
        found["allow_http"] = "true"
    return found


def _span(versions: Sequence[int]) -> str:
    return f"{min(versions)} to {max(versions)}" if len(versions) > 1 else ", ".join(map(str, versions))


def _one_line(error: BaseException) -> str:
    return " ".join(_COLOURS.sub("", str(error)).split())[:300]
