"""The rows of a chunk in shared memory: made once by a loader host, read by every process of its machine.

What is shared is what delivery needs and no more: the tokens, where each row begins and ends in them, the mask, and the
columns that batches name or images are decoded from. Values that lie in a mapped file stay there: only their places are
shared, and the reader maps the file too.
"""

from __future__ import annotations

import logging
import pickle
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from overlord.batches.buffers import Arenas, segment_of
from overlord.chunks.chunk import Chunk
from overlord.runtime.transport import table_from_stream, table_to_stream
from overlord.sources.numbers import is_present
from overlord.sources.storage import MappedFile, StoredFile, mapped_file_at
from overlord.sources.views import VIEW, combine_chunks, compact, is_view

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from overlord.chunks.chunk import Lineage
    from overlord.stream.facts import ChunkFacts, Ints

BytePlaces: TypeAlias = tuple[tuple[int, int], ...]
"""From byte, to byte."""

_log = logging.getLogger(__name__)
_ALIGNMENT = 64
_LEAST_IDLE_BYTES = 16 << 20
_IDLE_PART = 8
_LOOKED_AT = 16
_MOST_WASTE = 2


@dataclass(frozen=True, slots=True)
class SharedRows:
    """What delivery needs of a chunk; the fields are those of `Chunk`."""

    columns: _SharedTable
    table_row: Ints
    values: NDArray[np.integer] | None
    begin: Ints
    document_end: Ints
    mask: NDArray[np.generic] | None

    @staticmethod
    def of(chunk: Chunk, columns: Collection[str]) -> SharedRows | None:
        """The rows of a chunk with these columns of its table, not copied yet; None where that would copy a mapped file,
        which may be larger than any buffer."""
        if chunk.values is not None and mapped_file_at(chunk.values.ctypes.data) is not None:
            return None
        names = [name for name in chunk.table.column_names if name in columns]
        table = _SharedTable.of(chunk.table.select(names))
        if table is None:
            return None
        if chunk.values is None or not len(chunk.begin):
            return SharedRows(table, chunk.table_row, chunk.values, chunk.begin, chunk.document_end, chunk.mask)
        # Rows may use a part of the tokens only: the rest of a file's column, or documents that a policy dropped.
        first, last = int(chunk.begin.min()), int(chunk.document_end.max())
        begin, end = chunk.begin - first, chunk.document_end - first
        mask = None if chunk.mask is None else chunk.mask[first:last]
        return SharedRows(table, chunk.table_row, chunk.values[first:last], begin, end, mask)


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """Rows that were copied into one piece of memory. Whoever maps the memory finds them by `places`."""

    memory: NDArray[np.uint8]
    places: BytePlaces
    """Where the pickled rows lie, and each of their arrays."""

    def open(self) -> SharedRows:
        """The rows, as views of the memory."""
        memory = self.memory.data
        head, *buffers = (memory[begin:end] for begin, end in self.places)
        return pickle.loads(head, buffers=buffers)

    @property
    def num_bytes(self) -> int:
        return len(self.memory)


def copy_rows(rows: SharedRows, arenas: Arenas) -> RowsInMemory:
    """Copy rows into memory of `arenas`."""
    buffers: list[memoryview] = []
    head = pickle.dumps(rows, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    places: list[tuple[int, int]] = []
    end = 0
    for part in (head, *buffers):
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + len(part)
        places.append((begin, end))
    memory = arenas.lease(end)
    for part, (begin, stop) in zip((head, *buffers), places, strict=True):
        memory[begin:stop] = np.frombuffer(part, np.uint8)
    return RowsInMemory(memory, tuple(places))


def share_chunk(chunk: Chunk, columns: Collection[str], arenas: Arenas) -> Chunk:
    """The same chunk over memory of `arenas`, with these columns of its table, and without its own memory. Returned as it is
    where it cannot be shared."""
    rows = SharedRows.of(chunk, columns) if arenas.is_shared else None
    if rows is None:
        return chunk
    shared = copy_rows(rows, arenas)
    if segment_of(shared.memory) is None:
        return chunk  # the system had no shared memory left
    return _chunk_over(shared, facts=chunk.facts, origin=chunk.origin, lineage=chunk.lineage)


@dataclass(frozen=True, slots=True)
class ChunkHead:
    """What a loader needs of a finished chunk beside its shared rows, to hold it too."""

    facts: ChunkFacts
    origin: Ints
    lineage: Lineage
    """Without the files that rows point into: they come with the rows."""

    @staticmethod
    def of(chunk: Chunk) -> ChunkHead:
        return ChunkHead(chunk.facts, chunk.origin, replace(chunk.lineage, mapped=()))


def copy_chunk(head: ChunkHead, rows: RowsInMemory, arenas: Arenas) -> Chunk:
    """A chunk that another loader made, with its rows copied into memory of `arenas`."""
    memory = arenas.lease(rows.num_bytes)
    memory[:] = rows.memory
    shared = RowsInMemory(memory, rows.places)
    found = _chunk_over(shared, facts=head.facts, origin=head.origin, lineage=head.lineage)
    return found if segment_of(memory) is not None else replace(found, shared=None)


def _chunk_over(shared: RowsInMemory, *, facts: ChunkFacts, origin: Ints, lineage: Lineage) -> Chunk:
    opened = shared.open()
    table, mapped = opened.columns.open()
    return Chunk(
        facts=facts,
        table=table,
        table_row=opened.table_row,
        origin=origin,
        lineage=replace(lineage, mapped=mapped),
        values=opened.values,
        begin=opened.begin,
        document_end=opened.document_end,
        mask=opened.mask,
        shared=shared,
    )


class ChunkArenas(Arenas):
    """A pool of shared memory for chunks. Their sizes differ from source to source, so a buffer is chosen by its size. Idle
    buffers are at most a part of those in use, and as many as were always left over while the last chunks were made are
    given back."""

    most_descriptors = 0.5  # less than batches need: rows of a chunk that is not shared are copied, those of all others not

    def __init__(self) -> None:
        super().__init__(shared=True)
        self._num_looked, self._fewest_idle = 0, sys.maxsize
        self._free: dict[int, Any] = {}  # by segment, in the order in which they became free

    def take_back(self, memory: Any) -> None:
        # Called by a finalizer: no lock, and no global of this module.
        if memory.segment is not None and not memory.segment.is_retired:
            self._free[memory.segment.number] = memory

    @property
    def num_idle(self) -> int:
        return len(self._free)

    @property
    def idle_bytes(self) -> int:
        return sum(len(memory) for memory in list(self._free.values()))

    def _idle_of(self, size: int) -> Any:
        free = list(self._free.values())
        found = None
        for memory in sorted((memory for memory in free if size <= len(memory) <= _MOST_WASTE * size), key=len):
            found = self._free.pop(memory.segment.number, None)
            if found is not None:  # no other thread has taken it
                break
        left = [memory for memory in free if memory is not found]
        num_surplus = self._num_left_over(len(left))
        idle = sum(len(memory) for memory in left)
        most = max(_LEAST_IDLE_BYTES, (self.shared_bytes - idle) // _IDLE_PART)
        for memory in left:  # those that were free for longest
            if idle <= most and num_surplus <= 0:
                break
            idle -= len(memory)
            num_surplus -= 1
            self._free.pop(memory.segment.number, None)
        return found

    def _num_left_over(self, num_idle: int) -> int:
        """How many idle buffers nobody has needed while the last chunks were made; 0 until as many were made again."""
        self._fewest_idle = min(self._fewest_idle, num_idle)
        self._num_looked += 1
        if self._num_looked < _LOOKED_AT:
            return 0
        found, self._num_looked, self._fewest_idle = self._fewest_idle, 0, sys.maxsize
        return found

    def _give_up(self, reason: str) -> None:
        self.is_shared, self.why_private = False, reason
        _log.warning("chunks are made in private memory, and copied to other processes: %s", reason)


@dataclass(frozen=True, slots=True)
class _SharedTable:
    """Columns of a table: those in memory as an Arrow stream, and views into mapped files as the places in these."""

    stream: pa.Buffer | None
    views: tuple[_SharedViews, ...]
    files: tuple[StoredFile, ...]

    @staticmethod
    def of(table: pa.Table) -> _SharedTable | None:
        """None where a column other than views lies in a mapped file."""
        files: dict[StoredFile, int] = {}
        views: list[_SharedViews] = []
        for name in table.column_names:
            if not _has_mapped_values(table.column(name)):
                continue
            if not is_view(table.column(name).type):
                return None
            views.append(_SharedViews.of(name, combine_chunks(table.column(name)), files))
        plain = table.drop_columns([column.name for column in views]) if views else table
        stream = table_to_stream(compact(plain)) if plain.num_columns else None
        return _SharedTable(stream, tuple(views), tuple(files))

    def open(self) -> tuple[pa.Table, tuple[MappedFile, ...]]:
        """The table, and the files that it points into. They must be kept as long as the table."""
        mapped = tuple(map(_map_file, self.files))
        views = {column.name: pa.chunked_array([column.open(mapped)]) for column in self.views}
        plain = None if self.stream is None else table_from_stream(self.stream)
        return pa.table(
            views if plain is None else dict(zip(plain.column_names, plain.columns, strict=True)) | views
        ), mapped


@dataclass(frozen=True, slots=True)
class _SharedViews:
    """A column of views, with places in files instead of addresses."""

    name: str
    is_text: bool
    validity: NDArray[np.uint8] | None
    views: NDArray[np.void]
    pieces: tuple[tuple[int, int, int] | NDArray[np.uint8], ...]
    """What the views point into: (file, begin, size), or bytes that are in no file."""

    @staticmethod
    def of(name: str, array: pa.Array[Any], files: dict[StoredFile, int]) -> _SharedViews:
        """`files`: the numbers of the files of the table, to which those of this column are added."""
        buffers = array.buffers()
        assert buffers[1] is not None  # a view array always has its views
        views = np.frombuffer(memoryview(buffers[1]), VIEW)[array.offset : array.offset + len(array)]
        validity = None
        if array.null_count:
            validity = np.packbits(is_present(array), bitorder="little")
        pieces: list[tuple[int, int, int] | NDArray[np.uint8]] = []
        for piece in buffers[2:]:
            mapped = None if piece is None else mapped_file_at(piece.address)
            if piece is None or mapped is None:
                pieces.append(np.zeros(0, np.uint8) if piece is None else np.frombuffer(memoryview(piece), np.uint8))
            else:
                number = files.setdefault(mapped.file, len(files))
                pieces.append((number, piece.address - mapped.start, piece.size))
        return _SharedViews(name, pa.types.is_string_view(array.type), validity, views, tuple(pieces))

    def open(self, mapped: tuple[MappedFile, ...]) -> pa.Array[Any]:
        buffers = [None if self.validity is None else pa.py_buffer(self.validity.data), pa.py_buffer(self.views.data)]
        for piece in self.pieces:
            if isinstance(piece, tuple):
                file, begin, size = piece
                buffers.append(mapped[file].data.slice(begin, size))
            else:
                buffers.append(pa.py_buffer(piece.data))
        kind = pa.string_view() if self.is_text else pa.binary_view()
        return pa.Array.from_buffers(kind, len(self.views), buffers)


_mapped_files: WeakValueDictionary[StoredFile, MappedFile] = WeakValueDictionary()
"""Each file is mapped once by a process, however many chunks point into it."""


def _map_file(file: StoredFile) -> MappedFile:
    mapped = _mapped_files.get(file)
    if mapped is None:
        mapped = _mapped_files[file] = MappedFile(file)
    return mapped


def _has_mapped_values(column: pa.ChunkedArray[Any]) -> bool:
    buffers = (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None)
    return any(mapped_file_at(buffer.address) is not None for buffer in buffers)
