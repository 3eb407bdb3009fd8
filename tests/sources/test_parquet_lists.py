"""Lists read without their levels: what Arrow reads, and Arrow's answer where a file does not lend itself to it."""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError
from overlord.sources.parquet import Parquet
from overlord.sources.parquet_footer import ColumnChunk
from overlord.sources.parquet_lists import (
    ListColumn,
    NotFlat,
    decode_lists,
    is_worth_it,
    list_columns,
    read_lists,
    take_apart,
)
from overlord.sources.thrift import (
    Encoded,
    binary,
    i32,
    i64,
    sequence,
    structure,
)

NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32()]
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(200, 3000), st.none()), min_size=1, max_size=30)
WAYS = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "data_page_size": st.sampled_from([1000, 10_000, 1 << 20]),
        "write_page_checksum": st.booleans(),
        "write_batch_size": st.sampled_from([1, 1024]),
        "dictionary_pagesize_limit": st.sampled_from([100, 1 << 20]),
    }
)


def lists_of(
    lengths: Sequence[int | None], kind: pa.DataType, *, nullable: bool = True, large: bool = False, seed: int = 0
) -> pa.Table:
    rng = np.random.default_rng(seed)
    values = [None if length is None else rng.integers(0, 100, length) for length in lengths]
    if not nullable:
        values = [() if value is None else value for value in values]
    kinds = pa.large_list if large else pa.list_
    field = pa.field("tokens", kinds(pa.field("element", kind, nullable=nullable)), nullable=nullable)
    return pa.table([pa.array(values, field.type)], schema=pa.schema([field]))


def written(table: pa.Table, **way: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream, **way)
    return stream.getvalue()


def only_chunk(table: pa.Table) -> pa.Array:
    (chunk,) = table.column(0).chunks
    return cast("pa.Array", chunk)  # the stubs say ChunkedArray


def first_chunk(data: bytes) -> tuple[ListColumn, ColumnChunk, pa.Buffer]:
    """Of the first row group of a file's only column."""
    file = pq.ParquetFile(io.BytesIO(data))
    (column,) = list_columns(file.metadata, file.schema_arrow)
    chunk = ColumnChunk.of(file.metadata.row_group(0).column(column.leaf))
    start, stop = chunk.extent
    return column, chunk, pa.py_buffer(data[start:stop])


def read_flat(data: bytes) -> pa.Array:
    """The first row group of a file's only column, or NotFlat."""
    return read_lists(*first_chunk(data))


@given(
    LENGTHS.filter(lambda lengths: sum(filter(None, lengths)) > 150 * len(lengths)),
    st.sampled_from(NUMBERS),
    st.booleans(),
    st.booleans(),
    WAYS,
)
def test_lists_are_those_that_arrow_reads(
    lengths: list[int | None], kind: pa.DataType, nullable: bool, large: bool, way: dict[str, Any]
) -> None:
    data = written(lists_of(lengths, kind, nullable=nullable, large=large), **way)
    found, expected = read_flat(data), only_chunk(pq.read_table(io.BytesIO(data)))
    found.validate(full=True)
    assert found.type == expected.type
    assert found.equals(expected)


@given(
    st.lists(st.tuples(LENGTHS.filter(lambda lengths: sum(filter(None, lengths)) > 150 * len(lengths)), WAYS), max_size=4),
    st.sampled_from(NUMBERS),
    st.booleans(),
)
def test_row_groups_that_are_decoded_together_are_those_that_arrow_reads(
    written_so: list[tuple[list[int | None], dict[str, Any]]], kind: pa.DataType, nullable: bool
) -> None:
    tables = [lists_of(lengths, kind, nullable=nullable, seed=i) for i, (lengths, _) in enumerate(written_so)]
    files = [written(table, **way) for table, (_, way) in zip(tables, written_so, strict=True)]
    chunks = [first_chunk(data) for data in files]
    found = [take_apart(*chunk) for chunk in chunks]
    if len(found) > 1 and not all(part.num_values for part in found):
        with pytest.raises(NotFlat, match="no values"):
            decode_lists(chunks[0][0], found)
    elif found:
        lists: Any = decode_lists(chunks[0][0], found)
        lists.validate(full=True)
        expected = [only_chunk(pq.read_table(io.BytesIO(data))) for data in files]
        assert lists.equals(pa.concat_arrays(expected))
        assert [part.num_lists for part in found] == list(map(len, expected))


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"])
def test_other_encodings_of_values_are_arrows_matter(encoding: str) -> None:
    table = lists_of([500, 0, 900], pa.int32())
    data = written(table, use_dictionary=False, column_encoding={"tokens.list.element": encoding})
    assert read_flat(data).equals(only_chunk(table))


def test_a_list_may_go_on_over_many_pages() -> None:
    table = lists_of([100_000, 7, 50_000], pa.int64())
    data = written(table, data_page_size=4096, use_dictionary=False, write_batch_size=100)
    assert read_flat(data).equals(only_chunk(table))


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 23, reason="pyarrow before 23 cannot write such a page")
def test_a_page_may_have_no_numbers() -> None:
    table = lists_of([0] * 40 + [2000, 0, 9000], pa.int32())
    data = written(table, max_rows_per_page=20, use_dictionary=False)
    assert read_flat(data).equals(only_chunk(table))


def test_where_a_number_is_missing_arrow_reads(tmp_path: Path) -> None:
    table = pa.table({"tokens": [[*range(500), None], list(range(500))], "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(NotFlat, match="numbers are missing"):
        read_flat(written(table.select(["tokens"])))
    source = Parquet(str(tmp_path / "a.parquet"))
    assert pa.concat_tables([source.read(unit) for unit in source.units()]).equals(table)


def test_short_lists_and_large_row_groups_are_left_to_arrow() -> None:
    for lengths, expected in [([200, 200], True), ([100, 100], False), ([20_000_000], False)]:
        data = written(lists_of(lengths, pa.int8()), use_dictionary=False, compression="zstd")
        group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
        assert is_worth_it(ColumnChunk.of(group.column(0)), group.num_rows) is expected


def test_columns_of_other_types_are_not_tried() -> None:
    columns = {
        "number": pa.int32(),
        "words": pa.list_(pa.string()),
        "nested": pa.list_(pa.list_(pa.int32())),
        "pairs": pa.list_(pa.struct([("a", pa.int32())])),
        "when": pa.list_(pa.timestamp("us")),
        "in": pa.struct([("lists", pa.list_(pa.int32()))]),
        "a.b": pa.list_(pa.int32()),
        "tokens": pa.list_(pa.int32()),
        "large": pa.large_list(pa.int32()),
    }
    file = pq.ParquetFile(io.BytesIO(written(pa.schema(columns).empty_table())))
    assert [column.field.name for column in list_columns(file.metadata, file.schema_arrow)] == ["a.b", "tokens", "large"]


def test_long_lists_stand_beside_other_columns(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": [1, 2, 3],
            "tokens": lists_of([300, 0, 900], pa.uint16()).column(0),
            "text": ["a", "b", "c"],
            "mask": lists_of([300, 0, 900], pa.int8(), seed=1).column(0),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    for columns in (None, ("mask", "tokens"), ("text", "mask")):
        source = Parquet(str(tmp_path / "a.parquet"), columns=columns)
        found = source.read(source.units()[0])
        assert found.equals(table if columns is None else table.select(columns))


@given(
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=80),
    st.sampled_from(["1.0", "2.0"]),
    st.sampled_from(["none", "zstd"]),
)
def test_damage_ends_in_an_answer_or_in_not_flat(where: int, damage: bytes, version: str, compression: str) -> None:
    data = bytearray(written(lists_of([300, 0, 400], pa.int32()), compression=compression, data_page_version=version))
    end = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    start = 4 + where % (end - 4)
    data[start : min(start + len(damage), end)] = damage[: end - start]
    with contextlib.suppress(NotFlat):
        read_flat(bytes(data)).validate(full=True)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_damage_under_a_checksum_names_the_row_group(tmp_path: Path, version: str) -> None:
    table = lists_of([300, 0, 400], pa.int32())
    data = bytearray(written(table, write_page_checksum=True, use_dictionary=False, data_page_version=version))
    data[1000] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    source = Parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(SourceError, match=r"row group 0 of .*a.parquet cannot be decoded.*(?i:checksum|crc)"):
        source.read(source.units()[0])


@pytest.mark.strangers
def test_a_row_group_of_another_type_than_the_schema_is_an_error(tmp_path: Path) -> None:
    data = written(lists_of([300, 400], pa.int32()))
    head, found, tail = data.rpartition(b"\x15\x02\x19")  # in the entry of the column chunk: INT32, then a list of encodings
    assert found
    data = head + b"\x15\x04\x19" + tail
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet .*INT64 vs\. INT32"):
        Parquet(str(tmp_path / "a.parquet")).units()


@pytest.mark.strangers
@pytest.mark.parametrize(
    "kind", [i64, lambda number: Encoded(4, i32(number).data), lambda number: Encoded(3, bytes([number]))]
)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_numbers_of_another_width_in_a_page_header_are_left_to_arrow(
    tmp_path: Path, kind: Callable[[int], Encoded], version: str
) -> None:
    data = written(lists_of([300], pa.int32()), compression="none", use_dictionary=False, data_page_version=version)
    of_page = {"1.0": 0, "2.0": 3}[version]
    right, other = structure({1: i32(of_page)}).data[:-1], structure({1: kind(of_page)}).data[:-1]
    assert data[4:].startswith(right)
    data = data[:4] + other + data[4 + len(right) :]
    with pytest.raises(NotFlat):
        read_flat(data)
    (tmp_path / "a.parquet").write_bytes(data)
    source = Parquet(str(tmp_path / "a.parquet"))
    units = source.units()
    with pytest.raises(SourceError, match=r"row group 0 of .*a\.parquet cannot be decoded"):
        source.read(units[0])


@pytest.mark.strangers
@pytest.mark.parametrize("make", [lambda numbers: binary(bytes(numbers)), lambda numbers: sequence(*map(i32, numbers))])
def test_a_page_header_with_fields_of_other_types_is_left_to_arrow(make: Callable[[list[int]], Encoded]) -> None:
    file = pq.ParquetFile(io.BytesIO(written(lists_of([200], pa.int32()), compression="none", use_dictionary=False)))
    (column,) = list_columns(file.metadata, file.schema_arrow)
    header = structure({1: i32(3), 2: i32(800), 3: i32(800), 8: make([0, 200, 0, 0, 0, 4, 4])}).data
    chunk = ColumnChunk.of(file.metadata.row_group(0).column(0))
    with pytest.raises(NotFlat, match="the pages could not be taken apart"):
        read_lists(column, chunk, pa.py_buffer(header + bytes(800)))
