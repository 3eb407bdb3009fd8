"""A finished chunk as a file, so that a loader that starts again need not make it.

The file has the arrays of the chunk, its other columns as an Arrow stream, and a checksum. It has no code: a file that is
damaged, or not of its chunk, is refused. The units that the chunk was read from are not in it, because they follow from the
chunk's number.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from overlord.chunks.chunk import Chunk, Lineage
from overlord.chunks.shared_rows import SharedRows
from overlord.errors import StateError
from overlord.runtime.transport import table_from_stream
from overlord.stream.facts import ChunkFacts, ImageSizes, RowOrigins

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from overlord.chunks.bad_rows import BadRowKey
    from overlord.declare.source import Unit

ChunkArray: TypeAlias = "NDArray[Any]"

_MAGIC = b"OVERLORD-CHUNK-1"
_BEFORE_HEAD = len(_MAGIC) + 12  # with the length of the head, and its checksum
_ALIGNMENT = 64
_TABLE = "table"
_KINDS = frozenset("iufb")


class _Place(msgspec.Struct, frozen=True):
    """Where an array lies behind the head."""

    first: int
    num_bytes: int
    dtype: str


class _Head(msgspec.Struct, frozen=True):
    source: str
    number: int
    arrays: dict[str, _Place]
    counts: dict[str, int]
    bad_rows: list[tuple[str, int | str]]
    checksum: int
    """Of everything behind the head."""


def encode_chunk(
    chunk: Chunk, source: str, number: int, *, columns: Collection[str], bad_rows: Collection[BadRowKey]
) -> list[bytes | memoryview] | None:
    """The parts of a file, with these columns of the chunk's table. None for a chunk that lies in mapped files: reading it
    again costs as much."""
    rows = SharedRows.of(chunk, columns)
    if rows is None or rows.columns.views:
        return None
    found: dict[str, ChunkArray | pa.Buffer | None] = {
        "values": rows.values,
        "mask": rows.mask,
        "begin": rows.begin,
        "document_end": rows.document_end,
        "table_row": rows.table_row,
        "origin": chunk.origin,
        "first": chunk.lineage.first,
        "tokens": chunk.facts.tokens,
        "loss_tokens": chunk.facts.loss_tokens,
        _TABLE: rows.columns.stream,
        **{f"sizes/{name}": column for name, column in chunk.facts.sizes.items()},
        **{f"row_numbers/{index}": numbers for index, numbers in enumerate(chunk.lineage.row_numbers)},
    }
    images = chunk.facts.images
    if images is not None:
        compact = images.compact()
        found |= {f"images/{name}": getattr(compact, name) for name in _IMAGES}
    if chunk.facts.origins is not None:
        found |= {f"origins/{name}": getattr(chunk.facts.origins, name) for name in _ORIGINS}
    places: dict[str, _Place] = {}
    body: list[bytes | memoryview] = []
    end, checksum = 0, 0
    for name, array in found.items():
        if array is None:
            continue
        data = np.frombuffer(memoryview(array), np.uint8) if isinstance(array, pa.Buffer) else np.ascontiguousarray(array)
        padding = bytes(-end % _ALIGNMENT)
        view = data.reshape(-1).view(np.uint8).data
        places[name] = _Place(end + len(padding), len(view), data.dtype.str)
        body += [padding, view]
        end += len(padding) + len(view)
        checksum = zlib.crc32(view, zlib.crc32(padding, checksum))
    head = msgspec.json.encode(_Head(source, number, places, dict(chunk.facts.counts), sorted(bad_rows, key=str), checksum))
    head += b" " * (-(_BEFORE_HEAD + len(head)) % _ALIGNMENT)  # arrays must be aligned in memory
    return [_MAGIC, len(head).to_bytes(8, "little"), zlib.crc32(head).to_bytes(4, "little"), head, *body]


_ORIGINS = ("row", "place", "token")
_IMAGES = ("first", "count", "height", "width")


def decode_chunk(
    data: bytes, source: str, number: int, *, units: Sequence[Unit], unit_numbers: Sequence[int]
) -> tuple[Chunk, frozenset[BadRowKey]]:
    """The chunk of a file, and the rows that were dropped while it was made. `units` are those that it was read from, with
    their numbers among the units of the source. StateError if it is another chunk, or damaged."""
    head, body = _open(data)
    if (head.source, head.number) != (source, number):
        raise StateError(f"the file has chunk {head.number} of source {head.source!r}, not {number} of {source!r}")
    arrays = {name: _array(body, place) for name, place in head.arrays.items()}
    try:
        table = pa.table({}) if _TABLE not in arrays else table_from_stream(pa.py_buffer(arrays[_TABLE].data))
        images = None
        if "images/count" in arrays:
            images = ImageSizes(*(arrays[f"images/{name}"] for name in _IMAGES))
        origins = None
        if "origins/row" in arrays:
            origins = RowOrigins(
                tuple(unit_numbers), arrays["origins/row"], arrays.get("origins/place"), arrays.get("origins/token")
            )
        facts = ChunkFacts(
            tokens=arrays["tokens"],
            loss_tokens=arrays["loss_tokens"],
            sizes={name.removeprefix("sizes/"): array for name, array in arrays.items() if name.startswith("sizes/")},
            counts=head.counts,
            images=images,
            origins=origins,
        )
        numbers = tuple(arrays.get(f"row_numbers/{index}") for index in range(len(units)))
        chunk = Chunk(
            facts=facts,
            table=table,
            table_row=arrays["table_row"],
            origin=arrays["origin"],
            lineage=Lineage(tuple(units), arrays["first"], numbers, unit_numbers=tuple(unit_numbers)),
            values=arrays.get("values"),
            begin=arrays["begin"],
            document_end=arrays["document_end"],
            mask=arrays.get("mask"),
            file_bytes=len(data),
        )
    except (KeyError, pa.ArrowException) as error:
        raise StateError(f"the file of a chunk is not whole: {error}") from error
    return chunk, frozenset((file, row) for file, row in head.bad_rows)


def _open(data: bytes) -> tuple[_Head, memoryview]:
    """The head and the rest, both with the right checksums."""
    begin = _BEFORE_HEAD
    length = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 8], "little")
    raw = data[begin : begin + length]
    if data[: len(_MAGIC)] != _MAGIC or zlib.crc32(raw).to_bytes(4, "little") != data[begin - 4 : begin]:
        raise StateError("the file of a chunk is damaged, or of another release")
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except msgspec.DecodeError as error:
        raise StateError(f"the file of a chunk is of another release: {error}") from error
    body = memoryview(data)[begin + length :]
    if zlib.crc32(body) != head.checksum:
        raise StateError("the file of a chunk is damaged: its checksum is wrong")
    return head, body


def _array(body: memoryview, place: _Place) -> ChunkArray:
    dtype = np.dtype(place.dtype)
    if dtype.kind not in _KINDS or place.first < 0 or place.first + place.num_bytes > len(body):
        raise StateError("the file of a chunk names an array that it does not have")
    if not place.num_bytes:
        return np.zeros(0, dtype)
    return np.frombuffer(body[place.first : place.first + place.num_bytes], dtype)
