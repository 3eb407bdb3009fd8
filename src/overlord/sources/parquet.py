"""Parquet: a unit is a row group. Footers are read once, when the source is listed, and travel with its units."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import BufferTooSmallError, SourceError
from overlord.sources.files import FileSource, check_columns, common_schema
from overlord.sources.parquet_lists import (
    ArrowLists,
    ListColumn,
    NotFlat,
    is_worth_it,
    list_columns,
    read_lists,
)
from overlord.sources.reading import validate
from overlord.sources.storage import (
    SparseFile,
    Storage,
    StoredFile,
    check_unchanged,
    is_remote,
    map_threads,
    open_arrow,
    source_errors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData, ParquetFile

    from overlord.sources.reading import ReadResult, UnitReader


MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
TAIL_BYTES = 64 << 10
GAP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The detail of a unit. All units of a file share the footer and the schema."""

    file: StoredFile
    footer: FileMetaData
    schema: pa.Schema
    leaves: tuple[int, ...]
    """The columns of the file that make up the columns of the schema."""
    lists: tuple[ListColumn, ...]
    """Columns that `parquet_lists` may be able to read."""

    def chunks(self, index: int) -> list[ColumnChunkMetaData]:
        group = self.footer.row_group(index)
        return [group.column(i) for i in self.leaves]


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files. `columns` names the columns to read, all of them unless given."""

    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))

    def units(self) -> list[Unit]:
        files = self.list_files()
        footers = map_threads(lambda file: _read_footer(self.storage, file), files)
        schemas = ((file.path, _arrow_schema(file, footer)) for file, footer in zip(files, footers, strict=True))
        schema = common_schema(schemas, self.columns).remove_metadata()
        units: list[Unit] = []
        for file, footer in zip(files, footers, strict=True):
            _check_chunks(file, footer, schema.names)
            leaves, lists = _leaves(footer, schema.names), list_columns(footer, schema)
            detail = RowGroup(file, footer, schema, leaves, lists)
            units += _units(file, detail)
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

    With `release_gil` Arrow decodes all columns, because it releases the GIL while it does. Without, columns of lists go
    through `parquet_lists`, which takes less processor time but holds the GIL.
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
        detail: RowGroup = unit.detail
        stretches = _stretches(map(_extent, detail.chunks(unit.index)))
        return {start: self._storage.read(detail.file, start, stop) for start, stop in stretches}

    def _decode_fetched(self, unit: Unit, ranges: Mapping[int, pa.Buffer]) -> pa.Table:
        detail: RowGroup = unit.detail
        file = pa.PythonFile(SparseFile(detail.file.num_bytes, ranges), mode="r")
        with file, _parquet_file(file, detail.footer) as parquet:
            return self._row_group(file, parquet, unit)

    def _decode_local(self, unit: Unit) -> pa.Table:
        detail: RowGroup = unit.detail
        opened = self._last_file.take(detail.file, detail.footer)
        if opened is None:
            # An open file rather than a path: for a path Arrow would work out the filesystem again each time.
            file = open_arrow(detail.file)
            opened = _OpenFile(detail.file, detail.footer, file, _parquet_file(file, detail.footer))
        try:
            table = self._row_group(opened.file, opened.parquet, unit)
        finally:
            # By its path: an open descriptor still reads a file that was replaced or deleted.
            with source_errors(unit.path):
                check_unchanged(detail.file, os.stat(unit.path))
        self._last_file.put_back(opened)
        return table

    def _row_group(self, file: pa.NativeFile, parquet: ParquetFile, unit: Unit) -> pa.Table:
        detail: RowGroup = unit.detail
        lists = {} if self._release_gil else self._lists(file, unit)
        others = [name for name in detail.schema.names if name not in lists]
        if not others:
            return pa.table(lists, detail.schema)
        table = parquet.read_row_group(unit.index, columns=others, use_threads=False)
        columns = [lists[name] if name in lists else table.column(name) for name in detail.schema.names]
        return pa.table(columns, schema=detail.schema)

    def _lists(self, file: pa.NativeFile, unit: Unit) -> dict[str, ArrowLists]:
        """The columns that need not go through Arrow."""
        detail: RowGroup = unit.detail
        group = detail.footer.row_group(unit.index)
        lists: dict[str, ArrowLists] = {}
        for column in detail.lists:
            name, chunk = column.field.name, group.column(column.leaf)
            if name in self._not_flat or not is_worth_it(chunk, group.num_rows):
                continue
            if (error := _find_entries_error(detail.footer, detail.file.num_bytes, [unit.index], [column.leaf])) is not None:
                raise error
            start, stop = _extent(chunk)
            file.seek(start)
            try:
                lists[name] = read_lists(column, chunk, file.read_buffer(stop - start))
            except NotFlat:
                self._not_flat.add(name)
        return lists


@dataclass(frozen=True, slots=True)
class _OpenFile:
    stored: StoredFile
    footer: FileMetaData
    file: pa.NativeFile
    parquet: ParquetFile


class _LastFile:
    """Keeps one file open between two row groups. Threads that share it take the file away while they read it."""

    _room = threading.Semaphore(256)
    """Bounds the files that all readers of a process keep open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: _OpenFile | None = None
        self._is_closed = False

    def take(self, stored: StoredFile, footer: FileMetaData) -> _OpenFile | None:
        """The file if it is the one that is open; no other thread gets it until it is put back."""
        found = self._take_any()
        if found is None or (found.stored == stored and found.footer is footer):
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


def _parquet_file(file: pa.NativeFile, footer: FileMetaData) -> ParquetFile:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file, metadata=footer, pre_buffer=False, page_checksum_verification=True)


def _units(file: StoredFile, detail: RowGroup) -> list[Unit]:
    units = []
    for i in range(detail.footer.num_row_groups):
        num_rows, num_bytes = detail.footer.row_group(i).num_rows, 0
        if not num_rows:
            continue
        for chunk in detail.chunks(i):
            start, stop = _extent(chunk)
            if start < len(MAGIC) or stop > file.num_bytes:
                raise SourceError(
                    f"row group {i} of {file.path} should lie at bytes {start:,} to {stop:,}, but the file has "
                    f"{file.num_bytes:,}: a part of it is missing; copy or write it again"
                )
            num_bytes += chunk.total_uncompressed_size
        units.append(Unit(file.path, i, num_rows, num_bytes, detail, file.version))
    return units


def _leaves(footer: FileMetaData, names: Sequence[str]) -> tuple[int, ...]:
    """The indices of the leaf columns of the named columns: a nested column has several."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    wanted, nested = set(names), tuple(f"{name}." for name in names)
    return tuple(i for i, path in enumerate(paths) if path in wanted or path.startswith(nested))


def _arrow_schema(file: StoredFile, footer: FileMetaData) -> pa.Schema:
    try:
        schema = footer.schema.to_arrow_schema()
        for i in range(footer.num_columns):
            _ = footer.schema.column(i).path  # raises for a name that is not UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable_error(file, error) from error
    return schema


def _check_chunks(file: StoredFile, footer: FileMetaData, names: Sequence[str]) -> None:
    """Raises SourceError where the footer's entry for a column chunk of the named columns cannot be used."""
    num_rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    if min(num_rows, default=0) < 0 or sum(num_rows) != footer.num_rows:
        raise _unreadable_error(file, f"its row groups have {sum(num_rows):,} rows, but it says {footer.num_rows:,}")
    leaves, groups = list(_leaves(footer, names)), list(range(footer.num_row_groups))
    error = _find_entries_error(footer, file.num_bytes, groups, leaves)
    if error is None:
        return
    for i in leaves:
        column = footer.schema.column(i).path
        found = _find_entries_error(footer, file.num_bytes, groups, [i])
        if found is not None and "crypt" in str(found):
            raise SourceError(
                f"{file.path} has the encrypted column {column!r}, and encrypted columns cannot be read: name the others "
                "with columns=, or write the file without encryption"
            ) from found
        if found is not None:
            raise _unreadable_error(file, f"column {column!r}: {found}") from found
    raise _unreadable_error(file, error) from error


def _find_entries_error(footer: FileMetaData, num_bytes: int, groups: list[int], leaves: list[int]) -> Exception | None:
    """Arrow's error for the footer's entries of column chunks, found by beginning to read them; None without error.

    pyarrow's accessors of these entries do not catch C++ exceptions for damaged or encrypted ones: the process aborts.
    Reading makes the same calls with exceptions caught. A pre-buffered read of several row groups checks every entry; a
    buffered read of one row group checks its codecs too. The read asks for no rows, so it ends before it needs data.
    """
    import pyarrow.parquet as pq

    options = {"metadata": footer, "pre_buffer": len(groups) > 1, "buffer_size": 4096}
    try:
        with pq.ParquetFile(_empty_file(num_bytes), **options) as file:
            next(file.reader.iter_batches(0, groups, leaves, use_threads=False), None)
    except EOFError:  # raised by SparseFile: Arrow got as far as reading data, so the entries are fine
        return None
    except (pa.ArrowException, OSError) as error:
        return error
    return None


def _empty_file(num_bytes: int) -> pa.NativeFile:
    # Larger than the file: `_units` reports offsets beyond its end with a better message.
    bits = max(30, num_bytes.bit_length())
    try:
        return pa.BufferReader(_address_space(bits))
    except (OSError, ValueError, OverflowError):  # ulimit -v
        return pa.PythonFile(SparseFile(1 << bits, {}), mode="r")


@lru_cache(maxsize=64)
def _address_space(bits: int) -> pa.Buffer:
    """Reserved addresses that are never read and take no memory."""
    return pa.py_buffer(mmap.mmap(-1, 1 << bits, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))


def _extent(chunk: ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def _stretches(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The extents, joined over small gaps: reading a gap costs less than another request."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _read_footer(storage: Storage, file: StoredFile) -> FileMetaData:
    """Read the end of the file, and a second time only when the footer is longer."""
    import pyarrow.parquet as pq

    tail_start = max(0, file.num_bytes - TAIL_BYTES)
    tail = storage.read(file, tail_start, file.num_bytes)
    end = tail[-8:].to_pybytes()
    if end[4:] == ENCRYPTED_MAGIC:
        raise SourceError(
            f"{file.path} is an encrypted Parquet file (its last four bytes are b'PARE'), and encrypted files cannot be "
            "read: write it without encryption"
        )
    if file.num_bytes < 12 or end[4:] != MAGIC:
        raise SourceError(
            f"{file.path} does not end like a Parquet file ({file.num_bytes:,} bytes, the last four are {end[4:]!r} and "
            "should be b'PAR1'): it was cut off, or is not Parquet; copy or write it again"
        )
    footer_start = file.num_bytes - 8 - int.from_bytes(end[:4], "little")
    if footer_start < len(MAGIC):
        raise SourceError(f"{file.path} says its footer is longer than the file: it is damaged; copy or write it again")
    if footer_start < tail_start:
        tail, tail_start = storage.read(file, footer_start, file.num_bytes), footer_start
    try:
        # The parser counts from the end, so it does not need the rest of the file.
        return pq.read_metadata(pa.BufferReader(tail.slice(footer_start - tail_start)))
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is not UTF-8
        raise _unreadable_error(file, error) from error


def _unreadable_error(file: StoredFile, what: object) -> SourceError:
    return SourceError(f"{file.path} has a footer that cannot be read: {what}; copy or write it again")
