"""One rank's part of a step as Arrow record batches, and back.

The batches have one column of binary views. Each of its values is a *region*: a large array as it lies in memory, or many
small ones side by side. Arrays longer than a message are cut into several regions. What lies where is in the metadata of
the first batch (`wire.Contents`). Sending copies no large array. Receiving copies one only when it was cut, or came to lie
where its type must not: then into memory that is used again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from overlord.data.arenas import Arenas
from overlord.data.views import VIEW, compact, is_view
from overlord.errors import OverlordError
from overlord.roles.data_constructor import Delivery
from overlord.transport.wire import Array, Column, Contents, Field, Ragged, Scalar, Shapes

SCHEMA = pa.schema([("region", pa.binary_view())])
MESSAGE_BYTES = 8 << 20
"""About the size of a message: larger ones need fresh memory, which is slow, smaller ones cost a round each."""

_SMALL_BYTES = 1 << 14
"""Arrays up to this size are copied together into one region."""
_ALIGNMENT = 64
_KINDS = "biufc"
"""numpy's letters for booleans, integers, floats and complex numbers: what has no pointers in it."""


def packed_step(delivery: Delivery) -> tuple[Contents, Iterator[pa.RecordBatch]]:
    """What is in the step, and the batches that carry it; there is always at least one."""
    regions = _Regions()
    microbatches = [[_packed(regions, name, value) for name, value in micro.items()] for micro in delivery.microbatches]
    return Contents(delivery.step, delivery.loss_tokens, microbatches), regions.batches()


class _Regions:
    """Collects arrays. Region 0 holds the small ones."""

    def __init__(self) -> None:
        self._small: list[NDArray[np.uint8]] = []
        self._small_bytes = 0
        self._large: list[NDArray[np.uint8]] = []

    def add(self, name: str, array: NDArray[Any]) -> Array:
        if array.dtype.kind not in _KINDS:
            raise OverlordError(
                f"field {name!r} has dtype {array.dtype}, which cannot be sent to another process; numbers can"
            )
        dtype, shape = array.dtype.str, array.shape
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(content) <= _SMALL_BYTES:
            offset = self._small_bytes
            self._small.append(content)
            self._small_bytes += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
            return Array(name, dtype, shape, 0, offset)
        pieces = [content[begin : begin + MESSAGE_BYTES] for begin in range(0, len(content), MESSAGE_BYTES)]
        first = len(self._large) + 1
        self._large += pieces
        return Array(name, dtype, shape, first, 0, len(pieces))

    def batches(self) -> Iterator[pa.RecordBatch]:
        message, num_bytes = [self._joined()], self._small_bytes
        for region in self._large:
            if num_bytes and num_bytes + len(region) > MESSAGE_BYTES:
                yield _batch(message)
                message, num_bytes = [], 0
            message.append(region)
            num_bytes += len(region)
        if message:
            yield _batch(message)

    def _joined(self) -> NDArray[np.uint8]:
        # Never so short that Arrow would keep it inside the view.
        joined = np.zeros(max(self._small_bytes, _ALIGNMENT), np.uint8)
        begin = 0
        for content in self._small:
            joined[begin : begin + len(content)] = content
            begin += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        return joined


def _batch(regions: Sequence[NDArray[np.uint8]]) -> pa.RecordBatch:
    views = np.zeros(len(regions), VIEW)
    views["length"] = [len(region) for region in regions]
    views["prefix"] = [region[:4].tobytes() for region in regions]
    views["buffer"] = np.arange(len(regions))
    buffers = [None, pa.py_buffer(views.data), *(pa.py_buffer(region.data) for region in regions)]
    return pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary_view(), len(regions), buffers)], schema=SCHEMA)


def _packed(regions: _Regions, name: str, value: Any) -> Field:
    if isinstance(value, np.ndarray):
        return regions.add(name, value)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return _packed_column(regions, name, value)
    if isinstance(value, list):
        return Ragged(name, [regions.add(name, array) for array in value])
    if isinstance(value, dict):
        listed = {entry: shape if isinstance(shape, list) else [shape] for entry, shape in value.items()}
        return Shapes(name, listed, [entry for entry, shape in value.items() if isinstance(shape, list)])
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (int, float, str)):
        return Scalar(name, value)
    raise OverlordError(f"field {name!r} is of type {type(value).__name__}, which cannot be sent to another process")


def _packed_column(regions: _Regions, name: str, column: pa.Array | pa.ChunkedArray) -> Column:
    table = compact(pa.table({name: column}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream = regions.add(name, np.frombuffer(memoryview(sink.getvalue()), np.uint8))
    return Column(name, stream, is_view(column.type), isinstance(column, pa.ChunkedArray))


def unpacked_step(contents: Contents, batches: Sequence[pa.RecordBatch], arenas: Arenas) -> Delivery:
    """The step again. Arrays over received memory are read-only."""
    regions = [region for batch in batches for region in _regions(batch)]
    microbatches = tuple(
        {field.name: _unpacked(field, regions, arenas) for field in fields} for fields in contents.microbatches
    )
    return Delivery(contents.step, contents.loss_tokens, microbatches)


def _regions(batch: pa.RecordBatch) -> list[pa.Buffer]:
    _, _, *regions = batch.column(0).buffers()
    if len(regions) != batch.num_rows:
        raise OverlordError(f"a message of {batch.num_rows} regions came with {len(regions)} buffers; it is damaged")
    return regions  # type: ignore[return-value] - only a validity buffer may be missing


def _unpacked(field: Field, regions: Sequence[pa.Buffer], arenas: Arenas) -> Any:
    match field:
        case Array():
            return _array(field, regions, arenas)
        case Ragged():
            return [_array(array, regions, arenas) for array in field.arrays]
        case Column():
            return _column(field, regions, arenas)
        case Shapes():
            return {name: shapes if name in field.ragged else shapes[0] for name, shapes in field.shapes.items()}
        case Scalar():
            return field.value


def _array(array: Array, regions: Sequence[pa.Buffer], arenas: Arenas) -> NDArray[Any]:
    dtype = np.dtype(array.dtype)
    if dtype.kind not in _KINDS:
        raise OverlordError(
            f"field {array.name!r} came with dtype {array.dtype}, which is no number; the message is damaged"
        )
    count = math.prod(array.shape)
    num_bytes = count * dtype.itemsize
    held = regions[array.region : array.region + array.num_regions]
    pieces = [np.frombuffer(memoryview(region), np.uint8) for region in held]
    if min(array.shape, default=0) < 0 or array.offset < 0 or array.region < 0 or len(pieces) != array.num_regions:
        raise OverlordError(f"field {array.name!r} came with a place that no message has; the message is damaged")
    # Before memory is taken for it: a damaged number must not ask for terabytes.
    if num_bytes > sum(map(len, pieces)) - array.offset:
        raise OverlordError(f"field {array.name!r} came with fewer bytes than its shape takes; the message is damaged")
    content = pieces[0][array.offset : array.offset + num_bytes] if len(pieces) == 1 else None
    if content is None or content.ctypes.data % dtype.alignment:
        memory = np.empty(num_bytes, np.uint8) if num_bytes <= _SMALL_BYTES else arenas.lease(num_bytes)
        content = np.concatenate(pieces if content is None else [content], out=memory)
    return content.view(dtype).reshape(array.shape)


def _column(column: Column, regions: Sequence[pa.Buffer], arenas: Arenas) -> pa.Array | pa.ChunkedArray:
    content = _array(column.stream, regions, arenas)
    with pa.ipc.open_stream(pa.py_buffer(content.data)) as reader:
        values = reader.read_all().column(0)
    if column.is_view:
        values = values.cast(pa.binary_view() if pa.types.is_large_binary(values.type) else pa.string_view())
    if column.is_chunked:
        return values
    return values.chunk(0) if values.num_chunks == 1 else pa.array([], values.type)
