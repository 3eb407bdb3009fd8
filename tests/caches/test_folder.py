"""A folder of entries: what is kept and what goes, with many processes, kills, full disks and strange file systems."""

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from overlord.caches import folder as folder_module
from overlord.caches.folder import CacheFolder, digest_key
from overlord.errors import SpecError
from tests.full_disk import full_disk

MIB = 1 << 20
BIG = 100 * MIB


def key(number: int, kind: str = "chunks") -> str:
    return digest_key(kind, str(number))


def content(number: int, size: int = 10_000) -> bytes:
    return random.Random(number).randbytes(size)


def put(cache: CacheFolder, number: int, size: int = 10_000, needed_in_s: float = 60.0) -> bool:
    data = content(number, size)
    return cache.put(key(number), [data[:100], b"", memoryview(data)[100:]], needed_in_s)


def got(cache: CacheFolder, number: int) -> bytes | None:
    found = cache.get(key(number))
    return None if found is None else found.to_pybytes()


def files(place: Path) -> list[Path]:
    return [path for path in place.rglob("chunks-*") if path.is_file()]


def bytes_in(place: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in place.rglob("*") if path.is_file())


def test_what_is_put_is_got_by_this_process_and_by_others(tmp_path):
    cache = CacheFolder(str(tmp_path), BIG)
    assert got(cache, 1) is None
    assert put(cache, 1)
    assert put(cache, 2, size=0)
    assert got(cache, 1) == content(1)
    assert got(cache, 2) == b""
    assert got(CacheFolder(str(tmp_path), BIG), 1) == content(1)
    use = cache.use()["chunks"]
    assert (use.hits, use.misses, use.read_bytes) == (2, 1, 10_000)
    assert use.written_bytes == 3 * 4096 + 4096


@pytest.mark.parametrize("damage", ["cut", "flip", "zeros", "empty", "another"])
def test_a_damaged_entry_is_deleted_and_told(tmp_path, caplog, damage):
    cache = CacheFolder(str(tmp_path), BIG)
    put(cache, 1)
    put(cache, 2)
    (path,) = [each for each in files(tmp_path) if each.name == key(1)]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[5000] ^= 1
    new = {
        "cut": data[:-1],
        "flip": data,
        "zeros": bytes(len(data)),
        "empty": b"",
        "another": next(each for each in files(tmp_path) if each.name == key(2)).read_bytes(),
    }[damage]
    path.write_bytes(new)
    assert got(cache, 1) is None
    assert not path.exists()
    assert f"{path} is damaged, or of another release: it is deleted and made again" in caplog.text
    assert cache.use()["chunks"].damaged == 1
    assert put(cache, 1)
    assert got(cache, 1) == content(1)


def test_room_is_made_by_deleting_what_is_needed_last(tmp_path):
    cache = CacheFolder(str(tmp_path), 2 * MIB)
    for number in range(8):
        assert put(cache, number, 200_000, needed_in_s=1000.0 * (number + 1))
    assert put(cache, 100, 200_000, needed_in_s=10.0)
    assert put(cache, 101, 200_000, needed_in_s=10.0)
    assert put(cache, 102, 200_000, needed_in_s=10.0)
    assert bytes_in(tmp_path) <= 2 * MIB
    assert got(cache, 7) is None
    assert got(cache, 0) == content(0, 200_000)
    assert cache.use()["chunks"].evicted_bytes > 0


def test_an_entry_that_is_needed_later_than_all_others_is_not_written(tmp_path):
    cache = CacheFolder(str(tmp_path), 2 * MIB)
    for number in range(9):
        assert put(cache, number, 200_000, needed_in_s=100.0)
    assert not all([put(cache, number, 200_000, needed_in_s=5000.0) for number in range(50, 55)])
    assert all(got(cache, number) is not None for number in range(9))
    began = len(os.listdir(tmp_path))
    assert not put(cache, 60, 200_000, needed_in_s=6000.0)
    assert len(os.listdir(tmp_path)) == began


def test_what_is_long_overdue_goes_before_what_is_needed_tomorrow(tmp_path):
    cache = CacheFolder(str(tmp_path), 2 * MIB)
    for number in range(9):
        put(cache, number, 200_000, needed_in_s=86_400.0)
    cache.note_need(key(3), -86_400.0)  # of a job that ended yesterday
    for number in (10, 11):
        assert put(cache, number, 200_000, needed_in_s=80_000.0)
    assert got(cache, 3) is None


def test_the_time_of_the_next_need_is_noted_when_an_entry_is_found(tmp_path):
    cache = CacheFolder(str(tmp_path), BIG)
    put(cache, 1, needed_in_s=5.0)
    cache.get(key(1), 5000.0)
    (path,) = files(tmp_path)
    assert 4000 < path.stat().st_mtime - time.time() < 6000


def test_an_entry_larger_than_a_quarter_of_the_cache_is_not_kept(tmp_path, caplog):
    cache = CacheFolder(str(tmp_path), 2 * MIB)
    assert not put(cache, 1, MIB)
    assert "is more than a quarter of max_bytes=2,097,152" in caplog.text


WRITER = """
import os, random, sys
from overlord.caches.folder import CacheFolder, digest_key
cache = CacheFolder(sys.argv[1], int(sys.argv[2]))
first = int(sys.argv[3])
print("ready", flush=True)
for number in range(first, first + int(sys.argv[4])):
    cache.put(digest_key("chunks", str(number)), [random.Random(number).randbytes(50_000)], random.random() * 100)
"""


def writer(place: Path, most: int, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(place), str(most), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stats(place: Path) -> Iterator[os.stat_result]:
    for path in place.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path.stat()


def test_many_processes_never_exceed_the_bytes_together(tmp_path):
    most = 2 * MIB
    writers = [writer(tmp_path, most, 1000 * i, 100) for i in range(4)]
    seen = 0
    while any(each.poll() is None for each in writers):
        usage = tmp_path / "overlord-cache-1" / "usage"
        if not usage.exists():
            continue
        with open(usage, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # nothing is added or evicted meanwhile, but files may get their names
            seen = max(seen, sum({status.st_ino: status.st_blocks * 512 for status in stats(tmp_path)}.values()))
    for each in writers:
        each.communicate()
        assert each.returncode == 0
    assert 0 < seen <= most
    cache = CacheFolder(str(tmp_path), most)
    kept = [number for i in range(4) for number in range(1000 * i, 1000 * i + 100) if got(cache, number) is not None]
    assert len(kept) >= 20
    assert cache.use()["chunks"].damaged == 0


def test_a_process_that_is_killed_while_it_writes_leaves_no_wrong_entry_and_no_lock(tmp_path):
    most = 3 * MIB
    for kill in range(3):
        process = writer(tmp_path, most, 1000 * kill, 100_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        has_begun = time.monotonic() + 30
        while len(files(tmp_path)) < 5 and time.monotonic() < has_begun:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    cache = CacheFolder(str(tmp_path), most)
    found = [number for number in range(3000) if got(cache, number) == content(number, 50_000)]
    assert cache.use()["chunks"].damaged == 0
    assert len(found) == cache.use()["chunks"].hits >= 5
    began = time.monotonic()
    assert put(cache, 9999, needed_in_s=0.1)  # the lock is free
    assert time.monotonic() - began < 5


RUN = """
import sys
import overlord as ol
from overlord.chunks import row_cache
row_cache._KEEPING_SHARE = 1e6  # these rows cost less to make than to keep
source = ol.Jsonl(sys.argv[1], transform=ol.Tokenize("text", encoding=ol.ByteTokenizer()), unit_bytes=2000, window=2)
batch = ol.Batch(samples=20, sequence_length=64)
job = ol.Job(sources={"a": source}, batch=batch, cache=ol.Cache(sys.argv[2], 1 << 26), num_workers=1)
with ol.start(job) as loader:
    client = loader.client(0)
    for number in range(int(sys.argv[3])):
        step = next(client)
        print(number, [micro["tokens"].tolist() for micro in step.microbatches], flush=True)
    print(loader.metrics().caches["chunks"].damaged, flush=True)
"""


def test_a_run_that_is_killed_again_and_again_leaves_a_cache_that_changes_nothing(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text("".join(f'{{"text": "document {row} {"x" * (row % 30)}"}}\n' for row in range(2000)))

    def command(cache: str, steps: int) -> list[str]:
        return [sys.executable, "-c", RUN, str(data), str(tmp_path / cache), str(steps)]

    for kill_at in (1, 6):
        with subprocess.Popen(command("kept", 10_000), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(kill_at):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
    found = subprocess.run(command("kept", 40), capture_output=True, text=True, check=True).stdout
    fresh = subprocess.run(command("fresh", 40), capture_output=True, text=True, check=True).stdout
    assert found == fresh
    assert found.endswith("\n0\n")  # no entry was damaged


def test_what_a_killed_process_left_unfinished_is_deleted(tmp_path, monkeypatch):
    cache = CacheFolder(str(tmp_path), 2 * MIB)
    put(cache, 1)
    left = tmp_path / "overlord-cache-1" / "tmp-1-abc"
    left.write_bytes(bytes(MIB))
    (tmp_path / "overlord-cache-1" / "usage").write_bytes(b"torn by a crash")
    monkeypatch.setattr(folder_module, "_UNFINISHED_S", -1.0)
    assert put(cache, 2)
    assert not left.exists()
    assert bytes_in(tmp_path) < MIB


def test_a_full_disk_costs_the_entries_and_is_told_once(tmp_path, caplog):
    cache = CacheFolder(str(tmp_path), BIG)
    put(cache, 1)
    with full_disk(5000):
        assert not put(cache, 2)
        assert not put(cache, 3)
    assert got(cache, 1) == content(1)
    assert not [path for path in tmp_path.rglob("tmp-*")]
    lines = [record.message for record in caplog.records]
    assert lines == [f"the cache {tmp_path} cannot be written: File too large; make room on its disk, or lower max_bytes"]
    assert cache.use()["chunks"].failures == 1
    monkey = CacheFolder(str(tmp_path), BIG)
    assert put(monkey, 2)


READ_ONLY = """
import logging, os, sys
from overlord.caches.folder import CacheFolder, digest_key
logging.basicConfig(format="%(message)s")
if os.geteuid() == 0: os.seteuid(65534)  # root may write everything
cache = CacheFolder(sys.argv[1], 1 << 30)
cache.check()
print(cache.get(digest_key("chunks", "1")).size, cache.put(digest_key("chunks", "2"), [b"x"], 1.0))
"""


def test_a_read_only_folder_is_read_and_told():
    with tempfile.TemporaryDirectory() as place:
        put(CacheFolder(place, BIG), 1)
        for folder, _, names in os.walk(place):
            os.chmod(folder, 0o555)
            for name in names:
                os.chmod(f"{folder}/{name}", 0o444)
        done = subprocess.run([sys.executable, "-c", READ_ONLY, place], capture_output=True, text=True, check=True)
        for folder, _, _ in os.walk(place):
            os.chmod(folder, 0o755)
    assert done.stdout == "10000 False\n"
    assert done.stderr == (
        f"the cache {place} cannot be written: Permission denied; entries that are there are still used; give this user the "
        "right to write it, or name another folder\n"
    )


def test_entries_of_another_release_are_told_and_left_alone(tmp_path, caplog):
    other = tmp_path / "overlord-cache-2" / "ab" / "chunks-ab"
    other.parent.mkdir(parents=True)
    other.write_bytes(bytes(3 * MIB))
    cache = CacheFolder(str(tmp_path), 2 * MIB)
    assert caplog.messages == [
        f"the cache {tmp_path} has overlord-cache-2 of another release, whose entries are neither used nor counted: delete "
        "it once no job of that release runs"
    ]
    assert put(cache, 1)
    assert other.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_two_hosts_share_a_file_system_without_locks(tmp_path, monkeypatch, caplog, code):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    hosts = [CacheFolder(str(tmp_path), 4 * MIB) for _ in range(2)]
    for number in range(120):
        put(hosts[number % 2], number, 100_000, needed_in_s=1000.0 - number)
        assert bytes_in(tmp_path) <= 4 * MIB * 1.06
    assert "has no locks" in caplog.text
    assert "may exceed max_bytes by a few percent" in caplog.text
    assert got(hosts[0], 119) == got(hosts[1], 119) == content(119, 100_000)


HOST = """
import fcntl, os, random, sys
from overlord.caches.folder import CacheFolder, digest_key
if sys.argv[2] == "own":
    fcntl.flock = lambda descriptor, operation: None
cache, rng, found = CacheFolder(sys.argv[1], 4 << 20), random.Random(int(sys.argv[3])), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(400):
    number = rng.randrange(200)
    kept, data = cache.get(digest_key("chunks", str(number))), random.Random(number).randbytes(40_000)
    assert kept is None or kept.to_pybytes() == data, f"entry {number} is another"
    found += kept is not None
    if kept is None:
        cache.put(digest_key("chunks", str(number)), [data], rng.random() * 100)
print(found, cache.use()["chunks"].damaged)
"""


@contextmanager
def mounted_twice(place: Path) -> Iterator[list[Path]]:
    """A folder under two mounts of a network file system, as two hosts have it. It has no locks between them."""
    sshfs, server = shutil.which("sshfs"), "/usr/lib/openssh/sftp-server"
    server = os.environ.get("SFTP_SERVER", server)
    if sshfs is None or not os.access("/dev/fuse", os.W_OK) or not os.path.exists(server):
        pytest.skip("sshfs, sftp-server and /dev/fuse make a network file system (SFTP_SERVER=PATH where it lies elsewhere)")
    command = place / "connect"
    command.write_text(f"#!/bin/sh\nexec {server}\n")
    command.chmod(0o755)
    mounts = [place / "shared", place / "first", place / "second"]
    for each in mounts:
        each.mkdir()
    with ExitStack() as stack:
        for each in mounts[1:]:
            subprocess.run([sshfs, "-o", f"ssh_command={command}", f"host:{mounts[0]}", each], check=True, timeout=20)
            stack.callback(subprocess.run, ["umount", each], check=True, timeout=20)
        yield mounts[1:]


@pytest.mark.parametrize("locks", ["own", "sshfs"])
def test_two_hosts_whose_locks_do_not_reach_each_other_find_nothing_wrong(tmp_path, locks):
    """Some network file systems grant each host its own lock. Then entries may be counted once where two were written."""
    with mounted_twice(tmp_path) if locks == "sshfs" else nullcontext([tmp_path, tmp_path]) as places:
        command = [sys.executable, "-c", HOST]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        hosts = [subprocess.Popen([*command, str(place / "kept"), locks, str(i)], **pipes) for i, place in enumerate(places)]
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == "ready\n"
        said = [thread_of(host) for host in hosts]
        for thread, answer in said:
            thread.join()
            found, damaged = answer[0].split()
            assert int(found) > 20
            assert damaged == "0"
        assert [host.returncode for host in hosts] == [0, 0]
        kept = tmp_path / ("shared/kept" if locks == "sshfs" else "kept")
        assert 2 * MIB < bytes_in(kept) <= 5 * MIB
        assert not list(kept.rglob("tmp-*"))


def thread_of(process: subprocess.Popen[str]) -> tuple[threading.Thread, list[str]]:
    """Lets a process go on, and gathers what it says from then on."""
    answer: list[str] = []
    thread = threading.Thread(target=lambda: answer.append(process.communicate("go\n", timeout=60)[0]))
    thread.start()
    return thread, answer


def test_a_lock_that_a_stopped_process_holds_costs_the_entry_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_LOCK_S", 0.05)
    cache = CacheFolder(str(tmp_path), BIG)
    put(cache, 1)
    with open(tmp_path / "overlord-cache-1" / "usage", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not put(cache, 2)
    assert put(cache, 2)


def test_an_entry_that_is_evicted_by_another_host_while_it_is_read_is_a_miss(tmp_path, monkeypatch, caplog):
    cache = CacheFolder(str(tmp_path), BIG)
    put(cache, 1)

    def stale(*args: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", stale)
    assert got(cache, 1) is None
    assert "an entry of the cache cannot be read, and is made again" in caplog.text


def test_a_file_is_no_cache(tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    for location in (place, place / "below"):
        with pytest.raises(SpecError, match=rf"the cache {location} is not a folder: {place} is a file; name a folder"):
            CacheFolder(str(location), BIG).check()


def test_declarations_are_checked():
    with pytest.raises(
        SpecError, match="a cache needs a place: a folder, or a URL such as s3://bucket/cache; got location=''"
    ):
        ol.Cache("", BIG)
    with pytest.raises(SpecError, match="max_bytes is a whole number of bytes, at least 1,048,576, got 200"):
        ol.Cache("x", 200)
    with pytest.raises(
        SpecError, match="files=True keeps bytes of remote storage on a local disk, and location='s3://b/c' is"
    ):
        ol.Cache("s3://b/c", BIG, files=True)
    with pytest.raises(SpecError, match=r"cache is an ol\.Cache, got '/tmp/x'"):
        ol.Jsonl("x.jsonl", cache="/tmp/x")  # type: ignore[arg-type]
    assert ol.Cache("~/x", BIG).location == os.path.expanduser("~/x")


def test_what_is_found_is_aligned_for_arrow(tmp_path):
    cache = CacheFolder(str(tmp_path), BIG)
    put(cache, 1)
    found = cache.get(key(1))
    assert isinstance(found, pa.Buffer)
    assert found.address % 64 == 0
