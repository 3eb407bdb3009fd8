"""Arrow IPC files, IPC streams and Feather (version 2). A unit is some record batches; only wanted columns are read."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.ipc

from overlord.declare.source import MIB, Unit
from overlord.errors import BufferTooSmallError, SourceError, SpecError, StorageError
from overlord.sources.files import FileSource, check_columns, common_schema
from overlord.sources.ipc_blocks import (
    CONTINUATION,
    MAGIC,
    Blocks,
    batch_rows,
    decompressed_bytes,
    file_blocks,
    header_bytes,
    is_compressed,
    message_bytes,
    stream_blocks,
)
from overlord.sources.reading import validate
from overlord.sources.storage import (
    FileBytes,
    MappedFile,
    Storage,
    StoredFile,
    is_remote,
    map_threads,
    open_local,
    read_into,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.sources.range_cache import RangeOfFile
    from overlord.sources.reading import ReadResult

HEAD_BYTES = 64 << 10
HEADER_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class Batches:
    """The record batches of a unit. Without `starts` the unit is the whole file: a remote stream, which has no index, or a
    file with dictionaries, which its batches share."""

    file: StoredFile
    file_schema: pa.Schema
    schema: pa.Schema
    """The columns to read."""
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Index:
    schema: pa.Schema
    blocks: Blocks | None
    """None where the whole file is one unit."""
    rows: tuple[int, ...] | None
    """The rows of each batch, if known without fetching them."""


@dataclass(frozen=True)
class ArrowIpc(FileSource):
    """Arrow IPC files and streams, and Feather. `columns` names the columns to read, all of them unless given.

    Batches of a file are joined to units of about `unit_bytes`; a batch is never cut.
    """

    columns: Sequence[str] | None = None
    unit_bytes: int = 8 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))
        if self.unit_bytes < 1:
            raise SpecError(f"unit_bytes must be positive, got {self.unit_bytes}")

    def units(self) -> list[Unit]:
        files = self.list_files()
        indexes = map_threads(lambda file: _read_index(self.storage, file), files)
        found = [(file.path, index.schema) for file, index in zip(files, indexes, strict=True)]
        schema = common_schema(found, self.columns)
        units: list[Unit] = []
        for file, index in zip(files, indexes, strict=True):
            units += _units(file, index, schema, self.unit_bytes)
        return self._check_not_empty(units)

    def read_rows(self, unit: Unit) -> ReadResult:
        detail: Batches = unit.detail
        mapped = ()
        try:
            if is_remote(unit.path) or 2 * self.units_per_chunk * unit.num_bytes <= self.buffer_bytes:
                table = self._read(unit)
            else:
                # In memory, the unit and the next one would not fit into the buffer together. Mapping is the last resort,
                # because truncating a mapped file kills the process.
                mapped = (MappedFile(detail.file),)
                table = self._decode(unit, mapped[0].data, 0) if detail.starts else _decode_whole(unit.path, mapped[0].data)
        except StorageError:
            raise  # an OSError too, but not a fault of the file
        except (pa.ArrowException, OSError, EOFError, struct.error, ValueError, IndexError) as error:
            raise SourceError(f"{unit} cannot be decoded as Arrow IPC: {error}; copy or write the file again") from error
        table = table.select(detail.schema.names).replace_schema_metadata(None)
        where = [f"the record batch at byte {start:,} of {unit.path}" for start in detail.starts]
        result = validate(table, where or unit.path, mapped=mapped)
        if unit.num_rows is not None and table.num_rows != unit.num_rows:
            raise SourceError(
                f"{unit} has {table.num_rows} rows and had {unit.num_rows} when it was listed; do not change the files of "
                "a running job"
            )
        return result

    def _read(self, unit: Unit) -> pa.Table:
        detail: Batches = unit.detail
        file, schema = detail.file, detail.file_schema
        if not detail.starts:
            return _decode_whole(unit.path, self.storage.read(file, 0, file.num_bytes))
        if is_remote(file.path) or len(detail.schema) == len(schema):
            start = min(detail.starts)
            return self._decode(unit, self.storage.read(file, start, max(detail.stops)), start)
        with open_local(file) as descriptor:
            places = zip(detail.starts, detail.stops, strict=True)
            batches = [self._read_columns(unit, descriptor, start, stop) for start, stop in places]
        return pa.Table.from_batches(batches)

    def _decode(self, unit: Unit, data: pa.Buffer, origin: int) -> pa.Table:
        """The record batches of a unit from `data`, which begins at byte `origin` of the file."""
        detail: Batches = unit.detail
        places = zip(detail.starts, detail.stops, strict=True)
        pieces = [data.slice(start - origin, stop - start) for start, stop in places]
        self._check_bytes(unit, sum(map(decompressed_bytes, pieces)))
        batches = [_decode_batch(unit, piece, start) for start, piece in zip(detail.starts, pieces, strict=True)]
        return pa.Table.from_batches(batches, detail.file_schema)

    def _read_columns(self, unit: Unit, descriptor: int, start: int, stop: int) -> pa.RecordBatch:
        """The record batch in the bytes [start, stop), with only the columns of the schema read.

        Arrow gets a buffer in which only the header is filled in, and makes arrays that point into the rest without reading
        it. These arrays tell which bytes belong to which column.
        """
        detail: Batches = unit.detail
        message = pa.allocate_buffer(stop - start)
        content = memoryview(message)
        read_into(detail.file, descriptor, content[:8], start)
        body = header_bytes(bytes(content[:8]))
        read_into(detail.file, descriptor, content[8:body], start + 8)
        if is_compressed(bytes(content[8:body])):
            read_into(detail.file, descriptor, content[body:], start + body)
            self._check_bytes(unit, decompressed_bytes(message))
            return _decode_batch(unit, message, start).select(detail.schema.names)
        batch = _decode_batch(unit, message, start).select(detail.schema.names)
        found = (data for column in batch.columns for data in column.buffers() if data is not None)
        wanted = [(data.address - message.address, data.size) for data in found]
        if 2 * sum(size for _, size in wanted) > message.size:
            wanted = [(body, message.size - body)]  # one long read costs less than many
        for place, size in wanted:
            read_into(detail.file, descriptor, content[place : place + size], start + place)
        return batch

    def _check_bytes(self, unit: Unit, num_bytes: int) -> None:
        if num_bytes > self.most_unit_bytes:
            raise BufferTooSmallError(
                f"{unit} takes {num_bytes:,} bytes decompressed, and a unit may take {self.most_unit_bytes:,}; raise "
                f"buffer_bytes, which is {self.buffer_bytes:,}, lower unit_bytes, or write smaller record batches"
            )

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        detail: Batches = unit.detail
        if not detail.starts:
            return [(detail.file, 0, detail.file.num_bytes)]
        return [(detail.file, min(detail.starts), max(detail.stops))]

    def identity(self) -> str:
        columns = self.columns and list(self.columns)
        return f"ArrowIpc({list(self.patterns)!r}, columns={columns!r}, unit_bytes={self.unit_bytes})"


def _units(file: StoredFile, index: _Index, schema: pa.Schema, unit_bytes: int) -> list[Unit]:
    blocks = index.blocks
    if blocks is None:
        return [Unit(file.path, 0, None, file.num_bytes, Batches(file, index.schema, schema), file.version)]
    units: list[Unit] = []
    first = 0
    for last, stop in enumerate(blocks.stops, 1):
        if stop - blocks.starts[first] < unit_bytes and last < len(blocks.stops):
            continue
        starts, stops = blocks.starts[first:last], blocks.stops[first:last]
        rows = None if index.rows is None else sum(index.rows[first:last])
        size = sum(stops) - sum(starts)
        detail = Batches(file, index.schema, schema, starts, stops)
        units.append(Unit(file.path, len(units), rows, size, detail, file.version))
        first = last
    return units


def _read_index(storage: Storage, file: StoredFile) -> _Index:
    try:
        if is_remote(file.path):
            return _read_remote_index(storage, file)
        with open_local(file) as descriptor:
            data = FileBytes(file, descriptor, HEADER_BYTES)
            if data[: len(MAGIC)] == MAGIC:
                blocks, schema = _footer_index(file.path, file.num_bytes, _read_tail(storage, file))
            else:
                schema, blocks = _read_head_schema(storage, file), stream_blocks(file.path, data)
            if blocks.has_dictionaries:
                return _Index(schema, None, None)
            ends = zip(blocks.starts, blocks.stops, strict=True)
            return _Index(schema, blocks, tuple(batch_rows(data, start, stop) for start, stop in ends))
    except StorageError:
        raise  # an OSError too, but not a fault of the file
    except (pa.ArrowException, OSError, EOFError, struct.error, ValueError, IndexError) as error:
        raise SourceError(
            f"{file.path} has an Arrow index that cannot be read: {error}; copy or write the file again"
        ) from error


def _read_remote_index(storage: Storage, file: StoredFile) -> _Index:
    tail = _read_tail(storage, file)
    if tail.size > len(MAGIC) and tail[-len(MAGIC) :].to_pybytes() == MAGIC:
        blocks, schema = _footer_index(file.path, file.num_bytes, tail)
        return _Index(schema, None if blocks.has_dictionaries else blocks, None)
    return _Index(_read_head_schema(storage, file), None, None)


def _read_tail(storage: Storage, file: StoredFile) -> pa.Buffer:
    """The end of a file, with its whole footer if it has one."""
    start = max(0, file.num_bytes - HEAD_BYTES)
    tail = storage.read(file, start, file.num_bytes)
    footer_bytes = int.from_bytes(tail[-10:-6].to_pybytes(), "little")
    is_short = tail.size < footer_bytes + 10 <= file.num_bytes
    if is_short and tail[-len(MAGIC) :].to_pybytes() == MAGIC:
        start = file.num_bytes - footer_bytes - 10
        tail = storage.read(file, start, file.num_bytes)
    return tail


def _read_head_schema(storage: Storage, file: StoredFile) -> pa.Schema:
    head_bytes = min(file.num_bytes, HEAD_BYTES)
    while True:
        head = storage.read(file, 0, head_bytes)
        try:
            return _stream_schema(file.path, head)
        except (pa.ArrowException, OSError):
            if head_bytes == file.num_bytes:
                raise
            head_bytes = min(file.num_bytes, head_bytes * 16)


def _footer_index(path: str, num_bytes: int, tail: pa.Buffer) -> tuple[Blocks, pa.Schema]:
    """The index in the footer of the file format, from the end of the file."""
    end = tail[-10:].to_pybytes()
    footer_bytes = int.from_bytes(end[:4], "little", signed=True)
    if end[4:] != MAGIC or not 0 < footer_bytes <= tail.size - 10:
        raise SourceError(
            f"{path} begins like an Arrow file but has no footer at its end ({num_bytes:,} bytes): it was cut off; copy or "
            "write it again"
        )
    footer = tail.slice(tail.size - 10 - footer_bytes, footer_bytes)
    blocks = file_blocks(path, footer, num_bytes)
    # A file of the footer alone, in memory: Arrow reads a Python file in a thread of its own, and a thread that releases a
    # Python object while the interpreter shuts down aborts the process.
    alone = MAGIC + bytes(2) + footer.to_pybytes() + end
    with pa.ipc.open_file(pa.BufferReader(alone)) as reader:
        return blocks, _check_names(reader.schema)


def _stream_schema(path: str, head: pa.Buffer) -> pa.Schema:
    if head.size < 8 or head[:4].to_pybytes() != CONTINUATION:
        raise SourceError(
            f"{path} is neither an Arrow file nor an Arrow stream (it begins with {head[:6].to_pybytes()!r}); "
            "Feather version 1 and streams from before Arrow 0.15 must be written again"
        )
    return _check_names(pa.ipc.read_schema(head))


def decode_table(path: str, data: pa.Buffer, most_bytes: int) -> pa.Table:
    """The table of an Arrow file or stream that lies in another file. Raises what Arrow raises, ValueError, IndexError or
    struct.error where it is damaged."""
    if data[: len(MAGIC)].to_pybytes() == MAGIC:
        blocks, schema = _footer_index(path, data.size, data)
    else:
        blocks, schema = stream_blocks(path, data), _stream_schema(path, data)
    if blocks.has_dictionaries:
        raise ValueError("it has dictionaries")
    pieces = [data.slice(start, stop - start) for start, stop in zip(blocks.starts, blocks.stops, strict=True)]
    if any(message_bytes(piece) != piece.size for piece in pieces):
        raise ValueError("its footer and its record batches differ in their lengths")
    num_bytes = sum(map(decompressed_bytes, pieces))
    if num_bytes > most_bytes:
        raise BufferTooSmallError(
            f"{path} takes {num_bytes:,} bytes decompressed, and a unit may take {most_bytes:,}; raise buffer_bytes, or "
            "write smaller files"
        )
    return pa.Table.from_batches([pa.ipc.read_record_batch(piece, schema) for piece in pieces], schema)


def _check_names(schema: pa.Schema) -> pa.Schema:
    """The schema. Raises UnicodeDecodeError, a ValueError, where the name of a field, also a nested one, is not UTF-8."""
    fields = list(schema)
    while fields:
        field = fields.pop()
        _ = field.name
        fields += [field.type.field(i) for i in range(field.type.num_fields)]
    return schema


def _decode_batch(unit: Unit, message: pa.Buffer, start: int) -> pa.RecordBatch:
    detail: Batches = unit.detail
    try:
        return pa.ipc.read_record_batch(message, detail.file_schema)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"the record batch at byte {start:,} of {unit} cannot be decoded as Arrow IPC: {error}; copy or write the file "
            "again"
        ) from error


def _decode_whole(path: str, data: pa.Buffer) -> pa.Table:
    is_file = data[: len(MAGIC)].to_pybytes() == MAGIC
    if not is_file:
        stream_blocks(path, data)  # checks more than Arrow does; listing does not check a remote stream
    with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.BufferReader(data)) as reader:
        return reader.read_all()
