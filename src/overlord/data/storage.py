"""Where files are: local paths, globs, brace ranges and URLs in; an ordered list of files, and their bytes, out."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from overlord.data.object_store import ObjectStore, Retry, shared_store
from overlord.data.patterns import expand_braces, glob_regex, has_glob
from overlord.errors import SourceError, SpecError

A = TypeVar("A")
B = TypeVar("B")

REMOTE_SCHEMES = ("s3", "gs", "az", "http", "https")
THREADS = 32


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Storage:
    """How to reach files. A value: it may be made anywhere and pickled; connections are kept per process."""

    options: tuple[tuple[str, str], ...] = ()
    retry: Retry = field(default_factory=Retry)

    def files(self, patterns: Sequence[str]) -> tuple[StoredFile, ...]:
        """Every file that the patterns name: patterns in the order given, the matches of one glob sorted."""
        found: dict[str, tuple[str, StoredFile]] = {}
        for pattern, file in self._matches(patterns):
            if file.path in found:
                raise SpecError(
                    f"{file.path} is named twice, by {found[file.path][0]!r} and by {pattern!r}: it would be read "
                    "twice; narrow one of the two, or give the source more weight"
                )
            found[file.path] = (pattern, file)
        return tuple(file for _, file in found.values())

    def read(self, path: str, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop), in memory."""
        if is_remote(path):
            store, key = self._store(path)
            return store.read(key, start, stop)
        with _reporting(path), pa.OSFile(path, "rb") as file:
            file.seek(start)
            data = file.read_buffer(stop - start)
        if data.size != stop - start:
            raise SourceError(
                f"{path} gave {data.size:,} bytes for the range {start:,} to {stop:,}: it has become shorter since it "
                "was listed; do not change the files of a running job"
            )
        return data

    def map(self, path: str, num_bytes: int) -> pa.Buffer:
        """The whole file: local ones are mapped, so that only what is touched takes memory; others are fetched."""
        if is_remote(path) or num_bytes == 0:
            return self.read(path, 0, num_bytes)
        with _reporting(path), pa.memory_map(path) as file:
            data = file.read_buffer()
        if data.size != num_bytes:
            raise SourceError(
                f"{path} has {data.size:,} bytes and had {num_bytes:,} when it was listed; do not change the files of a "
                "running job"
            )
        return data

    def _matches(self, patterns: Sequence[str]) -> Iterator[tuple[str, StoredFile]]:
        named: list[tuple[str, str]] = []
        for pattern in patterns:
            for path in [pattern] if _is_file(pattern) else expand_braces(pattern):
                named.append((pattern, path.removeprefix("file://")))
        groups = map_threads(lambda item: self._files_of(item[1]), named)
        for (pattern, _), group in zip(named, groups, strict=True):
            for file in group:
                yield pattern, file

    def _files_of(self, path: str) -> list[StoredFile]:
        scheme = _scheme(path)
        if not scheme:
            return _local_files(path)
        if scheme not in REMOTE_SCHEMES:
            raise SpecError(f"{path}: {scheme}:// is not a known scheme; use a path or {', '.join(REMOTE_SCHEMES)}, file")
        if scheme in ("http", "https") and has_glob(path):
            raise SpecError(
                f"{path}: http servers cannot be listed and queries are not supported; name each file, or a range of "
                f"them as in part-{{000..099}}.parquet"
            )
        store, key = self._store(path)
        if not has_glob(key):
            return [StoredFile(path, store.num_bytes(key))]
        keys = sorted(_matching_keys(store, "", key.split("/")), key=lambda file: file.path)
        if not keys:
            raise SourceError(f"nothing matches {path}: check the pattern; * stays inside a folder, **/ crosses them")
        return [StoredFile(f"{store.root}/{file.path}", file.num_bytes) for file in keys]

    def _store(self, url: str) -> tuple[ObjectStore, str]:
        scheme, rest = url.split("://", 1)
        bucket, _, key = rest.partition("/")
        if not bucket or not key:
            raise SpecError(f"{url} names no object: write {scheme}://bucket/name")
        return shared_store(f"{scheme}://{bucket}", self.options, self.retry), key


def is_remote(path: str) -> bool:
    return _scheme(path) in REMOTE_SCHEMES


def map_threads(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """The results in order, many at a time: for waits on storage. The first error stops what has not begun."""
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


def _is_file(path: str) -> bool:
    """True for an existing local file, so that a name with brackets or braces in it can be given as it is."""
    return not _scheme(path) and os.path.isfile(path)


def _local_files(pattern: str) -> list[StoredFile]:
    if _is_file(pattern) or not has_glob(pattern):
        return [_local_file(pattern)]
    found = glob.glob(pattern, recursive=True)
    # A file `a` matches `a/**` as `a/`, which is no file.
    matches = sorted(path for path in found if not path.endswith("/") and not os.path.isdir(path))
    if not matches:
        raise SourceError(
            f"nothing matches {pattern} (in {os.getcwd()}): check the pattern; * stays inside a folder, **/ crosses them"
        )
    return [_local_file(path) for path in matches]


def _local_file(path: str) -> StoredFile:
    with _reporting(path):
        status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise SourceError(f"{path} is a folder: name the files in it, as in {os.path.join(path, '*')}")
    return StoredFile(path, status.st_size)


@contextmanager
def _reporting(path: str) -> Iterator[None]:
    """Turns an error of the file system into a SourceError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{path} does not exist (in {os.getcwd()}): check the path") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def _matching_keys(store: ObjectStore, prefix: str, segments: Sequence[str]) -> Iterator[StoredFile]:
    """Lists folder by folder, so that a pattern in one folder of a huge bucket does not list the bucket."""
    segment, rest = segments[0], segments[1:]
    if "**" in segment:
        regex = glob_regex("/".join(segments))
        for listed in store.list_all(prefix):
            if regex.match(listed.key[len(prefix) :].lstrip("/")):
                yield StoredFile(listed.key, listed.num_bytes)
        return
    if rest and not has_glob(segment):
        yield from _matching_keys(store, _joined(prefix, segment), rest)
        return
    objects, folders = store.list_level(prefix)
    regex = glob_regex(segment)
    if not rest:
        yield from (StoredFile(o.key, o.num_bytes) for o in objects if regex.match(o.key.rpartition("/")[2]))
        return
    for folder in folders:
        if regex.match(folder.rstrip("/").rpartition("/")[2]):
            yield from _matching_keys(store, folder.rstrip("/"), rest)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
