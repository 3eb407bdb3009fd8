"""A folder of entries that any number of processes write and read, within a number of bytes.

An entry is a file that is written once, under the digest of all that it depends on: into a file of another name, which is
then renamed. A reader checks its length, its key and its checksum, so an entry is whole or is not there, whatever was killed
or lost in between. Damaged entries are deleted.

Bytes are reserved under a lock before they are written, so that the folder never exceeds its limit. The kernel frees the
lock of a process that dies; bytes that it had reserved and not written are found free again by the next count of the folder.
Where the file system has no locks, each process counts the folder again after some writes, and hosts may exceed the limit by
what they write meanwhile, a few percent.

The modification time of an entry is the time when it will be needed next, as far as its writer or last reader knew: chunks
come in an order that is known in advance. Room is made by deleting what is needed last. An entry that is needed later than
all that is there is not written, because it would push out what is needed sooner. An entry that is overdue belongs to a job
that ended or has changed: the longer it is overdue, the later it counts as needed.

A folder that is full, read-only, or fails in another way costs time and is logged once. It never raises.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import threading
import time
import uuid
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from overlord.errors import SpecError
from overlord.status import CacheUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

VERSION = 1
_MAGIC = b"OVERLORD-CACHE-%d" % VERSION
_HEADER_BYTES = 64  # what follows is aligned for Arrow
_PREFIX = "overlord-cache-"
_PAGE = 4096
_MOST_PARTS = 512  # of one write; the system's limit is 1,024
_OVERDUE_FACTOR = 16.0
_FREED_PART = 50
"""One part in so many is freed at once, so that the folder is seldom counted."""
_LOCK_S = 5.0
_REFUSED_S = 30.0
_RETRY_S = 60.0
_UNFINISHED_S = 600.0  # a file that a killed process was writing is deleted after this long
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

_log = logging.getLogger("overlord.cache")


def digest_key(kind: str, *parts: str | bytes) -> str:
    """The key of an entry: its kind, which is counted by, and the digest of all that it depends on."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"{kind}-{digest.hexdigest()}"


def kind_of(key: str) -> str:
    return key.partition("-")[0]


def frame(key: str, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The parts of an entry behind its header."""
    length, checksum = 0, 0
    for part in parts:
        length += len(part)
        checksum = zlib.crc32(part, checksum)
    header = _MAGIC + _key_mark(key) + checksum.to_bytes(4, "little") + length.to_bytes(8, "little")
    return [header.ljust(_HEADER_BYTES, b"\0"), *parts]


def unframe(key: str, data: pa.Buffer) -> pa.Buffer | None:
    """The content of an entry; None if it is damaged, of another release, or not of this key."""
    view = memoryview(data)
    mark = _MAGIC + _key_mark(key)
    if len(view) < _HEADER_BYTES or bytes(view[: len(mark)]) != mark:
        return None
    place = len(mark)
    checksum = int.from_bytes(view[place : place + 4], "little")
    length = int.from_bytes(view[place + 4 : place + 12], "little")
    if length != len(view) - _HEADER_BYTES or zlib.crc32(view[_HEADER_BYTES:]) != checksum:
        return None
    return data.slice(_HEADER_BYTES)


def _key_mark(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


class UseCounts:
    """Counts what a store did, by kind of entry. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, CacheUse] = {}

    def add(self, kind: str, use: CacheUse) -> None:
        with self._lock:
            self._counts[kind] = self._counts.get(kind, CacheUse()).plus(use)

    def now(self) -> dict[str, CacheUse]:
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class _KeptFile:
    path: str
    num_bytes: int
    needed_at: float

    def distance(self, now: float) -> float:
        """Seconds until it is needed, for choosing what goes first."""
        ahead = self.needed_at - now
        return ahead if ahead >= 0 else -ahead * _OVERDUE_FACTOR


class CacheFolder:
    """Keeps entries in a folder, within `max_bytes`. Thread-safe; processes and hosts may share the folder."""

    is_far = False

    def __init__(self, location: str, max_bytes: int) -> None:
        self._location = Path(location)
        self._folder = self._location / f"{_PREFIX}{VERSION}"
        self._usage_path = f"{self._folder}/usage"
        self._max_bytes = max_bytes
        self._counts = UseCounts()
        self._state = threading.Lock()
        self._told: set[str] = set()
        self._rests_until = 0.0  # after an error, nothing is written before
        self._refused: tuple[float, float] = (0.0, 0.0)  # until when, and from which distance on, nothing is written
        self._has_locks = True
        self._own_count = _OwnCount(max_bytes // _FREED_PART)
        self._warn_of_other_versions()

    def use(self) -> dict[str, CacheUse]:
        return self._counts.now()

    def check(self) -> None:
        """Raise SpecError if the location can never be a cache, and log whatever keeps it from being written."""
        for place in (self._location, *self._location.parents):
            if place.is_dir():
                break
            if place.exists():
                raise SpecError(f"the cache {self._location} is not a folder: {place} is a file; name a folder")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f"tmp-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            self._note_failure(error, "chunks")

    def get(self, key: str, needed_in_s: float | None = None) -> pa.Buffer | None:
        """The content of an entry, and note when it will be needed again; None where it is not there."""
        kind, path = kind_of(key), self._path(key)
        try:
            data = _read_file(path)
        except FileNotFoundError:
            data = None
        except OSError as error:  # a network file system may say ESTALE
            self._tell("read", f"an entry of the cache cannot be read, and is made again: {error}")
            data = None
        content = None if data is None else unframe(key, data)
        if content is None:
            self._counts.add(kind, CacheUse(misses=1, damaged=int(data is not None)))
            if data is not None:
                self._tell("damaged", f"{path} is damaged, or of another release: it is deleted and made again")
                with suppress(OSError):
                    os.unlink(path)
            return None
        self._counts.add(kind, CacheUse(hits=1, read_bytes=content.size))
        if needed_in_s is not None:
            self.note_need(key, needed_in_s)
        return content

    def has(self, key: str) -> bool:
        return os.path.exists(self._path(key))

    def note_need(self, key: str, needed_in_s: float) -> None:
        """Note when an entry will be needed."""
        at = time.time() + needed_in_s
        with suppress(OSError):  # it was evicted, or the folder is read-only
            os.utime(self._path(key), (at, at))

    def put(self, key: str, parts: Sequence[bytes | memoryview], needed_in_s: float) -> bool:
        """Keep an entry that will be needed in so many seconds. False if it is not kept."""
        now = time.monotonic()
        with self._state:
            until, distance = self._refused
            if now < self._rests_until or (now < until and needed_in_s >= distance):
                return False
        path = self._path(key)
        if os.path.exists(path):
            return True
        framed = frame(key, parts)
        num_bytes = sum(map(len, framed))
        size = _on_disk(num_bytes)
        if size > self._max_bytes // 4:
            self._tell("large", f"an entry of {size:,} bytes is more than a quarter of max_bytes={self._max_bytes:,}")
            return False
        unfinished = f"{self._folder}/tmp-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            descriptor = self._reserve(unfinished, num_bytes, needed_in_s)
            if descriptor is None:
                return False
            try:
                _write_all(descriptor, framed)
                _finish(descriptor, unfinished, path, time.time() + needed_in_s)
            except OSError:
                with suppress(OSError):
                    os.unlink(unfinished)
                self._release(size)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            self._note_failure(error, kind_of(key))
            return False
        self._counts.add(kind_of(key), CacheUse(written_bytes=size))
        return True

    def _path(self, key: str) -> str:
        digest = key.partition("-")[2]
        return f"{self._folder}/{digest[0]}/{key}"  # more folders would cost more to make than they help

    # The bytes in use

    def _reserve(self, unfinished: str, num_bytes: int, needed_in_s: float) -> int | None:
        """Open a file of this size, after making room where that is needed. It has its size before it has its content, so
        that whoever counts the folder meanwhile counts it. None if there is no room."""
        size = _on_disk(num_bytes)
        with self._locked() as usage:
            if usage is None:
                return None
            used = usage.read()
            if used is None or used + size > self._max_bytes:
                used = self._make_room(size, needed_in_s)
                if used is None:
                    return None
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(descriptor, num_bytes)
            except OSError:
                os.close(descriptor)
                os.unlink(unfinished)
                raise
            usage.write(used + size)
            return descriptor

    def _release(self, size: int) -> None:
        with self._locked() as usage:
            used = None if usage is None else usage.read()
            if usage is not None and used is not None:
                usage.write(max(used - size, 0))

    @contextmanager
    def _locked(self) -> Iterator[_UsageFile | _OwnCount | None]:
        """The count of used bytes, which nobody else changes meanwhile; None if others hold it for too long."""
        if not self._has_locks:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._own_count.lock:
                yield self._own_count
            return
        descriptor = self._open_usage()
        try:
            try:
                has_lock = _take_lock(descriptor)
            except OSError as error:
                if error.errno in _READ_ONLY:
                    raise
                self._has_locks = False
                self._tell(
                    "locks",
                    f"the file system of the cache {self._location} has no locks ({error.strerror}): hosts that share it "
                    "may exceed max_bytes by a few percent",
                )
                with self._own_count.lock:
                    yield self._own_count
                return
            yield _UsageFile(descriptor) if has_lock else None
        finally:
            os.close(descriptor)  # which frees the lock

    def _open_usage(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._usage_path, flags, 0o644)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._usage_path, flags, 0o644)

    def _make_room(self, size: int, needed_in_s: float) -> int | None:
        """Count the folder, and delete what is needed later than in so many seconds. The bytes in use; None if there is no
        room."""
        now = time.time()
        entries, total = self._count(now)
        must_free = total + size - self._max_bytes
        if must_free <= 0:
            return total
        distance = _KeptFile("", 0, now + needed_in_s).distance(now)
        far = sorted((e for e in entries if e.distance(now) > distance), key=lambda e: e.distance(now), reverse=True)
        if sum(entry.num_bytes for entry in far) < must_free:
            self._refused = (time.monotonic() + _REFUSED_S, needed_in_s)
            return None
        goal, freed = must_free + self._max_bytes // _FREED_PART, 0
        for entry in far:
            if freed >= goal:
                break
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
            freed += entry.num_bytes
            self._counts.add(kind_of(os.path.basename(entry.path)), CacheUse(evicted_bytes=entry.num_bytes))
        return total - freed

    def _count(self, now: float) -> tuple[list[_KeptFile], int]:
        """The entries, and the bytes of all files. Deletes what killed processes have left unfinished."""
        entries: list[_KeptFile] = []
        total = 0
        # Unfinished files first, and the folders of entries after that: a file that gets its name meanwhile may be counted
        # twice, but is never missed.
        for file in [each for each in _scan(self._folder) if not each.is_dir(follow_symlinks=False)]:
            with suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                if file.name.startswith("tmp-") and now - status.st_ctime > _UNFINISHED_S:
                    os.unlink(file.path)
                else:
                    total += _on_disk(status.st_size)
        for folder in [each for each in _scan(self._folder) if each.is_dir(follow_symlinks=False)]:
            for file in _scan(folder.path):
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    entries.append(_KeptFile(file.path, _on_disk(status.st_size), status.st_mtime))
                    total += entries[-1].num_bytes
        return entries, total

    # What goes wrong

    def _note_failure(self, error: OSError, kind: str) -> None:
        """Nothing is written for a while: the disk is full, or the folder may not be written."""
        with self._state:
            self._rests_until = time.monotonic() + _RETRY_S
        self._counts.add(kind, CacheUse(failures=1))
        reason = error.strerror or str(error)
        way_out = (
            "entries that are there are still used; give this user the right to write it, or name another folder"
            if error.errno in _READ_ONLY
            else "make room on its disk, or lower max_bytes"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "the run goes on without it"
        )
        self._tell(f"write {error.errno}", f"the cache {self._location} cannot be written: {reason}; {way_out}")

    def _warn_of_other_versions(self) -> None:
        with suppress(OSError):
            others = [each.name for each in _scan(self._location) if each.name.startswith(_PREFIX) and each.is_dir()]
            if others := sorted(name for name in others if name != self._folder.name):
                self._tell(
                    "version",
                    f"the cache {self._location} has {', '.join(others)} of another release, whose entries are neither used "
                    "nor counted: delete it once no job of that release runs",
                )

    def _tell(self, what: str, text: str) -> None:
        """Log a line once."""
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s", text)


class _UsageFile:
    """The bytes in use, in the file whose lock is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """None if nobody has counted yet, or the count was lost in a crash."""
        data = os.pread(self._descriptor, 16, 0)
        if len(data) < 12 or zlib.crc32(data[:8]).to_bytes(4, "little") != data[8:12]:
            return None
        return int.from_bytes(data[:8], "little")

    def write(self, used: int) -> None:
        data = used.to_bytes(8, "little")
        os.pwrite(self._descriptor, data + zlib.crc32(data).to_bytes(4, "little"), 0)


class _OwnCount:
    """The bytes in use as this process knows them, where there are no locks. Whoever reads or writes them holds `lock`."""

    def __init__(self, most_grown: int) -> None:
        self.lock = threading.Lock()
        self._most_grown = most_grown
        self._used: int | None = None
        self._grown = 0

    def read(self) -> int | None:
        """None if the folder is to be counted again, because others write too."""
        if self._grown > self._most_grown:
            self._used, self._grown = None, 0
        return self._used

    def write(self, used: int) -> None:
        self._grown += 0 if self._used is None else max(used - self._used, 0)
        self._used = used


_folders: dict[tuple[str, int], CacheFolder] = {}
_folders_lock = threading.Lock()


def shared_folder(location: str, max_bytes: int) -> CacheFolder:
    """The folder at a location: one per process, which counts what the process does."""
    with _folders_lock:
        key = (os.path.abspath(location), max_bytes)
        if key not in _folders:
            _folders[key] = CacheFolder(*key)
        return _folders[key]


def folder_use() -> dict[str, CacheUse]:
    """What this process did with folders, by kind of entry."""
    with _folders_lock:
        folders = list(_folders.values())
    return sum_uses([folder.use() for folder in folders])


def sum_uses(uses: Iterable[Mapping[str, CacheUse]]) -> dict[str, CacheUse]:
    total: dict[str, CacheUse] = {}
    for use in uses:
        for kind, counted in use.items():
            total[kind] = total.get(kind, CacheUse()).plus(counted)
    return total


def _take_lock(descriptor: int) -> bool:
    """Take the lock of an open file. False if others hold it for too long: one of them may be stopped."""
    ends = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends:
                return False
            time.sleep(0.002)
        else:
            return True


def _scan(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _read_file(path: str) -> pa.Buffer:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        data = pa.allocate_buffer(size)
        target, done = memoryview(data), 0
        while done < size:
            found = os.preadv(descriptor, [target[done:]], done)
            if not found:
                return data.slice(0, done)  # its length is wrong then
            done += found
        return data
    finally:
        os.close(descriptor)


def _finish(descriptor: int, unfinished: str, path: str, needed_at: float) -> None:
    """Give a file that was written its time and its name."""
    os.utime(descriptor, (needed_at, needed_at))
    try:
        os.rename(unfinished, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(unfinished, path)


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        written = os.writev(descriptor, left[:_MOST_PARTS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
