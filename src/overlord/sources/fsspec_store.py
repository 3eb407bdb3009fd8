"""Schemes that obstore does not know, by any file system of fsspec: `msc://`, `hdfs://`, and what is installed.

Retries are those of object stores. fsspec's reads do not say which version of a file they return, so each read is followed
by a request for the file's version: an object that was replaced is noticed at the cost of one request more. A scheme that
obstore knows goes through obstore, which needs no such request.
"""

from __future__ import annotations

import logging
import threading
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from overlord.errors import OverlordError, SourceError, SpecError, StorageError
from overlord.runtime.recorder import note_event
from overlord.runtime.retry import FailedAttempt, retry
from overlord.sources.object_store import ListedObject, changed_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.sources.object_store import Retry

T = TypeVar("T")

_AHEAD_BYTES = 1 << 16
"""What is read beyond a range where fsspec reads it as part of an open file: megabytes, unless it is told."""
_VERSIONS = (
    *("ETag", "etag", "e_tag", "version_id", "VersionId", "generation", "blob_id", "checksum", "md5", "content_hash"),
    *("mtime", "modified", "last_modified", "LastModified", "modificationTime", "created"),
)
"""Where file systems keep what tells one content of a file from another, the best first."""
_REFUSALS = (IsADirectoryError, NotADirectoryError, ValueError, TypeError, NotImplementedError)
_log = logging.getLogger("overlord.storage")


class FsspecStore:
    """Reads and lists files under one root such as `hf://datasets`. Thread-safe, as far as the file system is."""

    def __init__(self, root: str, options: Mapping[str, str], retry: Retry) -> None:
        self.root = root
        self._requests = Requests(root, retry)
        self._lock = threading.Lock()
        self.num_bytes = 0
        self._files = _connect(root, options)
        self._how_to_open = _how_to_open(self._files)
        self._base = str(self._files._strip_protocol(f"{root}/")).rstrip("/")  # noqa: SLF001 - how fsspec has one parse URLs

    @property
    def num_retries(self) -> int:
        return self._requests.num_retries

    def head(self, key: str) -> ListedObject:
        found = self._requests.send(key, lambda: self._info(key))
        if found.get("type") == "directory":
            raise SourceError(f"{self.root}/{key} is a folder: name the files in it, as in {self.root}/{key}/*")
        return self._listed(found)

    def list_all(self, prefix: str) -> list[ListedObject]:
        """Every file below the folder `prefix`, however deep."""
        found = self._requests.send(prefix, lambda: self._files.find(self._path(prefix), detail=True))
        return [self._listed(info) for info in found.values()]

    def list_level(self, prefix: str) -> tuple[list[ListedObject], list[str]]:
        """The files and the folders directly in the folder `prefix`."""
        found = self._requests.send(prefix, lambda: self._files.ls(self._path(prefix), detail=True))
        files = [self._listed(info) for info in found if info["type"] != "directory"]
        return files, [self._key(info["name"]) for info in found if info["type"] == "directory"]

    def read(self, listed: ListedObject, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop) of a file; SourceError if it has changed since it was listed."""
        if stop <= start:
            return pa.py_buffer(b"")
        data = self._requests.send(listed.key, lambda: self._read(listed, start, stop))
        with self._lock:
            self.num_bytes += len(data)
        return pa.py_buffer(data)

    def _read(self, listed: ListedObject, start: int, stop: int) -> bytes:
        data = self._files.cat_file(self._path(listed.key), start=start, end=stop, **self._how_to_open)
        named = listed.version.partition("=")[0]
        found = self._listed(self._info(listed.key), (named,) if named else _VERSIONS)
        if found.num_bytes != listed.num_bytes or (listed.version and found.version and found.version != listed.version):
            raise changed_error(self.root, listed, found)
        if len(data) != stop - start:
            raise OSError(f"{len(data):,} bytes came for the range {start:,} to {stop:,} of {listed.num_bytes:,}")
        return data

    def _info(self, key: str) -> dict[str, Any]:
        path = self._path(key)
        self._files.invalidate_cache(path.rpartition("/")[0])
        return self._files.info(path)

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}" if key else self._base

    def _key(self, path: str) -> str:
        return path.removeprefix(self._base).strip("/") if path.startswith(self._base) else path.strip("/")

    def _listed(self, info: Mapping[str, Any], names: Sequence[str] = _VERSIONS) -> ListedObject:
        """The version is that of the first of these names, with its name: a listing may have others than a single file."""
        name = next((name for name in names if info.get(name) not in (None, "")), None)
        version = "" if name is None else f"{name}={_plain_version(info[name])}"
        return ListedObject(self._key(info["name"]), int(info["size"] or 0), version)


class Requests:
    """Sends requests to one root until one succeeds, refuses or comes too late, and counts those that were sent again. A
    refusal is an error of Overlord, a FileNotFoundError, a PermissionError or one of `_REFUSALS`; what else is raised may
    pass."""

    def __init__(self, root: str, retry: Retry) -> None:
        self._root = root
        self._retry = retry
        self._lock = threading.Lock()
        self.num_retries = 0

    def send(self, key: str, request: Callable[[], T]) -> T:
        place = f"{self._root}/{key}"

        def note(failed: FailedAttempt[Exception]) -> None:
            error, wait = failed.error, failed.pause_s or 0.0
            if isinstance(error, OverlordError):
                raise error
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            if isinstance(error, FileNotFoundError):
                raise SourceError(f"{place} does not exist: check the name, and the rights to see it ({reason})") from error
            if isinstance(error, PermissionError):
                raise SourceError(
                    f"{place} may not be read with these credentials: give others in storage_options ({reason})"
                ) from error
            if isinstance(error, _REFUSALS):
                raise SourceError(f"{place} cannot be read ({reason})") from error
            if failed.waited_s + wait > self._retry.deadline_s:
                raise StorageError(
                    f"{place}: storage did not answer in {failed.number} attempts over {failed.waited_s:.1f} s "
                    f"(deadline_s={self._retry.deadline_s:g}); the last error was: {reason}. Check the address and the "
                    "network, or give more time: retry=ol.policies.Retry(deadline_s=...)"
                ) from error
            with self._lock:
                self.num_retries += 1
            note_event("retry", f"{place}: attempt {failed.number} failed, again in {wait:.1f} s: {reason}")
            _log.warning("%s: attempt %d failed, again in %.1f s: %s", place, failed.number, wait, reason)

        return retry(request, on=Exception, pauses=self._retry.waits(), on_failure=note)


def _how_to_open(files: Any) -> dict[str, Any]:
    """What `cat_file` passes on to `open`."""
    from fsspec import AbstractFileSystem
    from fsspec.implementations.arrow import ArrowFSWrapper

    if isinstance(files, ArrowFSWrapper):  # hdfs: for a range from 0 on it opens what cannot be sought, and then seeks
        return {"seekable": True}
    return {"block_size": _AHEAD_BYTES} if type(files).cat_file is AbstractFileSystem.cat_file else {}


def _plain_version(value: Any) -> str:
    """Some file systems have times as numbers in one place and as dates in another, and ETags with quotes or without."""
    if isinstance(value, datetime):
        value = value.timestamp()
    return f"{value:.6f}" if isinstance(value, float) else str(value).removeprefix("W/").strip('"')


def _connect(root: str, options: Mapping[str, str]) -> Any:
    scheme = root.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise SpecError(
            f"{root}: {scheme}:// is read by fsspec: pip install 'overlord-dataloader[fsspec]' and the package of the scheme"
        ) from error
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise SpecError(
            f"{root}: {scheme}:// is not a known scheme; use a path, file, s3, gs, az, http, https, or one that fsspec "
            "knows (hf, msc, hdfs, abfs, ftp, sftp, ...)"
        ) from error
    except ImportError as error:
        raise SpecError(f"{root}: {scheme}:// needs a package that is not installed: {error}") from error
    try:
        files, _ = fsspec.core.url_to_fs(f"{root}/", **options, use_listings_cache=False)
    except Exception as error:
        raise SpecError(f"storage_options for {root} are not understood, or it cannot be reached: {error}") from error
    if scheme == "webhdfs":
        files.session.hooks["response"].append(partial(_refuse_pages_of_errors, files.url))
    return files


def _refuse_pages_of_errors(name_node: str, answer: Any, *_: Any, **__: Any) -> None:
    """fsspec looks at what the name node says, and takes whatever a data node says for data."""
    if not answer.url.startswith(name_node):
        answer.raise_for_status()
