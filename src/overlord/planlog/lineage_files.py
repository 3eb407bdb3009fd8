"""Where the lineage of a run is stored: beside its plan log, in a folder or under a URL.

    lineage/00000003.blocks           the blocks of the fourth planner: each a head (its steps, its size, its checksum) and
                                      a body. On an object store, an object `lineage/00000003/<first step>-<steps>` each.
    lineage/run-<digest>              what all blocks of a job refer to: its fingerprint and the units of its sources
    lineage/00000003.run              the digest of that, the mesh, and the first step of this planner

Finding a block takes the heads alone, and reading a step one block: nothing depends on how long the run was.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from overlord.errors import StateError, StorageError
from overlord.planlog.lineage import checksum
from overlord.planlog.segments import store_at
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FOLDER = "lineage"
_HEAD = struct.Struct("<4sQIIIB3x")  # marker, first step, steps, length, checksum, whether it has a progress
_MARK = b"\xf5OLb"
_BLOCKS = re.compile(r"(\d{8})\.blocks")
_OBJECT = re.compile(r"(\d{8})/(\d{12})-(\d+)(p?)")


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that can be read."""

    first: int
    num_steps: int
    has_after: bool
    name: str
    read: Callable[[], bytes]

    @property
    def end(self) -> int:
        return self.first + self.num_steps


class LineageFiles(Protocol):
    """The stored lineage of one log."""

    place: str
    writes_at_once: bool
    """True if writing a block takes less than a millisecond."""

    def writers(self) -> list[int]:
        """The numbers of the writers so far, in order."""
        ...

    def begin(self, run: bytes) -> int:
        """Begin the blocks of a new writer, with what is to be known of its run; returns its number."""
        ...

    def append(self, writer: int, first: int, count: int, body: bytes, *, has_after: bool) -> None: ...

    def blocks(self, writer: int) -> list[StoredBlock]:
        """The blocks of a writer, in the order of their steps. A torn end is left out."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Store something under a name, unless it is there already."""
        ...

    def get(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        ...


def lineage_at(location: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> LineageFiles:
    """The lineage beside the log at a folder or URL."""
    location = os.fspath(location)
    if is_remote(location):
        return _LineageObjects(location, storage_options or {})
    return _LineageFolder(location)


class _LineageFolder:
    writes_at_once = True

    def __init__(self, location: str) -> None:
        self.place = os.path.join(location.removeprefix("file://"), FOLDER)

    def writers(self) -> list[int]:
        try:
            names = os.listdir(self.place)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match.group(1)) for name in names if (match := _BLOCKS.fullmatch(name)))

    def begin(self, run: bytes) -> int:
        os.makedirs(self.place, exist_ok=True)
        number = max(self.writers(), default=-1) + 1
        while True:
            try:
                os.close(os.open(self._blocks(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            except FileExistsError:
                number += 1
            else:
                self.put(f"{number:08}.run", run)
                return number

    def append(self, writer: int, first: int, count: int, body: bytes, *, has_after: bool) -> None:
        head = _HEAD.pack(_MARK, first, count, len(body), checksum(body), has_after)
        with open(self._blocks(writer), "ab", buffering=0) as file:
            begin = file.seek(0, os.SEEK_END)
            rest = memoryview(head + body)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(begin)  # works on a full disk
                raise

    def blocks(self, writer: int) -> list[StoredBlock]:
        path, found, offset = self._blocks(writer), [], 0
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            while offset + _HEAD.size <= size:
                mark, first, count, length, expected, has_after = _HEAD.unpack(os.pread(file.fileno(), _HEAD.size, offset))
                begin = offset + _HEAD.size
                if mark != _MARK or begin + length > size:
                    break
                name = f"{path}, byte {offset}"
                found.append(StoredBlock(first, count, bool(has_after), name, _FilePart(path, begin, length, expected)))
                offset = begin + length
        return found

    def put(self, name: str, content: bytes) -> None:
        path = os.path.join(self.place, name)
        if os.path.exists(path):
            return
        os.makedirs(self.place, exist_ok=True)
        draft = f"{path}.{os.getpid()}"
        with open(draft, "wb") as file:
            file.write(content)
        os.replace(draft, path)

    def get(self, name: str) -> bytes:
        with open(os.path.join(self.place, name), "rb") as file:
            return file.read()

    def _blocks(self, writer: int) -> str:
        return os.path.join(self.place, f"{writer:08}.blocks")


@dataclass(frozen=True, slots=True)
class _FilePart:
    """Reads a part of a file, and checks it."""

    path: str
    begin: int
    length: int
    expected: int

    def __call__(self) -> bytes:
        with open(self.path, "rb") as file:
            body = os.pread(file.fileno(), self.length, self.begin)
        if len(body) != self.length or checksum(body) != self.expected:
            raise StateError(
                f"{self.path} is damaged at byte {self.begin}: its checksum differs from what was written; delete the file, "
                "and its steps are drawn again"
            )
        return body


class _LineageObjects:
    """Objects. Blocks are stored whole, so their names say which steps they have."""

    writes_at_once = False

    def __init__(self, location: str, storage_options: Mapping[str, str]) -> None:
        self._store, prefix = store_at(location.rstrip("/"), storage_options)
        self.place = f"{location.rstrip('/')}/{FOLDER}"
        self._prefix = f"{prefix}/{FOLDER}"

    def writers(self) -> list[int]:
        return sorted({int(name[:8]) for name in self._names() if name.endswith(".run")})

    def begin(self, run: bytes) -> int:
        number = max(self.writers(), default=-1) + 1
        while True:
            try:
                self._store.put_new(f"{self._prefix}/{number:08}.run", run)
            except FileExistsError:
                number += 1
            else:
                return number

    def append(self, writer: int, first: int, count: int, body: bytes, *, has_after: bool) -> None:
        name = f"{writer:08}/{first:012}-{count}{'p' if has_after else ''}"
        self._store.put_new(f"{self._prefix}/{name}", body)

    def blocks(self, writer: int) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        for name in self._names():
            match = _OBJECT.fullmatch(name)
            if match and int(match.group(1)) == writer:
                key = f"{self._prefix}/{name}"
                stored = f"{self.place}/{name}"
                block = StoredBlock(
                    int(match.group(2)),
                    int(match.group(3)),
                    bool(match.group(4)),
                    stored,
                    _WholeObject(self._store.get, key),
                )
                found.append(block)
        return sorted(found, key=lambda block: block.first)

    def put(self, name: str, content: bytes) -> None:
        try:
            self._store.put_new(f"{self._prefix}/{name}", content)
        except FileExistsError:
            return

    def get(self, name: str) -> bytes:
        try:
            return self._store.get(f"{self._prefix}/{name}")
        except StorageError as error:
            raise FileNotFoundError(f"{self.place}/{name}") from error

    def _names(self) -> list[str]:
        return [listed.key[len(self._prefix) + 1 :] for listed in self._store.list_all(self._prefix)]


@dataclass(frozen=True, slots=True)
class _WholeObject:
    """Reads an object."""

    fetch: Callable[[str], bytes]
    key: str

    def __call__(self) -> bytes:
        return self.fetch(self.key)
