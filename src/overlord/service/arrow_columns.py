"""Columns of Arrow data in a step, as streams of bytes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa

from overlord.runtime.transport import table_to_stream
from overlord.service.wire import Array, Column
from overlord.sources.views import compact, is_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

Chunked: TypeAlias = "pa.ChunkedArray[Any]"
ArrowColumn: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any]"


class Regions(Protocol):
    """Collects the arrays of a step, for a way to send them."""

    def add(self, name: str, array: NDArray[Any]) -> Array:
        """Returns where the array of a field will be found."""
        ...


def is_column(value: Any) -> TypeGuard[ArrowColumn]:
    return isinstance(value, (pa.Array, pa.ChunkedArray))


def pack_column(regions: Regions, name: str, column: ArrowColumn) -> Column:
    arrow: Any = pa
    table = compact(arrow.table({name: column}))
    stream = regions.add(name, np.frombuffer(memoryview(table_to_stream(table)), np.uint8))
    return Column(name, stream, is_view(column.type), isinstance(column, pa.ChunkedArray))


def unpack_column(column: Column, stream: NDArray[Any]) -> ArrowColumn:
    """The column whose bytes came. Raises ValueError where it cannot come from `pack_column`."""
    values = _read_stream(column, pa.py_buffer(stream.data))
    if column.is_view:
        # `compact` wrote views as large binary or string.
        if not (pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)):
            raise ValueError(f"field {column.name!r} is a column of views that came as {values.type}")
        values = values.cast(pa.binary_view() if pa.types.is_large_binary(values.type) else pa.string_view())
    if column.is_chunked:
        return values
    if values.num_chunks > 1:
        raise ValueError(f"field {column.name!r} is one array that came in {values.num_chunks} pieces")
    return values.chunk(0) if values.num_chunks else pa.array([], values.type)


def _read_stream(column: Column, stream: pa.Buffer) -> Chunked:
    """Read the one column of a complete Arrow stream. It is validated, so that reading values stays within the buffer."""
    source = pa.BufferReader(stream)
    try:
        with pa.ipc.open_stream(source) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: the name of a column
        raise ValueError(f"field {column.name!r} came as an Arrow stream that cannot be read: {error}") from None
    if table.num_columns != 1:
        raise ValueError(f"field {column.name!r} came as {table.num_columns} columns instead of one")
    if source.tell() != stream.size:
        raise ValueError(
            f"field {column.name!r} came as an Arrow stream that ends after {source.tell()} of {stream.size} bytes"
        )
    return table.column(0)
