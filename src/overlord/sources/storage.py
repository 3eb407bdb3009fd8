"""Lists and reads files: from local paths, globs, brace ranges and URLs to an ordered list of files, and their bytes.

Every read checks that the file is still the one that was listed: a regular file of the same size and modification time, an
object with the same ETag. Local files are read with pread, not through a mapping: touching a page of a mapped file that was
truncated meanwhile kills the process (SIGBUS).

Patterns are brace ranges and globs, the same for local files and object stores.
"""

from __future__ import annotations

import bisect
import glob
import io
import os
import re
import stat
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from overlord.errors import SourceError, SpecError
from overlord.sources.object_store import (
    OBSTORE_SCHEMES,
    ListedObject,
    Retry,
    remote_use,
    shared_store,
)
from overlord.sources.range_cache import shared_range_cache
from overlord.status import StorageUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from overlord.declare.cache import Cache
    from overlord.sources.object_store import RemoteStore
    from overlord.sources.range_cache import RangeOfFile

A = TypeVar("A")
B = TypeVar("B")

THREADS = 32
# Without O_NONBLOCK, opening a FIFO in place of a file would block until another process writes to it.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
AHEAD_BYTES = 32 << 10
_KINDS = {
    stat.S_IFIFO: "a FIFO (a named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was when it was listed."""

    path: str
    num_bytes: int
    version: str = ""
    """Tells one content of the file from another: the modification time of a local file in nanoseconds, the ETag of an
    object, or its modification time where it has none. Empty where neither is known."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Options and retries for reaching files. A value that pickles; connections are cached per process."""

    options: tuple[tuple[str, str], ...] = ()
    retry: Retry = field(default_factory=Retry)
    cache: Cache | None = None
    """A folder for what is read from remote storage."""
    keeps_data: bool = False
    """Keep all of it there; else only what listing reads."""

    def list_files(self, patterns: Sequence[str]) -> tuple[StoredFile, ...]:
        """Every file that the patterns name: patterns in the order given, the matches of one glob sorted."""
        found: dict[object, tuple[str, StoredFile]] = {}
        for pattern, file, identity in self._list_matches(patterns):
            if identity in found:
                other_pattern, other = found[identity]
                same = "" if other.path == file.path else f" (it is the same file as {other.path}, through a link)"
                raise SpecError(
                    f"{file.path} is named twice{same}, by {other_pattern!r} and by {pattern!r}: it would be read twice; "
                    "narrow one of the two, or give the source more weight"
                )
            found[identity] = (pattern, file)
        return tuple(file for _, file in found.values())

    def read(self, file: StoredFile, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop), in memory."""
        if not is_remote(file.path):
            return read_local(file, start, stop)
        fetch = partial(self._fetch, file, start, stop)
        if self.cache is None:
            return fetch()
        return shared_range_cache(self.cache).read((file, start, stop), fetch, self.keeps_data)

    def read_ranges(self, file: StoredFile, ranges: Iterable[tuple[int, int]]) -> dict[int, pa.Buffer]:
        """Ranges of a file by their first byte, side by side, in as few requests as there are stretches of them."""
        context = copy_context()  # of this thread, which knows when the ranges are needed again
        stretches = join_ranges(ranges)
        found = map_threads(lambda each: context.copy().run(self.read, file, *each), stretches)
        return {start: data for (start, _), data in zip(stretches, found, strict=True)}

    def fetch_ahead(self, wanted: RangeOfFile, needed_in_s: float) -> None:
        """Fetch a range of a remote file into the cache, unless it is there."""
        assert self.cache is not None  # there is no other place to fetch to
        kept = shared_range_cache(self.cache)
        if not kept.has(wanted):
            kept.fetch(wanted, partial(self._fetch, *wanted), needed_in_s)

    def _fetch(self, file: StoredFile, start: int, stop: int) -> pa.Buffer:
        store, key = self._store(file.path)
        return store.read(ListedObject(key, file.num_bytes, file.version), start, stop)

    @contextmanager
    def stream(self, file: StoredFile) -> Iterator[pa.NativeFile]:
        """The whole file as a stream: a local one is read on demand, a remote one is fetched first."""
        if is_remote(file.path):
            with pa.BufferReader(self.read(file, 0, file.num_bytes)) as stream:
                yield stream
            return
        with open_arrow(file) as stream:
            yield stream
            count_local_bytes(file.num_bytes if stream.closed else stream.tell())
        with source_errors(file.path):
            check_unchanged(file, os.stat(file.path))

    def _list_matches(self, patterns: Sequence[str]) -> Iterator[tuple[str, StoredFile, object]]:
        named: list[tuple[str, str]] = []
        for pattern in patterns:
            path = _expand_home(pattern.removeprefix("file://"))
            for each in [path] if _is_file(path) else expand_braces(path):
                named.append((pattern, each))
        groups = map_threads(lambda item: self._list_path(item[1]), named)
        for (pattern, _), group in zip(named, groups, strict=True):
            for file, identity in group:
                yield pattern, file, identity

    def _list_path(self, path: str) -> list[tuple[StoredFile, object]]:
        """The files that a path or a glob names, each with an identity that all names of one file share."""
        scheme = _scheme(path)
        if not scheme:
            return _list_local(path)
        if scheme in ("http", "https") and has_glob(path):
            raise SpecError(
                f"{path}: http servers cannot be listed and queries are not supported; name each file, or a range of "
                f"them as in part-{{000..099}}.parquet"
            )
        store, key = self._store(path)
        if not has_glob(key):
            head = store.head(key)
            return [(StoredFile(path, head.num_bytes, head.version), path)]
        listed = sorted(_list_keys(store, "", key.split("/")), key=lambda found: found.path)
        if not listed:
            raise SourceError(
                f"nothing matches {path}: check the pattern; * stays inside a folder, **/ crosses them; a name that has "
                "*, ?, [ or { in it is written with that character in brackets, as in [[]"
            )
        files = [StoredFile(f"{store.root}/{found.path}", found.num_bytes, found.version) for found in listed]
        return [(file, file.path) for file in files]

    def _store(self, url: str) -> tuple[RemoteStore, str]:
        scheme, rest = url.split("://", 1)
        bucket, _, key = rest.partition("/")
        has_default = scheme not in OBSTORE_SCHEMES and scheme != "hf"  # hdfs:///name is a file of the configured cluster
        if not key or not (bucket or has_default):
            raise SpecError(f"{url} names no object: write {scheme}://bucket/name")
        return shared_store(f"{scheme}://{bucket}", self.options, self.retry), key


@contextmanager
def open_local(file: StoredFile) -> Iterator[int]:
    """The descriptor of a local file. Before and after the block it is checked to be the listed file."""
    with source_errors(file.path):
        descriptor = os.open(file.path, _OPEN_FLAGS)
        try:
            check_unchanged(file, os.fstat(descriptor))
            yield descriptor
            check_unchanged(file, os.fstat(descriptor))
        finally:
            os.close(descriptor)


def open_arrow(file: StoredFile) -> pa.NativeFile:
    """Open a local file for Arrow, and check that it is the listed one. The caller checks it again after reading."""
    with source_errors(file.path):
        check_unchanged(file, os.stat(file.path))  # says "is a socket", where opening one fails with "No such device"
    with open_local(file) as descriptor:
        return pa.OSFile(_descriptor_path(descriptor), "rb")


def _descriptor_path(descriptor: int) -> str:
    """A path to an open file itself. By its name Arrow could open a file that has replaced the checked one meanwhile, and
    `OSFile.fileno()`, which would tell, fails in pyarrow 20 to 24."""
    return f"/proc/self/fd/{descriptor}"


def read_local(file: StoredFile, start: int, stop: int) -> pa.Buffer:
    """The bytes [start, stop) of a local file: `open_local` and `read_at` in one, without the cost of a context manager."""
    try:
        descriptor = os.open(file.path, _OPEN_FLAGS)
        try:
            check_unchanged(file, os.fstat(descriptor))
            data = read_at(file, descriptor, start, stop)
            check_unchanged(file, os.fstat(descriptor))
            return data
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable_error(file.path, error) from error


def read_at(file: StoredFile, descriptor: int, start: int, stop: int) -> pa.Buffer:
    """The bytes [start, stop) of an open file."""
    data = pa.allocate_buffer(stop - start)
    read_into(file, descriptor, memoryview(data), start)
    return data


def read_into(file: StoredFile, descriptor: int, target: memoryview, start: int) -> None:
    """Fill `target` with the bytes from `start` on."""
    done = 0
    while done < len(target):
        num_bytes = os.preadv(descriptor, [target[done:]], start + done)  # at most 2 GiB at once
        if not num_bytes:
            check_unchanged(file, os.fstat(descriptor))
            raise SourceError(
                f"{file.path} ends at byte {start + done:,}, inside the range {start:,} to {start + len(target):,} that "
                f"should be read (it was listed with {file.num_bytes:,} bytes); copy or write it again"
            )
        done += num_bytes
    count_local_bytes(done)


_local_bytes = 0
_local_lock = threading.Lock()


def count_local_bytes(num_bytes: int) -> None:
    """Count bytes that were read from files of this machine."""
    global _local_bytes
    with _local_lock:
        _local_bytes += num_bytes


def storage_use() -> dict[str, StorageUse]:
    """What this process has read, by root; "local" for files of this machine."""
    return ({"local": StorageUse(_local_bytes, 0)} if _local_bytes else {}) | remote_use()


def check_unchanged(file: StoredFile, status: os.stat_result) -> None:
    """Raise SourceError unless the status is that of the listed file."""
    if (
        status.st_size == file.num_bytes
        and stat.S_ISREG(status.st_mode)
        and (not file.version or status.st_mtime_ns == int(file.version))
    ):
        return
    _check_regular(file.path, status)
    if status.st_size != file.num_bytes:
        raise SourceError(
            f"{file.path} has changed since it was listed: it has {status.st_size:,} bytes and had {file.num_bytes:,}; do "
            "not change the files of a running job: put the old file back, or start again"
        )
    raise SourceError(
        f"{file.path} has changed since it was listed: it was written at {_utc_text(status.st_mtime_ns)}, the one that was "
        f"listed at {_utc_text(int(file.version))}; do not change the files of a running job: put the old file back (with "
        "its time, as `cp -p` does), or start again"
    )


class FileBytes:
    """The bytes of an open local file by slice, with read-ahead: for a walk over headers."""

    def __init__(self, file: StoredFile, descriptor: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        self.size = file.num_bytes
        self._ahead_bytes = ahead_bytes
        self._file = file
        self._descriptor = descriptor
        self._start = 0
        self._window = b""

    def __getitem__(self, place: slice) -> bytes:
        start, stop = place.start or 0, min(place.stop, self.size)
        if start < self._start or stop > self._start + len(self._window):
            end = min(max(stop, start + self._ahead_bytes), self.size)
            self._start, self._window = start, read_at(self._file, self._descriptor, start, end).to_pybytes()
        return self._window[start - self._start : stop - self._start]


class SparseFile(io.IOBase):
    """The fetched `ranges` (offset to bytes) of a remote file as a file for Arrow. Nothing is copied; a read outside of the
    ranges raises EOFError."""

    def __init__(self, num_bytes: int, ranges: Mapping[int, pa.Buffer]) -> None:
        self._num_bytes = num_bytes
        self._ranges = dict(sorted(ranges.items()))
        self._position = 0

    def read(self, num_bytes: int = -1) -> pa.Buffer:
        start = self._position
        stop = self._num_bytes if num_bytes < 0 else min(start + num_bytes, self._num_bytes)
        for offset, data in self._ranges.items():
            if offset <= start and stop <= offset + data.size:
                self._position = stop
                return data.slice(start - offset, stop - start)
        raise EOFError(f"the bytes {start:,} to {stop:,} were not fetched")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class MappedFile:
    """A local file mapped to a range of addresses that views may point to. The addresses are not to be read:
    `mapped_file_at` returns the file of an address, and its bytes are then read from the file."""

    def __init__(self, file: StoredFile) -> None:
        self.file = file
        with open_local(file) as descriptor, pa.memory_map(_descriptor_path(descriptor)) as mapping:
            self.data: pa.Buffer = mapping.read_buffer()
        if self.data.size != file.num_bytes:
            raise SourceError(
                f"{file.path} has {self.data.size:,} bytes and had {file.num_bytes:,} when it was listed; do not change the "
                "files of a running job"
            )
        self.start, self.stop = self.data.address, self.data.address + self.data.size
        with _mappings_lock:
            bisect.insort(_mappings, (self.start, self.stop, weakref.ref(self)), key=lambda entry: entry[0])
        weakref.finalize(self, _forget_mapping, self.start)


_mappings: list[tuple[int, int, weakref.ref[MappedFile]]] = []
"""By address. An entry is removed before its addresses can be reused, because the MappedFile holds the mapping."""
_mappings_lock = threading.RLock()  # reentrant: a finalizer may run in a thread that holds the lock


def mapped_file_at(address: int) -> MappedFile | None:
    """The mapped file that an address lies in."""
    with _mappings_lock:
        index = bisect.bisect_right(_mappings, address, key=lambda entry: entry[0]) - 1
        if index < 0 or address >= _mappings[index][1]:
            return None
        return _mappings[index][2]()


def _forget_mapping(start: int) -> None:
    with _mappings_lock:
        index = bisect.bisect_left(_mappings, start, key=lambda entry: entry[0])
        if index < len(_mappings) and _mappings[index][0] == start and _mappings[index][2]() is None:
            del _mappings[index]


GAP_BYTES = 1 << 20


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, joined over small gaps: reading a gap costs less than another request."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def is_remote(path: str) -> bool:
    return bool(_scheme(path))


def map_threads(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """The results in order, computed by many threads, to overlap waits for storage. The first error cancels the rest."""
    todo = list(items)
    if len(todo) < 2:
        return [function(item) for item in todo]
    pool = ThreadPoolExecutor(min(THREADS, len(todo)), thread_name_prefix="overlord-list")
    try:
        return list(pool.map(function, todo))
    finally:
        pool.shutdown(cancel_futures=True)


def _scheme(path: str) -> str:
    scheme, found, _ = path.partition("://")
    return scheme if found and scheme.isalnum() else ""


def _expand_home(path: str) -> str:
    """The path with `~` or `~user` expanded, unless a file of that very name exists."""
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def _is_file(path: str) -> bool:
    """True for an existing local file, so that a name with brackets or braces in it can be given as it is."""
    return not _scheme(path) and os.path.isfile(path)


def _list_local(pattern: str) -> list[tuple[StoredFile, object]]:
    if _is_file(pattern) or not has_glob(pattern):
        return [_stat_local(pattern)]
    matches = sorted(_glob_local(pattern))
    folders = [path for path in matches if os.path.isdir(path)]
    if folders and "." in pattern.rpartition("/")[2]:
        raise SourceError(
            f"{folders[0]} matches {pattern} and is a folder: name the files in it, as in "
            f"{os.path.join(folders[0], '*')}, or narrow the pattern"
        )
    files = [path for path in matches if path not in set(folders)] if folders else matches
    if not files:
        raise SourceError(
            f"nothing matches {pattern} (in {printable(os.getcwd())}): check the pattern; * stays inside a folder, **/ "
            "crosses them"
        )
    return [_stat_local(path) for path in files]


def _glob_local(pattern: str) -> Iterator[str]:
    """The paths that match. Circles of links are not followed."""
    segments = pattern.split("/")
    deep = next((i for i, segment in enumerate(segments) if "**" in segment), None)
    if deep is None:
        yield from glob.glob(pattern)
        return
    base, regex = "/".join(segments[:deep]), glob_regex("/".join(segments[deep:]))
    roots = ["/" if pattern.startswith("/") else ""] if not base else glob.glob(base) if has_glob(base) else [base]
    for root in roots:
        prefix = root if root in ("", "/") else f"{root}/"
        for path in _walk(root or ".", prefix, any(segment.startswith(".") for segment in segments[deep:])):
            if regex.match(path[len(prefix) :]):
                yield path


def _walk(folder: str, prefix: str, hidden: bool, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """All paths below a folder; with `hidden`, also those in hidden folders. Links to folders are followed, except to a
    folder that contains the link."""
    try:
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if hidden or not entry.name.startswith(".")]
    except OSError:
        return  # not a folder, or no right to read it
    for name in names:
        yield f"{prefix}{name}"
        if os.path.isdir(f"{prefix}{name}"):
            yield from _walk(f"{prefix}{name}", f"{prefix}{name}/", hidden, (*above, here))


def _stat_local(path: str) -> tuple[StoredFile, object]:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"{printable(path)} has a name that is not UTF-8, which logs and states cannot hold; rename it, or narrow the "
            "pattern"
        ) from None
    if "\0" in path:
        raise SourceError(f"{printable(path)} has a NUL in its name, which no file can have: check what names it")
    with source_errors(path):
        status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise SourceError(f"{path} is a folder: name the files in it, as in {os.path.join(path, '*')}")
    _check_regular(path, status)
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise SourceError(
            f"{path} may not be read by this user (uid {os.geteuid()}): it has mode {stat.filemode(status.st_mode)} and "
            f"belongs to uid {status.st_uid}; give the right to read it, or narrow the pattern"
        )
    return StoredFile(path, status.st_size, str(status.st_mtime_ns)), (status.st_dev, status.st_ino)


def _check_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise SourceError(f"{path} is {kind}: a source reads regular files; put the data in a file, or narrow the pattern")


def printable(text: str) -> str:
    """The text with bytes that are not UTF-8 as escapes."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _utc_text(ns: int) -> str:
    return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M:%S}.{ns % 10**9:09d} UTC"


@contextmanager
def source_errors(path: str) -> Iterator[None]:
    """Turns OSError into a SourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: str, error: OSError) -> SourceError:
    if not isinstance(error, FileNotFoundError):
        return SourceError(f"{path} cannot be read: {error.strerror or error}")
    if os.path.islink(path):
        target = printable(os.readlink(path))
        return SourceError(f"{path} is a link to {target}, which does not exist: repair or remove the link")
    return SourceError(f"{path} does not exist (in {printable(os.getcwd())}): check the path, or put the file back")


def _list_keys(store: RemoteStore, prefix: str, segments: Sequence[str]) -> Iterator[StoredFile]:
    """Lists folder by folder, so that a pattern in one folder of a huge bucket does not list the bucket."""
    segment, rest = segments[0], segments[1:]
    if "**" in segment:
        regex = glob_regex("/".join(segments))
        for listed in store.list_all(prefix):
            if regex.match(listed.key[len(prefix) :].lstrip("/")):
                yield StoredFile(listed.key, listed.num_bytes, listed.version)
        return
    if rest and not has_glob(segment):
        yield from _list_keys(store, _join_key(prefix, segment), rest)
        return
    objects, folders = store.list_level(prefix)
    regex = glob_regex(segment)
    if not rest:
        for listed in objects:
            if regex.match(listed.key.rpartition("/")[2]):
                yield StoredFile(listed.key, listed.num_bytes, listed.version)
        return
    for folder in folders:
        if regex.match(folder.rstrip("/").rpartition("/")[2]):
            yield from _list_keys(store, folder.rstrip("/"), rest)


def _join_key(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


MOST_BRACES = 1_000_000
# A brace in brackets, `[{]`, stands for itself.
_BRACES = re.compile(r"(?<!\[)\{([^{}]*)\}(?!\])")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def expand_braces(pattern: str) -> list[str]:
    """`a-{000..002}.{x,y}` expanded in the order of a shell. Leading zeros of a bound set the width."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    rests = expand_braces(after)
    choices = _choices(match.group(1), pattern)
    if len(choices) * len(rests) > MOST_BRACES:
        raise SpecError(f"{pattern!r} stands for more than {MOST_BRACES:,} files; use a glob such as *")
    return [before + choice + rest for choice in choices for rest in rests]


def _choices(inside: str, pattern: str) -> list[str]:
    if match := _RANGE.fullmatch(inside):
        first, last = match.groups()
        low, high = int(first), int(last)
        if abs(high - low) >= MOST_BRACES:
            raise SpecError(f"{pattern!r} stands for more than {MOST_BRACES:,} files; use a glob such as *")
        padded = any(len(bound.lstrip("-")) > 1 and bound.lstrip("-")[0] == "0" for bound in (first, last))
        width = max(len(first), len(last)) if padded else 0
        step = 1 if low <= high else -1
        return [f"{n:0{width}d}" for n in range(low, high + step, step)]
    if "," in inside:
        return inside.split(",")
    raise SpecError(f"in {pattern!r}, {{{inside}}} must be a range {{000..099}} or a choice {{a,b}}")


def has_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def glob_regex(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay inside a folder and pass over names that begin with a dot; `**/` is any number of folders."""
    out, i = [], 0
    while i < len(pattern):
        at_start = i == 0 or pattern[i - 1] == "/"
        hidden = r"(?!\.)" if at_start else ""
        if at_start and pattern.startswith("**/", i):
            out.append(r"(?:(?!\.)[^/]+/)*")
            i += 3
        elif at_start and pattern[i:] == "**":
            out.append(r"(?:(?!\.)[^/]+/)*(?!\.)[^/]+")
            i += 2
        elif pattern[i] == "*":
            out.append(hidden + "[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append(hidden + "[^/]")
            i += 1
        elif pattern[i] == "[" and (end := _set_end(pattern, i)) > 0:
            inside = re.sub(r"([\\^\[\]&~|])", r"\\\1", pattern[i + 1 : end])
            out.append(hidden + "[" + ("^/" + inside[1:] if inside[0] == "!" else inside) + "]")
            i = end + 1
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    return re.compile("".join(out) + r"\Z", re.DOTALL)


def _set_end(pattern: str, start: int) -> int:
    """The place of the `]` that closes the `[` at `start`; -1 when its segment has none. `[]]` and `[!]]` contain one."""
    first = start + 2 if pattern.startswith("!", start + 1) else start + 1
    slash = pattern.find("/", start)
    return pattern.find("]", first + 1, slash if slash >= 0 else len(pattern))
