"""Values that lie scattered in a block of bytes, as Arrow arrays: for formats that keep whole samples one after the other.

All of it works on columns: the places of a value in every sample are computed with numpy, and Arrow gathers the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.errors import SourceError
from overlord.sources.views import MOST_BYTES, views_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Numbers = Any
"""A numpy array of one of several types."""
NARROW_BYTES = 64


def numbers(data: pa.Buffer, dtype: Any, count: int = -1, offset: int = 0) -> Numbers:
    """The bytes of a buffer from `offset` on as an array, without a copy."""
    content: Any = data
    return np.frombuffer(content, dtype, count, offset)


def offsets_of(sizes: NDArray[np.integer]) -> NDArray[np.int64]:
    """0 and the running sum: where each value begins, and the end of the last."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def read_uint32(data: pa.Buffer, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The little-endian numbers of four bytes at these places."""
    return gather_records(data, places, 4).view("<u4").ravel().astype(np.int64)


def gather_records(data: pa.Buffer, starts: NDArray[np.int64], num_bytes: int) -> NDArray[np.uint8]:
    """The bytes [start, start + num_bytes) of every row, as a matrix. They must lie in the data."""
    if num_bytes > NARROW_BYTES:
        values = gather(data, starts, np.full(len(starts), num_bytes))
        return numbers(values, np.uint8).reshape(len(starts), num_bytes)
    return numbers(data, np.uint8)[starts[:, None] + np.arange(num_bytes)]


def gather(data: pa.Buffer, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> pa.Buffer:
    """The bytes of all rows, one after the other. They must lie in the data."""
    if not len(starts) or not sizes.any():
        return pa.py_buffer(b"")
    if (starts[1:] == starts[:-1] + sizes[:-1]).all():
        return data.slice(int(starts[0]), int(sizes.sum()))
    gathered: Any = views_into(data, starts, sizes).cast(pa.large_binary())
    return gathered.buffers()[2]


def binary_column(where: str, data: pa.Buffer, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Numbers:
    """A column of bytes."""
    offsets = offsets_of(sizes)
    check_fits(where, int(offsets[-1]))
    values = gather(data, starts, sizes)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32).data), values]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def number_column(type_: pa.DataType, data: pa.Buffer, count: int) -> Any:
    """A column of numbers, whose bytes lie one after the other."""
    if data.address % 8:  # Arrow expects numbers at multiples of their size
        data = pa.py_buffer(data.to_pybytes())
    return pa.Array.from_buffers(type_, count, [None, data])


def nested_lists(where: str, values: Any, shapes: NDArray[np.int64]) -> Any:
    """A column of arrays: row i has the shape `shapes[i]`, and the values of all rows lie one after the other."""
    levels: list[NDArray[np.int64]] = []
    outer = np.ones(len(shapes), np.int64)
    for sizes in shapes.T:
        levels.append(np.repeat(sizes, outer))
        outer = outer * sizes
    for lengths in reversed(levels):
        values = list_column(where, offsets_of(lengths), values)
    return values


def list_column(where: str, offsets: NDArray[np.int64], values: Any) -> Any:
    check_fits(where, int(offsets[-1]))
    return pa.ListArray.from_arrays(_int32(offsets), values)


def list_type(value_type: pa.DataType, num_levels: int) -> pa.DataType:
    for _ in range(num_levels):
        value_type = pa.list_(value_type)
    return value_type


def check_fits(where: str, size: int) -> None:
    """Arrow's lists and bytes have 32-bit offsets."""
    if size > MOST_BYTES:
        raise SourceError(f"{where} has {size:,} bytes or values in one unit, and the most is 2 GiB; write smaller files")


def _int32(offsets: Sequence[int] | NDArray[np.int64]) -> Any:
    return pa.array(np.asarray(offsets).astype(np.int32))
