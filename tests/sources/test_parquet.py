"""Parquet: row groups in, exact tables out, damage named."""

import base64
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import encryption

from overlord.errors import BadRowError, BufferTooSmallError, SchemaError, SourceError, SpecError
from overlord.sources.parquet import Parquet
from tests.sources.damage import rewrite


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


class PlainKms(encryption.KmsClient):
    """Keys that are not kept secret."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        return base64.b64decode(wrapped_key)


def write_encrypted(path: Path, table: pa.Table, column: str, *, plaintext_footer: bool) -> str:
    keys = encryption.EncryptionConfiguration("key", column_keys={"key": [column]}, plaintext_footer=plaintext_footer)
    factory = encryption.CryptoFactory(lambda _: PlainKms())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), keys)
    pq.write_table(table, path, encryption_properties=properties)
    return str(path)


@pytest.mark.strangers
def test_an_encrypted_column_is_named_and_the_others_can_be_read(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "text": ["a", "b"]})
    path = write_encrypted(tmp_path / "a.parquet", table, "text", plaintext_footer=True)
    with pytest.raises(SourceError, match=r"a\.parquet has the encrypted column 'text', .*columns="):
        Parquet(path).units()
    assert read_all(Parquet(path, ["id"])).to_pydict() == {"id": [1, 2]}
    path = write_encrypted(tmp_path / "b.parquet", table, "text", plaintext_footer=False)
    with pytest.raises(SourceError, match=r"b\.parquet is an encrypted Parquet file .*write it without encryption"):
        Parquet(path).units()


FLIP_BITS = """
import sys
from overlord.sources.parquet import Parquet
from overlord.errors import OverlordError

path, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = open(path, "rb").read()
refused = 0
for place in range(start, stop):
    for bit in (1, 2, 4):
        changed = bytearray(data)
        changed[place] ^= bit
        with open(path, "wb") as file:
            file.write(changed)
        source = Parquet(path)
        try:
            for unit in source.units():
                source.read(unit)
        except OverlordError:
            refused += 1
print(refused)
"""


@pytest.mark.strangers
@pytest.mark.parametrize("part", ["footer", "page header"])
def test_no_flipped_bit_of_a_footer_or_page_header_ends_the_process(tmp_path: Path, part: str) -> None:
    path = tmp_path / "a.parquet"
    lists = pa.array([list(range(300))], pa.list_(pa.int32()))
    pq.write_table(pa.table({"t": lists}), path, use_dictionary=False, compression="zstd", store_schema=False)
    size = path.stat().st_size
    footer_bytes = int.from_bytes(path.read_bytes()[-8:-4], "little")
    start, stop = (size - 8 - footer_bytes, size - 8) if part == "footer" else (4, 64)
    command = [sys.executable, "-c", FLIP_BITS, str(path), str(start), str(stop)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > stop - start


@pytest.mark.strangers
def test_row_groups_that_do_not_add_up_are_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", pa.table({"x": range(77)}), 77))
    data, rows = path.read_bytes(), b"\x9a\x01"  # 77, as Thrift writes it
    assert data.count(rows) >= 2
    path.write_bytes(data[: data.rindex(rows)] + b"\x9c" + data[data.rindex(rows) + 1 :])
    with pytest.raises(SourceError, match=r"a\.parquet has a footer that cannot be read: .*78"):
        Parquet(str(path)).units()


@pytest.mark.strangers
def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    values = pa.array([b"good", b"b\xffd", None, b"fine"])
    text = pa.Array.from_buffers(pa.string(), 4, values.buffers())
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3, 4], text)], names=["texts"])
    write(tmp_path / "a.parquet", pa.table({"id": range(4), "text": text}), 2)
    write(tmp_path / "b.parquet", pa.table({"id": range(4), "nested": nested}), 4)
    source = Parquet(str(tmp_path / "a.parquet"))
    results = [source.read_rows(unit) for unit in source.units()]
    assert [result.table["id"].to_pylist() for result in results] == [[0], [2, 3]]
    assert [str(bad).split(":")[0] for bad in results[0].bad] == [f"row group 0 of {tmp_path}/a.parquet"]
    assert results[0].bad[0].row == 1
    with pytest.raises(BadRowError, match=r"a\.parquet: column 'text' is not UTF-8 text.*on_bad_row='skip'"):
        read_all(source)
    source = Parquet(str(tmp_path / "b.parquet"))
    result = source.read_rows(source.units()[0])
    assert result.table["id"].to_pylist() == [0, 2, 3]
    assert result.row_numbers is not None
    assert result.row_numbers.tolist() == [0, 2, 3]


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


@pytest.mark.strangers
@pytest.mark.parametrize("other", [pa.table({"id": [1], "score": ["high"]}), pa.table({"id": [1]})])
def test_columns_that_nobody_needs_and_that_differ_are_left_out_as_the_error_says(tmp_path: Path, other: pa.Table) -> None:
    write(tmp_path / "a.parquet", pa.table({"id": [1], "score": [0.5]}))
    write(tmp_path / "b.parquet", other)
    with pytest.raises(SchemaError, match=r"b\.parquet has .*'score'.*a\.parquet has .*columns=\('id',\)"):
        Parquet(f"{tmp_path}/*").units()
    source = Parquet(f"{tmp_path}/*", ("id",))
    assert [source.read(unit).to_pydict() for unit in source.units()] == [{"id": [1]}, {"id": [1]}]


@pytest.mark.strangers
def test_a_row_group_that_would_take_far_more_than_the_buffer_is_refused_before_it_is_read(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**62, 1 << 23)
    pq.write_table(pa.table({"n": numbers}), tmp_path / "a.parquet", use_dictionary=False, row_group_size=1 << 23)
    source = Parquet(str(tmp_path / "a.parquet"), buffer_bytes=1 << 20)
    with pytest.raises(
        BufferTooSmallError, match=r"row group 0 of .*a\.parquet has 67,\d+,\d+ bytes.*buffer_bytes, which is"
    ):
        source.read(source.units()[0])


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
