"""A faster decoder for Parquet columns of long lists of numbers. Unlike Arrow's it holds the GIL most of the time.

A page of a list column holds levels, which say where lists begin and which values are missing, and then the values. Levels
are stored as runs of equal values and as bits in groups of eight. Arrow expands each level to a number, which takes half of
its time. `read_lists` reads the levels by their runs, puts the values, still encoded, into a Parquet file in memory whose
one column has no levels, and lets Arrow decode that file. The result equals the array that Arrow returns for the column.
Columns that do not lend themselves to this (short lists, missing numbers, old encodings) raise `NotFlat`: Arrow reads them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from overlord.sources import thrift
from overlord.sources.numbers import array_of
from overlord.sources.thrift import (
    Encoded,
    binary,
    boolean,
    i32,
    i64,
    read_varint,
    sequence,
    structure,
)
from overlord.sources.views import combine_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from pyarrow.parquet import FileMetaData

    from overlord.sources.parquet_footer import ColumnChunk

_SHORTEST = 160
"""The least average length of lists: the two decoders are equally fast at about 120."""
_LARGEST_BYTES = 64 << 20
"""Of a column chunk: the encoded values are in memory twice, so larger ones are left to Arrow."""
_LARGEST_SHARED_BYTES = 4 << 20
"""The same where other threads need the GIL: they wait for some milliseconds at most."""
_VALUES_OF_A_BYTE = 32
"""The least number of values for each byte of levels, unless there are few. A list has about five bytes of levels."""
_FEW_BYTES = 256
_MOST_OFFSET = 2**31 - 1
_MAGIC = b"PAR1"
_KIND, _PAGE_BYTES, _COMPRESSED_BYTES, _CHECKSUM, _DATA_PAGE_HEADER, _DATA_PAGE_V2_HEADER = 1, 2, 3, 4, 5, 8
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_RUNS = 3  # the encoding of levels


CodecName: TypeAlias = Literal["snappy", "gzip", "zstd"]
_CODECS: dict[int, CodecName | None] = {0: None, 1: "snappy", 2: "gzip", 6: "zstd"}
"""By their numbers in Parquet."""


class PhysicalType(NamedTuple):
    """A physical type of Parquet, its number, and the converted type that selects one of Arrow's types."""

    name: str
    number: int
    converted: int | None = None


_TYPES = {
    pa.int8(): PhysicalType("INT32", 1, 15),
    pa.int16(): PhysicalType("INT32", 1, 16),
    pa.int32(): PhysicalType("INT32", 1),
    pa.int64(): PhysicalType("INT64", 2),
    pa.uint8(): PhysicalType("INT32", 1, 11),
    pa.uint16(): PhysicalType("INT32", 1, 12),
    pa.uint32(): PhysicalType("INT32", 1, 13),
    pa.uint64(): PhysicalType("INT64", 2, 14),
    pa.float32(): PhysicalType("FLOAT", 4),
    pa.float64(): PhysicalType("DOUBLE", 5),
}


ArrowLists = pa.ListArray | pa.LargeListArray


class NotFlat(Exception):
    """Arrow must read the column."""


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A column of a file that holds lists of numbers."""

    field: pa.Field
    leaf: int

    @property
    def empty_level(self) -> int:
        """The definition level of an empty list; 0 is a missing one where lists may be missing."""
        return int(self.field.nullable)

    @property
    def full_level(self) -> int:
        """The definition level of a number."""
        return self.empty_level + 1 + int(self.field.type.value_field.nullable)

    def fits(self, footer: FileMetaData) -> bool:
        leaf = footer.schema.column(self.leaf)
        known = _TYPES.get(self.field.type.value_type)
        return (
            known is not None
            and leaf.physical_type == known.name
            and leaf.max_repetition_level == 1
            and leaf.max_definition_level == self.full_level
        )


def list_columns(footer: FileMetaData, schema: pa.Schema) -> tuple[ListColumn, ...]:
    """The columns of the schema that `read_lists` may be able to read."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    columns = []
    for field in schema:
        leaves = [i for i, path in enumerate(paths) if path.startswith(f"{field.name}.")]
        if (pa.types.is_list(field.type) or pa.types.is_large_list(field.type)) and len(leaves) == 1:
            columns.append(ListColumn(field, leaves[0]))
    return tuple(column for column in columns if column.fits(footer))


def is_worth_it(chunk: ColumnChunk, num_rows: int, *, release_gil: bool = False) -> bool:
    """Whether `read_lists` is likely to be faster than Arrow, by the footer. `release_gil`: other threads need the GIL."""
    most = _LARGEST_SHARED_BYTES if release_gil else _LARGEST_BYTES
    return chunk.num_values >= num_rows * _SHORTEST and chunk.decoded_bytes <= most


class FlatPages(NamedTuple):
    """A column chunk whose values have been taken apart from its levels."""

    codec: int
    bounds: NDArray[np.int64]
    """The begins of lists, and the end, counted in levels."""
    absent: list[tuple[int, int]]
    """(place, level) of the levels that have no value."""
    dictionary: bytes | memoryview
    pages: list[bytes | memoryview]
    num_values: int

    @property
    def num_lists(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_bytes(self) -> int:
        return len(self.dictionary) + sum(map(len, self.pages))


def read_lists(column: ListColumn, chunk: ColumnChunk, data: pa.Buffer) -> ArrowLists:
    """The lists of one row group, which has the column in the type of the schema; `data` is the column chunk from its first
    page on."""
    return decode_lists(column, [take_apart(column, chunk, data)])


def take_apart(column: ListColumn, chunk: ColumnChunk, data: pa.Buffer) -> FlatPages:
    """The first half of `read_lists`."""
    try:
        return _take_apart(column, chunk, data)
    except NotFlat:
        raise
    except Exception as error:  # damage of any kind: Arrow's result or error counts
        raise NotFlat(f"the pages could not be taken apart: {error}") from error


def decode_lists(column: ListColumn, parts: Sequence[FlatPages]) -> ArrowLists:
    """The lists of row groups, one row group after the other. The values of all are decoded in one go, which costs less."""
    if len(parts) > 1 and not all(part.num_values for part in parts):
        raise NotFlat("a row group has no values")  # alone it is read
    try:
        values, num_values = _decode_flat(_flat_file(column, parts)), sum(part.num_values for part in parts)
        if len(values) != num_values:
            raise NotFlat(f"{len(values)} values, but {num_values} levels of values")
        return _lists(column, *_joined_levels(parts), values)
    except NotFlat:
        raise
    except Exception as error:
        raise NotFlat(f"the values could not be decoded: {error}") from error


def _joined_levels(parts: Sequence[FlatPages]) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """The bounds of all parts, and the levels without a value, counted from the first part on."""
    if len(parts) == 1:
        return parts[0].bounds, parts[0].absent
    bounds: list[NDArray[np.int64]] = []
    absent: list[tuple[int, int]] = []
    first = 0
    for part in parts:
        bounds.append(part.bounds[:-1] + first)
        absent += [(first + where, level) for where, level in part.absent]
        first += int(part.bounds[-1])
    return np.concatenate([*bounds, [first]]), absent


def _take_apart(column: ListColumn, chunk: ColumnChunk, data: pa.Buffer) -> FlatPages:
    starts: list[int] = []
    absent: list[tuple[int, int]] = []
    dictionary, pages = b"", []
    num_levels = num_values = 0
    if chunk.codec not in _CODECS:
        raise NotFlat(f"the codec has the number {chunk.codec}")
    full_level = column.full_level
    for page in _pages(chunk, data):
        if page.header[_KIND] == _DICTIONARY_PAGE:
            dictionary = page.whole
            continue
        split = _split(page, _CODECS[chunk.codec])
        missing = other_levels(split.definition, split.num_levels, full_level)
        starts += zero_levels(split.repetition, split.num_levels, num_levels)
        absent += [(num_levels + where, level) for where, level in missing]
        num_here = split.num_levels - len(missing)
        if num_here:  # Arrow stops at a page without values
            pages += [_flat_header(split, num_here), split.values]
        num_levels += split.num_levels
        num_values += num_here
    if starts[0] != 0:
        raise NotFlat("the first list does not begin with the row group")
    return FlatPages(chunk.codec, np.array([*starts, num_levels]), absent, dictionary, pages, num_values)


class Page(NamedTuple):
    header: dict[int, Any]
    whole: memoryview
    """Header and body."""
    body: pa.Buffer


def _pages(chunk: ColumnChunk, data: pa.Buffer) -> Iterator[Page]:
    view = memoryview(data).cast("B")
    at = num_levels = 0
    while num_levels < chunk.num_values:
        header, start = thrift.read_structure(view, at)
        size = header[_COMPRESSED_BYTES]
        if not 0 <= size <= len(view) - start or not 0 <= header[_PAGE_BYTES] <= chunk.decoded_bytes:
            raise NotFlat(f"a page of {size:,} bytes, {header[_PAGE_BYTES]:,} uncompressed, in {len(view) - start:,}")
        if _CHECKSUM in header and zlib.crc32(view[start : start + size]) != header[_CHECKSUM] & 0xFFFFFFFF:
            raise NotFlat("a page's checksum does not fit")
        of_data = header.get(_DATA_PAGE_HEADER) or header.get(_DATA_PAGE_V2_HEADER) or {1: 0}
        num_levels += of_data[1]
        if not 0 <= of_data[1] <= num_levels <= chunk.num_values:
            raise NotFlat(f"a page of {of_data[1]:,} levels, in a row group of {chunk.num_values:,}")
        yield Page(header, view[at : start + size], data.slice(start, size))
        at = start + size


class ListSplit(NamedTuple):
    """A data page in its parts."""

    num_levels: int
    encoding: int
    repetition: bytes
    definition: bytes
    values: memoryview
    values_bytes: int
    """Their size uncompressed."""
    is_compressed: bool


def _split(page: Page, codec: CodecName | None) -> ListSplit:
    kind = page.header[_KIND]
    if kind == _DATA_PAGE:
        split = _split_v1(page, codec)
    elif kind == _DATA_PAGE_V2:
        split = _split_v2(page)
    else:
        raise NotFlat(f"a page of the kind {kind}")
    num_bytes = len(split.repetition) + len(split.definition)
    if num_bytes > _FEW_BYTES and num_bytes * _VALUES_OF_A_BYTE > split.num_levels:
        raise NotFlat(f"{num_bytes:,} bytes of levels for {split.num_levels:,} values")
    return split


def _split_v1(page: Page, codec: CodecName | None) -> ListSplit:
    """Levels are compressed with the values."""
    num_bytes, header = page.header[_PAGE_BYTES], page.header[_DATA_PAGE_HEADER]
    num_levels, encoding, *of_levels = (header[i] for i in (1, 2, 3, 4))
    if of_levels != [_RUNS, _RUNS]:
        raise NotFlat(f"levels in the encodings {of_levels}")
    data = page.body if codec is None else pa.Codec(codec).decompress(page.body, num_bytes)
    view = memoryview(data).cast("B")
    if len(view) != num_bytes:
        raise NotFlat(f"a page of {len(view):,} bytes that should have {num_bytes:,}")
    middle = 4 + int.from_bytes(view[:4], "little")
    end = middle + 4 + int.from_bytes(view[middle : middle + 4], "little")
    repetition, definition, values = bytes(view[4:middle]), bytes(view[middle + 4 : end]), view[end:]
    return ListSplit(num_levels, encoding, repetition, definition, values, len(values), False)


def _split_v2(page: Page) -> ListSplit:
    """Levels come before the values and are not compressed."""
    header, view = page.header[_DATA_PAGE_V2_HEADER], memoryview(page.body).cast("B")
    num_levels, encoding, definition_bytes, middle = (header[i] for i in (1, 4, 5, 6))
    is_compressed = header.get(7, True)
    if not isinstance(is_compressed, bool):
        raise NotFlat(f"a page that is compressed: {is_compressed!r}")
    end = middle + definition_bytes
    repetition, definition, values = bytes(view[:middle]), bytes(view[middle:end]), view[end:]
    return ListSplit(num_levels, encoding, repetition, definition, values, page.header[_PAGE_BYTES] - end, is_compressed)


_NONE, _FLAT_KIND = i32(0), i32(_DATA_PAGE_V2)


def _flat_header(split: ListSplit, num_values: int) -> bytes:
    count = i32(num_values)
    of_page = {1: count, 2: _NONE, 3: count, 4: i32(split.encoding), 5: _NONE, 6: _NONE}
    header = {
        _KIND: _FLAT_KIND,
        _PAGE_BYTES: i32(split.values_bytes),
        _COMPRESSED_BYTES: i32(len(split.values)),
        _DATA_PAGE_V2_HEADER: structure({**of_page, 7: boolean(split.is_compressed)}),
    }
    return structure(header).data


def _flat_file(column: ListColumn, parts: Sequence[FlatPages]) -> bytes:
    """A Parquet file of one required column, `v`, of numbers, with a row group for each part."""
    known = _TYPES[column.field.type.value_type]
    groups: list[Encoded] = []
    contents: list[bytes | memoryview] = [_MAGIC]
    begin, num_values = len(_MAGIC), 0
    for part in parts:
        size, count = i64(part.num_bytes), i64(part.num_values)
        chunk = {**_column_head(known, part.codec), 5: count, 6: size, 7: size, 9: i64(begin + len(part.dictionary))}
        if len(part.dictionary):
            chunk[11] = i64(begin)
        groups.append(structure({1: sequence(structure({2: _ZERO, 3: structure(chunk)})), 2: size, 3: count}))
        contents += (part.dictionary, *part.pages)
        begin += part.num_bytes
        num_values += part.num_values
    footer = structure({1: _VERSION, 2: _flat_schema(known), 3: i64(num_values), 4: sequence(*groups)}).data
    return b"".join([*contents, footer, len(footer).to_bytes(4, "little"), _MAGIC])


_ZERO, _VERSION, _FLAT_NAME = i64(0), i32(2), binary(b"v")


@lru_cache(maxsize=64)
def _column_head(known: PhysicalType, codec: int) -> dict[int, Encoded]:
    return {1: i32(known.number), 2: sequence(i32(_RUNS)), 3: sequence(_FLAT_NAME), 4: i32(codec)}


@lru_cache(maxsize=64)
def _flat_schema(known: PhysicalType) -> Encoded:
    leaf = {1: i32(known.number), 3: i32(0), 4: _FLAT_NAME}
    if known.converted is not None:
        leaf[6] = i32(known.converted)
    return sequence(structure({4: binary(b"schema"), 5: i32(1)}), structure(leaf))


def _decode_flat(file: bytes) -> pa.Array:
    import pyarrow.parquet as pq

    flat = pq.ParquetFile(pa.BufferReader(file), pre_buffer=False)
    return combine_chunks(flat.read(use_threads=False).column(0))


def _lists(column: ListColumn, bounds: NDArray[np.int64], absent: list[tuple[int, int]], values: pa.Array) -> ArrowLists:
    """`bounds` are the begins of lists and the end, counted in levels. The levels in `absent` have no value."""
    mask = None
    if absent:
        where, level = np.array(absent).T
        if level.max() > column.empty_level:
            raise NotFlat("numbers are missing")
        if not np.isin(where, bounds).all():
            raise NotFlat("a list that begins nowhere is empty")
        is_missing = np.zeros(len(bounds) - 1, bool)
        is_missing[np.searchsorted(bounds, where[level < column.empty_level])] = True
        mask = pa.array(is_missing) if is_missing.any() else None
        bounds = bounds - np.searchsorted(where, bounds)
    if len(values) > _MOST_OFFSET and not pa.types.is_large_list(column.field.type):
        raise NotFlat(f"{len(values):,} numbers, more than the column's offsets can say")  # of several row groups
    if pa.types.is_large_list(column.field.type):
        return pa.LargeListArray.from_arrays(array_of(bounds), values, type=column.field.type, mask=mask)
    offsets = array_of(bounds.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, type=column.field.type, mask=mask)


_ZERO_BITS = tuple(tuple(bit for bit in range(8) if not byte >> bit & 1) for byte in range(256))


def zero_levels(levels: bytes, num_values: int, first: int = 0) -> list[int]:
    """The places of level 0 among levels that are 0 or 1, counted from `first` on."""
    found: list[int] = []
    append, position = found.append, first
    left = iter(levels)
    try:
        for head in left:  # hot: twice per list, so no calls in the loop, and the usual case first
            if head == 3:
                for bit in _ZERO_BITS[next(left)]:
                    append(position + bit)
                position += 8
                continue
            if head > 0x7F:
                head, shift = head & 0x7F, 7
                while (byte := next(left)) > 0x7F and shift < 63:
                    head |= (byte & 0x7F) << shift
                    shift += 7
                head |= byte << shift
            if head & 1:
                for _ in range(head >> 1):
                    for bit in _ZERO_BITS[next(left)]:
                        append(position + bit)
                    position += 8
            else:
                end, level = position + (head >> 1), next(left)
                if level == 0 and end <= first + num_values:
                    found.extend(range(position, end))
                elif level > 1:
                    raise ValueError(f"a level of {level}, where the most is 1")
                position = end
    except StopIteration:
        raise ValueError("levels end in the middle of a run") from None
    _check_length(position - first, num_values)
    return _without_padding(found, first + num_values)


def _without_padding(places: list[int], end: int) -> list[int]:
    """The places before `end`; the others fill up the last group of eight."""
    while places and places[-1] >= end:
        places.pop()
    return places


def other_levels(levels: bytes, num_values: int, usual: int) -> list[tuple[int, int]]:
    """(place, level) of all levels but the `usual` one, which is the largest possible and below 256."""
    width = usual.bit_length()
    all_usual = sum(usual << width * i for i in range(8)).to_bytes(width, "little")
    found: list[tuple[int, int]] = []
    position = at = 0
    while at < len(levels):
        head, at = read_varint(levels, at)
        count = head >> 1
        end = position + (8 * count if head & 1 else count)
        _check_length(max(end, num_values), num_values)
        if head & 1:
            for group in range(at, at + count * width, width):
                if (packed := levels[group : group + width]) != all_usual:
                    found += _other_levels_of_group(packed, width, usual, position)
                position += 8
            at += count * width
        else:
            if levels[at] != usual:
                found += [(where, levels[at]) for where in range(position, position + count)]
            position += count
            at += 1
    _check_length(position, num_values)
    return [(where, level) for where, level in found if where < num_values]


def _other_levels_of_group(packed: bytes, width: int, usual: int, position: int) -> list[tuple[int, int]]:
    bits = int.from_bytes(packed, "little")
    levels = [bits >> width * i & (1 << width) - 1 for i in range(8)]
    return [(position + i, level) for i, level in enumerate(levels) if level != usual]


def _check_length(num_levels: int, num_values: int) -> None:
    if not num_values <= num_levels < num_values + 8:
        raise ValueError(f"{num_levels} levels for {num_values} values")
