"""JSON Lines: every line exactly once however files are cut, and bad lines named."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.data.readers import Jsonl
from overlord.errors import BadRowError, SchemaError, SourceError


def write(path: Path, rows: list[dict]) -> str:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(path)


def read_all(source: Jsonl) -> list[dict]:
    return [row for unit in source.units() for row in source.read(unit).to_pylist()]


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


lines = st.lists(
    st.tuples(st.text(max_size=40), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n  \r\n", b" \n"])),
    min_size=1,
    max_size=20,
)


@given(lines, st.booleans(), st.integers(1, 90), st.booleans())
def test_every_line_comes_exactly_once_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[str, bytes]],
    last_newline: bool,
    unit_bytes: int,
    mark: bool,
) -> None:
    content = b"".join(orjson.dumps({"text": text}) + end for text, end in lines)
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + (content if last_newline else content.rstrip()))
    source = Jsonl(str(path), {"text": pa.string()}, unit_bytes)
    assert [row["text"] for row in read_all(source)] == [text for text, _ in lines]
    assert sum(unit.num_bytes for unit in source.units()) == path.stat().st_size


def test_a_line_longer_than_many_ranges_belongs_to_the_one_it_begins_in(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "x" * 300_000}, {"text": "b"}]
    source = Jsonl(write(tmp_path / "a.jsonl", rows), unit_bytes=1000)
    counts = [source.read(unit).num_rows for unit in source.units()]
    assert [n for n in counts if n] == [2, 1]
    assert len(counts) > 300
    assert read_all(source) == rows


def test_compressed_files_are_one_unit_each_and_several_frames_are_one_file(tmp_path: Path) -> None:
    rows = [{"n": i, "text": f"t{i}"} for i in range(2000)]
    content = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    half = content.index(b"\n", len(content) // 2) + 1
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(content[:half]) + zstd(content[half:]))
    source = Jsonl(f"{tmp_path}/*", unit_bytes=1000)
    assert len(source.units()) == 2
    assert read_all(source) == rows + rows


def test_columns_select_fields_in_the_order_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": 1, "b": "x", "c": [1, 2]}, {"b": "y", "a": 2}])
    table = Jsonl(path, ["c", "a"]).read(Jsonl(path, ["c", "a"]).units()[0])
    assert table.schema == pa.schema([("c", pa.list_(pa.int64())), ("a", pa.int64())])
    assert table.to_pylist() == [{"c": [1, 2], "a": 1}, {"c": None, "a": 2}]


def test_types_come_from_the_first_unit_or_the_declaration_and_never_from_the_range_read(
    tmp_path: Path,
) -> None:
    rows = [{"x": 1.5, "t": [1]}, {"x": 2, "t": []}, {"x": None}]
    path = write(tmp_path / "a.jsonl", rows)
    inferred = Jsonl(path, unit_bytes=20)
    assert {str(inferred.read(unit).schema) for unit in inferred.units()} == {
        "x: double\nt: list<item: int64>\n  child 0, item: int64"
    }
    declared = Jsonl(path, {"t": pa.list_(pa.int32()), "x": pa.float32()}, 20)
    assert {tuple(declared.read(unit).schema.types) for unit in declared.units()} == {(pa.list_(pa.int32()), pa.float32())}


def test_a_unit_reads_the_same_after_pickling(tmp_path: Path) -> None:
    source = Jsonl(write(tmp_path / "a.jsonl", [{"a": i} for i in range(100)]), unit_bytes=100)
    for unit in source.units():
        again, same = pickle.loads(pickle.dumps((source, unit)))
        assert again.read(same).equals(source.read(unit))


BAD = (
    b'{"a": 1',
    b"null",
    b"[1]",
    b'"x"',
    b'{"a": 1} {"a": 2}',
    b'{"a": \xff}',
    b"}",
    b'{"a": NaN}',
    b"\x00",
    b"[" * 5000,
)


@given(
    st.lists(st.one_of(st.just(b'{"a": 7}'), st.sampled_from(BAD)), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_bad_lines_are_reported_with_their_place_and_the_others_kept(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("bad") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    source = Jsonl(str(path), {"a": pa.int64()}, unit_bytes)
    found: list[bytes] = []
    for unit in source.units():
        result = source.read_rows(unit)
        assert result.table["a"].to_pylist() == [7] * result.table.num_rows
        rows = np.arange(result.table.num_rows) if result.row_numbers is None else result.row_numbers
        parts = {int(row): b'{"a": 7}' for row in rows}
        for bad in result.bad:
            place = int(bad.where.rpartition(" at byte ")[2])
            parts[bad.row] = path.read_bytes()[place:].partition(b"\n")[0]
        assert sorted(parts) == list(range(len(parts)))
        found += [parts[row] for row in sorted(parts)]
    assert found == lines


def test_the_strict_reading_names_file_byte_and_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"a": oops}\n')
    source = Jsonl(str(tmp_path / "a.jsonl"))
    with pytest.raises(BadRowError, match=r"a\.jsonl at byte 10: not a JSON object: .*column.*on_bad_row='skip'"):
        source.read(source.units()[0])


def test_a_value_that_does_not_fit_is_one_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": 1}, {"a": "one"}, {"a": None}, {"a": 4}])
    result = Jsonl(path, {"a": pa.int64()}).read_rows(Jsonl(path, {"a": pa.int64()}).units()[0])
    assert result.table["a"].to_pylist() == [1, None, 4]
    assert result.row_numbers is not None
    assert result.row_numbers.tolist() == [0, 2, 3]
    assert "the field 'a' does not fit its type int64" in result.bad[0].error


def test_a_file_of_another_type_is_a_schema_error(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"a": 1}, {"a": 2}])
    write(tmp_path / "b.jsonl", [{"a": "x"}, {"a": "y"}])
    source = Jsonl(f"{tmp_path}/*")
    units = source.units()
    with pytest.raises(SchemaError, match=r"b\.jsonl has the field 'a' as str, but the source has it as int64; give a type"):
        source.read(units[1])


def test_a_field_missing_in_one_file_is_an_error_unless_declared(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"a": 1, "b": 2}])
    write(tmp_path / "b.jsonl", [{"a": 1}])
    source = Jsonl(f"{tmp_path}/*")
    with pytest.raises(SchemaError, match=r"b\.jsonl has no row with the field 'b', .*columns=\{'b': pa.string"):
        source.read(source.units()[1])
    declared = Jsonl(f"{tmp_path}/*", {"a": pa.int64(), "b": pa.int64()})
    assert read_all(declared) == [{"a": 1, "b": 2}, {"a": 1, "b": None}]
    with pytest.raises(SchemaError, match=r"no row at the start of .*a\.jsonl has the field 'text'; they have \['a', 'b'\]"):
        Jsonl(f"{tmp_path}/*", ["text"]).units()


def test_compressed_files_that_are_cut_or_damaged_are_errors(tmp_path: Path) -> None:
    content = b"".join(orjson.dumps({"text": f"t{i * 7919}"}) + b"\n" for i in range(5000))
    for name, data in (("a.jsonl.gz", gzip.compress(content)), ("a.jsonl.zst", zstd(content))):
        path = tmp_path / name
        path.write_bytes(data[:-100])
        source = Jsonl(str(path), {"text": pa.string()})
        units = source.units()
        with pytest.raises(SourceError, match=rf"{name} is not whole (gzip|zstd) data: Truncated.*copy or write it again"):
            source.read(units[0])
        path.write_bytes(b"this is not compressed at all" * 10)
        with pytest.raises(SourceError, match=rf"{name} is not whole (gzip|zstd) data"):
            Jsonl(str(path)).units()


def test_empty_files_are_no_units_and_a_source_without_rows_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(SourceError, match="not a single row"):
        Jsonl(f"{tmp_path}/*").units()
    write(tmp_path / "b.jsonl", [{"a": 1}])
    assert read_all(Jsonl(f"{tmp_path}/*")) == [{"a": 1}]


def test_a_file_that_is_not_json_is_refused_when_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"PAR1 this is no json\nat all\n")
    with pytest.raises(SourceError, match=r"a\.jsonl has no JSON object on any of its first lines"):
        Jsonl(f"{tmp_path}/*").units()


def test_identity_follows_columns_types_and_cuts() -> None:
    sources = (
        Jsonl("a"),
        Jsonl("b"),
        Jsonl("a", ["x"]),
        Jsonl("a", {"x": pa.int32()}),
        Jsonl("a", unit_bytes=5),
    )
    assert len({source.identity() for source in sources}) == len(sources)
