"""One rank's part of a step as Arrow record batches, and back.

The batches have one column of binary views. Each value is a *region*: the memory of one large array, or of many small ones,
concatenated. Arrays longer than a message are split into several regions. The metadata of the first batch (`wire.Contents`)
says where each array is. Sending copies no large array. Receiving copies one, into a reused arena, only if it was split or
arrived misaligned for its dtype.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import pyarrow as pa

from overlord.errors import OverlordError
from overlord.messages import Delivery
from overlord.runtime.transport import table_to_stream
from overlord.service.wire import (
    Array,
    Column,
    Contents,
    Field,
    Ragged,
    Scalar,
    Shapes,
)
from overlord.sources.views import VIEW, compact, is_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas

Chunked: TypeAlias = "pa.ChunkedArray[Any]"
ArrowColumn: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any]"

SCHEMA = pa.schema([("region", pa.binary_view())])
MESSAGE_BYTES = 8 << 20
"""About the size of a message: larger ones need fresh memory, which is slow; smaller ones cost a round trip each."""

_SMALL_BYTES = 1 << 14
"""Arrays up to this size are copied together into one region."""
_ALIGNMENT = 64
_KINDS = "biufc"
"""numpy's letters for booleans, integers, floats and complex numbers: types without pointers."""


def pack_step(delivery: Delivery) -> tuple[Contents, Iterator[pa.RecordBatch]]:
    """Return the contents of a step, and at least one batch with its data."""
    regions = _Regions()
    microbatches = [[_pack_field(regions, name, value) for name, value in micro.items()] for micro in delivery.microbatches]
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
        message, num_bytes = [self._small_region()], self._small_bytes
        for region in self._large:
            if num_bytes and num_bytes + len(region) > MESSAGE_BYTES:
                yield batch_of(message)
                message, num_bytes = [], 0
            message.append(region)
            num_bytes += len(region)
        if message:
            yield batch_of(message)

    def _small_region(self) -> NDArray[np.uint8]:
        # At least 64 bytes: Arrow stores shorter values inline, in the view itself.
        joined = np.zeros(max(self._small_bytes, _ALIGNMENT), np.uint8)
        begin = 0
        for content in self._small:
            joined[begin : begin + len(content)] = content
            begin += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        return joined


def batch_of(regions: Sequence[NDArray[np.uint8]]) -> pa.RecordBatch:
    """Return a message with these regions, without copying them."""
    views = np.zeros(len(regions), VIEW)
    views["length"] = [len(region) for region in regions]
    views["prefix"] = [region[:4].tobytes() for region in regions]
    views["buffer"] = np.arange(len(regions))
    buffers = [None, pa.py_buffer(views.data), *(pa.py_buffer(region.data) for region in regions)]
    arrow: Any = pa  # its stubs are incomplete
    return arrow.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary_view(), len(regions), buffers)], schema=SCHEMA)


def _pack_field(regions: _Regions, name: str, value: Any) -> Field:
    if isinstance(value, np.ndarray):
        return regions.add(name, cast("NDArray[Any]", value))
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return _pack_column(regions, name, cast("ArrowColumn", value))
    if isinstance(value, list):
        return Ragged(name, [regions.add(name, array) for array in cast("list[NDArray[Any]]", value)])
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value)
        listed: dict[str, Any] = {entry: shape if isinstance(shape, list) else [shape] for entry, shape in value.items()}
        return Shapes(name, listed, [entry for entry, shape in value.items() if isinstance(shape, list)])
    if isinstance(value, np.generic):
        value = cast("Any", value.item())
    if value is None or isinstance(value, (int, float, str)):
        return Scalar(name, value)
    raise OverlordError(f"field {name!r} is of type {type(value).__name__}, which cannot be sent to another process")


def _pack_column(regions: _Regions, name: str, column: ArrowColumn) -> Column:
    arrow: Any = pa
    table = compact(arrow.table({name: column}))
    stream = regions.add(name, np.frombuffer(memoryview(table_to_stream(table)), np.uint8))
    return Column(name, stream, is_view(column.type), isinstance(column, pa.ChunkedArray))


class DamagedStepError(ValueError):
    """The data cannot come from `pack_step`. The caller, which knows the sender, raises ServiceError."""


def unpack_step(contents: Contents, batches: Sequence[pa.RecordBatch], arenas: Arenas) -> Delivery:
    """Return the step that was packed. Arrays that are views of received memory are read-only.

    `wire` has checked the bounds of single numbers in `contents`. Here they are checked against one another and against the
    batches; DamagedStepError if they do not match.
    """
    regions = [region for batch in batches for region in _regions(batch)]
    microbatches = tuple(
        {field.name: _unpack_field(field, regions, arenas) for field in fields} for fields in contents.microbatches
    )
    return Delivery(contents.step, contents.loss_tokens, microbatches)


def _regions(batch: pa.RecordBatch) -> list[pa.Buffer]:
    if not batch.schema.equals(SCHEMA):
        raise DamagedStepError(f"a message has columns {batch.schema.names} instead of one of regions")
    _, _, *regions = batch.column(0).buffers()
    if len(regions) != batch.num_rows:
        raise DamagedStepError(f"a message of {batch.num_rows} regions came with {len(regions)} buffers")
    return regions  # type: ignore[return-value] - only a validity buffer may be missing


def _unpack_field(field: Field, regions: Sequence[pa.Buffer], arenas: Arenas) -> Any:
    match field:
        case Array():
            return _array(field, regions, arenas)
        case Ragged():
            return [_array(array, regions, arenas) for array in field.arrays]
        case Column():
            return _column(field, regions, arenas)
        case Shapes():
            return {name: _shapes(field, name, shapes) for name, shapes in field.shapes.items()}
        case Scalar():
            return field.value


def _shapes(field: Shapes, name: str, shapes: list[Any]) -> Any:
    if name in field.ragged:
        return shapes
    if len(shapes) != 1:
        raise DamagedStepError(f"field {field.name!r} has {len(shapes)} shapes for {name!r}, which is one array")
    return shapes[0]


def _array(array: Array, regions: Sequence[pa.Buffer], arenas: Arenas) -> NDArray[Any]:
    dtype = np.dtype(array.dtype)
    num_bytes = math.prod(array.shape) * dtype.itemsize
    held = regions[array.region : array.region + array.num_regions]
    if len(held) != array.num_regions:
        raise DamagedStepError(
            f"field {array.name!r} lies in {array.num_regions} regions from number {array.region} on, and "
            f"{len(regions)} came"
        )
    # Checked before memory is allocated: a damaged number must not allocate terabytes.
    held_bytes = sum(region.size for region in held)
    end = array.offset + num_bytes
    if end > held_bytes or (len(held) > 1 and (array.offset or end != held_bytes)):
        raise DamagedStepError(
            f"field {array.name!r} of shape {array.shape} takes bytes {array.offset} to {end} of regions that have "
            f"{held_bytes}"
        )
    pieces = [np.frombuffer(memoryview(region), np.uint8) for region in held]
    content = pieces[0][array.offset : end] if len(pieces) == 1 else None
    if content is None or content.ctypes.data % dtype.alignment:
        memory = np.empty(num_bytes, np.uint8) if num_bytes <= _SMALL_BYTES else arenas.lease(num_bytes)
        content = np.concatenate(pieces if content is None else [content], out=memory)
    try:
        return content.view(dtype).reshape(array.shape)
    except ValueError as error:  # a dimension that is too long for numpy, next to one of 0
        raise DamagedStepError(f"field {array.name!r} has shape {array.shape}: {error}") from None


def _column(column: Column, regions: Sequence[pa.Buffer], arenas: Arenas) -> ArrowColumn:
    values = _read_stream(column, pa.py_buffer(_array(column.stream, regions, arenas).data))
    if column.is_view:
        # `compact` wrote views as large binary or string.
        if not (pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)):
            raise DamagedStepError(f"field {column.name!r} is a column of views that came as {values.type}")
        values = values.cast(pa.binary_view() if pa.types.is_large_binary(values.type) else pa.string_view())
    if column.is_chunked:
        return values
    if values.num_chunks > 1:
        raise DamagedStepError(f"field {column.name!r} is one array that came in {values.num_chunks} pieces")
    return values.chunk(0) if values.num_chunks else pa.array([], values.type)


def _read_stream(column: Column, stream: pa.Buffer) -> Chunked:
    """Read the one column of a complete Arrow stream. It is validated, so that reading values stays within the buffer."""
    source = pa.BufferReader(stream)
    try:
        with pa.ipc.open_stream(source) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: the name of a column
        raise DamagedStepError(f"field {column.name!r} came as an Arrow stream that cannot be read: {error}") from None
    if table.num_columns != 1:
        raise DamagedStepError(f"field {column.name!r} came as {table.num_columns} columns instead of one")
    if source.tell() != stream.size:
        raise DamagedStepError(
            f"field {column.name!r} came as an Arrow stream that ends after {source.tell()} of {stream.size} bytes"
        )
    return table.column(0)
