"""Parquet: a unit is a row group. Footers are read once, when the source is listed; what reading needs of them travels with
the units."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import BufferTooSmallError, SourceError
from overlord.sources.files import FileSource, check_columns, common_schema
from overlord.sources.parquet_footer import ColumnChunk, FooterReader, RowGroups, details_of
from overlord.sources.parquet_lists import (
    ArrowLists,
    NotFlat,
    is_worth_it,
    read_lists,
)
from overlord.sources.reading import validate
from overlord.sources.storage import (
    SparseFile,
    StoredFile,
    check_unchanged,
    is_remote,
    open_arrow,
    source_errors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyarrow.parquet import FileMetaData

    from overlord.sources.reading import ReadResult, UnitReader


GAP_BYTES = 1 << 20


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files. `columns` names the columns to read, all of them unless given."""

    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))

    def units(self) -> list[Unit]:
        files = self.list_files()
        footers = FooterReader(self.storage, self.columns).read_all(files)
        schema = common_schema(((each.file.path, each.schema) for each in footers), self.columns).remove_metadata()
        units: list[Unit] = []
        for footer, detail in zip(footers, details_of(footers, schema), strict=True):
            file = footer.file
            for i, (num_rows, num_bytes) in enumerate(zip(footer.num_rows, footer.num_bytes, strict=True)):
                if num_rows:
                    units.append(Unit(file.path, i, num_rows, num_bytes, detail, file.version))
        return self._check_not_empty(units)

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

    def close(self) -> None:
        self._last_file.close()

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
        stretches = _stretches(chunk.extent for chunk in detail.chunks(unit.index))
        return {start: self._storage.read(detail.file, start, stop) for start, stop in stretches}

    def _decode_fetched(self, unit: Unit, ranges: Mapping[int, pa.Buffer]) -> pa.Table:
        detail: RowGroups = unit.detail
        with pa.PythonFile(SparseFile(detail.file.num_bytes, ranges), mode="r") as file:
            return self._row_group(file, unit)

    def _decode_local(self, unit: Unit) -> pa.Table:
        detail: RowGroups = unit.detail
        opened = self._last_file.take(detail.file)
        if opened is None:
            # An open file rather than a path: for a path Arrow would work out the filesystem again each time.
            opened = _OpenFile(detail.file, open_arrow(detail.file))
        try:
            table = self._row_group(opened.file, unit)
        finally:
            # By its path: an open descriptor still reads a file that was replaced or deleted.
            with source_errors(unit.path):
                check_unchanged(detail.file, os.stat(unit.path))
        self._last_file.put_back(opened)
        return table

    def _row_group(self, file: pa.NativeFile, unit: Unit) -> pa.Table:
        import pyarrow.parquet as pq

        detail: RowGroups = unit.detail
        footer, group = detail.footer(unit.index, unit.num_rows or 0)
        lists = self._lists(file, footer, group, detail)
        others = [name for name in detail.schema.names if name not in lists]
        if not others:
            return pa.table(lists, detail.schema)
        parquet = pq.ParquetFile(file, metadata=footer, pre_buffer=False, page_checksum_verification=True)
        table = parquet.read_row_group(group, columns=others, use_threads=False)
        columns = [lists[name] if name in lists else table.column(name) for name in detail.schema.names]
        return pa.table(columns, schema=detail.schema)

    def _lists(self, file: pa.NativeFile, footer: FileMetaData, number: int, detail: RowGroups) -> dict[str, ArrowLists]:
        """The columns that need not go through Arrow."""
        group = footer.row_group(number)
        lists: dict[str, ArrowLists] = {}
        for column in detail.lists:
            name, chunk = column.field.name, group.column(column.leaf)
            if name in self._not_flat or not is_worth_it(chunk, group.num_rows, release_gil=self._release_gil):
                continue
            start, stop = ColumnChunk.of(chunk).extent
            file.seek(start)
            try:
                lists[name] = read_lists(column, chunk, file.read_buffer(stop - start))
            except NotFlat:
                self._not_flat.add(name)
        return lists


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


def _stretches(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The extents, joined over small gaps: reading a gap costs less than another request."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
