"""What a run keeps on disk of what it has read and transformed, as a user declares it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps what was read and transformed, for `Job(cache=...)` or one source's `cache=`. Later epochs, a run that resumes,
    shadows, and other jobs with the same sources take it from there. It changes the time that a step takes, never the step.

    An entry is found by what it depends on: the version of its file, the reader and its options, the code and the options of
    transforms, the files that these name, and the versions of the packages that they use. After a change it is not found.
    docs/caches.md lists what code may read unseen: the network, say, or files that rows name. Processes, hosts and jobs may
    share a cache. One that is full, damaged or cannot be written makes a run slower, and never stops it.
    """

    location: str | os.PathLike[str]
    """A folder, on a disk of each machine or shared by several; or the URL of an object store."""
    max_bytes: int
    """The most bytes that entries take there. What will be needed last makes room for the rest."""
    files: bool | None = None
    """Keep the bytes that are read from remote storage, and fetch those of the next chunks ahead. None: only for sources
    without transforms, because of the others the transformed rows are kept. In a folder only."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Endpoint, region and credentials of an object store, as obstore names them."""

    def __post_init__(self) -> None:
        if not self.location or not isinstance(self.location, (str, os.PathLike)):
            raise SpecError(
                f"a cache needs a place: a folder, or a URL such as s3://bucket/cache; got location={self.location!r}"
            )
        object.__setattr__(self, "location", os.path.expanduser(os.fspath(self.location)).removeprefix("file://"))
        if type(self.max_bytes) is not int or self.max_bytes < LEAST_BYTES:
            raise SpecError(
                f"max_bytes is a whole number of bytes, at least {LEAST_BYTES:,}, got {self.max_bytes!r}; 200 GB are "
                "200 * 10**9"
            )
        if self.is_remote and self.files:
            raise SpecError(
                f"files=True keeps bytes of remote storage on a local disk, and location={self.location!r} is a URL: name a "
                "folder, or leave files out"
            )

    @property
    def is_remote(self) -> bool:
        return "://" in os.fspath(self.location)
