"""What a state knows of the files it was saved over: whether any has changed since, and, as well as a few bytes can tell,
which.

A state holds, for each source, eight short digests, each over the files whose names fall to it, and the newest modification
time. A file in a digest that differs may have changed; it has, if it is newer than all files were then.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.stream.plain import (
    DamagedError,
    as_list,
    short_repr,
    text,
    whole,
)

if TYPE_CHECKING:
    from overlord.declare.source import Unit

NUM_GROUPS = 8
_DIGEST_BYTES = 3
_MOST_NAMED = 3

PlainVersions = Sequence[str | int]
"""[digests in base64, newest modification time in nanoseconds]"""


@dataclass(frozen=True, slots=True)
class FileVersions:
    """The files of one source."""

    versions: dict[str, str]
    """Path to version."""

    @staticmethod
    def of(units: Iterable[Unit]) -> FileVersions | None:
        """None for a source that does not tell the versions of its files."""
        versions = {unit.path: unit.version for unit in units if unit.version}
        return FileVersions(versions) if versions else None

    @staticmethod
    def check(saved: Any, at: str) -> None:
        """Raises DamagedError for what `to_plain` did not make."""
        digests, newest = as_list(saved, at, length=2)
        try:
            found = base64.b64decode(text(digests, f"{at}[0]"), validate=True)
        except ValueError:
            found = b""
        if len(found) != NUM_GROUPS * _DIGEST_BYTES:
            raise DamagedError(f"{at}[0] must be {NUM_GROUPS} digests in base64, it is {short_repr(digests)}")
        whole(newest, f"{at}[1]", most=2**63)

    def to_plain(self) -> list[str | int]:
        sums = [0] * NUM_GROUPS
        for path, version in self.versions.items():
            name = path.encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(name + b"\0" + version.encode(), digest_size=_DIGEST_BYTES).digest()
            sums[_group(path)] += int.from_bytes(digest, "big")
        digests = b"".join((total % 256**_DIGEST_BYTES).to_bytes(_DIGEST_BYTES, "big") for total in sums)
        return [base64.b64encode(digests).decode(), max(map(self._modified_ns, self.versions))]

    def changes(self, saved: PlainVersions) -> str | None:
        """What to tell of the files that have changed since; None where none has."""
        then, newest = base64.b64decode(str(saved[0])), int(saved[1])
        now = base64.b64decode(str(self.to_plain()[0]))
        if now == then:
            return None
        places = (slice(i * _DIGEST_BYTES, (i + 1) * _DIGEST_BYTES) for i in range(NUM_GROUPS))
        changed = {group for group, place in enumerate(places) if now[place] != then[place]}
        possible = sorted(path for path in self.versions if _group(path) in changed)
        newer = [path for path in possible if self._modified_ns(path) > newest > 0]
        named = ", ".join((newer or possible)[:_MOST_NAMED])
        others = len(newer or possible) - _MOST_NAMED
        named += f" and {others} others" if others > 0 else ""
        return named if newer or len(possible) == len(changed) else f"one or more of {named}"

    def _modified_ns(self, path: str) -> int:
        """0 for an object, whose version is a tag."""
        return 0 if "://" in path else int(self.versions[path])


def _group(path: str) -> int:
    return zlib.crc32(path.encode("utf-8", "surrogatepass")) % NUM_GROUPS
