"""Columns of views: large values (images) that stay where they are, in a mapped file, until somebody asks for them.

A `binary_view` column holds 16 bytes a row that point into shared buffers. Arrow cannot yet take rows from
such a column, and pickling or sending one would carry the whole file along: use `take_rows` and `compact` of
this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

INLINE_BYTES = 12
PIECE_BYTES = 1 << 30
MOST_BYTES = (1 << 31) - 1
VIEW = np.dtype([("length", "<i4"), ("prefix", "V4"), ("buffer", "<i4"), ("offset", "<i4")])


def is_view(type_: pa.DataType) -> bool:
    return pa.types.is_binary_view(type_) or pa.types.is_string_view(type_)


def views_into(data: pa.Buffer, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> pa.Array:
    """Row i is data[offsets[i]:offsets[i] + lengths[i]], without a copy; null where the length is negative."""
    num_rows = len(offsets)
    present = lengths >= 0
    lengths = np.where(present, lengths, 0)
    views = np.zeros(num_rows, VIEW)
    views["length"] = lengths
    # Offsets are 32 bit, so that a long file is seen as several buffers; as slices of one mapping they may overlap.
    longest = int(lengths.max(initial=0))
    pieces = [data]
    if data.size > MOST_BYTES:
        starts = range(0, data.size, PIECE_BYTES)
        pieces = [data.slice(start, min(PIECE_BYTES + longest, data.size - start)) for start in starts]
        views["buffer"] = offsets // PIECE_BYTES
        views["offset"] = offsets % PIECE_BYTES
    else:
        views["offset"] = offsets
    _fill_prefixes(views, data, offsets, lengths)
    validity = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little").data)
    return pa.Array.from_buffers(pa.binary_view(), num_rows, [validity, pa.py_buffer(views.data), *pieces])


def _fill_prefixes(views: NDArray[np.void], data: pa.Buffer, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """A view starts with the first 4 bytes of its value, or holds the whole of a value of up to 12 bytes."""
    if not data.size:
        return
    content = np.frombuffer(memoryview(data), np.uint8)
    raw = views.view(np.uint8).reshape(len(views), VIEW.itemsize)
    long = lengths > INLINE_BYTES
    raw[long, 4:8] = content[offsets[long, None] + np.arange(4)]
    column = np.arange(INLINE_BYTES)
    inside = column < lengths[~long, None]
    place = np.minimum(offsets[~long, None] + column, data.size - 1)
    raw[~long, 4:] = np.where(inside, content[place], 0)


def take_rows(table: pa.Table, rows: NDArray[np.integer]) -> pa.Table:
    """The rows in the order given. Views are taken without touching what they point to."""
    columns: list[pa.Array | pa.ChunkedArray] = []
    for column in table.columns:
        columns.append(_take_views(column, rows) if is_view(column.type) else column.take(rows))
    return pa.table(columns, schema=table.schema)


def _take_views(column: pa.ChunkedArray, rows: NDArray[np.integer]) -> pa.Array:
    array = joined(column)
    buffers: Sequence[pa.Buffer | None] = array.buffers()
    assert buffers[1] is not None  # a view array always has its views
    views = np.frombuffer(memoryview(buffers[1]), VIEW)[array.offset : array.offset + len(array)][rows]
    validity = None
    if array.null_count:
        present = array.is_valid().to_numpy(zero_copy_only=False)[rows]
        validity = pa.py_buffer(np.packbits(present, bitorder="little").data)
    return pa.Array.from_buffers(array.type, len(rows), [validity, pa.py_buffer(views.data), *buffers[2:]])


def joined(column: pa.ChunkedArray) -> pa.Array:
    """One array out of the chunks of a column; the values of views stay where they are."""
    chunks = column.chunks or [pa.array([], column.type)]
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def compact(table: pa.Table) -> pa.Table:
    """The table with the values of its views copied in: do this before a table leaves the process."""
    for i, field in enumerate(table.schema):
        if is_view(field.type):
            plain = pa.large_binary() if pa.types.is_binary_view(field.type) else pa.large_string()
            table = table.set_column(i, field.name, table.column(i).cast(plain))
    return table
