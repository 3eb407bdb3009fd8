"""JSON Lines: every line exactly once however files are cut, and bad lines named."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import BadRowError, BufferTooSmallError, SchemaError, SourceError, SpecError
from overlord.sources.files import BLOCK_BYTES
from overlord.sources.jsonl import Jsonl
from overlord.sources.reading import ReadResult


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


def test_compressed_files_are_cut_by_their_size_and_several_frames_are_one_file(tmp_path: Path) -> None:
    rows = [{"n": i, "text": f"t{i}"} for i in range(2000)]
    content = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    half = content.index(b"\n", len(content) // 2) + 1
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(content[:half]) + zstd(content[half:]))
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    for unit_bytes in (8000, 1 << 30):
        source = Jsonl(f"{tmp_path}/*", unit_bytes=unit_bytes)
        numbers = [i for size in sizes for i in range(-(-4 * size // unit_bytes))]
        assert [unit.index for unit in source.units()] == numbers
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


# Values are never changed to fit a type


def results(source: Jsonl) -> tuple[list[dict], list[str]]:
    """All good rows and all errors, unit by unit."""
    read = [source.read_rows(unit) for unit in source.units()]
    return [row for result in read for row in result.table.to_pylist()], [str(b) for result in read for b in result.bad]


@pytest.mark.strangers
def test_fractions_in_a_field_that_was_whole_at_first_are_bad_rows_and_never_cut_off(tmp_path: Path) -> None:
    rows = [{"score": i % 2} for i in range(40)] + [{"score": 1}, {"score": 0.97}, {"score": 2.0}]
    source = Jsonl(write(tmp_path / "a.jsonl", rows), unit_bytes=64)
    good, errors = results(source)
    assert good == [row for row in rows if row["score"] != 0.97]
    assert len(errors) == 1
    assert "a.jsonl at byte" in errors[0]
    assert "'score' does not fit its type int64: 0.97 is not a whole number" in errors[0]
    assert "columns={'score': pa.float64(), ...}" in errors[0]
    declared = Jsonl(source.paths, {"score": pa.float64()}, 64)
    assert results(declared) == ([{"score": float(row["score"])} for row in rows], [])


INT, FLOAT, TEXT, INTS = pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int64())
MISFITS = (
    (INT, 0.5),
    (INT, True),
    (INT, 2**63),
    (INT, 2**70),
    (INT, -(2**63) - 1),
    (INT, "1"),
    (pa.uint8(), 0.5),
    (pa.date32(), 0.5),
    (pa.timestamp("s"), 0.5),
    (pa.dictionary(pa.int32(), pa.int64()), 0.5),
    (FLOAT, True),
    (FLOAT, 2**53 + 1),
    (FLOAT, 2**64 + 1),
    (FLOAT, 10**30 + 1),
    (pa.float32(), 1e300),
    (pa.list_(pa.float64()), [0.5, 10**30 + 1]),
    (pa.bool_(), 1),
    (TEXT, 5),
    (TEXT, ["a"]),
    (pa.list_(pa.string()), "abc"),
    (INTS, [1, 0.5]),
    (INTS, [True]),
    (INTS, [-(2**63) - 1]),
    (pa.list_(FLOAT), [0.5, True]),
    (INTS, "12"),
    (pa.large_list(pa.list_(pa.float32())), [[1e300]]),
    (pa.struct([("n", pa.int64())]), {"n": 0.5}),
    (pa.struct([("n", FLOAT), ("is_ok", pa.bool_())]), {"n": False, "is_ok": False}),
    (pa.struct([("n", pa.struct([("m", INTS)]))]), {"n": {"m": [0.5]}}),
    (pa.map_(pa.string(), pa.int64()), {"a": 0.5}),
    (pa.null(), None),
)


@pytest.mark.strangers
@pytest.mark.parametrize(("type_", "value"), MISFITS[:-1], ids=lambda v: str(v).replace(" ", "")[:40])
def test_a_value_that_a_type_does_not_hold_exactly_is_a_bad_row_and_its_neighbours_are_kept(
    tmp_path: Path, type_: pa.DataType, value: object
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"v": None}, {"v": value}, {})))
    good, errors = results(Jsonl(str(path), {"v": type_}))
    assert good == [{"v": None}, {"v": None}]
    assert len(errors) == 1
    assert "does not fit its type" in errors[0]


@pytest.mark.strangers
def test_true_and_false_among_floats_are_bad_rows_and_never_numbers(tmp_path: Path) -> None:
    rows = [
        {"v": 0.5, "w": [0.0, 1.0], "s": {"x": 1.0, "is_ok": True}},
        {"v": False, "w": [0.5], "s": {"x": 0.5, "is_ok": False}},
        {"v": 1.0, "w": [0.5, True], "s": {"x": 0.5, "is_ok": False}},
        {"v": 0.0, "w": None, "s": {"x": True, "is_ok": True}},
        {"v": None, "w": [], "s": None},
    ]
    good, errors = results(Jsonl(write(tmp_path / "a.jsonl", rows)))
    assert good == [rows[0], rows[4]]
    assert [error.partition("the field ")[2].split()[0] for error in errors] == ["'v'", "'w'", "'s'"]


@pytest.mark.strangers
def test_the_least_int64_is_read_and_what_is_below_it_is_a_bad_row(tmp_path: Path) -> None:
    least = -(2**63)
    rows = [{"v": 1}, {"v": least}, {"v": least - 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, errors = results(Jsonl(str(tmp_path / "a.jsonl"), {"v": pa.int64()}))
    assert good == rows[:2]
    assert len(errors) == 1
    assert f"{least - 1} is not exactly a int64" in errors[0]


@pytest.mark.strangers
def test_bad_lines_beside_numbers_that_only_floats_hold_are_only_bad_rows(tmp_path: Path) -> None:
    deep = f'{{"v": 1e30, "w": 1234567890123456789, "deep": {"[" * 1000}{"]" * 1000}}}'
    (tmp_path / "a.jsonl").write_text('{"v": 1e30}\n{"v": 12345678901234567890123, "w" 1}\n' + deep + "\n")
    good, errors = results(Jsonl(str(tmp_path / "a.jsonl"), {"v": pa.float64()}))
    assert good[0] == {"v": 1e30}
    assert "a.jsonl at byte 12: not a JSON object" in errors[0]
    assert len(good) + len(errors) == 3


@pytest.mark.strangers
def test_rows_without_a_field_ask_for_the_fields_to_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    with pytest.raises(SourceError, match=r"a\.jsonl has nothing but \{\} on its first lines.*columns=\{'text': pa\.string"):
        Jsonl(str(tmp_path / "a.jsonl")).units()
    assert results(Jsonl(str(tmp_path / "a.jsonl"), {"text": pa.string()})) == ([{"text": None}] * 2, [])


numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.text()
)
json_values = st.recursive(
    numbers,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner)),
    max_leaves=6,
)
exact_types = st.sampled_from(
    [t for t, _ in MISFITS if not (pa.types.is_temporal(t) or pa.types.is_map(t) or "float" in str(t))]
)


def is_same(found: object, said: object) -> bool:
    """Equal as JSON, where missing keys and null are the same; 1 and 1.0 are one number, 1 and true are not."""
    if isinstance(found, dict) and isinstance(said, dict):
        return all(is_same(value, said.get(key)) for key, value in found.items())
    if isinstance(found, list) and isinstance(said, list):
        return len(found) == len(said) and all(map(is_same, found, said))
    return found == said and isinstance(found, bool) == isinstance(said, bool)


@pytest.mark.strangers
@given(st.lists(json_values, min_size=1, max_size=6), exact_types)
def test_what_is_read_equals_what_json_says(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], type_: pa.DataType
) -> None:
    path = tmp_path_factory.mktemp("values") / "a.jsonl"
    path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    source = Jsonl(str(path), {"v": type_})
    try:
        result = source.read_rows(source.units()[0])
    except SchemaError:
        return
    kept = range(len(values)) if result.row_numbers is None else result.row_numbers.tolist()
    assert len(kept) + len(result.bad) == len(values)
    for row, found in zip(kept, result.table["v"].to_pylist(), strict=True):
        assert is_same(found, values[row])


@pytest.mark.strangers
def test_a_field_of_any_kind_can_be_read_as_json_text_as_the_error_says(tmp_path: Path) -> None:
    values = ["text", ["a", 1], {"k": None}, 0.5, 2**70, None, True, "é"]
    path = write_json(tmp_path / "a.jsonl", [{"v": value, "n": i} for i, value in enumerate(values)])
    with pytest.raises(
        SchemaError, match=r"where it is .*str: .*columns=\{'v': pa.json_\(\), \.\.\.\} \(pa.json_"
    ) as caught:
        Jsonl(path).units()
    assert str(caught.value).count("{") == str(caught.value).count("}")
    read = read_all(Jsonl(path, {"v": pa.json_(), "n": pa.int64()}))
    assert [None if row["v"] is None else json.loads(row["v"]) for row in read] == values
    assert read[7]["v"] == '"é"'
    assert read_all(Jsonl(path, ["n"])) == [{"n": i} for i in range(8)]


@pytest.mark.strangers
def test_a_field_that_was_null_or_empty_at_first_asks_for_its_type(tmp_path: Path) -> None:
    for value in ("x", ["x"], {"k": 1}):
        empty = [] if isinstance(value, list) else None
        path = write(tmp_path / "a.jsonl", [{"v": empty, "n": i} for i in range(20)] + [{"v": value, "n": 20}])
        source = Jsonl(path, unit_bytes=64)
        with pytest.raises(SchemaError, match=r"'v' as \w+, but its type is not known.*columns=\{'v': pa.string"):
            results(source)
        assert len(results(Jsonl(path, ["n"], 64))[0]) == 21


@pytest.mark.strangers
def test_a_whole_number_beyond_int64_says_which_type_would_hold_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"id": 1}, {"id": 2}, {"id": 2**64 - 1}])
    _, errors = results(Jsonl(path, {"id": pa.int64()}))
    assert "columns={'id': pa.uint64(), ...}" in errors[0]
    assert read_all(Jsonl(path, {"id": pa.uint64()}))[2] == {"id": 2**64 - 1}


@pytest.mark.strangers
def test_declared_types_are_types() -> None:
    with pytest.raises(SpecError, match=r"gives the column 'a' the type 'int'; a type is a pyarrow one"):
        Jsonl("a.jsonl", {"a": "int"})  # type: ignore[dict-item]


# Compressed files of any size


def write_json(path: Path, rows: list[dict]) -> str:
    """Unlike orjson, with whole numbers of any length."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def peak_of(code: str) -> int:
    """By how many bytes a fresh process grew while it ran the last line of `code`, which prints that it failed."""
    script = f"""
import resource
import pyarrow as pa
import overlord as ol
from overlord.sources.jsonl import Jsonl
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    {code}
except ol.errors.BufferTooSmallError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, error)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "raise buffer_bytes" in out
    return int(out.split()[0])


@pytest.mark.strangers
@pytest.mark.parametrize("is_one_line", [False, True])
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_small_compressed_file_cannot_take_all_memory(tmp_path: Path, ending: str, is_one_line: bool) -> None:
    line = b'{"text": "' + b"x" * (1 << 20) + b'"}'
    content = line[:-2] * 512 if is_one_line else (line + b"\n") * 512
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(zstd(content) if ending == "zst" else gzip.compress(content, 1))
    del content
    declared = f"Jsonl({str(path)!r}, {{'text': pa.string()}}, buffer_bytes=1 << 20)"
    assert peak_of(f"s = {declared}; s.read(s.units()[0])") < 256 << 20
    if is_one_line:
        assert peak_of(f"Jsonl({str(path)!r}, buffer_bytes=1 << 20).units()") < 256 << 20


@pytest.mark.strangers
def test_a_plain_file_without_an_end_of_a_line_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * (40 << 20))
    with pytest.raises(BufferTooSmallError, match=r"a\.jsonl has no end of a line in the .* is it JSON Lines\?"):
        Jsonl(str(path), buffer_bytes=1 << 20).units()


def numbers_of(result: ReadResult) -> list[int] | None:
    return None if result.row_numbers is None else result.row_numbers.tolist()


@pytest.mark.strangers
@pytest.mark.parametrize("blank", [b"", b'{"a": 1, "t": oops}\n'])
def test_a_compressed_file_of_many_blocks_reads_like_the_plain_one(tmp_path: Path, blank: bytes) -> None:
    rows = [{"a": i, "t": "x" * (i % 7000)} for i in range(6000)]
    content = b"".join(orjson.dumps(row) + b"\n" for row in rows[:3000]) + blank
    content += b"".join(orjson.dumps(row) + b"\n" for row in rows[3000:])
    assert len(content) > 2 * BLOCK_BYTES
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(content[:-1]))
    plain, packed = (Jsonl(str(tmp_path / name), unit_bytes=1 << 30) for name in ("a.jsonl", "b.jsonl.zst"))
    expected, found = plain.read_rows(plain.units()[0]), packed.read_rows(packed.units()[0])
    assert found.table.equals(expected.table)
    assert found.table["a"].num_chunks == 1
    assert [(bad.row, bad.where[-10:]) for bad in found.bad] == [(bad.row, bad.where[-10:]) for bad in expected.bad]
    assert numbers_of(found) == (numbers_of(expected) if blank else None)
    assert found.table.num_rows == len(rows)
