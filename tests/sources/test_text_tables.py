"""Lines of text, CSV and TSV."""

import csv
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import BadRowError, BufferTooSmallError, SchemaError, SourceError, SpecError
from overlord.formats import Csv, TextLines


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))), unit_bytes=st.integers(1, 40))
def test_every_line_is_read_once_for_any_units(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("\n".join(["first", *lines]).encode())
    source = TextLines(path, unit_bytes=unit_bytes)
    assert read_all(source)["text"].to_pylist() == ["first", *(line for line in lines if line)]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_lines_end_in_newlines_of_both_kinds_and_may_be_compressed(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbfone\r\n\r\n\ntwo\n three \n" + b"".join(b"line %d\n" % i for i in range(500)) + b"last"
    codec = {"a.txt": None, "a.txt.gz": "gzip", "a.txt.zst": "zstd"}[name]
    (tmp_path / name).write_bytes(
        content
        if codec is None
        else gzip.compress(content)
        if codec == "gzip"
        else pa.compress(content, codec, asbytes=True)
    )
    source = TextLines(tmp_path / name, column="line", unit_bytes=300)
    ol.testing.assert_source_keeps_its_promises(source)
    assert len(source.units()) > 3
    assert read_all(source)["line"].to_pylist() == ["one", "two", " three ", *(f"line {i}" for i in range(500)), "last"]


def test_a_line_that_is_not_utf_8_is_a_bad_row_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo \xff\nthree\n")
    source = TextLines(tmp_path / "a.txt")
    (unit,) = source.units()
    result = source.read_rows(unit)
    assert result.table["text"].to_pylist() == ["one", "three"]
    assert [(bad.row, bad.where) for bad in result.bad] == [(1, f"{tmp_path}/a.txt at byte 5")]
    with pytest.raises(BadRowError, match=r"a\.txt at byte 5: column 'text' is not UTF-8 text"):
        source.read(unit)


def test_a_file_without_newlines_is_refused_beyond_the_buffer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(40 << 20))
    with pytest.raises(BufferTooSmallError, match=r"a\.txt has no end of a line in the .* is it text\?"):
        read_all(TextLines(tmp_path / "a.txt", buffer_bytes=1))
    with pytest.raises(SpecError, match="unit_bytes must be positive, got 0"):
        TextLines("a.txt", unit_bytes=0)
    (tmp_path / "b.txt").touch()
    with pytest.raises(SourceError, match="not a single row"):
        TextLines(tmp_path / "b.txt").units()


FIELD = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="\u2028\u2029\x85"), max_size=6
)


@given(
    rows=st.lists(st.tuples(FIELD, st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)), max_size=12),
    unit_bytes=st.integers(1, 60),
)
def test_csv_is_what_the_standard_library_wrote_for_any_units(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, float]], unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows([("text", "number", "float"), ("first", 1, 0.5), *rows])
    path.write_text(sink.getvalue(), "utf-8")
    types = {"float": pa.float64(), "text": pa.string(), "number": pa.int64()}
    found = read_all(Csv(path, types, unit_bytes=unit_bytes))
    assert found.column_names == ["float", "text", "number"]
    expected = [("first", 1, 0.5), *rows]
    assert list(zip(*(found[name].to_pylist() for name in ("text", "number", "float")), strict=True)) == expected


def test_types_are_inferred_and_tabs_go_by_the_name(tmp_path: Path) -> None:
    lines = [
        b"id\tscore\ttext\tflag",
        b"1\t0.5\ta,b\ttrue",
        b"2\t\t\tfalse",
        *(b"%d\t7\tx\ttrue" % i for i in range(3, 400)),
    ]
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    source = Csv(tmp_path / "a.tsv.gz", unit_bytes=500)
    ol.testing.assert_source_keeps_its_promises(source)
    table = read_all(source)
    assert [str(field.type) for field in table.schema] == ["int64", "double", "string", "bool"]
    assert table["id"].to_pylist() == list(range(1, 400))
    assert table.slice(0, 2).to_pylist() == [
        {"id": 1, "score": 0.5, "text": "a,b", "flag": True}, {"id": 2, "score": None, "text": "", "flag": False},
    ]  # fmt: skip


def test_bad_rows_of_csv_are_reported_one_by_one_and_columns_that_are_not_used_are_not_checked(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text,n\n1,one,1\n2,two\n\n3,\xff,3\nx,four,4\n5,five,5,5\n6,six,6\n")
    source = Csv(tmp_path / "a.csv", {"id": pa.int64(), "text": pa.string()})
    (unit,) = source.units()
    result = source.read_rows(unit)
    assert result.table.to_pylist() == [{"id": 1, "text": "one"}, {"id": 6, "text": "six"}]
    assert [bad.row for bad in result.bad] == [1, 2, 3, 4]
    assert result.row_numbers is not None
    assert result.row_numbers.tolist() == [0, 5]
    errors = [bad.error for bad in result.bad]
    assert errors[0] == "it has 2 fields, and the header has 3"
    assert "'text' does not fit its type string" in errors[1]
    assert "'id' does not fit its type int64" in errors[2]
    assert errors[3] == "it has 4 fields, and the header has 3"
    assert Csv(tmp_path / "a.csv", {"n": pa.int64()}).read_rows(unit_of(Csv(tmp_path / "a.csv", ["n"]))).table[
        "n"
    ].to_pylist() == [1, 3, 4, 6]


def unit_of(source: ol.Source) -> ol.Unit:
    (unit,) = source.units()
    return unit


def test_newlines_in_quotes_need_a_word_and_then_a_file_is_one_unit(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,"two\nlines"\n2,one\n')
    with pytest.raises((BadRowError, SourceError), match=r"a\.csv"):
        read_all(Csv(tmp_path / "a.csv", unit_bytes=4))
    source = Csv(tmp_path / "a.csv", unit_bytes=4, newlines_in_values=True)
    assert len(source.units()) == 1
    assert read_all(source).to_pylist() == [{"id": 1, "text": "two\nlines"}, {"id": 2, "text": "one"}]


def test_files_may_have_their_columns_in_any_order_and_must_have_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,one\n")
    (tmp_path / "b.csv").write_text("more,text,id\nx,two,2\n")
    assert read_all(Csv(tmp_path / "*.csv", ["id", "text"]))["text"].to_pylist() == ["one", "two"]
    with pytest.raises(SchemaError, match=r"a\.csv has no column 'none'; it has \('id', 'text'\)"):
        Csv(tmp_path / "*.csv", ["none"]).units()
    (tmp_path / "c.csv").write_text("text\nx\n")
    with pytest.raises(SchemaError, match=r"c\.csv has no column 'id'"):
        Csv(tmp_path / "*.csv", ["id"]).units()
    (tmp_path / "d.csv").write_text("id,id\n1,2\n")
    with pytest.raises(SchemaError, match=r"d\.csv has the column 'id' 2 times"):
        Csv(tmp_path / "d.csv").units()
    (tmp_path / "e.csv").write_text("\n\n")
    with pytest.raises(SourceError, match=r"e\.csv has no header line"):
        Csv(tmp_path / "e.csv").units()
    with pytest.raises(SpecError, match="delimiter is one character"):
        Csv("a.csv", delimiter="||")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("unit_bytes", [20, 100, 500, 1 << 20])
def test_newlines_in_quotes_are_refused_wherever_units_are_cut(tmp_path: Path, unit_bytes: int, ending: str) -> None:
    values = [f"first {i}{ending}second {i}" for i in range(40)]
    (tmp_path / "a.csv").write_bytes(f"text{ending}".encode() + b"".join(f'"{v}"{ending}'.encode() for v in values))
    with pytest.raises(SourceError, match=r"a\.csv has quoted fields with newlines in them .* newlines_in_values=True"):
        read_all(Csv(tmp_path / "a.csv", unit_bytes=unit_bytes))
    assert read_all(Csv(tmp_path / "a.csv", newlines_in_values=True))["text"].to_pylist() == values


@given(
    rows=st.lists(st.tuples(st.text("ab,\" '"), st.text('a\n"b')), min_size=1, max_size=30), unit_bytes=st.integers(10, 200)
)
def test_csv_is_read_whole_or_refused_and_never_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([("one", "two"), *rows])
    source = Csv(path, {"one": pa.string(), "two": pa.string()}, unit_bytes=unit_bytes)
    if any("\n" in two for _, two in rows):
        with pytest.raises(SourceError, match="newlines_in_values=True"):
            read_all(source)
    else:
        assert [tuple(row.values()) for row in read_all(source).to_pylist()] == rows


def test_quotes_and_returns_that_are_no_newlines_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,size\n1,5" wide\n\n2,"a ""quoted"" word"\r\n3,"one\rtwo"\n4,ends "open\n')
    assert read_all(Csv(tmp_path / "a.csv"))["size"].to_pylist() == ['5" wide', 'a "quoted" word', "one\rtwo", 'ends "open']
