"""Footers of Parquet files: units keep what reading needs of them, and read what Arrow reads with the whole footer."""

import datetime
import decimal
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overlord.sources.parquet import Parquet
from overlord.sources.parquet_footer import RowGroups, pack
from overlord.sources.thrift import read_structure


def odd_types(rows: int = 40) -> pa.Table:
    day = datetime.datetime(2024, 1, 1)
    return pa.table(
        {
            "dictionary": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(),
            "large": pa.array([f"text {i}" for i in range(rows)], pa.large_string()),
            "zone": pa.array([day] * rows, pa.timestamp("ns", "Europe/Berlin")),
            "duration": pa.array(range(rows), pa.duration("s")),
            "price": pa.array([decimal.Decimal(i) / 8 for i in range(rows)], pa.decimal128(9, 3)),
            "fixed": pa.array([bytes([i]) * 5 for i in range(rows)], pa.binary(5)),
            "map": pa.array([[(f"k{j}", j) for j in range(i % 3)] for i in range(rows)], pa.map_(pa.string(), pa.int32())),
            "deep": pa.array([[[i], [], [i, None]] for i in range(rows)], pa.list_(pa.list_(pa.int16()))),
            "sized": pa.array([[i, i] for i in range(rows)], pa.list_(pa.int8(), 2)),
            "inner": pa.array([{"x": None if i % 2 else i, "y": {"z": [i]}} for i in range(rows)]),
            "tokens": pa.array([[i] * 300 for i in range(rows)], pa.list_(pa.int32())),
            "long": pa.array([[i] * 200 for i in range(rows)], pa.large_list(pa.uint16())),
        }
    )


@pytest.mark.parametrize("store_schema", [True, False])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("columns", [None, ["tokens"], ["zone", "inner", "dictionary"]])
def test_columns_of_any_type_are_read_as_with_the_whole_footer(
    tmp_path: Path, columns: list[str] | None, compression: Any, store_schema: bool
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(odd_types(), path, row_group_size=15, compression=compression, store_schema=store_schema)
    units = pickle.loads(pickle.dumps(Parquet(str(path), columns).units()))
    whole = pq.ParquetFile(path)
    assert [unit.num_rows for unit in units] == [15, 15, 10]
    for unit in units:
        assert unit.detail.frame is not None
        want = whole.read_row_group(unit.index, columns).select(columns or odd_types().column_names)
        assert Parquet(str(path), columns).read(unit).equals(want.replace_schema_metadata(None))


def test_a_wide_file_takes_memory_for_the_columns_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({f"c{i}": np.arange(64) for i in range(300)}), path, row_group_size=8)
    units = Parquet(str(path), ["c7", "c299"]).units()
    assert len(units[0].detail.packed) == 8 * 2 * 25
    assert Parquet(str(path), ["c7", "c299"]).read(units[3])["c299"].to_pylist() == list(range(24, 32))


def test_files_of_nine_columns_take_a_few_kilobytes_each(tmp_path: Path) -> None:
    """Statistics, page indexes and metadata that differ from file to file, as pandas writes it, are not kept."""
    num_files, num_groups = 6, 16
    for i in range(num_files):
        columns = {f"text{j}": [f"{'long value ' * 20}{n}" for n in range(64)] for j in range(8)}
        table = pa.table({"tokens": pa.array([[n] * 200 for n in range(64)], pa.list_(pa.int32())), **columns})
        table = table.replace_schema_metadata({"pandas": f"stop {i}" * 100})
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=4, write_page_index=True)
    units = Parquet(f"{tmp_path}/*").units()
    assert len(units) == num_files * num_groups
    assert len(pickle.dumps(units)) < 5_000 * num_files + 5_000
    details: list[RowGroups] = [unit.detail for unit in units]
    assert len({id(detail.frame) for detail in details}) == 1
    assert all(len(detail.packed) == num_groups * 9 * 25 for detail in details)


def test_numbers_of_more_than_32_bits_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": np.arange(10)}), path, row_group_size=5)
    detail: RowGroups = Parquet(str(path)).units()[1].detail
    chunks = [chunk._replace(decoded_bytes=5 << 30) for chunk in detail.chunks(1)]
    packed, is_large = pack(chunks)
    assert is_large
    footer, group = replace(detail, packed=packed, is_large=True).footer(0, 5)
    assert footer.row_group(group).column(0).total_uncompressed_size == 5 << 30


def test_a_footer_that_is_built_unlike_others_is_kept_whole(tmp_path: Path) -> None:
    """Fields of a footer may come in any order; no writer makes use of that."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": np.arange(10)}), path, row_group_size=5)
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8]
    assert footer[0] == 0x15  # field 1, the version, is moved to the end
    end, _ = 2, read_structure(footer, 0)
    moved = bytes([0x29]) + footer[end + 1 : -1] + bytes([0x05, 0x02]) + footer[1:end] + b"\0"
    path.write_bytes(data[:start] + moved + len(moved).to_bytes(4, "little") + b"PAR1")
    units = Parquet(str(path)).units()
    assert units[0].detail.frame is None
    assert [Parquet(str(path)).read(unit)["n"].to_pylist() for unit in units] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
