"""Where the record batches of an Arrow IPC file or stream lie, read from its index or headers, not from its data.

Both formats are rows of messages: FF FF FF FF, the length of a header, the header (a flatbuffer), a body. The
file format adds a magic in front and a footer with an index behind. Arrow's own readers do not tell the
places, so this does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from overlord.data.storage import FileBytes
from overlord.errors import SourceError

MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
_BLOCK = np.dtype([("offset", "<i8"), ("header", "<i4"), ("_", "<i4"), ("body", "<i8")])
_DICTIONARY, _BATCH = 2, 3


@dataclass(frozen=True, slots=True)
class Blocks:
    """Record batch i is the bytes [starts[i], stops[i])."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    has_dictionaries: bool


def file_blocks(footer: pa.Buffer) -> Blocks:
    """From the footer of a file, without its length and the magic behind it."""
    root = _u32(footer, 0)
    batches = _blocks(footer, root, 3)
    starts = batches["offset"]
    stops = starts + batches["header"] + batches["body"]
    return Blocks(tuple(starts.tolist()), tuple(stops.tolist()), len(_blocks(footer, root, 2)) > 0)


def stream_blocks(path: str, data: FileBytes) -> Blocks:
    """From the headers of a stream; its data is not touched."""
    starts: list[int] = []
    stops: list[int] = []
    has_dictionaries = False
    offset = 0
    while offset < data.size:
        mark = data[offset : offset + 8]
        length = struct.unpack_from("<i", mark, 4)[0] if len(mark) == 8 else -1
        if length == 0:
            break  # the end-of-stream mark
        stop = offset + 8 + length
        if mark[:4] != CONTINUATION or length < 0 or stop > data.size:
            raise _cut(path, offset, data.size)
        kind, body = _message(data[offset + 8 : stop])
        if stop + body > data.size:
            raise _cut(path, offset, data.size)
        has_dictionaries |= kind == _DICTIONARY
        if kind == _BATCH:
            starts.append(offset)
            stops.append(stop + body)
        offset = stop + body
    return Blocks(tuple(starts), tuple(stops), has_dictionaries)


def batch_rows(data: FileBytes, start: int) -> int:
    """The number of rows of the record batch whose message begins at `start`."""
    header = data[start + 8 : start + header_bytes(data[start : start + 8])]
    batch = _record_batch(header)
    length = _field(header, batch, 0)
    return struct.unpack_from("<q", header, length)[0] if length is not None else 0


def header_bytes(mark: bytes) -> int:
    """How many bytes of a message lie before its body, by the first 8 of them."""
    return 8 + struct.unpack_from("<i", mark, 4)[0]


def is_compressed(header: bytes) -> bool:
    """Whether the body of a record batch must be decompressed, by its header without the first 8 bytes."""
    return _field(header, _record_batch(header), 3) is not None


def _record_batch(header: bytes) -> int:
    table = _u32(header, 0)
    place = _field(header, table, 2)
    assert place is not None  # every message has a header
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
    """Where field `index` of a flatbuffer table lies; None when it has its default value."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * index
    if slot >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else None


def _u32(data: pa.Buffer | bytes, offset: int) -> int:
    return struct.unpack_from("<I", data, offset)[0]


def _cut(path: str, offset: int, num_bytes: int) -> SourceError:
    return SourceError(
        f"{path} is not a whole Arrow stream: the message at byte {offset:,} of {num_bytes:,} is cut off or damaged; "
        "copy or write it again"
    )
