"""Storage for the numbered segments of a log: files in a local folder, objects under a URL, or entries of a cluster's own
table.

Creating a segment is exclusive, so each has one writer. An append is all or nothing: a full disk leaves no partial record.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from overlord.errors import SpecError
from overlord.runtime.liveness import LOG_STORAGE
from overlord.sources.object_store import ObjectStore, Retry, shared_store
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WRITABLE_SCHEMES = ("s3", "gs", "az")
_NAME = re.compile(r"segment-(\d{8})(?:\.log)?")
_RETRY = Retry(deadline_s=LOG_STORAGE.after_s, request_timeout_s=LOG_STORAGE.after_s)


class Segment(Protocol):
    """A segment that is being written."""

    def append(self, data: bytes) -> None:
        """Add all of these bytes or none. Raises FileExistsError if another writer has created the segment."""
        ...

    def sync(self) -> None:
        """Return when the appended bytes survive a crash of the machine."""
        ...

    def close(self) -> None: ...


class Segments(Protocol):
    """All segments of a log."""

    location: str
    writes_at_once: bool
    """True if an append takes microseconds. Otherwise appends are batched."""

    def numbers(self) -> list[int]:
        """The numbers of the existing segments, in order."""
        ...

    def exists(self, number: int) -> bool:
        """True if a segment exists: cheaper than listing all."""
        ...

    def name(self, number: int) -> str:
        """The path or URL of a segment."""
        ...

    def read(self, number: int) -> bytes: ...

    def create(self, number: int) -> Segment:
        """Create a segment. Raises FileExistsError, now or at the first append, if it exists."""
        ...

    def delete(self, number: int) -> None: ...


def segments_at(location: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Segments:
    """The segments of the log at a folder or URL, which need not exist."""
    location = os.fspath(location)
    if is_remote(location):
        return ObjectSegments(location, storage_options or {})
    return FileSegments(location)


def store_at(location: str, storage_options: Mapping[str, str]) -> tuple[ObjectStore, str]:
    """The object store of a log's URL, and the prefix of the log in it."""
    scheme, rest = location.split("://", 1)
    bucket, _, prefix = rest.partition("/")
    if scheme not in WRITABLE_SCHEMES:
        raise SpecError(f"log={location!r}: a log can be written to a folder or to {', '.join(WRITABLE_SCHEMES)}")
    if not bucket or not prefix:
        raise SpecError(f"log={location!r} names no folder in a bucket: write {scheme}://bucket/name")
    store = shared_store(f"{scheme}://{bucket}", tuple(sorted(storage_options.items())), _RETRY)
    assert isinstance(store, ObjectStore), "the schemes that can be written to are obstore's"
    return store, prefix


class LogTable(Protocol):
    """A table of bytes that every machine of a cluster reaches. It pickles, and ends with the cluster."""

    location: str
    """What messages call it."""

    def put_new(self, key: str, value: bytes) -> bool:
        """Store a value, unless the key has one; returns whether it was stored. OSError if the table does not answer."""
        ...

    def get(self, key: str) -> bytes | None: ...

    def keys(self, prefix: str) -> list[str]: ...

    def delete(self, key: str) -> None: ...


class FileSegments:
    """Files `segment-00000012.log` in a folder."""

    writes_at_once = True

    def __init__(self, location: str) -> None:
        self.location = location.removeprefix("file://")
        if os.path.exists(self.location) and not os.path.isdir(self.location):
            raise SpecError(f"log={location!r} is a file: a log is a folder (or a URL), which is created if it is missing")

    def numbers(self) -> list[int]:
        try:
            names = os.listdir(self.location)
        except (FileNotFoundError, NotADirectoryError):
            return []  # `create` makes the folder, or raises the error
        return sorted(int(match.group(1)) for name in names if (match := _NAME.fullmatch(name)))

    def exists(self, number: int) -> bool:
        return os.path.exists(self.name(number))

    def name(self, number: int) -> str:
        return os.path.join(self.location, f"segment-{number:08}.log")

    def read(self, number: int) -> bytes:
        with open(self.name(number), "rb") as file:
            return file.read()

    def create(self, number: int) -> Segment:
        os.makedirs(self.location, exist_ok=True)
        return _FileSegment(self.name(number))

    def delete(self, number: int) -> None:
        with suppress(FileNotFoundError):
            os.remove(self.name(number))


class _FileSegment:
    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._is_listed = False
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)  # works on a full disk
            raise
        self._size += len(data)

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if not self._is_listed:
            folder = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            self._is_listed = True

    def close(self) -> None:
        os.close(self._fd)


class ObjectSegments:
    """Objects `segment-00000012/00000003`. Each append creates one, so records are batched before they are written."""

    writes_at_once = False

    def __init__(self, location: str, storage_options: Mapping[str, str]) -> None:
        self.location = location.rstrip("/")
        self._store, self._prefix = store_at(self.location, storage_options)

    def numbers(self) -> list[int]:
        return sorted(self._parts())

    def exists(self, number: int) -> bool:
        return self._store.exists(f"{self._prefix}/segment-{number:08}/{0:08}")

    def name(self, number: int) -> str:
        return f"{self.location}/segment-{number:08}"

    def read(self, number: int) -> bytes:
        return b"".join(self._store.get(key) for key in self._parts().get(number, ()))

    def create(self, number: int) -> Segment:
        return _ObjectSegment(self._store, f"{self._prefix}/segment-{number:08}")

    def delete(self, number: int) -> None:
        # From the end, so that a partial deletion leaves a short segment, not one with holes.
        for key in reversed(self._parts().get(number, ())):
            self._store.delete(key)

    def _parts(self) -> dict[int, list[str]]:
        return _parts_by_segment((listed.key for listed in self._store.list_all(self._prefix)), self._prefix)


class _ObjectSegment:
    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._num_parts = 0

    def append(self, data: bytes) -> None:
        self._store.put_new(f"{self._prefix}/{self._num_parts:08}", data)
        self._num_parts += 1

    def sync(self) -> None:
        """Nothing to do: a stored object is durable."""

    def close(self) -> None:
        """Nothing to do."""


class TableSegments:
    """Entries `log/segment-00000012/00000003` of a table. Each append adds one, so records are batched as for objects."""

    writes_at_once = False

    def __init__(self, table: LogTable) -> None:
        self.location = table.location
        self._table = table

    def numbers(self) -> list[int]:
        return sorted(self._parts())

    def exists(self, number: int) -> bool:
        return self._table.get(f"{_IN_TABLE}/segment-{number:08}/{0:08}") is not None

    def name(self, number: int) -> str:
        return f"{self.location}, segment {number}"

    def read(self, number: int) -> bytes:
        parts = [self._table.get(key) for key in self._parts().get(number, ())]
        return b"".join(part for part in parts if part is not None)  # one that its writer has just deleted is None

    def create(self, number: int) -> Segment:
        return _TableSegment(self._table, f"{_IN_TABLE}/segment-{number:08}")

    def delete(self, number: int) -> None:
        for key in reversed(self._parts().get(number, ())):
            self._table.delete(key)

    def _parts(self) -> dict[int, list[str]]:
        return _parts_by_segment(self._table.keys(f"{_IN_TABLE}/"), _IN_TABLE)


_IN_TABLE = "log"


class _TableSegment:
    def __init__(self, table: LogTable, prefix: str) -> None:
        self._table = table
        self._prefix = prefix
        self._num_parts = 0

    def append(self, data: bytes) -> None:
        key = f"{self._prefix}/{self._num_parts:08}"
        if not self._table.put_new(key, data):
            raise FileExistsError(f"another writer has written {key} of {self._table.location}")
        self._num_parts += 1

    def sync(self) -> None:
        """Nothing to do: an entry is as durable as the cluster."""

    def close(self) -> None:
        """Nothing to do."""


def _parts_by_segment(keys: Iterable[str], prefix: str) -> dict[int, list[str]]:
    """The keys of each segment's parts, in order."""
    found: dict[int, list[str]] = {}
    for key in sorted(keys):
        folder = key[len(prefix) + 1 :].split("/")
        if len(folder) == 2 and (match := _NAME.fullmatch(folder[0])):
            found.setdefault(int(match.group(1)), []).append(key)
    return found
