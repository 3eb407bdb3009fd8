"""Footers of Parquet files: read and checked once, when a source is listed. Its units keep what reading needs of them.

A parsed footer takes a hundred kilobytes and more, most of it statistics. To read a row group Arrow needs the schema, which
files share, and five numbers for each column chunk. `RowGroups` keeps these packed, for all row groups of a file, and makes
from them a footer of one row group whenever it is read.
"""

from __future__ import annotations

import base64
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from overlord.errors import SourceError
from overlord.sources import thrift
from overlord.sources.parquet_lists import list_columns
from overlord.sources.storage import SparseFile, map_threads
from overlord.sources.thrift import binary, i32, i64, sequence, structure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData, ParquetFile

    from overlord.sources.parquet_lists import ListColumn
    from overlord.sources.storage import Storage, StoredFile

MAGIC = b"PAR1"
_ENCRYPTED_MAGIC = b"PARE"
_TAIL_BYTES = 64 << 10
_SCHEMA, _KEYS, _WRITER = 2, 5, 6  # fields of a footer
_ARROW_SCHEMA = b"ARROW:schema"
_NO_GROUPS = b"\x16\x00\x19\x0c"  # fields 3 and 4: no rows, and an empty list of structures
_NOT_READ = structure({2: i64(0)}).data  # a column chunk of which only the required field is there
# By pyarrow's names. It has none for the LZ4 of Hadoop.
_CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "LZO": 3, "BROTLI": 4, "UNKNOWN": 5, "ZSTD": 6, "LZ4": 7}
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_SMALL, _LARGE = struct.Struct("<BqiIII"), struct.Struct("<Bqqqqq")


class ColumnChunk(NamedTuple):
    """What reading needs to know of a column chunk."""

    codec: int
    """By its number in Parquet."""
    start: int
    """The offset of the first data page."""
    dictionary: int
    """Bytes from there back to the page of the dictionary; 0 without one."""
    num_bytes: int
    decoded_bytes: int
    num_values: int

    @staticmethod
    def of(entry: ColumnChunkMetaData) -> ColumnChunk:
        start, dictionary = entry.data_page_offset, entry.dictionary_page_offset
        return ColumnChunk(
            _CODECS[entry.compression],
            start,
            0 if dictionary is None else start - dictionary,
            entry.total_compressed_size,
            entry.total_uncompressed_size,
            entry.num_values,
        )

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of its pages in the file."""
        begin = min(self.start, self.start - self.dictionary)
        return begin, begin + self.num_bytes

    def encoded(self, physical_type: int) -> bytes:
        fields = {
            1: i32(physical_type),
            2: _NO_NUMBERS,
            3: _NO_TEXTS,
            4: i32(self.codec),
            5: i64(self.num_values),
            6: i64(self.decoded_bytes),
            7: i64(self.num_bytes),
            9: i64(self.start),
        }
        if self.dictionary:
            fields[11] = i64(self.start - self.dictionary)
        return structure({2: _ZERO, 3: structure(fields)}).data


_NO_NUMBERS, _NO_TEXTS, _ZERO = sequence(of=i32(0)), sequence(of=binary(b"")), i64(0)


@dataclass(frozen=True, slots=True)
class FooterFrame:
    """A footer without its row groups. Files that were written alike share one."""

    before: bytes
    """Version and schema."""
    after: bytes
    """What of the keys selects Arrow's types, and the name of the writer, whose bugs Arrow knows."""
    num_leaves: int
    leaves: tuple[int, ...]
    """The columns of the file that make up the columns to read, whose chunks are kept."""
    types: tuple[int, ...]
    """The physical types of these leaves, by their numbers in Parquet."""

    def footer(self, num_rows: int = 0, chunks: Iterable[ColumnChunk] = ()) -> FileMetaData:
        """A footer with one row group, of these chunks; or with none."""
        groups = _NO_GROUPS
        if num_rows:
            columns = [_NOT_READ] * self.num_leaves
            for leaf, kind, chunk in zip(self.leaves, self.types, chunks, strict=True):
                columns[leaf] = chunk.encoded(kind)
            group = {1: thrift.structures(columns), 2: _ZERO, 3: i64(num_rows)}
            groups = b"\x16" + i64(num_rows).data + b"\x19\x1c" + structure(group).data
        return parse_footer(self.before + groups + self.after)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The detail of the units of one file: all its row groups. It takes some 25 bytes for each column chunk."""

    file: StoredFile
    schema: pa.Schema
    lists: tuple[ListColumn, ...]
    """Columns that `parquet_lists` may be able to read."""
    frame: FooterFrame | None
    """None for a footer that is not built like others: it is kept as it is."""
    packed: bytes
    is_large: bool = False
    """Some number in `packed` needed 64 bits."""

    def chunks(self, index: int) -> list[ColumnChunk]:
        """The column chunks of a row group that are to be read."""
        if self.frame is None:
            group = parse_footer(self.packed).row_group(index)
            return [ColumnChunk.of(group.column(leaf)) for leaf in leaves_of(parse_footer(self.packed), self.schema.names)]
        layout, num_chunks = _LARGE if self.is_large else _SMALL, len(self.frame.leaves)
        begin = index * num_chunks * layout.size
        entries = layout.iter_unpack(memoryview(self.packed)[begin : begin + num_chunks * layout.size])
        return [ColumnChunk(*entry) for entry in entries]

    def chunk(self, index: int, leaf: int) -> ColumnChunk:
        """The column chunk of one leaf of a row group. It is one of those to be read."""
        if self.frame is None:
            return ColumnChunk.of(parse_footer(self.packed).row_group(index).column(leaf))
        layout, leaves = _LARGE if self.is_large else _SMALL, self.frame.leaves
        return ColumnChunk(*layout.unpack_from(self.packed, (index * len(leaves) + leaves.index(leaf)) * layout.size))

    def footer(self, index: int, num_rows: int) -> tuple[FileMetaData, int]:
        """A footer that has the row group, and the number of the row group in it."""
        if self.frame is None:
            return parse_footer(self.packed), index
        return self.frame.footer(num_rows, self.chunks(index)), 0


class ListedFooter(NamedTuple):
    """A file's footer after it was checked, as far as it is kept."""

    file: StoredFile
    schema: pa.Schema
    num_rows: list[int]
    """Of each row group."""
    num_bytes: list[int]
    """Decoded, of the columns to read, of each row group."""
    frame: FooterFrame | None
    packed: bytes
    is_large: bool


def details_of(footers: Iterable[ListedFooter], schema: pa.Schema) -> Iterator[RowGroups]:
    """The details of the units of each file, once the schema of all is known."""
    lists: dict[FooterFrame, tuple[ListColumn, ...]] = {}
    for each in footers:
        if each.frame is None:
            found = list_columns(parse_footer(each.packed), schema)
        elif (found := lists.get(each.frame)) is None:
            found = lists[each.frame] = list_columns(each.frame.footer(), schema)
        yield RowGroups(each.file, schema, found, each.frame, each.packed, each.is_large)


class FooterReader:
    """Reads the footers of a source's files, in any thread, and remembers what files have in common."""

    def __init__(self, storage: Storage, columns: Sequence[str] | None) -> None:
        self._storage = storage
        self._columns = columns
        self._known: dict[bytes, dict[tuple[bytes, str], tuple[FooterFrame, pa.Schema]]] = {}
        """By version and schema; then by Arrow's schema and the writer."""
        self._frames: dict[FooterFrame, FooterFrame] = {}

    def read_all(self, files: Sequence[StoredFile]) -> list[ListedFooter]:
        # The first one alone: the others are mostly like it.
        return [*map(self._read, files[:1]), *map_threads(self._read, files[1:])]

    def _read(self, file: StoredFile) -> ListedFooter:
        raw = _read_tail(self._storage, file)
        try:
            footer = parse_footer(raw)
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is not UTF-8
            raise _unreadable_error(file, error) from error
        frame, schema = self._frame(file, raw, footer)
        leaves = leaves_of(footer, self._columns or schema.names) if frame is None else frame.leaves
        _check_entries(file, footer, leaves)
        num_groups = footer.num_row_groups
        num_rows = [footer.row_group(i).num_rows for i in range(num_groups)]
        groups = [_chunks(file, footer, i, leaves) for i in range(num_groups)]
        for i in range(num_groups):
            if num_rows[i]:
                _check_extents(file, i, groups[i])
        num_bytes = [sum(chunk.decoded_bytes for chunk in chunks) for chunks in groups]
        if frame is None:
            return ListedFooter(file, schema, num_rows, num_bytes, None, raw, False)
        packed, is_large = pack([chunk for chunks in groups for chunk in chunks])
        return ListedFooter(file, schema, num_rows, num_bytes, frame, packed, is_large)

    def _frame(self, file: StoredFile, raw: bytes, footer: FileMetaData) -> tuple[FooterFrame | None, pa.Schema]:
        try:
            key = (footer.metadata or {}).get(_ARROW_SCHEMA, b""), footer.created_by or ""
            before = next((before for before in list(self._known) if raw.startswith(before)), None)
            if before is not None and (known := self._known[before].get(key)) is not None:
                return known
            schema = footer.schema.to_arrow_schema()
            for i in range(footer.num_columns):
                _ = footer.schema.column(i).path  # raises for a name that is not UTF-8
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable_error(file, error) from error
        frame = _find_frame(raw, footer, schema, self._columns or schema.names)
        if frame is None:
            return None, schema
        found = self._frames.setdefault(frame, frame), schema
        self._known.setdefault(frame.before, {})[key] = found
        return found


def parse_footer(raw: bytes) -> FileMetaData:
    import pyarrow.parquet as pq

    # The parser counts from the end, so it does not need the rest of the file.
    return pq.read_metadata(pa.BufferReader(raw + len(raw).to_bytes(4, "little") + MAGIC))


def leaves_of(footer: FileMetaData, names: Sequence[str]) -> tuple[int, ...]:
    """The indices of the leaf columns of the named columns: a nested column has several."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    wanted, nested = set(names), tuple(f"{name}." for name in names)
    return tuple(i for i, path in enumerate(paths) if path in wanted or path.startswith(nested))


def _find_frame(raw: bytes, footer: FileMetaData, schema: pa.Schema, names: Sequence[str]) -> FooterFrame | None:
    """The frame of a footer; None where a footer made from it would mean something else."""
    try:
        before = raw[: thrift.end_of_field(raw, _SCHEMA)]
    except (ValueError, IndexError):
        return None
    writer, keys = footer.created_by, footer.metadata or {}
    # Arrow's schema holds metadata that differ from file to file. It is only needed where it selects other types.
    arrow_schemas = [b""]
    if _ARROW_SCHEMA in keys:
        arrow_schemas += [base64.b64encode(schema.remove_metadata().serialize()), keys[_ARROW_SCHEMA]]
    leaves = leaves_of(footer, names)
    types = tuple(_TYPES.index(footer.schema.column(leaf).physical_type) for leaf in leaves)
    for arrow in arrow_schemas:
        fields = {}
        if arrow:
            fields[_KEYS] = thrift.structures([structure({1: binary(_ARROW_SCHEMA), 2: binary(arrow)}).data])
        if writer:
            fields[_WRITER] = binary(writer.encode())
        frame = FooterFrame(before, structure(fields, after=4).data, footer.num_columns, leaves, types)
        try:
            made = frame.footer()
            if made.schema.equals(footer.schema) and made.schema.to_arrow_schema().equals(schema):
                return frame
        except (pa.ArrowException, OSError, ValueError):
            continue
    return None


def pack(chunks: Sequence[ColumnChunk]) -> tuple[bytes, bool]:
    try:
        return b"".join(_SMALL.pack(*chunk) for chunk in chunks), False
    except struct.error:
        return b"".join(_LARGE.pack(*chunk) for chunk in chunks), True


def _chunks(file: StoredFile, footer: FileMetaData, index: int, leaves: Sequence[int]) -> list[ColumnChunk]:
    group, chunks = footer.row_group(index), list[ColumnChunk]()
    for leaf in leaves:
        entry, declared = group.column(leaf), footer.schema.column(leaf)
        if entry.physical_type != declared.physical_type:
            what = f"row group {index} has {entry.physical_type} vs. {declared.physical_type} in the schema"
            raise _unreadable_error(file, f"column {declared.path!r}: {what}")
        chunks.append(ColumnChunk.of(entry))
    return chunks


def _check_extents(file: StoredFile, index: int, chunks: Iterable[ColumnChunk]) -> None:
    for chunk in chunks:
        start, stop = chunk.extent
        if start < len(MAGIC) or stop > file.num_bytes:
            raise SourceError(
                f"row group {index} of {file.path} should lie at bytes {start:,} to {stop:,}, but the file has "
                f"{file.num_bytes:,}: a part of it is missing; copy or write it again"
            )


def _check_entries(file: StoredFile, footer: FileMetaData, leaves: Sequence[int]) -> None:
    """Raises SourceError where the footer's entry for a column chunk of these leaves cannot be used."""
    num_rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    if min(num_rows, default=0) < 0 or sum(num_rows) != footer.num_rows:
        raise _unreadable_error(file, f"its row groups have {sum(num_rows):,} rows, but it says {footer.num_rows:,}")
    # Without columns Arrow divides by zero. They are missing, which is said when files are compared.
    error = _find_entries_error(footer, file.num_bytes, list(leaves)) if leaves else None
    if error is None:
        return
    for i in leaves:
        column = footer.schema.column(i).path
        found = _find_entries_error(footer, file.num_bytes, [i])
        if found is not None and "crypt" in str(found):
            raise SourceError(
                f"{file.path} has the encrypted column {column!r}, and encrypted columns cannot be read: name the others "
                "with columns=, or write the file without encryption"
            ) from found
        if found is not None:
            raise _unreadable_error(file, f"column {column!r}: {found}") from found
    raise _unreadable_error(file, error) from error


def _find_entries_error(footer: FileMetaData, num_bytes: int, leaves: list[int]) -> Exception | None:
    """Arrow's error for the footer's entries of column chunks, found by beginning to read them; None without error.

    pyarrow's accessors of these entries do not catch C++ exceptions for damaged or encrypted ones: the process aborts.
    Reading makes the same calls with exceptions caught. A buffered read checks every entry of a row group, with its codec.
    It asks for no rows, so it ends before it needs data.
    """
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(_empty_file(num_bytes), metadata=footer, pre_buffer=False, buffer_size=4096) as file:
            for group in range(footer.num_row_groups):
                _begin_to_read(file, group, leaves)
    except (pa.ArrowException, OSError) as error:
        return error
    return None


def _begin_to_read(file: ParquetFile, group: int, leaves: list[int]) -> None:
    try:
        next(file.reader.iter_batches(0, [group], leaves, use_threads=False), None)
    except EOFError:  # raised by SparseFile: Arrow got as far as reading data, so the entries are fine
        return


def _empty_file(num_bytes: int) -> pa.NativeFile:
    # Larger than the file: `_check_extents` reports offsets beyond its end with a better message.
    bits = max(30, num_bytes.bit_length())
    try:
        return pa.BufferReader(_address_space(bits))
    except (OSError, ValueError, OverflowError):  # ulimit -v
        return pa.PythonFile(SparseFile(1 << bits, {}), mode="r")


@lru_cache(maxsize=64)
def _address_space(bits: int) -> pa.Buffer:
    """Reserved addresses that are never read and take no memory."""
    return pa.py_buffer(mmap.mmap(-1, 1 << bits, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))


def _read_tail(storage: Storage, file: StoredFile) -> bytes:
    """The footer, still encoded. Reads the end of the file, and a second time only when the footer is longer."""
    tail_start = max(0, file.num_bytes - _TAIL_BYTES)
    tail = storage.read(file, tail_start, file.num_bytes)
    end = tail[-8:].to_pybytes()
    if end[4:] == _ENCRYPTED_MAGIC:
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
    return tail.slice(footer_start - tail_start, file.num_bytes - 8 - footer_start).to_pybytes()


def _unreadable_error(file: StoredFile, what: object) -> SourceError:
    return SourceError(f"{file.path} has a footer that cannot be read: {what}; copy or write it again")
