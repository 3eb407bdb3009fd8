"""The places of the record batches of an Arrow IPC file or stream, from its index or headers. Data is not read.

Both formats are sequences of messages: FF FF FF FF, the length of a header, the header (a flatbuffer), a body. The
file format adds a magic in front and a footer with an index at the end. Arrow's own readers do not expose these places.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.sources.storage import FileBytes

MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
_BLOCK = np.dtype([("offset", "<i8"), ("header", "<i4"), ("_", "<i4"), ("body", "<i8")])
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_LEAST_HEADER_BYTES = 16
"""Of a message: the continuation mark, the length of the header, and the smallest header."""


_STEP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """Record batch i is the bytes [starts[i], stops[i])."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    has_dictionaries: bool


def file_blocks(path: str, footer: pa.Buffer, num_bytes: int) -> Blocks:
    """The blocks of a file of `num_bytes`, from its footer without the length and magic after it. Raises ValueError,
    IndexError or struct.error where the footer is damaged."""
    root = _u32(footer, 0)
    batches, dictionaries = _blocks(footer, root, 3), _blocks(footer, root, 2)
    starts: list[int] = []
    stops: list[int] = []
    # As Python integers, which do not overflow. Arrow does not check these offsets before it reads there.
    for offset, header_bytes, _, body_bytes in np.concatenate([batches, dictionaries]).tolist():
        stop = offset + header_bytes + body_bytes
        if stop > num_bytes:
            raise SourceError(
                f"{path} should have a record batch up to byte {stop:,}, but has only {num_bytes:,} bytes: a part of it is "
                "missing; copy or write it again"
            )
        if offset < len(MAGIC) or header_bytes < _LEAST_HEADER_BYTES or body_bytes < 0:
            raise ValueError(f"a record batch at byte {offset:,} with {header_bytes:,} + {body_bytes:,} bytes")
        starts.append(offset)
        stops.append(stop)
    return Blocks(tuple(starts[: len(batches)]), tuple(stops[: len(batches)]), len(dictionaries) > 0)


def stream_blocks(path: str, data: FileBytes | pa.Buffer) -> Blocks:
    """The blocks of a stream, from the headers of its messages."""
    starts: list[int] = []
    stops: list[int] = []
    has_dictionaries = False
    offset = 0
    while offset < data.size:
        mark = _bytes(data, offset, offset + 8)
        length = struct.unpack_from("<i", mark, 4)[0] if len(mark) == 8 else -1
        stop = offset + 8 + length
        if mark[:4] != CONTINUATION or length < 0 or stop > data.size:
            raise _cut_error(path, offset, data.size)
        if length == 0:
            _check_end(path, data, stop)
            break
        header = _bytes(data, offset + 8, stop)
        kind, body = _message(header)
        is_known = kind in (_DICTIONARY, _BATCH) if offset else kind == _SCHEMA
        if not is_known or body < 0 or stop + body > data.size:
            raise _cut_error(path, offset, data.size)
        has_dictionaries |= kind == _DICTIONARY
        if kind == _BATCH:
            starts.append(offset)
            stops.append(stop + body)
        offset = stop + body
    return Blocks(tuple(starts), tuple(stops), has_dictionaries)


def _check_end(path: str, data: FileBytes | pa.Buffer, end: int) -> None:
    """Raises SourceError where data follows the end-of-stream mark: Arrow would ignore it silently."""
    if any(any(_bytes(data, start, start + _STEP_BYTES)) for start in range(end, data.size, _STEP_BYTES)):
        raise SourceError(
            f"{path} goes on after the end-of-stream mark at byte {end - 8:,}, for {data.size - end:,} bytes that would not "
            "be read: if streams were joined, name each of them as a file of its own; otherwise copy or write it again"
        )


def _bytes(data: FileBytes | pa.Buffer, start: int, stop: int) -> bytes:
    part = data[start : min(stop, data.size)]
    return part if isinstance(part, bytes) else part.to_pybytes()


def batch_rows(data: FileBytes, start: int, stop: int) -> int:
    """The number of rows of the record batch whose message is the bytes [start, stop)."""
    header = data[start + 8 : min(stop, start + header_bytes(data[start : start + 8]))]
    length = _field(header, _record_batch(header), 0)
    num_rows = struct.unpack_from("<q", header, length)[0] if length is not None else 0
    if num_rows < 0:
        raise ValueError(f"the record batch at byte {start:,} has {num_rows:,} rows")
    return num_rows


def decompressed_bytes(message: pa.Buffer) -> int:
    """The decompressed size of a record batch, as its buffers state it; 0 where it is not compressed."""
    header = message.slice(8)
    batch = _record_batch(header)
    buffers = _field(header, batch, 2)
    if _field(header, batch, 3) is None or buffers is None:
        return 0
    vector = buffers + _u32(header, buffers)
    places = np.frombuffer(memoryview(header), "<i8", count=2 * _u32(header, vector), offset=vector + 4)
    body = message.slice(8 + _u32(message, 4))
    # A buffer begins with its decompressed length; -1 means that it is not compressed.
    sizes = (struct.unpack_from("<q", body, start)[0] for start, size in places.reshape(-1, 2).tolist() if size)
    return sum(size for size in sizes if size > 0)


def header_bytes(mark: bytes) -> int:
    """The number of bytes of a message before its body, from its first 8 bytes."""
    return 8 + struct.unpack_from("<i", mark, 4)[0]


def message_bytes(message: pa.Buffer) -> int:
    """The number of bytes of a message with its body, as the message itself states it."""
    stop = header_bytes(message[:8].to_pybytes())
    return stop + _message(message[8:stop].to_pybytes())[1]


def is_compressed(header: bytes) -> bool:
    """Whether the body of a record batch is compressed, from its header without the first 8 bytes."""
    return _field(header, _record_batch(header), 3) is not None


def _record_batch(header: pa.Buffer | bytes) -> int:
    """The offset of the record batch table in the header of its message."""
    place = _field(header, _u32(header, 0), 2)
    if place is None:
        raise ValueError("a message has no header")
    return place + _u32(header, place)


def _message(header: bytes) -> tuple[int, int]:
    table = _u32(header, 0)
    kind, body = _field(header, table, 1), _field(header, table, 3)
    return (
        header[kind] if kind is not None else 0,
        struct.unpack_from("<q", header, body)[0] if body is not None else 0,
    )


def _blocks(footer: pa.Buffer, root: int, index: int) -> np.ndarray:
    place = _field(footer, root, index)
    if place is None:
        return np.zeros(0, _BLOCK)
    vector = place + _u32(footer, place)
    return np.frombuffer(memoryview(footer), _BLOCK, count=_u32(footer, vector), offset=vector + 4)


def _field(data: pa.Buffer | bytes, table: int, index: int) -> int | None:
    """The offset of field `index` of a flatbuffer table; None when it has its default value."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("a flatbuffer table before the start of the data")
    (size,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * index
    if slot >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else None


def _u32(data: pa.Buffer | bytes, offset: int) -> int:
    return struct.unpack_from("<I", data, offset)[0]


def _cut_error(path: str, offset: int, num_bytes: int) -> SourceError:
    return SourceError(
        f"{path} is not a whole Arrow stream: the message at byte {offset:,} of {num_bytes:,} is cut off or damaged; "
        "copy or write it again"
    )
