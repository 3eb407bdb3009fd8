"""Tar shards: members grouped by key, mapped and not copied, damage named."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.data.read_result import held_bytes
from overlord.data.readers import WebDataset
from overlord.data.readers.tar_index import members
from overlord.errors import BadRowError, SchemaError, SourceError, SpecError


def tar(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write(path: Path, files: dict[str, bytes]) -> str:
    path.write_bytes(tar(files))
    return str(path)


def read_all(source: WebDataset) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


SHARD = {
    "a/0.jpg": b"J" * 5000,
    "a/0.txt": b"zero",
    "a/1.jpg": b"K" * 7000,
    "a/1.txt": b"one",
    "a/1.json": b"{}",
}


def test_members_are_grouped_by_key_with_nulls_where_a_sample_has_none(tmp_path: Path) -> None:
    table = read_all(WebDataset(write(tmp_path / "a.tar", SHARD)))
    assert table.to_pylist() == [
        {"__key__": "a/0", "jpg": b"J" * 5000, "json": None, "txt": b"zero"},
        {"__key__": "a/1", "jpg": b"K" * 7000, "json": b"{}", "txt": b"one"},
    ]


def test_a_key_ends_at_the_first_dot_of_the_last_part_and_endings_are_lower_case(tmp_path: Path) -> None:
    files = {
        "d.x/k.seg.PNG": b"1",
        "d.x/k.txt": b"2",
        "d.x/.hidden.txt": b"3",
        "README": b"4",
        "d.x/k.d/": b"",
    }
    table = read_all(WebDataset(write(tmp_path / "a.tar", files)))
    assert table.to_pylist() == [{"__key__": "d.x/k", "seg.png": b"1", "txt": b"2"}]


def test_members_of_a_sample_need_not_stand_together(tmp_path: Path) -> None:
    files = {"0.jpg": b"a", "1.jpg": b"b", "0.txt": b"c", "1.txt": b"d"}
    table = read_all(WebDataset(write(tmp_path / "a.tar", files)))
    assert table["txt"].to_pylist() == [b"c", b"d"]


def test_large_members_stay_in_the_mapped_shard(tmp_path: Path) -> None:
    files = {f"{i:03}.{end}": bytes([i]) * size for i in range(50) for end, size in (("jpg", 40_000), ("txt", 10))}
    source = WebDataset(write(tmp_path / "a.tar", files))
    unit = source.units()[0]
    result = source.read_rows(unit)
    assert [str(t) for t in result.table.schema.types] == ["string", "binary_view", "binary"]
    assert held_bytes(result.table, result.mapped) < 50 * 60
    assert result.table["jpg"][7].as_py() == bytes([7]) * 40_000


def test_declared_types_give_plain_columns_and_text(tmp_path: Path) -> None:
    source = WebDataset(write(tmp_path / "a.tar", SHARD), {"txt": pa.string(), "jpg": pa.binary(), "png": pa.binary()})
    table = read_all(source)
    assert [str(t) for t in table.schema.types] == ["string", "string", "binary", "binary"]
    assert table.filter(pa.array([False, True])).to_pylist() == [
        {"__key__": "a/1", "txt": "one", "jpg": b"K" * 7000, "png": None}
    ]


def test_a_unit_reads_the_same_after_pickling(tmp_path: Path) -> None:
    source = WebDataset(write(tmp_path / "a.tar", SHARD))
    again, unit = pickle.loads(pickle.dumps((source, source.units()[0])))
    assert again.read(unit).equals(source.read(unit))


def test_compressed_shards_are_read_whole(tmp_path: Path) -> None:
    want = read_all(WebDataset(write(tmp_path / "a.tar", SHARD)))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar(SHARD)))
    assert read_all(WebDataset(str(tmp_path / "a.tar.gz"))).equals(want)


names = st.text("abcdefgh/é", min_size=1, max_size=300).filter(lambda n: "//" not in n and n.strip("/") == n)


@given(
    st.dictionaries(names, st.binary(max_size=1500), max_size=8),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_the_index_agrees_with_the_standard_library(files: dict[str, bytes], form: int) -> None:
    try:
        data = tar(files, form)
    except ValueError:
        return  # ustar cannot hold such a name
    found = members("x.tar", pa.py_buffer(data))
    assert {m.name: data[m.offset : m.offset + m.num_bytes] for m in found} == files
    assert [m.name for m in found] == list(files)


@given(st.integers(0, 8000))
def test_a_cut_archive_is_an_error_unless_it_ends_between_members(size: int) -> None:
    whole = tar({f"{i}.bin": bytes([i + 1]) * 700 for i in range(3)}, tarfile.USTAR_FORMAT)
    data = pa.py_buffer(whole[:size])
    if size % 1536 == 0 or (size > 3 * 1536 and size % 512 == 0):
        assert len(members("x.tar", data)) == min(size // 1536, 3)
    else:
        with pytest.raises(SourceError, match=r"x\.tar is cut off.* at byte [\d,]+: copy or write the archive again"):
            members("x.tar", data)


def test_a_cut_shard_names_the_member_when_read(tmp_path: Path) -> None:
    source = WebDataset(write(tmp_path / "a.tar", SHARD))
    data = tar(SHARD)
    (tmp_path / "a.tar").write_bytes(data[:3000])
    with pytest.raises(SourceError, match=r"a\.tar is cut off: the member 'a/0.jpg' needs 2,632 bytes more, at byte 0"):
        source.units()


@given(st.integers(0, 511), st.integers(1, 255), st.integers(0, 2))
def test_any_changed_byte_in_a_header_is_noticed(place: int, change: int, member: int) -> None:
    data = bytearray(tar({f"{i}.bin": bytes(700) for i in range(3)}, tarfile.USTAR_FORMAT))
    data[member * 1536 + place] ^= change
    if 148 <= place < 156:
        return  # the checksum itself may be written in several ways
    with pytest.raises(SourceError, match=rf"at byte {member * 1536:,}"):
        members("x.tar", pa.py_buffer(bytes(data)))


def test_archives_joined_one_behind_the_other_are_all_read() -> None:
    data = tar({"0.txt": b"a"}) + tar({"1.txt": b"b"})
    assert [m.name for m in members("x.tar", pa.py_buffer(data))] == ["0.txt", "1.txt"]


def test_sizes_beyond_eight_gibibytes_are_understood() -> None:
    info = tarfile.TarInfo("big.bin")
    info.size = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        head = info.tobuf(form)
        found = members("x.tar", pa.py_buffer(head), len(head) + (9 << 30) + 1024)
        assert [(m.name, m.num_bytes) for m in found] == [("big.bin", 9 << 30)]


def test_what_is_not_a_tar_is_refused_when_listed(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"hello " * 500)
    with pytest.raises(SourceError, match=r"a\.tar has no header where one should be, at byte 0"):
        WebDataset(str(tmp_path / "a.tar")).units()
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(SourceError, match=r"a\.tar is empty"):
        WebDataset(str(tmp_path / "a.tar")).units()


def test_a_member_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar({"0.txt": b"a"}) + tar({"0.txt": b"b"}))
    with pytest.raises(SourceError, match=r"a\.tar has the member '0.txt' twice"):
        WebDataset(str(tmp_path / "a.tar")).units()


def test_endings_that_the_first_shard_has_not_are_an_error_unless_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"0.txt": b"a"})
    write(tmp_path / "b.tar", {"1.txt": b"b", "1.png": b"p"})
    source = WebDataset(f"{tmp_path}/*.tar")
    with pytest.raises(SchemaError, match=r"b\.tar has members that end in \.png, .*columns=\('txt',\)"):
        read_all(source)
    assert read_all(WebDataset(f"{tmp_path}/*.tar", ["txt"]))["txt"].to_pylist() == [b"a", b"b"]
    with pytest.raises(SchemaError, match=r"no sample of .*a\.tar has a member that ends in \.png; they end in \['txt'\]"):
        WebDataset(f"{tmp_path}/*.tar", ["png"]).units()


def test_a_shard_with_none_of_the_columns_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"0.txt": b"a"})
    write(tmp_path / "b.tar", {"0.jpg": b"a"})
    with pytest.raises(SchemaError, match=r"b\.tar has no member that ends in any of \['txt'\]; it has \['jpg'\]"):
        read_all(WebDataset(f"{tmp_path}/*.tar", ["txt"]))


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    files = {"0.txt": b"ok", "0.jpg": b"J" * 99, "1.txt": b"\xff\xfe", "1.jpg": b"K" * 99}
    path = write(tmp_path / "a.tar", files)
    source = WebDataset(path, {"txt": pa.string(), "jpg": pa.binary_view()})
    result = source.read_rows(source.units()[0])
    assert result.table.to_pylist() == [{"__key__": "0", "txt": "ok", "jpg": b"J" * 99}]
    assert np.array_equal(result.row_numbers, [0])
    with pytest.raises(BadRowError, match=r"a\.tar, sample '1': the member \.txt is not text"):
        source.read(source.units()[0])


def test_the_declaration_checks_itself() -> None:
    with pytest.raises(SpecError, match=r"column 'n' of a tar is one of binary, .*, not int64"):
        WebDataset("x", {"n": pa.int64()})
    with pytest.raises(SpecError, match="__key__ is always read"):
        WebDataset("x", ["__key__", "txt"])
