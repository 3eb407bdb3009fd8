"""Parquet files, against pyarrow's own reader."""

from __future__ import annotations

import datetime
import decimal
import io
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from tests.fuzz.mutations import NUMBERS, Region, damaged, set_varint, varint
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, FileTarget, OracleFailed, Seed, Wrong


def _tables() -> dict[str, pa.Table]:
    rng = random.Random(1)
    flat = {
        "number": pa.array([None if i % 7 == 3 else i - 20 for i in range(60)], pa.int64()),
        "small": pa.array([i % 5 for i in range(60)], pa.int8()),
        "unsigned": pa.array([2**63 + i for i in range(60)], pa.uint64()),
        "ratio": pa.array([i / 7 for i in range(60)], pa.float64()),
        "text": pa.array([None if i % 11 == 0 else f"text {i % 9} é" for i in range(60)], pa.string()),
        "is_even": pa.array([i % 2 == 0 for i in range(60)], pa.bool_()),
        "when": pa.array([datetime.datetime(2024, 1, 1, i % 24) for i in range(60)], pa.timestamp("us")),
        "day": pa.array([datetime.date(2024, 1, 1 + i % 28) for i in range(60)], pa.date32()),
        "price": pa.array([decimal.Decimal(i) / 8 for i in range(60)], pa.decimal128(9, 3)),
        "raw": pa.array([bytes([i]) * (i % 4) for i in range(60)], pa.binary()),
        "fixed": pa.array([bytes([i]) * 5 for i in range(60)], pa.binary(5)),
    }
    nested = {
        "tokens": pa.array([None if i == 4 else list(range(i % 6)) for i in range(30)], pa.list_(pa.int32())),
        "pairs": pa.array([[{"a": i, "b": f"{i}"}] * (i % 3) for i in range(30)]),
        "deep": pa.array([[[i], [], [i, None]] for i in range(30)], pa.list_(pa.list_(pa.int16()))),
        "map": pa.array([[(f"k{j}", j) for j in range(i % 3)] for i in range(30)], pa.map_(pa.string(), pa.int32())),
        "inner": pa.array([{"x": None if i % 2 else i, "y": {"z": [i]}} for i in range(30)]),
    }
    # Lists of a length at which they are decoded by Overlord itself.
    lengths = [400, 0, 1, 900, 200, 300, 700, 250]
    long = [[rng.randrange(50_000) for _ in range(length)] for length in lengths]
    lists = {
        "tokens": pa.array(long, pa.list_(pa.int32())),
        "missing": pa.array([None if i == 5 else values for i, values in enumerate(long)], pa.large_list(pa.uint16())),
        "same": pa.array([[7] * length for length in lengths], pa.list_(pa.field("element", pa.int64(), False))),
    }
    return {"flat": pa.table(flat), "nested": pa.table(nested), "lists": pa.table(lists)}


_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"compression": "none", "use_dictionary": False},
    "snappy": {"compression": "snappy", "row_group_size": 17},
    "zstd-v2": {"compression": "zstd", "data_page_version": "2.0", "row_group_size": 25},
    "checked": {"compression": "gzip", "write_page_checksum": True, "row_group_size": 20},
    "checked-v2": {"compression": "none", "write_page_checksum": True, "data_page_version": "2.0"},
    "pages": {"compression": "snappy", "data_page_size": 64, "write_batch_size": 4, "write_page_index": True},
    "lz4-delta": {"compression": "lz4", "use_dictionary": False, "version": "2.6"},
}


def _written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def make_seeds() -> Sequence[Seed]:
    seeds = []
    for name, table in _tables().items():
        for option, options in _OPTIONS.items():
            seeds.append(_seed(f"{name}-{option}", _written(table, **options)))
    integers = pa.table({"n": pa.array(range(200), pa.int64()), "s": pa.array([f"prefix{i}" for i in range(200)])})
    encodings = {"n": "DELTA_BINARY_PACKED", "s": "DELTA_BYTE_ARRAY"}
    seeds.append(_seed("delta", _written(integers, use_dictionary=False, column_encoding=encodings)))
    split = {"n": "BYTE_STREAM_SPLIT"}
    floats = pa.table({"n": pa.array([i / 3 for i in range(100)], pa.float32())})
    seeds.append(_seed("split-floats", _written(floats, use_dictionary=False, column_encoding=split)))
    seeds.append(_seed("no-rows", _written(integers.slice(0, 0))))
    seeds.append(_seed("one-row", _written(integers.slice(0, 1))))
    return seeds


def _seed(name: str, data: bytes) -> Seed:
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    regions = [Region(len(data) - 8 - footer_bytes, len(data) - 8)] * 3
    footer = pq.read_metadata(io.BytesIO(data))
    for g in range(footer.num_row_groups):
        for c in range(footer.num_columns):
            chunk = footer.row_group(g).column(c)
            start = min(offset for offset in (chunk.data_page_offset, chunk.dictionary_page_offset) if offset)
            regions.append(Region(start, min(start + 24, start + chunk.total_compressed_size)))
    return Seed(name, data, ".parquet", tuple(regions))


class _Thrift:
    """Where the numbers and the field headers of a structure in Thrift's compact protocol lie."""

    def __init__(self, data: bytes, at: int) -> None:
        self.numbers: list[Region] = []
        self.heads: list[int] = []
        self._data = data
        self.end = self._structure(at)

    def _structure(self, at: int) -> int:
        while head := self._data[at]:
            self.heads.append(at)
            at += 1
            if not head >> 4:
                at = self._varint(at)
            at = self._value(at, head & 0xF)
        return at + 1

    def _value(self, at: int, kind: int, *, in_list: bool = False) -> int:
        match kind:
            case 1 | 2:
                return at + in_list
            case 3:
                return at + 1
            case 4 | 5 | 6:
                return self._varint(at)
            case 7:
                return at + 8
            case 8:
                stop = self._varint(at)
                length = int.from_bytes(self._data[at : at + 1], "little")  # texts of more than 127 bytes are passed by
                return stop + (length if length < 0x80 else self._decoded(at))
            case 9 | 10:
                size, of = self._data[at] >> 4, self._data[at] & 0xF
                self.heads.append(at)
                at += 1
                if size == 0xF:
                    size, at = self._decoded(at), self._varint(at)
                for _ in range(size):
                    at = self._value(at, of, in_list=True)
                return at
            case 12:
                return self._structure(at)
        raise ValueError(f"a field of the kind {kind}")

    def _varint(self, at: int) -> int:
        stop = at + 1
        while self._data[stop - 1] & 0x80:
            stop += 1
        self.numbers.append(Region(at, stop))
        return stop

    def _decoded(self, at: int) -> int:
        number = shift = 0
        while self._data[at] & 0x80:
            number |= (self._data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
        return number | self._data[at] << shift


def _changed(rng: random.Random, data: bytes, at: int, *, may_move: bool) -> bytes:
    """A structure with another number, or another kind of field. What follows stays where it is unless it may move."""
    found = _Thrift(data, at)
    if rng.random() < 0.25:
        place = rng.choice(found.heads)
        head = data[place] & 0xF0 | rng.randrange(13) if rng.random() < 0.6 else rng.randrange(256)
        return data[:place] + bytes([head]) + data[place + 1 :]
    place = rng.choice(found.numbers)
    number = rng.choice((*NUMBERS, *(rng.randrange(300),) * 4))
    encoded = varint((number << 1) ^ (number >> 63))
    width = place.stop - place.start
    if not may_move:  # cut, or padded with zeros of the highest value
        encoded = encoded[: width - 1] + bytes([encoded[width - 1] & 0x7F]) if len(encoded) > width else encoded
        encoded = bytes(byte | 0x80 for byte in encoded).ljust(width, b"\x80")
        encoded = encoded[:-1] + bytes([encoded[-1] & 0x7F])
    return data[: place.start] + encoded + data[place.stop :]


def change_footer(rng: random.Random, seed: Seed) -> bytes:
    """Other numbers in the footer, whose length is then put right: what is left of it is still read."""
    data, region = seed.data, seed.regions[0]
    footer = data[region.start : region.stop]
    if rng.random() < 0.3:
        footer = set_varint(rng, footer, Region(0, len(footer)))
    else:
        footer = _changed(rng, footer, 0, may_move=True)
    return data[: region.start] + footer + len(footer).to_bytes(4, "little") + data[-4:]


def take_footer(rng: random.Random, seed: Seed) -> bytes:
    """The footer of another file behind the data of this one."""
    other = rng.choice(TARGET.seeds)
    return seed.data[: seed.regions[0].start] + other.data[other.regions[0].start :]


def change_page_header(rng: random.Random, seed: Seed) -> bytes | None:
    """Another number or kind of field in the header of a column chunk's first page, with all pages where they were."""
    if len(seed.regions) < 4:
        return None
    return _changed(rng, seed.data, rng.choice(seed.regions[3:]).start, may_move=False)


def change_levels(rng: random.Random, seed: Seed) -> bytes | None:
    """Other bytes right behind a page's header, where levels and the first values are."""
    if len(seed.regions) < 4:
        return None
    end = _Thrift(seed.data, rng.choice(seed.regions[3:]).start).end
    return damaged(rng, seed.data, [Region(end, min(end + 30, len(seed.data)))] * 9)


def read(path: str) -> Answer:
    source = ol.Parquet(path)
    reader = source.open_reader(release_gil=False)
    try:
        units = source.units()
        tables = []
        for unit in units:
            table = reader.read_rows(unit).strict()
            if table.num_rows != unit.num_rows:
                raise Wrong("a unit has other rows than it was listed with")
            tables.append(table)
        return checked(pa.concat_tables(tables))
    finally:
        reader.close()


def checked(table: pa.Table) -> Answer:
    try:
        return answer_of(table)
    except (pa.ArrowException, UnicodeDecodeError) as error:  # names of columns may be damaged too
        raise Wrong("returns a table that is not valid Arrow") from error


def oracle(data: bytes, suffix: str) -> list[Answer]:
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True, pre_buffer=False)
        whole = answer_of(file.read(use_threads=False).replace_schema_metadata(None))
        if not file.num_row_groups:
            return [whole]
        # Where levels are damaged the two differ in pyarrow itself: a row may begin in one row group and end in the next.
        groups = [file.read_row_group(i, use_threads=False) for i in range(file.num_row_groups)]
        return [whole, answer_of(pa.concat_tables(groups).replace_schema_metadata(None))]
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise OracleFailed(str(error)) from error


WAYS = (change_footer, change_footer, change_page_header, change_page_header, change_page_header, change_levels, take_footer)
TARGET = FileTarget("parquet", make_seeds, read, oracle, WAYS)
