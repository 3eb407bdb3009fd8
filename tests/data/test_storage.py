"""Listing and reading local files."""

import os
import pickle
from pathlib import Path

import pytest

from overlord.data.object_store import Retry
from overlord.data.storage import Storage, map_threads
from overlord.errors import SourceError, SpecError


def names(root: Path, *patterns: str) -> list[str]:
    return [os.path.relpath(file.path, root) for file in Storage().files([f"{root}/{p}" for p in patterns])]


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
    assert Storage().files([f"file://{tmp_path}/long-name"])[0].num_bytes == 9


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
    with pytest.raises(SpecError, match="ftp:// is not a known scheme"):
        Storage().files(["ftp://host/file"])
    with pytest.raises(SpecError, match=r"http servers cannot be listed .*name each file"):
        Storage().files(["https://host/*.parquet"])
    with pytest.raises(SpecError, match="names no object: write s3://bucket/name"):
        Storage().files(["s3://bucket"])


def test_reading_and_mapping_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    path = str(tmp_path / "f")
    assert Storage().read(path, 50, 60).to_pybytes() == bytes(range(50, 60))
    assert Storage().map(path, 200).to_pybytes() == bytes(range(200))
    (tmp_path / "empty").touch()
    assert Storage().map(str(tmp_path / "empty"), 0).to_pybytes() == b""


def test_a_file_that_shrank_or_went_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    path = str(tmp_path / "f")
    with pytest.raises(SourceError, match="5 bytes for the range 0 to 9: it has become shorter"):
        Storage().read(path, 0, 9)
    with pytest.raises(SourceError, match="has 5 bytes and had 9 when it was listed"):
        Storage().map(path, 9)
    with pytest.raises(SourceError, match="gone does not exist"):
        Storage().read(str(tmp_path / "gone"), 0, 1)


def test_a_mapped_file_does_not_keep_it_open(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    before = len(os.listdir("/proc/self/fd"))
    data = Storage().map(str(tmp_path / "f"), 5)
    assert len(os.listdir("/proc/self/fd")) == before
    assert data.to_pybytes() == b"12345"


def test_a_retry_policy_checks_itself_and_its_waits_grow_to_a_limit() -> None:
    waits = Retry(first_wait_s=1, factor=3, max_wait_s=5).waits()
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
