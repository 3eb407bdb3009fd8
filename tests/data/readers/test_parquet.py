"""Parquet: row groups in, exact tables out, damage named."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.data.readers import Parquet
from overlord.errors import SchemaError, SourceError, SpecError
from tests.data.damage import rewrite


def documents(num_rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 1000, n).astype(np.int32) for n in rng.integers(0, 20, num_rows)]
    return pa.table(
        {
            "id": pa.array(range(num_rows), pa.int64()),
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "meta": pa.array(
                [{"url": f"u{i}", "score": i / 2} for i in range(num_rows)],
                pa.struct([("url", pa.string()), ("score", pa.float64())]),
            ),
        }
    )


def write(path: Path, table: pa.Table, rows: int = 10) -> str:
    pq.write_table(table, path, row_group_size=rows, compression="zstd")
    return str(path)


def read_all(source: Parquet) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def test_every_row_group_is_a_unit_with_its_rows(tmp_path: Path) -> None:
    table = documents(25)
    source = Parquet(write(tmp_path / "a.parquet", table))
    units = source.units()
    assert [unit.num_rows for unit in units] == [10, 10, 5]
    assert [unit.index for unit in units] == [0, 1, 2]
    assert read_all(source).equals(table)


@given(st.integers(1, 40), st.integers(1, 15), st.sampled_from([None, ("tokens",), ("meta", "id")]))
def test_files_read_in_order_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, rows: int, columns: tuple[str, ...] | None
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    tables = [documents(num_rows, seed) for seed in range(3)]
    for i, table in enumerate(tables):
        write(folder / f"{i}.parquet", table, rows)
    whole = pa.concat_tables(tables)
    assert read_all(Parquet(f"{folder}/*.parquet", columns)).equals(whole.select(columns) if columns else whole)


def test_num_bytes_counts_only_the_selected_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", documents(10))
    group = pq.read_metadata(path).row_group(0)
    sizes = {group.column(i).path_in_schema: group.column(i).total_uncompressed_size for i in range(4)}
    assert Parquet(path, ["id"]).units()[0].num_bytes == sizes["id"]
    assert Parquet(path, ["meta"]).units()[0].num_bytes == sizes["meta.url"] + sizes["meta.score"]
    assert Parquet(path).units()[0].num_bytes == sum(sizes.values())


def test_a_column_is_one_chunk_and_carries_no_foreign_metadata(tmp_path: Path) -> None:
    table = documents(10).replace_schema_metadata({"pandas": "{}"})
    read = Parquet(write(tmp_path / "a.parquet", table)).units()
    result = Parquet(str(tmp_path / "a.parquet")).read(read[0])
    assert [column.num_chunks for column in result.columns] == [1, 1, 1]
    assert result.schema.metadata is None


def test_a_unit_reads_the_same_after_pickling_in_a_fresh_source(tmp_path: Path) -> None:
    source = Parquet(write(tmp_path / "a.parquet", documents(25)), ["tokens"])
    for unit in source.units():
        again, same = pickle.loads(pickle.dumps((source, unit)))
        assert again.read(same).equals(source.read(unit))


def test_reading_a_unit_does_not_need_the_footer_again(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", documents(25)))
    source = Parquet(str(path))
    units = source.units()
    want = [source.read(unit) for unit in units]
    data = path.read_bytes()
    rewrite(path, data[:-200] + bytes(200))
    assert [source.read(unit) for unit in units] == want


def test_lists_whose_items_have_other_names_are_the_same_type(tmp_path: Path) -> None:
    for name in ("item", "element"):
        column = pa.array([[1, 2]], pa.list_(pa.field(name, pa.int32())))
        pq.write_table(pa.table({"t": column}), tmp_path / f"{name}.parquet", use_compliant_nested_type=False)
    assert read_all(Parquet(f"{tmp_path}/*")).to_pydict() == {"t": [[1, 2], [1, 2]]}


def test_a_file_cut_off_at_the_end_is_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", documents(25)))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError, match=r"a\.parquet does not end like a Parquet file .*it was cut off"):
        Parquet(str(path)).units()


def test_a_file_that_is_not_parquet_is_refused_when_listed(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"not parquet at all, but long enough"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(SourceError, match="does not end like a Parquet file"):
            Parquet(f"{tmp_path}/*.parquet").units()


def test_a_damaged_footer_is_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", documents(25)))
    data = path.read_bytes()
    path.write_bytes(data[:-300] + bytes(292) + data[-8:])
    with pytest.raises(SourceError, match=r"a\.parquet has a footer that cannot be read"):
        Parquet(str(path)).units()
    path.write_bytes(data[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(SourceError, match="footer is longer than the file"):
        Parquet(str(path)).units()


def test_a_file_with_its_middle_missing_is_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", documents(2000), 2000))
    data = path.read_bytes()
    path.write_bytes(data[:4] + data[-2000:])
    with pytest.raises(SourceError, match=r"row group 0 of .*a\.parquet should lie at bytes .* a part of it is missing"):
        Parquet(str(path)).units()


def test_damaged_pages_name_the_row_group(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", documents(2000), 1000))
    source = Parquet(str(path))
    units = source.units()
    data = path.read_bytes()
    rewrite(path, data[:200] + bytes(2000) + data[2200:])
    with pytest.raises(SourceError, match=r"row group 0 of .*a\.parquet cannot be decoded: .*write the file again"):
        source.read(units[0])


def test_a_file_that_is_gone_when_read_is_named(tmp_path: Path) -> None:
    source = Parquet(write(tmp_path / "a.parquet", documents(5)))
    units = source.units()
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(SourceError, match=r"a\.parquet does not exist .*put the file back"):
        source.read(units[0])


def test_a_column_missing_in_one_file_names_file_and_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", documents(5))
    write(tmp_path / "b.parquet", documents(5).drop_columns(["tokens"]))
    with pytest.raises(SchemaError, match=r"b\.parquet has no column 'tokens'; it has \('id', 'meta'\)"):
        Parquet(f"{tmp_path}/*").units()
    with pytest.raises(SchemaError, match=r"a\.parquet has no column 'text'; it has \('id', 'tokens', 'meta'\)"):
        Parquet(f"{tmp_path}/*", ["text"]).units()


def test_an_added_column_in_one_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", documents(5).select(["id"]))
    write(tmp_path / "b.parquet", documents(5))
    with pytest.raises(SchemaError, match=r"b\.parquet has the column 'tokens', which .* columns=\('id',\)"):
        Parquet(f"{tmp_path}/*").units()
    assert len(Parquet(f"{tmp_path}/*", ["id"]).units()) == 2


def test_another_type_in_one_file_names_file_and_both_types(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": pa.array([1], pa.int32())}))
    write(tmp_path / "b.parquet", pa.table({"x": pa.array([1], pa.int64())}))
    with pytest.raises(SchemaError, match=r"b\.parquet has the column 'x' as int64, but .*a\.parquet has it as int32"):
        Parquet(f"{tmp_path}/*").units()


def test_files_without_rows_are_no_units_and_a_source_without_rows_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", documents(0))
    with pytest.raises(SourceError, match="not a single row"):
        Parquet(f"{tmp_path}/*").units()
    write(tmp_path / "b.parquet", documents(3))
    assert [unit.num_rows for unit in Parquet(f"{tmp_path}/*").units()] == [3]


def test_the_declaration_checks_itself() -> None:
    with pytest.raises(SpecError, match=r"write columns=\('tokens',\)"):
        Parquet("x", "tokens")
    with pytest.raises(SpecError, match="at least one column"):
        Parquet("x", [])
    with pytest.raises(SpecError, match="names a column twice"):
        Parquet("x", ["a", "a"])
    with pytest.raises(SpecError, match="one or more paths"):
        Parquet([])


def test_identity_follows_what_decides_the_stream_and_hides_credentials() -> None:
    source = Parquet("s3://b/*", ["a"], storage_options={"secret_access_key": "hush"})
    assert source.identity() == Parquet(["s3://b/*"], ("a",)).identity()
    assert source.identity() != Parquet("s3://b/*").identity()
    assert "hush" not in repr(source) + source.identity()
