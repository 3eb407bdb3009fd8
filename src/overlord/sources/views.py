"""Columns of views: large values (images) that stay in a local file until they are needed.

A `binary_view` column holds 16 bytes a row that point into shared buffers. Arrow cannot yet take rows from
such a column, and pickling or sending one would include the whole file: use `take_rows` and `compact` of
this module. Where a view points into a mapped file, get its value with `materialize` or `read_value`, which read the file:
reading through the mapping works too, but kills the process if the file is truncated at that moment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.sources.numbers import array_of, is_present
from overlord.sources.storage import (
    MappedFile,
    mapped_file_at,
    open_local,
    read_into,
    read_local,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

INLINE_BYTES = 12
PIECE_BYTES = 1 << 30
MOST_BYTES = (1 << 31) - 1
VIEW = np.dtype([("length", "<i4"), ("prefix", "V4"), ("buffer", "<i4"), ("offset", "<i4")])
_ONE_VIEW = struct.Struct("<i4sii")


def is_view(type_: pa.DataType) -> bool:
    return pa.types.is_binary_view(type_) or pa.types.is_string_view(type_)


def views_into(data: pa.Buffer, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> pa.Array:
    """Row i is data[offsets[i]:offsets[i] + lengths[i]], without a copy; null where the length is negative."""
    present = lengths >= 0
    lengths = np.where(present, lengths, 0)
    return _view_array(data, offsets, lengths, present, _starts(data, offsets, lengths))


def views_into_file(
    mapped: MappedFile, offsets: NDArray[np.int64], lengths: NDArray[np.int64], first: Sequence[bytes]
) -> pa.Array:
    """Like `views_into`, without reading the file: `first` has the first 12 bytes of each value, or all of a shorter one;
    it is ignored where the length is negative."""
    present = lengths >= 0
    lengths = np.where(present, lengths, 0)
    starts = np.frombuffer(b"".join(value.ljust(INLINE_BYTES, b"\0") for value in first), np.uint8)
    return _view_array(mapped.data, offsets, lengths, present, starts.reshape(-1, INLINE_BYTES))


def _view_array(
    data: pa.Buffer,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    present: NDArray[np.bool_],
    starts: NDArray[np.uint8],
) -> pa.Array:
    views = np.zeros(len(offsets), VIEW)
    views["length"] = lengths
    # Offsets have 32 bits, so a long file becomes several buffers. They are slices of one mapping and may overlap.
    longest = int(lengths.max(initial=0))
    pieces = [data]
    if data.size > MOST_BYTES:
        begins = range(0, data.size, PIECE_BYTES)
        pieces = [data.slice(begin, min(PIECE_BYTES + longest, data.size - begin)) for begin in begins]
        views["buffer"] = offsets // PIECE_BYTES
        views["offset"] = offsets % PIECE_BYTES
    else:
        views["offset"] = offsets
    # A view starts with the first 4 bytes of its value, or holds the whole of a value of up to 12 bytes.
    raw = views.view(np.uint8).reshape(len(views), VIEW.itemsize)
    long = lengths > INLINE_BYTES
    raw[long, 4:8] = starts[long, :4]
    raw[~long, 4:] = starts[~long]
    validity = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little").data)
    return pa.Array.from_buffers(pa.binary_view(), len(views), [validity, pa.py_buffer(views.data), *pieces])


def _starts(data: pa.Buffer, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The first 12 bytes of each value, padded with zeros."""
    if not data.size:
        return np.zeros((len(offsets), INLINE_BYTES), np.uint8)
    content = np.frombuffer(memoryview(data), np.uint8)
    column = np.arange(INLINE_BYTES)
    place = np.minimum(offsets[:, None] + column, data.size - 1)
    return np.where(column < lengths[:, None], content[place], 0)


@dataclass(frozen=True, slots=True)
class StoredValues:
    """The places of the values of a view column that lie in mapped files."""

    files: tuple[MappedFile, ...]
    file: NDArray[np.int64]
    """The index of the file of each row; -1 where the value is null or in memory."""
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @staticmethod
    def of(array: pa.Array) -> StoredValues | None:
        """The places of the values of an array; None where no value lies in a mapped file."""
        if not is_view(array.type):
            return None
        buffers: Sequence[pa.Buffer | None] = array.buffers()
        addresses = [data.address for data in buffers[2:] if data is not None]
        found = [mapped_file_at(address) for address in addresses]
        files = tuple(dict.fromkeys(file for file in found if file is not None))
        if not files or buffers[1] is None:
            return None
        number = np.array([-1 if file is None else files.index(file) for file in found])
        begin = np.array([0 if file is None else at - file.start for at, file in zip(addresses, found, strict=True)])
        views = np.frombuffer(memoryview(buffers[1]), VIEW)[array.offset : array.offset + len(array)]
        lengths = views["length"].astype(np.int64)
        long = lengths > INLINE_BYTES
        if array.null_count:
            long &= is_present(array)
        which = np.where(long, views["buffer"], 0)
        return StoredValues(files, np.where(long, number[which], -1), begin[which] + views["offset"], lengths)


def read_value(array: pa.Array, row: int) -> pa.Buffer | None:
    """One value of a view array, read from its file; None where it does not lie in a mapped file."""
    buffers: Sequence[pa.Buffer | None] = array.buffers()
    place, validity = array.offset + row, buffers[0]
    if buffers[1] is None or (validity is not None and not validity[place // 8] >> place % 8 & 1):
        return None
    length, _, number, offset = _ONE_VIEW.unpack_from(buffers[1], VIEW.itemsize * place)
    data = buffers[2 + number] if length > INLINE_BYTES else None
    mapped = None if data is None else mapped_file_at(data.address)
    if data is None or mapped is None:
        return None
    start = data.address - mapped.start + offset
    return read_local(mapped.file, start, start + length)


def materialize(array: pa.Array) -> pa.Array:
    """A `large_binary` (or `large_string`) array with the values of a view array, read from their files."""
    plain = pa.large_binary() if pa.types.is_binary_view(array.type) else pa.large_string()
    stored = StoredValues.of(array)
    if stored is None:
        return array.cast(plain)
    present = is_present(array)
    lengths = np.where(present, stored.lengths, 0)
    ends = np.cumsum(lengths)
    offsets = np.concatenate([[0], ends])
    data = pa.allocate_buffer(int(offsets[-1]))
    content = memoryview(data).cast("B")
    for number, mapped in enumerate(stored.files):
        with open_local(mapped.file) as descriptor:
            # A Python loop over rows: each value is a read of its own.
            for row in np.flatnonzero(stored.file == number).tolist():
                read_into(mapped.file, descriptor, content[offsets[row] : ends[row]], int(stored.offsets[row]))
    for row in np.flatnonzero(present & (stored.file < 0) & (lengths > 0)).tolist():
        content[offsets[row] : ends[row]] = memoryview(array[row].as_buffer()).cast("B")
    validity = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little").data)
    return pa.Array.from_buffers(plain, len(array), [validity, pa.py_buffer(offsets.data), data])


def take_rows(table: pa.Table, rows: NDArray[np.integer]) -> pa.Table:
    """The rows in the given order. The values of views are not read."""
    columns: list[pa.Array | pa.ChunkedArray] = []
    places = array_of(rows)
    for column in table.columns:
        columns.append(_take_views(column, rows) if is_view(column.type) else column.take(places))
    return pa.table(columns, schema=table.schema)


def _take_views(column: pa.ChunkedArray, rows: NDArray[np.integer]) -> pa.Array:
    array = combine_chunks(column)
    buffers: Sequence[pa.Buffer | None] = array.buffers()
    assert buffers[1] is not None  # a view array always has its views
    views = np.frombuffer(memoryview(buffers[1]), VIEW)[array.offset : array.offset + len(array)][rows]
    validity = None
    if array.null_count:
        present = is_present(array)[rows]
        validity = pa.py_buffer(np.packbits(present, bitorder="little").data)
    return pa.Array.from_buffers(array.type, len(rows), [validity, pa.py_buffer(views.data), *buffers[2:]])


def combine_chunks(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """The chunks of a column as one array. The values of views are not copied."""
    chunks = column.chunks or [pa.array([], column.type)]
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def compact(table: pa.Table) -> pa.Table:
    """The table with the values of its views copied in. Required before a table leaves the process."""
    for i, field in enumerate(table.schema):
        if is_view(field.type):
            table = table.set_column(i, field.name, materialize(combine_chunks(table.column(i))))
    return table
