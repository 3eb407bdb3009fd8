"""Tar shards: members grouped by key, mapped and not copied, damage named."""

import gzip
import io
import pickle
import subprocess
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.errors import BadRowError, SchemaError, SourceError, SpecError
from overlord.sources.reading import table_bytes
from overlord.sources.tar_index import read_members
from overlord.sources.webdataset import WebDataset


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
    assert table_bytes(result.table, result.mapped) < 50 * 60
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
    found = read_members("x.tar", pa.py_buffer(data))
    assert {m.name: data[m.offset : m.offset + m.num_bytes] for m in found} == files
    assert [m.name for m in found] == list(files)


@given(st.integers(0, 8000))
def test_a_cut_archive_is_an_error_unless_it_ends_between_members(size: int) -> None:
    whole = tar({f"{i}.bin": bytes([i + 1]) * 700 for i in range(3)}, tarfile.USTAR_FORMAT)
    data = pa.py_buffer(whole[:size])
    if size % 1536 == 0 or (size > 3 * 1536 and size % 512 == 0):
        assert len(read_members("x.tar", data)) == min(size // 1536, 3)
    else:
        with pytest.raises(SourceError, match=r"x\.tar is cut off.* at byte [\d,]+: copy or write the archive again"):
            read_members("x.tar", data)


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
        read_members("x.tar", pa.py_buffer(bytes(data)))


def test_archives_joined_one_behind_the_other_are_all_read() -> None:
    data = tar({"0.txt": b"a"}) + tar({"1.txt": b"b"})
    assert [m.name for m in read_members("x.tar", pa.py_buffer(data))] == ["0.txt", "1.txt"]


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", target: str = "", **pax: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.pax_headers = kind, len(data), target, {**pax}
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


END = bytes(1024)


@pytest.mark.strangers
@pytest.mark.parametrize("form", ["gnu", "pax --sparse-version=0.0", "pax --sparse-version=0.1", "pax --sparse-version=1.0"])
def test_sparse_files_are_refused_by_name(tmp_path: Path, form: str) -> None:
    with open(tmp_path / "0.bin", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"data")
    subprocess.run(f"tar -cSf a.tar --format={form} 0.bin", shell=True, cwd=tmp_path, check=True)
    with pytest.raises(SourceError, match=r"a\.tar has the sparse file '0\.bin' at byte [\d,]+, .*without --sparse"):
        WebDataset(str(tmp_path / "a.tar")).units()


@pytest.mark.strangers
def test_links_have_the_bytes_of_their_targets(tmp_path: Path) -> None:
    far, further = f"{'x/' * 80}9.txt", f"{'y/' * 80}6.txt"
    data = (
        entry(far, data=b"nine")
        + entry("d/0.txt", data=b"zero")
        + entry("d/1.txt", tarfile.LNKTYPE, target="d/0.txt")
        + entry("d/2.txt", tarfile.SYMTYPE, target="../e/3.txt")
        + entry("d/4.txt", tarfile.SYMTYPE, target="./1.txt")
        + entry("README", tarfile.SYMTYPE, target="nowhere")
        + entry("e.d/", tarfile.DIRTYPE)
        + entry(further, tarfile.LNKTYPE, target=far)
        + entry("e/3.txt", data=b"three")
        + END
    )
    (tmp_path / "a.tar").write_bytes(data)
    with tarfile.open(tmp_path / "a.tar") as archive:
        want = {name: archive.extractfile(name).read() for name in archive.getnames() if name.endswith(".txt")}  # type: ignore
    assert want[further] == b"nine"
    table = read_all(WebDataset(str(tmp_path / "a.tar")))
    assert {f"{row['__key__']}.txt": row["txt"] for row in table.to_pylist()} == want


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (tarfile.SYMTYPE, "gone.txt", "is a link to 'gone.txt', which is no file of the archive"),
        (tarfile.SYMTYPE, "1.txt", "is a link to '1.txt', which is no file of the archive"),
        (tarfile.LNKTYPE, "later.txt", "is a link to 'later.txt', which is no file of the archive"),
        (tarfile.FIFOTYPE, "", "is a FIFO"),
        (tarfile.CHRTYPE, "", "is a character device"),
    ],
)
def test_a_member_without_bytes_is_named(tmp_path: Path, kind: bytes, target: str, message: str) -> None:
    data = entry("0.txt", data=b"zero") + entry("1.txt", kind, target=target) + entry("later.txt", data=b"x") + END
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(SourceError, match=rf"a\.tar has the member '1\.txt' at byte 1,536, which {message}"):
        WebDataset(str(tmp_path / "a.tar")).units()


@pytest.mark.strangers
@pytest.mark.parametrize("hole", [(1, 2), (1, 4), (3, 20), (0, 1)])
def test_a_hole_of_zeros_is_an_error_and_not_the_end(hole: tuple[int, int]) -> None:
    data = bytearray(tar({f"{i}.txt": b"x" * 500 for i in range(30)}, tarfile.USTAR_FORMAT))
    start, stop = (1024 * i for i in hole)
    data[start:stop] = bytes(stop - start)
    with pytest.raises(SourceError, match=rf"{stop - start:,} bytes of zeros at byte {start:,} with more data after them"):
        read_members("x.tar", pa.py_buffer(bytes(data)))


@pytest.mark.strangers
def test_a_download_that_was_not_finished_is_no_long_end() -> None:
    data = tar({f"{i}.txt": b"x" * 500 for i in range(30)})
    assert len(read_members("x.tar", pa.py_buffer(data + bytes(1 << 19)))) == 30
    with pytest.raises(SourceError, match="nothing but zeros in its last 1,999,872 bytes"):
        read_members("x.tar", pa.py_buffer(data[:10_240] + bytes(2_000_000 // 512 * 512)))


@pytest.mark.strangers
def test_a_lone_block_of_zeros_between_members_is_an_error() -> None:
    data = entry("0.txt", data=b"a") + bytes(512) + entry("1.txt", data=b"b") + END
    with pytest.raises(SourceError, match="512 bytes of zeros at byte 1,024 with more data after them"):
        read_members("x.tar", pa.py_buffer(data))


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("size", "message"),
    [
        (b"\xff" * 12, "has the member '0.txt' with a size below zero"),
        (b"-0000000001\0", "has no header where one should be"),
        (b"0o000000001\0", "has no header where one should be"),
        (b"0000000_001\0", "has no header where one should be"),
        (b"\x80" + bytes(3) + b"\xff" * 8, "is cut off: the member '0.txt' needs [\\d,]+ bytes more"),
    ],
)
def test_a_size_that_no_file_has_is_an_error(size: bytes, message: str) -> None:
    data = bytearray(tar({"0.txt": b"a"}, tarfile.USTAR_FORMAT))
    data[124:136] = size
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 256)
    with pytest.raises(SourceError, match=rf"x\.tar {message}, at byte 0"):
        read_members("x.tar", pa.py_buffer(bytes(data)))


@pytest.mark.strangers
@pytest.mark.parametrize(
    "record",
    [
        b"9" * 5000 + b" path=x\n",
        b"3 a=b\n",
        b"12 size=\xc2\xb2\n",
        b"9 path=a",
        b"6 abc\n",
        b"8 path=\n",
        b"5 =x\n",
        b"16 path=a\0b.txt\n",
        b"9 pa\0h=a\n",
    ],
)
def test_a_damaged_pax_header_is_an_error_with_its_place(record: bytes) -> None:
    data = entry("pax", tarfile.XHDTYPE, record) + entry("0.txt", data=b"a") + END
    with pytest.raises(SourceError, match=r"x\.tar has a damaged pax header, at byte 0"):
        read_members("x.tar", pa.py_buffer(data))


PAX, LONG, FILE = (
    entry("pax", tarfile.XHDTYPE, b"14 path=0.txt\n"),
    entry("long", tarfile.GNUTYPE_LONGNAME, b"0.txt\0"),
    entry("cut.txt", data=b"a"),
)


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PAX + PAX + FILE + END, "two extended headers of one kind for one member, at byte 1,024"),
        (LONG + LONG + FILE + END, "two extended headers of one kind for one member, at byte 1,024"),
        (PAX + LONG + FILE + END, "two names for the member '0.txt', a GNU and a pax one, at byte 2,048"),
        (FILE + PAX + END, "an extended header .* without the member that it belongs to, at byte 2,048"),
        (FILE + LONG, "an extended header .* without the member that it belongs to, at byte 2,048"),
        (entry("long", b"L", bytes(6)) + FILE + END, "a damaged header for a long name, at byte 0"),
        (entry("long", b"L", b"0.\0txt") + FILE + END, "a damaged header for a long name, at byte 0"),
        (
            entry("long", b"L", b"0.txt")[:512] + b"0.txt.jpg".ljust(512, b"\0") + FILE + END,
            "a damaged header for a long name",
        ),
    ],
)
def test_extended_headers_that_do_not_give_one_member_one_name_are_errors(data: bytes, message: str) -> None:
    for head in (PAX, LONG):
        assert [m.name for m in read_members("x.tar", pa.py_buffer(head + FILE + END))] == ["0.txt"]
    with pytest.raises(SourceError, match=rf"x\.tar has {message}"):
        read_members("x.tar", pa.py_buffer(data))


@pytest.mark.strangers
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of the address space from /proc")
def test_a_damaged_compressed_shard_that_is_tried_again_and_again_takes_no_memory(tmp_path: Path) -> None:
    data = gzip.compress(tar(SHARD))
    (tmp_path / "a.tar.gz").write_bytes(data[:-8] + bytes(8))
    source = WebDataset(str(tmp_path / "a.tar.gz"))

    def mapped_pages() -> int:
        with pytest.raises(SourceError, match="not whole gzip data"):
            source.units()
        return int(Path("/proc/self/statm").read_text().split()[0])

    first = mapped_pages()
    assert [mapped_pages() for _ in range(40)][-1] - first < 100 << 8  # 100 MiB in pages of 4 KiB; each try read 8


@pytest.mark.strangers
def test_a_global_pax_header_may_comment_but_not_rename() -> None:
    comment, rename = b"13 comment=a\n", b"10 path=a\n"
    data = entry("pax", tarfile.XGLTYPE, comment) + entry("0.txt", data=b"a") + END
    assert [m.name for m in read_members("x.tar", pa.py_buffer(data))] == ["0.txt"]
    data = entry("pax", tarfile.XGLTYPE, rename) + entry("0.txt", data=b"a") + END
    with pytest.raises(SourceError, match=r"x\.tar has at byte 0 a global pax header that sets 'path' for all members"):
        read_members("x.tar", pa.py_buffer(data))


@pytest.mark.strangers
def test_headers_summed_with_signs_and_names_with_line_breaks_are_read(tmp_path: Path) -> None:
    data = bytearray(tar({"é\n/0.txt": b"a"}, tarfile.GNU_FORMAT))
    signed = sum(byte - 256 * (byte > 127) for byte in data[:148] + data[156:512]) + 256
    data[148:156] = b"%06o\0 " % signed
    (tmp_path / "a.tar").write_bytes(data)
    assert read_all(WebDataset(str(tmp_path / "a.tar"))).to_pylist() == [{"__key__": "é\n/0", "txt": b"a"}]


@pytest.mark.strangers
@given(st.data())
@settings(max_examples=300)
def test_damage_gives_an_error_or_what_the_standard_library_reads(draw: st.DataObject) -> None:
    files = {f"d/{i}.bin": bytes([i + 1]) * (300 * i) for i in range(6)}
    data = bytearray(tar(files, draw.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]))))
    start = draw.draw(st.integers(0, len(data) - 1))
    length, filler = (
        draw.draw(st.integers(1, 4096)),
        draw.draw(st.sampled_from([b"", b"\0", b"\xff", bytes(512), bytes(4096)])),
    )
    data[start : start + length] = filler
    try:
        found = [(m.name, m.offset, m.num_bytes) for m in read_members("x.tar", pa.py_buffer(bytes(data)))]
    except SourceError:
        return
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as archive:
        assert found == [(m.name, m.offset_data, m.size) for m in archive.getmembers()]


def test_sizes_beyond_eight_gibibytes_are_understood() -> None:
    info = tarfile.TarInfo("big.bin")
    info.size = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        head = info.tobuf(form)
        found = read_members("x.tar", pa.py_buffer(head), len(head) + (9 << 30) + 1024)
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
    assert result.row_numbers is not None
    assert result.row_numbers.tolist() == [0]
    with pytest.raises(BadRowError, match=r"a\.tar, sample '1': the member \.txt is not text"):
        source.read(source.units()[0])


@pytest.mark.strangers
def test_more_text_than_a_column_has_room_for_is_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "a.tar", "wb") as file:
        for i in range(3):  # of holes, which take no room on disk and are not read
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 1 << 30
            file.write(info.tobuf(tarfile.USTAR_FORMAT))
            file.seek(info.size, io.SEEK_CUR)
        file.write(END)
    source = WebDataset(str(tmp_path / "a.tar"))
    with pytest.raises(SourceError, match=r"3,221,225,472 bytes in its members that end in \.txt, .*pa\.large_binary"):
        source.read(source.units()[0])


def test_the_declaration_checks_itself() -> None:
    with pytest.raises(SpecError, match=r"column 'n' of a tar is one of binary, .*, not int64"):
        WebDataset("x", {"n": pa.int64()})
    with pytest.raises(SpecError, match="__key__ is always read"):
        WebDataset("x", ["__key__", "txt"])
