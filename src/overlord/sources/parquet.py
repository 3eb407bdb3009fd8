"""Parquet: a unit is a row group. Footers are read once, when the source is listed; what reading needs of them travels with
the units."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import BufferTooSmallError, SourceError
from overlord.sources.files import FileSource, check_columns, common_schema
from overlord.sources.parquet_footer import ColumnChunk, FooterReader, RowGroups, details_of
from overlord.sources.parquet_lists import (
    ArrowLists,
    FlatPages,
    ListColumn,
    NotFlat,
    decode_lists,
    is_worth_it,
    read_lists,
    take_apart,
)
from overlord.sources.reading import validate
from overlord.sources.storage import (
    SparseFile,
    StoredFile,
    check_unchanged,
    count_local_bytes,
    is_remote,
    join_ranges,
    open_arrow,
    source_errors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlord.sources.range_cache import RangeOfFile
    from overlord.sources.reading import ReadResult, UnitReader


_MOST_TOGETHER = 32 << 20
"""Bytes of row groups, decoded, whose lists are decoded in one go: their encoded values are in memory meanwhile."""


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files. `columns` names the columns to read, all of them unless given."""

    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))

    def units(self) -> list[Unit]:
        return self.units_of(self.list_files(), self.columns)

    def units_of(self, files: Sequence[StoredFile], columns: Sequence[str] | None) -> list[Unit]:
        footers = FooterReader(self.storage, columns).read_all(files)
        schemas = ((each.file.path, self.types_read(each.schema)) for each in footers)
        schema = common_schema(schemas, columns).remove_metadata()
        units: list[Unit] = []
        for footer, detail in zip(footers, details_of(footers, schema), strict=True):
            file = footer.file
            for i, (num_rows, num_bytes) in enumerate(zip(footer.num_rows, footer.num_bytes, strict=True)):
                if num_rows:
                    units.append(Unit(file.path, i, num_rows, num_bytes, detail, file.version))
        return self._check_not_empty(units)

    def types_read(self, schema: pa.Schema) -> pa.Schema:
        """The types that columns of a file are read as: those that it was written with."""
        return schema

    def read_rows(self, unit: Unit) -> ReadResult:
        reader = ParquetReader(self)
        try:
            return reader.read_rows(unit)
        finally:
            reader.close()

    def open_reader(self, *, release_gil: bool) -> UnitReader:
        if type(self).read_rows is not Parquet.read_rows:  # a subclass has a reading of its own
            return super().open_reader(release_gil=release_gil)
        return ParquetReader(self, release_gil=release_gil)

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        detail: RowGroups = unit.detail
        extents = join_ranges(chunk.extent for chunk in detail.chunks(unit.index))
        return [(detail.file, start, stop) for start, stop in extents]

    def identity(self) -> str:
        return f"Parquet({list(self.patterns)!r}, columns={self.columns and list(self.columns)!r})"


class ParquetReader:
    """Reads row groups, and keeps the local file that was read last open for its next row group.

    Columns of lists go through `parquet_lists`, which takes less processor time than Arrow but holds the GIL; with
    `release_gil` only short ones do.
    """

    def __init__(self, source: Parquet, *, release_gil: bool = False) -> None:
        self._source = source
        self._storage = source.storage
        self._most_unit_bytes = source.most_unit_bytes
        self._release_gil = release_gil
        self._last_file = _LastFile()
        self._not_flat: set[str] = set()  # columns of lists that turned out to be for Arrow to read

    def read_rows(self, unit: Unit) -> ReadResult:
        return validate(self._decode(unit), f"row group {unit.index} of {unit.path}")

    def read_together(self, units: Sequence[Unit]) -> pa.Table | None:
        """The rows of all units where there are only lists to read: these are decoded in one go."""
        return self._decode_together(units) if self._are_flat(units) else None

    def close(self) -> None:
        self._last_file.close()

    def _are_flat(self, units: Sequence[Unit]) -> bool:
        """True if there are several units, local and not too large, of nothing but lists that need not go through Arrow."""
        sizes = [unit.num_bytes for unit in units]
        if len(units) < 2 or sum(sizes) > _MOST_TOGETHER or max(sizes) > self._most_unit_bytes:
            return False
        for unit in units:
            detail: RowGroups = unit.detail
            names = {column.field.name for column in detail.lists if self._goes_flat(column, unit)}
            if is_remote(unit.path) or not names.issuperset(detail.schema.names):
                return False
        return True

    def _goes_flat(self, column: ListColumn, unit: Unit) -> bool:
        """True if a column of lists need not go through Arrow, as far as is known."""
        detail: RowGroups = unit.detail
        if column.field.name in self._not_flat:
            return False
        chunk = detail.chunk(unit.index, column.leaf)
        return is_worth_it(chunk, unit.num_rows or 0, release_gil=self._release_gil)

    def _decode_together(self, units: Sequence[Unit]) -> pa.Table | None:
        """The rows of units of nothing but lists; None where they have to be read one by one, so that an error names its row
        group, and Arrow reads what is not flat."""
        flat: dict[str, list[FlatPages]] = {}
        try:
            for unit in units:
                detail: RowGroups = unit.detail
                with self._open_local(unit) as file:
                    for column in detail.lists:
                        chunk = detail.chunk(unit.index, column.leaf)
                        part = take_apart(column, chunk, _read_chunk(file, chunk))
                        if part.num_lists != unit.num_rows:
                            return None
                        flat.setdefault(column.field.name, []).append(part)
            of_first: RowGroups = units[0].detail
            lists = {column.field.name: decode_lists(column, flat[column.field.name]) for column in of_first.lists}
            table = pa.table(lists, of_first.schema)
            table.validate(full=True)
        except (NotFlat, SourceError, pa.ArrowException, OSError, EOFError):
            return None
        return table

    def _decode(self, unit: Unit) -> pa.Table:
        source = self._source
        if unit.num_bytes > self._most_unit_bytes:
            raise BufferTooSmallError(
                f"row group {unit.index} of {unit.path} has {unit.num_bytes:,} bytes decompressed, and a unit may take "
                f"{self._most_unit_bytes:,}; raise buffer_bytes, which is {source.buffer_bytes:,}, read fewer columns with "
                "columns=, or write smaller row groups"
            )
        remote = is_remote(unit.path)
        ranges = self._fetch(unit) if remote else {}
        try:
            table = self._decode_fetched(unit, ranges) if remote else self._decode_local(unit)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise SourceError(
                f"row group {unit.index} of {unit.path} cannot be decoded: {error}; write the file again"
            ) from error
        if table.num_rows != unit.num_rows:
            raise SourceError(
                f"row group {unit.index} of {unit.path} has {table.num_rows} rows, its footer says {unit.num_rows}"
            )
        return table

    def _fetch(self, unit: Unit) -> dict[int, pa.Buffer]:
        """The wanted columns of a remote file by offset, in as few requests as there are stretches of them."""
        detail: RowGroups = unit.detail
        return self._storage.read_ranges(detail.file, (chunk.extent for chunk in detail.chunks(unit.index)))

    def _decode_fetched(self, unit: Unit, ranges: Mapping[int, pa.Buffer]) -> pa.Table:
        detail: RowGroups = unit.detail
        with pa.PythonFile(SparseFile(detail.file.num_bytes, ranges), mode="r") as file:
            return self._row_group(file, unit)

    def _decode_local(self, unit: Unit) -> pa.Table:
        with self._open_local(unit) as file:
            return self._row_group(file, unit)

    @contextmanager
    def _open_local(self, unit: Unit) -> Iterator[pa.NativeFile]:
        """The file of a unit, to read this unit from. Afterwards it is checked that the file is the listed one."""
        detail: RowGroups = unit.detail
        opened = self._last_file.take(detail.file)
        if opened is None:
            # An open file rather than a path: for a path Arrow would work out the filesystem again each time.
            opened = _OpenFile(detail.file, open_arrow(detail.file))
        try:
            yield opened.file
        finally:
            # By its path: an open descriptor still reads a file that was replaced or deleted.
            with source_errors(unit.path):
                check_unchanged(detail.file, os.stat(unit.path))
        self._last_file.put_back(opened)
        count_local_bytes(sum(chunk.num_bytes for chunk in detail.chunks(unit.index)))

    def _row_group(self, file: pa.NativeFile, unit: Unit) -> pa.Table:
        import pyarrow.parquet as pq

        detail: RowGroups = unit.detail
        lists = self._lists(file, unit)
        others = [name for name in detail.schema.names if name not in lists]
        if not others:
            return pa.table(lists, detail.schema)
        footer, group = detail.footer(unit.index, unit.num_rows or 0)
        parquet = pq.ParquetFile(file, metadata=footer, pre_buffer=False, page_checksum_verification=True)
        table = parquet.read_row_group(group, columns=others, use_threads=False)
        columns = [lists[name] if name in lists else table.column(name) for name in detail.schema.names]
        pairs = zip(columns, detail.schema.types, strict=True)
        return pa.table([each if each.type == kind else each.cast(kind) for each, kind in pairs], schema=detail.schema)

    def _lists(self, file: pa.NativeFile, unit: Unit) -> dict[str, ArrowLists]:
        """The columns that need not go through Arrow."""
        detail: RowGroups = unit.detail
        lists: dict[str, ArrowLists] = {}
        for column in detail.lists:
            if not self._goes_flat(column, unit):
                continue
            chunk = detail.chunk(unit.index, column.leaf)
            try:
                lists[column.field.name] = read_lists(column, chunk, _read_chunk(file, chunk))
            except NotFlat:
                self._not_flat.add(column.field.name)
        return lists


def _read_chunk(file: pa.NativeFile, chunk: ColumnChunk) -> pa.Buffer:
    start, stop = chunk.extent
    file.seek(start)
    return file.read_buffer(stop - start)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    stored: StoredFile
    file: pa.NativeFile


class _LastFile:
    """Keeps one file open between two row groups. Threads that share it take the file away while they read it."""

    _room = threading.Semaphore(256)
    """Bounds the files that all readers of a process keep open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: _OpenFile | None = None
        self._is_closed = False

    def take(self, stored: StoredFile) -> _OpenFile | None:
        """The file if it is the one that is open; no other thread gets it until it is put back."""
        found = self._take_any()
        if found is None or found.stored == stored:
            return found
        found.file.close()
        return None

    def put_back(self, opened: _OpenFile) -> None:
        other = self._take_any()
        if other is not None:
            other.file.close()
        with self._lock:
            if not self._is_closed and self._kept is None and self._room.acquire(blocking=False):
                self._kept = opened
                return
        opened.file.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        found = self._take_any()
        if found is not None:
            found.file.close()

    def _take_any(self) -> _OpenFile | None:
        with self._lock:
            found, self._kept = self._kept, None
        if found is not None:
            self._room.release()
        return found
