"""Arrow arrays of numbers as numpy's, and back, without a copy.

Arrow's own conversions (`to_numpy`, `pa.array`, `pa.scalar`) import pandas wherever it is installed: 0.15 s and 45 MiB for
every process that makes a first batch (pandas 3 on 2 cores).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_DTYPES: dict[pa.DataType, np.dtype[Any]] = {
    pa.bool_(): np.dtype(np.bool_),
    pa.int8(): np.dtype(np.int8),
    pa.int16(): np.dtype(np.int16),
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.uint8(): np.dtype(np.uint8),
    pa.uint16(): np.dtype(np.uint16),
    pa.uint32(): np.dtype(np.uint32),
    pa.uint64(): np.dtype(np.uint64),
    pa.float16(): np.dtype(np.float16),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
}
_TYPES = {dtype: kind for kind, dtype in _DTYPES.items()}


def numbers_of(column: pa.Array[Any] | pa.ChunkedArray[Any], default: int | None = None) -> NDArray[Any]:
    """The numbers or booleans of a column: a read-only view of an array of numbers, otherwise a copy. `default` stands for
    nulls; without it there are none."""
    if isinstance(column, pa.ChunkedArray):
        chunks = [numbers_of(chunk, default) for chunk in column.chunks] or [np.zeros(0, _DTYPES.get(column.type))]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    dtype = _DTYPES.get(column.type)
    if dtype is None or (column.null_count and default is None):
        return column.to_numpy(zero_copy_only=False)
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(0, dtype)
    if dtype == np.bool_:
        found = _bits_of(buffer, column)
    else:
        found = np.frombuffer(cast("Any", buffer), dtype, len(column), column.offset * dtype.itemsize)
    return np.where(is_present(column), found, dtype.type(default)) if column.null_count else found


def array_of(numbers: NDArray[Any]) -> Any:
    """The numbers as an Arrow array over the same memory; booleans, which Arrow stores as bits, are copied."""
    data = np.packbits(numbers, bitorder="little").data if numbers.dtype == np.bool_ else np.ascontiguousarray(numbers).data
    return pa.Array.from_buffers(_TYPES[numbers.dtype], len(numbers), [None, pa.py_buffer(data)])


def is_present(array: pa.Array[Any]) -> NDArray[np.bool_]:
    """Which entries of an array are not null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    bits = None if pa.types.is_null(array.type) else array.buffers()[0]
    if bits is None:  # nothing but nulls, or a type without a bitmap of its own
        return array.is_valid().to_numpy(zero_copy_only=False)
    return _bits_of(bits, array)


def texts_of(values: Sequence[str]) -> pa.Array[Any]:
    """Texts as an Arrow array. OverflowError beyond 2 GiB."""
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{offsets[-1]:,} bytes of text do not fit into one column")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32).data), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def text_scalar(text: str, kind: pa.DataType) -> Any:
    """A text as a scalar of a type of texts."""
    return texts_of([text]).cast(kind)[0]


def text_offsets(texts: pa.Array[Any]) -> NDArray[Any]:
    """Where each text of an array of strings or large strings begins in `text_data`, and where the last one ends."""
    kind = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    offsets = texts.buffers()[1]
    if offsets is None or not len(texts):
        return np.zeros(1, kind)
    return np.frombuffer(cast("Any", offsets), kind, len(texts) + 1, texts.offset * np.dtype(kind).itemsize)


def text_data(texts: pa.Array[Any]) -> memoryview:
    """The UTF-8 of an array of strings or large strings, one text after the other."""
    data = texts.buffers()[2]
    return memoryview(b"") if data is None else memoryview(cast("Any", data))


def _bits_of(buffer: pa.Buffer, array: pa.Array[Any]) -> NDArray[np.bool_]:
    """The bits of an array's own rows."""
    first, end = array.offset // 8, -(-(array.offset + len(array)) // 8)
    bits = np.unpackbits(np.frombuffer(cast("Any", buffer), np.uint8)[first:end], bitorder="little")
    begin = array.offset - 8 * first
    return bits[begin : begin + len(array)].view(np.bool_)
