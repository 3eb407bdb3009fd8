"""One rank's part of a step as Arrow record batches, and back.

The batches have one column of binary views. Each value is a *region*: the memory of one large array, or of many small ones,
concatenated. Arrays longer than a message are split into several regions. The metadata of the first batch (`wire.Contents`)
says where each array is. Sending copies no large array. Receiving copies one, into a reused arena, only if it was split or
arrived misaligned for its dtype. Arrays that follow from others do not travel (`lean_fields.py`).

To a trainer on the same host steps go without a copy, as regions of shared memory: see `local_steps.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import pyarrow as pa

from overlord.errors import OverlordError
from overlord.messages import Delivery
from overlord.runtime.transport import table_to_stream
from overlord.service.lean_fields import derive, find_derivable
from overlord.service.wire import (
    Array,
    Column,
    Contents,
    Derived,
    Field,
    Ragged,
    Scalar,
    Shapes,
)
from overlord.sources.views import VIEW, compact, is_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Fields

Chunked: TypeAlias = "pa.ChunkedArray[Any]"
ArrowColumn: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any]"

SCHEMA = pa.schema([("region", pa.binary_view())])
MESSAGE_BYTES = 8 << 20
"""About the size of a message: larger ones need fresh memory, which is slow; smaller ones cost a round trip each."""

SMALL_BYTES = 1 << 14
"""Arrays up to this size are copied together into one region."""
_ALIGNMENT = 64
_KINDS = "biufc"
"""numpy's letters for booleans, integers, floats and complex numbers: types without pointers."""


class Regions(Protocol):
    """Collects the arrays of a step, for a way to send them."""

    def add(self, name: str, array: NDArray[Any]) -> Array:
        """Returns where the array of a field will be found."""
        ...


def pack_step(delivery: Delivery, arenas: Arenas | None = None) -> tuple[Contents, Iterator[pa.RecordBatch]]:
    """Return the contents of a step, and at least one batch with its data. With `arenas`, which lend memory for a moment,
    arrays that the client can compute are left out."""
    regions = _MessageRegions()
    microbatches = [
        pack_fields(regions, fields, {} if arenas is None else find_derivable(fields, arenas))
        for fields in delivery.microbatches
    ]
    return Contents(delivery.step, delivery.loss_tokens, microbatches), regions.batches()


def pack_fields(regions: Regions, fields: Fields, derived: Mapping[str, NDArray[Any] | None]) -> list[Field]:
    """Describe the fields of a microbatch, and add their arrays to `regions`, except those that are derived."""
    return [
        _pack_derived(regions, name, derived[name]) if name in derived else _pack_field(regions, name, value)
        for name, value in fields.items()
    ]


def _pack_derived(regions: Regions, name: str, extra: NDArray[Any] | None) -> Derived:
    return Derived(name, None if extra is None else regions.add(name, extra))


def check_sendable(name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in _KINDS:
        raise OverlordError(f"field {name!r} has dtype {array.dtype}, which cannot be sent to another process; numbers can")


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of an array; a copy only where it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class SmallArrays:
    """Small arrays, to be copied together into one region."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._contents: list[NDArray[np.uint8]] = []

    def add(self, content: NDArray[np.uint8]) -> int:
        """Returns the offset of the bytes in the region."""
        offset = self.num_bytes
        self._contents.append(content)
        self.num_bytes += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        return offset

    def joined(self, least_bytes: int = 0) -> NDArray[np.uint8]:
        joined = np.zeros(max(self.num_bytes, least_bytes), np.uint8)
        begin = 0
        for content in self._contents:
            joined[begin : begin + len(content)] = content
            begin += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        return joined


class _MessageRegions:
    """Collects arrays for record batches. Region 0 holds the small ones."""

    def __init__(self) -> None:
        self._small = SmallArrays()
        self._large: list[NDArray[np.uint8]] = []

    def add(self, name: str, array: NDArray[Any]) -> Array:
        check_sendable(name, array)
        dtype, shape, content = array.dtype.str, array.shape, bytes_of(array)
        if len(content) <= SMALL_BYTES:
            return Array(name, dtype, shape, 0, self._small.add(content))
        pieces = [content[begin : begin + MESSAGE_BYTES] for begin in range(0, len(content), MESSAGE_BYTES)]
        first = len(self._large) + 1
        self._large += pieces
        return Array(name, dtype, shape, first, 0, len(pieces))

    def batches(self) -> Iterator[pa.RecordBatch]:
        # At least 64 bytes: Arrow stores shorter values inline, in the view itself.
        message, num_bytes = [self._small.joined(_ALIGNMENT)], self._small.num_bytes
        for region in self._large:
            if num_bytes and num_bytes + len(region) > MESSAGE_BYTES:
                yield batch_of(message)
                message, num_bytes = [], 0
            message.append(region)
            num_bytes += len(region)
        if message:
            yield batch_of(message)


def batch_of(regions: Sequence[NDArray[np.uint8]]) -> pa.RecordBatch:
    """Return a message with these regions, without copying them."""
    views = np.zeros(len(regions), VIEW)
    views["length"] = [len(region) for region in regions]
    views["prefix"] = [region[:4].tobytes() for region in regions]
    views["buffer"] = np.arange(len(regions))
    buffers = [None, pa.py_buffer(views.data), *(pa.py_buffer(region.data) for region in regions)]
    arrow: Any = pa  # its stubs are incomplete
    return arrow.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary_view(), len(regions), buffers)], schema=SCHEMA)


def _pack_field(regions: Regions, name: str, value: Any) -> Field:
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


def _pack_column(regions: Regions, name: str, column: ArrowColumn) -> Column:
    arrow: Any = pa
    table = compact(arrow.table({name: column}))
    stream = regions.add(name, np.frombuffer(memoryview(table_to_stream(table)), np.uint8))
    return Column(name, stream, is_view(column.type), isinstance(column, pa.ChunkedArray))


class DamagedStepError(ValueError):
    """The data cannot come from `pack_step`. The caller, which knows the sender, raises ServiceError."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that came with a step. `memory` is read-only."""

    memory: NDArray[np.uint8]
    address: int

    @staticmethod
    def of(buffer: pa.Buffer) -> Region:
        return Region(np.frombuffer(memoryview(buffer).toreadonly(), np.uint8), buffer.address)


def regions_of(batches: Sequence[pa.RecordBatch]) -> list[Region]:
    """The regions that came in these messages."""
    return [Region.of(buffer) for batch in batches for buffer in _buffers(batch)]


def unpack_step(contents: Contents, regions: Sequence[Region], arenas: Arenas) -> Delivery:
    """Return the step that was packed. Its arrays are read-only.

    `wire` has checked the bounds of single numbers in `contents`. Here they are checked against one another and against the
    regions; DamagedStepError if they do not match.
    """
    microbatches = tuple(_unpack_fields(fields, regions, arenas) for fields in contents.microbatches)
    return Delivery(contents.step, contents.loss_tokens, microbatches)


def _unpack_fields(listed: Sequence[Field], regions: Sequence[Region], arenas: Arenas) -> Fields:
    fields: Fields = {}
    derived: dict[str, NDArray[Any] | None] = {}
    for field in listed:
        if isinstance(field, Derived):
            derived[field.name] = None if field.extra is None else _array(field.extra, regions, arenas)
            fields[field.name] = None  # to keep the order of fields
        else:
            fields[field.name] = _unpack_field(field, regions, arenas)
            derived.pop(field.name, None)
    if derived:
        try:
            computed = derive(fields, derived, arenas)
            fields |= {name: computed[name] for name in derived}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DamagedStepError(f"fields {', '.join(derived)} do not follow from those that came: {error}") from None
        for array in computed.values():
            array.setflags(write=False)
    return fields


def _buffers(batch: pa.RecordBatch) -> list[pa.Buffer]:
    if not batch.schema.equals(SCHEMA):
        raise DamagedStepError(f"a message has columns {batch.schema.names} instead of one of regions")
    _, _, *regions = batch.column(0).buffers()
    if len(regions) != batch.num_rows:
        raise DamagedStepError(f"a message of {batch.num_rows} regions came with {len(regions)} buffers")
    return regions  # type: ignore[return-value] - only a validity buffer may be missing


def _unpack_field(field: Field, regions: Sequence[Region], arenas: Arenas) -> Any:
    match field:
        case Array():
            return _array(field, regions, arenas)
        case Scalar():
            return field.value
        case Ragged():
            return [_array(array, regions, arenas) for array in field.arrays]
        case Column():
            return _column(field, regions, arenas)
        case Shapes():
            return {name: _shapes(field, name, shapes) for name, shapes in field.shapes.items()}
        case Derived():
            raise DamagedStepError(f"field {field.name!r} is derived")  # `_unpack_fields` takes these


def _shapes(field: Shapes, name: str, shapes: list[Any]) -> Any:
    if name in field.ragged:
        return shapes
    if len(shapes) != 1:
        raise DamagedStepError(f"field {field.name!r} has {len(shapes)} shapes for {name!r}, which is one array")
    return shapes[0]


def _array(array: Array, regions: Sequence[Region], arenas: Arenas) -> NDArray[Any]:
    dtype = np.dtype(array.dtype)
    num_bytes = math.prod(array.shape) * dtype.itemsize
    held = regions[array.region : array.region + array.num_regions]
    if len(held) != array.num_regions:
        raise DamagedStepError(
            f"field {array.name!r} lies in {array.num_regions} regions from number {array.region} on, and "
            f"{len(regions)} came"
        )
    # Checked before memory is allocated: a damaged number must not allocate terabytes.
    held_bytes = sum(len(region.memory) for region in held)
    end = array.offset + num_bytes
    if end > held_bytes or (len(held) > 1 and (array.offset or end != held_bytes)):
        raise DamagedStepError(
            f"field {array.name!r} of shape {array.shape} takes bytes {array.offset} to {end} of regions that have "
            f"{held_bytes}"
        )
    try:
        if len(held) == 1 and (held[0].address + array.offset) % dtype.alignment == 0:
            return np.ndarray(array.shape, dtype, held[0].memory, array.offset)
        memory = np.empty(num_bytes, np.uint8) if num_bytes <= SMALL_BYTES else arenas.lease(num_bytes)
        pieces = [held[0].memory[array.offset : end]] if len(held) == 1 else [region.memory for region in held]
        joined = np.concatenate(pieces, out=memory).view(dtype).reshape(array.shape)
    except ValueError as error:  # a dimension that is too long for numpy, next to one of 0
        raise DamagedStepError(f"field {array.name!r} has shape {array.shape}: {error}") from None
    joined.setflags(write=False)
    return joined


def _column(column: Column, regions: Sequence[Region], arenas: Arenas) -> ArrowColumn:
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
