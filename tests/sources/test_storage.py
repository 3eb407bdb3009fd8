"""Listing and reading local files."""

import io
import os
import pickle
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from overlord.errors import SourceError, SpecError
from overlord.sources.object_store import Retry
from overlord.sources.storage import (
    MappedFile,
    Storage,
    StoredFile,
    map_threads,
    mapped_file_at,
)
from tests.sources.damage import replace


def names(root: Path, *patterns: str) -> list[str]:
    return [os.path.relpath(file.path, root) for file in Storage().list_files([f"{root}/{p}" for p in patterns])]


def write(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def test_the_matches_of_a_glob_are_sorted_and_patterns_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path, "b/2", "b/10", "b/1", "a/9")
    assert names(tmp_path, "b/*", "a/*") == ["b/1", "b/10", "b/2", "a/9"]
    assert names(tmp_path, "**/[0-9]") == ["a/9", "b/1", "b/2"]


def test_a_listed_file_has_its_size(tmp_path: Path) -> None:
    write(tmp_path, "long-name")
    assert Storage().list_files([f"file://{tmp_path}/long-name"])[0].num_bytes == 9


def test_braces_and_globs_go_together(tmp_path: Path) -> None:
    write(tmp_path, "x-00.a", "x-01.b", "x-02.a")
    assert names(tmp_path, "x-{01..02}.*") == ["x-01.b", "x-02.a"]


def test_an_existing_file_with_brackets_and_braces_in_its_name_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, "data[1]{x}.jsonl")
    assert names(tmp_path, "data[1]{x}.jsonl") == ["data[1]{x}.jsonl"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no\.parquet does not exist .*: check the path"):
        names(tmp_path, "no.parquet")


def test_one_missing_file_of_a_range_is_named(tmp_path: Path) -> None:
    write(tmp_path, "s-0", "s-2")
    with pytest.raises(SourceError, match="s-1 does not exist"):
        names(tmp_path, "s-{0..2}")


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    with pytest.raises(SourceError, match=r"nothing matches .*\*\.parquet .*\*\*/ crosses them"):
        names(tmp_path, "*.parquet")


def test_a_folder_is_refused_with_the_glob_that_was_meant(tmp_path: Path) -> None:
    write(tmp_path, "d/a")
    with pytest.raises(SourceError, match=r"is a folder: name the files in it, as in .*d/\*"):
        names(tmp_path, "d")


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    with pytest.raises(SpecError, match=r"a\.txt is named twice, by .* and by"):
        names(tmp_path, "a.txt", "*.txt")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SourceError, match="loop cannot be read: Too many levels of symbolic links"):
        names(tmp_path, "loop")


def test_unknown_schemes_and_listing_over_http_are_refused() -> None:
    with pytest.raises(SpecError, match="nowhere:// is not a known scheme"):
        Storage().list_files(["nowhere://host/file"])
    with pytest.raises(SpecError, match=r"http servers cannot be listed .*name each file"):
        Storage().list_files(["https://host/*.parquet"])
    with pytest.raises(SpecError, match="names no object: write s3://bucket/name"):
        Storage().list_files(["s3://bucket"])


def listed(path: Path, content: bytes | None = None) -> StoredFile:
    if content is not None:
        path.write_bytes(content)
    return Storage().list_files([str(path)])[0]


def test_ranges_streams_and_mappings_give_the_same_bytes(tmp_path: Path) -> None:
    file = listed(tmp_path / "f", bytes(range(200)))
    assert Storage().read(file, 50, 60).to_pybytes() == bytes(range(50, 60))
    with Storage().stream(file) as stream:
        assert stream.read() == bytes(range(200))
    assert MappedFile(file).data.to_pybytes() == bytes(range(200))
    assert Storage().read(listed(tmp_path / "empty", b""), 0, 0).to_pybytes() == b""


def test_a_file_that_shrank_or_went_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = listed(path, b"123456789")
    os.truncate(path, 5)
    for read in (lambda: Storage().read(file, 0, 3), lambda: MappedFile(file), lambda: Storage().stream(file).__enter__()):
        with pytest.raises(SourceError, match="f has changed since it was listed: it has 5 bytes and had 9"):
            read()
    path.unlink()
    with pytest.raises(SourceError, match=r"f does not exist .*put the file back"):
        Storage().read(file, 0, 1)


@pytest.mark.strangers
@pytest.mark.parametrize("change", ["replaced", "written over"])
def test_a_file_that_changed_without_a_change_of_size_is_an_error(tmp_path: Path, change: str) -> None:
    path = tmp_path / "f"
    file = listed(path, b"12345")
    if change == "replaced":
        replace(path, b"54321")
    else:
        with open(path, "r+b") as target:
            target.write(b"54321")
        os.utime(path, ns=(0, int(file.version) + 1))
    message = r"f has changed since it was listed: it was written at 20\d\d-.* UTC, the one that was listed at 20\d\d-"
    for read in (lambda: Storage().read(file, 0, 3), lambda: MappedFile(file), lambda: Storage().stream(file).__enter__()):
        with pytest.raises(SourceError, match=message):
            read()


@pytest.mark.strangers
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = listed(path, b"12345")

    def read_slowly() -> None:
        with Storage().stream(file) as stream:
            stream.read(2)
            replace(path)
            stream.read(3)

    with pytest.raises(SourceError, match="f has changed since it was listed"):
        read_slowly()


@pytest.mark.strangers
@pytest.mark.parametrize("opener", ["OSFile", "memory_map"])
def test_arrow_reads_the_file_that_was_checked_and_not_one_that_has_its_name_for_a_moment(
    tmp_path: Path, opener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept, other = tmp_path / "f", tmp_path / "kept", tmp_path / "other"
    file = listed(path, b"12345")
    other.write_bytes(b"54321")
    real = getattr(pa, opener)

    def open_while_another_has_the_name(*arguments: str) -> pa.NativeFile:
        path.rename(kept)
        other.rename(path)
        opened = real(*arguments)
        path.rename(other)
        kept.rename(path)
        return opened

    monkeypatch.setattr(pa, opener, open_while_another_has_the_name)
    if opener == "memory_map":
        assert MappedFile(file).data.to_pybytes() == b"12345"
        return
    with Storage().stream(file) as stream:
        assert stream.read() == b"12345"


def test_a_mapped_file_does_not_keep_it_open(tmp_path: Path) -> None:
    file = listed(tmp_path / "f", b"12345")
    before = len(os.listdir("/proc/self/fd"))
    mapped = MappedFile(file)
    assert len(os.listdir("/proc/self/fd")) == before
    assert mapped.data.to_pybytes() == b"12345"


def test_an_address_leads_to_the_file_that_is_mapped_there_as_long_as_it_is(tmp_path: Path) -> None:
    files = [MappedFile(listed(tmp_path / str(i), bytes(10))) for i in range(5)]
    for mapped in files:
        assert mapped_file_at(mapped.start) is mapped
        assert mapped_file_at(mapped.stop - 1) is mapped
        assert mapped_file_at(mapped.stop) is not mapped
    address = files[2].start
    del files[2]
    assert mapped_file_at(address) is None
    assert mapped_file_at(files[2].start) is files[2]


@pytest.mark.strangers
def test_one_file_under_two_names_is_refused_with_both(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "hard.txt")
    with pytest.raises(SpecError, match=r"hard\.txt is named twice \(it is the same file as .*a\.txt, through a link\)"):
        names(tmp_path, "*.txt")
    (tmp_path / "hard.txt").unlink()
    (tmp_path / "soft.txt").symlink_to("a.txt")
    with pytest.raises(SpecError, match=r"soft\.txt is named twice \(it is the same file as .*a\.txt"):
        names(tmp_path, "a.txt", "soft.txt")
    with pytest.raises(SpecError, match=r"\./a\.txt is named twice \(it is the same file as"):
        names(tmp_path, "a.txt", "./a.txt")
    assert names(tmp_path, "soft.txt") == ["soft.txt"]


@pytest.mark.strangers
def test_a_circle_of_links_is_walked_once(tmp_path: Path) -> None:
    write(tmp_path, "a/x", "a/b/y", "c/z")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "b" / "self").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "broken").symlink_to("broken")
    assert names(tmp_path, "**/[xyz]") == ["a/b/y", "a/x", "c/z"]
    (tmp_path / "again").symlink_to(tmp_path / "c")
    with pytest.raises(SpecError, match=r"c/z is named twice \(it is the same file as .*again/z, through a link\)"):
        names(tmp_path, "**/[xyz]")


@pytest.mark.strangers
@pytest.mark.parametrize("when", ["listed", "read"])
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path, kind: str, when: str) -> None:
    path = tmp_path / "x.jsonl"
    file = listed(path, b"12345")
    path.unlink()
    unix = socket.socket(socket.AF_UNIX)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(tmp_path)  # the address of a socket has room for a short path only
        unix.bind("x.jsonl")
        os.chdir(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(SourceError, match=rf"x\.jsonl (is a {kind}|matches .* is a folder|cannot be read: No such device)"):
        names(tmp_path, "*.jsonl") if when == "listed" else Storage().read(file, 0, 3)
    if when == "read":
        with pytest.raises(SourceError, match=rf"x\.jsonl is a {kind}"):
            Storage().stream(file).__enter__()
    unix.close()


@pytest.mark.strangers
def test_a_link_that_leads_nowhere_is_named_with_its_target(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(SourceError, match=r"x\.jsonl is a link to gone\.jsonl, which does not exist"):
        names(tmp_path, "*.jsonl")


@pytest.mark.strangers
def test_a_file_that_may_not_be_read_is_named_when_it_is_listed() -> None:
    program = (
        "import os, sys\n"
        "from overlord.sources.storage import Storage\n"
        "if os.geteuid() == 0: os.seteuid(65534)  # root may read everything\n"
        "Storage().list_files([sys.argv[1]])"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        write(Path(folder), "a.jsonl", "b.jsonl")
        os.chmod(f"{folder}/b.jsonl", 0)
        command = [sys.executable, "-c", program, f"{folder}/*.jsonl"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.search(r"SourceError: .*b\.jsonl may not be read by this user \(uid \d+\): it has mode ----", result.stderr)


@pytest.mark.strangers
def test_a_folder_that_looks_like_a_file_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", "b.parquet/part-0.parquet", "c/d")
    with pytest.raises(SourceError, match=r"b\.parquet matches .*\*\.parquet and is a folder: name the files in it, as in "):
        names(tmp_path, "*.parquet")
    assert names(tmp_path, "*") == ["a.parquet"]


@pytest.mark.strangers
def test_a_name_that_is_not_utf8_is_refused_in_words_that_can_be_printed(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    os.close(os.open(os.fsencode(tmp_path) + b"/caf\xe9.jsonl", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(SourceError, match=r"caf\\xe9\.jsonl has a name that is not UTF-8.*rename it") as caught:
        names(tmp_path, "*.jsonl")
    str(caught.value).encode()


@pytest.mark.strangers
def test_names_with_line_breaks_and_the_like_are_read(tmp_path: Path) -> None:
    odd = ["a\nb", "a%20b", "a#b?c", "a b", "é", "f[1]", "g{x}", "h*"]
    write(tmp_path, *odd)
    assert sorted(names(tmp_path, "*")) == sorted(odd)
    for name in odd:
        assert names(tmp_path, name) == [name]
    assert names(tmp_path, "f[[]1]", "g[{]x[}]", "h[*]") == ["f[1]", "g{x}", "h*"]


@pytest.mark.strangers
def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "data/a.txt", "data/b.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [file.path for file in Storage().list_files(["~/data/*.txt"])] == [
        f"{tmp_path}/data/a.txt",
        f"{tmp_path}/data/b.txt",
    ]


def test_a_retry_policy_checks_itself_and_its_waits_grow_to_a_limit() -> None:
    waits = Retry(first_wait_s=1, factor=3, max_wait_s=5, jitter=0).waits()
    assert [next(waits) for _ in range(4)] == [1, 3, 5, 5]
    with pytest.raises(SpecError, match=r"factor of at least 1, got 0\.5"):
        Retry(factor=0.5)
    with pytest.raises(SpecError, match="deadline is a number of seconds >= 0, got -1"):
        Retry(deadline_s=-1)
    with pytest.raises(SpecError, match="first_wait_s no longer than max_wait_s, got 9 and 5"):
        Retry(first_wait_s=9)


def test_storage_is_a_value_that_pickles() -> None:
    storage = Storage((("endpoint", "http://127.0.0.1:1"),), Retry(deadline_s=3))
    assert pickle.loads(pickle.dumps(storage)) == storage


def test_threads_keep_the_order_and_raise_the_first_error() -> None:
    assert map_threads(lambda n: n * n, range(100)) == [n * n for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        map_threads(lambda n: 1 // (n - 5), range(10))


CUT = """
import os, sys
import overlord as ol

kind, path = sys.argv[1:]
if kind == "tar":
    source = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("png"), window=2)
else:
    source = ol.ArrowIpc(path, tokens="tokens")
job = ol.Job(sources={"cut": source}, batch=ol.Batch(samples=2, sequence_length=100_000), num_workers=0, prefetch=0)
with ol.start(job) as loader:
    client = loader.client(0)
    next(client)
    for name in os.listdir(os.path.dirname(path)):
        os.truncate(os.path.join(os.path.dirname(path), name), 5000)
    try:
        for _ in range(100):
            next(client)
    except ol.errors.SourceError as error:
        print(error)
"""


@pytest.mark.strangers
@pytest.mark.parametrize("kind", ["tar", "arrow"])
def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, kind: str) -> None:
    if kind == "tar":
        for shard in range(2):
            with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
                for number in range(8):
                    noise = np.random.default_rng(number).integers(0, 256, (100, 100, 3), np.uint8)
                    picture = io.BytesIO()
                    Image.fromarray(noise).save(picture, "PNG")
                    member = tarfile.TarInfo(f"{number}.png")
                    member.size = picture.tell()
                    archive.addfile(member, io.BytesIO(picture.getvalue()))
    else:
        table = pa.table({"tokens": pa.array([[i] * 5000 for i in range(40)], pa.list_(pa.int32()))})
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    command = [sys.executable, "-c", CUT, kind, f"{tmp_path}/*.{kind}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"/\w\.{kind} has changed since it was listed: it has 5,000 bytes and had", result.stdout)
