"""What transformed rows depend on, for keeping them in a cache: the reader, the transforms, and the packages that they use.

A key has more than the fingerprint of a state: the full versions of packages, the files that code names, and whatever a unit
says of its place. It has less, too: neither the name of the source nor its other files, so that jobs share what they have in
common.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.caches.folder import digest_key
from overlord.checkpoint.code_reads import ReadsDescriber
from overlord.checkpoint.fingerprint import reader_text
from overlord.sources.files import FileSource

if TYPE_CHECKING:
    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit

KIND = "chunks"
FORMAT = "1"
"""Changes when rows are kept in another way, or Overlord's own readers and transforms make other rows."""

_ALWAYS = ("overlord-dataloader", "numpy", "pyarrow", "orjson")
_log = logging.getLogger("overlord.cache")


def row_keys(job: Job) -> dict[str, str]:
    """For each source that has a cache, what its transformed rows depend on beside the unit that they are read from. Without
    the sources whose transforms use something that cannot be inspected: a change of it would go unnoticed."""
    keys: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name, source in job.sources.items():
        if source.cache is None:
            continue
        describer = ReadsDescriber()
        at = f"sources.{name}"
        parts = [FORMAT, platform.python_version(), reader_text(_anywhere(source), at, describer)]
        parts += [describer.text(each, f"{at}.transform[{i}]") for i, each in enumerate(source.transforms)]
        if describer.unseen:
            _log.warning(
                "the rows of source %r are not kept in its cache: %s; give it an identity() method that names all that it "
                "depends on",
                name,
                describer.unseen[0],
            )
            continue
        parts += describer.reads_text
        parts += [f"{each}={_version(each, versions)}" for each in sorted({*_ALWAYS, *describer.packages})]
        keys[name] = digest_key(KIND, *parts)
    return keys


class PlaceText:
    """The texts of what units say of their place. Units of a file often share one object, whose text is made once."""

    def __init__(self) -> None:
        self._last: tuple[Any, str] | None = None

    def of(self, detail: Any) -> str:
        last = self._last  # read once: other threads replace it
        if last is None or last[0] is not detail:
            last = self._last = (detail, _plain_text(detail))
        return last[1]


def unit_key(base: str, unit: Unit, place: PlaceText) -> str | None:
    """The key of a unit's rows; None for a unit whose file has no version: a change of the file would go unnoticed."""
    if not unit.version:
        return None
    part: tuple[str, ...] = ()
    if unit.part is not None and unit.whole is not None:
        kind = "every" if unit.part.is_strided else "range"
        part, unit = (f"{kind} {unit.part.index} of {unit.part.of}",), unit.whole
    if unit.whole is not None:
        part = (*part, f"first {unit.num_rows}")
    return digest_key(KIND, base, unit.path, str(unit.index), unit.version, place.of(unit.detail), *part)


def _anywhere(source: Source) -> Source:
    """The source without its paths, if it is one of ours: these read a unit alike whatever other files there are."""
    if not isinstance(source, FileSource) or not type(source).__module__.startswith("overlord."):
        return source
    copied = copy.copy(source)
    object.__setattr__(copied, "paths", "*")
    return copied


def _version(package: str, known: dict[str, str]) -> str:
    if package not in known:
        import importlib.metadata  # with what reads mail: only for rows that are kept in a cache

        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = ""
    return known[package]


def _plain_text(value: Any) -> str:
    """A text that differs for values that differ. Equal values may have two texts, which costs an entry and no more."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, pa.Schema):
        return value.serialize().to_pybytes().hex()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_plain_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_plain_text(key)}:{_plain_text(entry)}' for key, entry in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = ",".join(f"{each.name}={_plain_text(getattr(value, each.name))}" for each in dataclasses.fields(value))
        return f"{type(value).__qualname__}({own})"
    return pickle.dumps(value, protocol=5).hex()
