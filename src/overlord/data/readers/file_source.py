"""What all sources made of files share: how they are named, listed and reached."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from overlord.data.object_store import Retry
from overlord.data.storage import Storage, StoredFile
from overlord.errors import SourceError, SpecError
from overlord.spec import Source, Unit


@dataclass(frozen=True)
class FileSource(Source):
    """`paths` is one or more local paths (as text or `pathlib.Path`, `~` is the home folder) or URLs (s3://, gs://, az://,
    http://, https://, file://), with globs (`*`, `?`, `[ab]`, `**`) and ranges (`{000..099}`, `{a,b}`). A local file
    that exists under just that name is taken as it is; elsewhere a character that has a meaning is put in brackets to
    stand for itself: `[[]`, `[*]`, `[{]`. Files are data in the order of their names.
    """

    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    storage_options: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    """Endpoint, region and credentials of an object store, as obstore names them. Not part of the stream."""
    retry: Retry = field(default_factory=Retry, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = self.paths
        given = (paths,) if isinstance(paths, (str, bytes, os.PathLike)) else tuple(paths)
        named = tuple(os.fspath(path) if isinstance(path, os.PathLike) else path for path in given)
        if not named or not all(isinstance(path, str) and path for path in named):
            raise SpecError(f"paths must be one or more paths, as text or pathlib.Path, got {paths!r}")
        object.__setattr__(self, "paths", named[0] if isinstance(paths, (str, os.PathLike)) else named)

    @property
    def patterns(self) -> tuple[str, ...]:
        # __post_init__ made text of all paths.
        return (self.paths,) if isinstance(self.paths, str) else cast("tuple[str, ...]", self.paths)

    @property
    def storage(self) -> Storage:
        return Storage(tuple(sorted(self.storage_options.items())), self.retry)

    def files(self) -> tuple[StoredFile, ...]:
        return self.storage.files(self.patterns)

    def identity(self) -> str:
        return f"{type(self).__name__}({list(self.patterns)!r})"

    def _some(self, units: list[Unit]) -> list[Unit]:
        if not units:
            raise SourceError(f"{self.identity()} has files but not a single row in them: check what wrote them")
        return units
