"""Megatron Energon: which shards a prepared dataset has (`.nv-meta/split.yaml`), and which datasets a metadataset blends.

The shards are tar files, which `WebDataset` reads. What Energon calls cookers and task encoders are transforms here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlord.errors import SourceError, SpecError
from overlord.sources.files import literal_pattern
from overlord.sources.object_store import Retry
from overlord.sources.storage import Storage, expand_braces
from overlord.sources.webdataset import WebDataset

_META = ".nv-meta"
_MOST_WEIGHT = 1e100


@dataclass(frozen=True, slots=True)
class EnergonBlend:
    """The sources of a dataset or metadataset, for `Job(sources=...)`, and their weights, for `Mixture(weights)`."""

    sources: dict[str, WebDataset]
    weights: dict[str, float]


def energon(path: str | os.PathLike[str], split: str = "train", **source: Any) -> EnergonBlend:
    """Read the split of a prepared dataset (its folder), or of a metadataset (its .yaml file), also of several that contain
    each other. `source` has fields of `WebDataset`, such as `columns` and `transform`, for all sources.

    A source is named by the folder of its dataset. Blends of weights are read, of both versions of metadatasets; joins,
    subsets and epochized blends are refused, and so are shards with single samples excluded.
    """
    options = source.get("storage_options") or {}
    storage = Storage(tuple(sorted(options.items())), source.get("retry", Retry()))
    found: dict[str, tuple[list[str], float]] = {}
    _collect(storage, os.fspath(path).rstrip("/"), split, 1.0, found)
    sources = {name: WebDataset(shards, **source) for name, (shards, _) in found.items()}
    return EnergonBlend(sources, {name: weight for name, (_, weight) in found.items()})


def _collect(
    storage: Storage, path: str, split: str, weight: float, found: dict[str, tuple[list[str], float]], *, depth: int = 0
) -> None:
    if depth > 20:
        raise SourceError(f"{path}: metadatasets are nested more than 20 deep; do two contain each other?")
    if not path.endswith((".yaml", ".yml")):
        name, number = path.rpartition("/")[2], 2
        while name in found:
            name, number = f"{path.rpartition('/')[2]}-{number}", number + 1
        found[name] = _shards(storage, path, split), weight
        return
    entries = _blend(path, _load(storage, path), split)
    total = sum(share for _, share, _ in entries)
    for inner, share, inner_split in entries:
        where = inner if "://" in inner or inner.startswith("/") else _join(path.rpartition("/")[0], inner)
        _collect(storage, where.rstrip("/"), inner_split or split, weight * share / total, found, depth=depth + 1)


def _blend(path: str, content: Any, split: str) -> list[tuple[str, float, str | None]]:
    """(path, weight, split) of the parts of a metadataset."""
    splits = content.get("splits") if isinstance(content, Mapping) else None
    if not isinstance(splits, Mapping):
        raise SourceError(f"{path} is no metadataset of Energon: it has no splits")
    if split not in splits:
        raise SpecError(f"{path} has the splits {', '.join(map(str, splits))}, not {split!r}: name one, split=...")
    part = splits[split]
    entries = part.get("blend") or part.get("datasets") if isinstance(part, Mapping) else None
    if entries is None and isinstance(part, Mapping) and "path" in part:
        entries = [part]
    if not isinstance(entries, list) or not entries:
        kinds = ", ".join(map(str, part)) if isinstance(part, Mapping) else type(part).__name__
        raise SpecError(
            f"{path}, split {split!r}, has {kinds}: only blends of weights are read, not joins or epochized blends"
        )
    parts = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
            raise SpecError(f"{path}, split {split!r}, has a part that is no dataset with a path: {entry!r}"[:300])
        if "subset" in entry:
            raise SpecError(f"{path}, split {split!r}: the subset of {entry['path']} is not read; leave it out")
        share = entry.get("weight", 1.0)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= _MOST_WEIGHT:
            raise SpecError(
                f"{path}, split {split!r}: the weight of {entry['path']} must be a number above 0, not {share!r}"
            )
        parts.append((entry["path"], float(share), entry.get("split_part") or entry.get("split")))
    return parts


def _shards(storage: Storage, folder: str, split: str) -> list[str]:
    path = f"{folder}/{_META}/split.yaml"
    content = _load(storage, path)
    parts = content.get("split_parts") if isinstance(content, Mapping) else None
    if not isinstance(parts, Mapping):
        raise SourceError(f"{path} has no split_parts: prepare the dataset again (energon prepare)")
    if not parts.get(split):
        known = ", ".join(str(name) for name, shards in parts.items() if shards)
        raise SpecError(f"{path} has shards for {known or 'no split'}, not for {split!r}: name a split that has some")
    excluded = _texts(path, "exclude", content.get("exclude") or [])
    if single := [name for name in sorted(excluded) if not name.endswith(".tar")]:
        raise SpecError(
            f"{path} excludes the sample {single[0]!r}: only whole shards are left out; use Job(skip=...) for rows"
        )
    try:
        names = [name for pattern in _texts(path, split, parts[split]) for name in expand_braces(pattern)]
    except SpecError as error:
        raise SourceError(f"{path}, split {split!r}: {error}") from error
    kept = [literal_pattern(f"{folder}/{name}") for name in names if name not in excluded]
    if not kept:
        raise SpecError(f"{path} excludes all shards of {split!r}: name another split, or exclude fewer")
    return kept


def _texts(path: str, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise SourceError(f"{path}: {name} must be a list of names, not {value!r}"[:300])
    return value


def _load(storage: Storage, path: str) -> Any:
    (file,) = storage.list_files([literal_pattern(path)])
    data = storage.read(file, 0, file.num_bytes).to_pybytes()
    import yaml  # here: only these readers need it

    try:
        return json.loads(data) if path.endswith(".json") else yaml.safe_load(data)
    except (ValueError, yaml.YAMLError) as error:
        raise SourceError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from error


def _join(folder: str, name: str) -> str:
    joined = f"{folder}/{name.removeprefix('./')}" if folder else name
    return joined if "://" in joined else os.path.normpath(joined)
