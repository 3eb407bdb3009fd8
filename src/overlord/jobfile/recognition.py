"""Tells which reader reads what lies at a path: by the files that a folder has, by endings, and by the first bytes."""

from __future__ import annotations

import glob
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlord.errors import SourceError, SpecError, StorageError
from overlord.jobfile.csv_form import csv_form
from overlord.jobfile.values import READERS, reader_of
from overlord.sources.prepared import MANIFEST
from overlord.sources.storage import Storage, has_glob, is_remote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_LISTED = 100_000
_MAGIC = (
    (b"PAR1", 0, "Parquet"),
    (b"ARROW1", 0, "ArrowIpc"),
    (b"\xff\xff\xff\xff", 0, "ArrowIpc"),
    (b"ustar", 257, "WebDataset"),
)
_FOLDERS = (
    ("HuggingFaceFiles", "dataset_dict.json"),
    ("HuggingFaceFiles", "state.json", "dataset_info.json"),
    ("Delta", "_delta_log/*.json"),
    ("Iceberg", "metadata/*.metadata.json"),
    ("Lance", "_versions/*"),
)
"""Readers of whole folders, and the files by which these are known."""
_SINGLE = {"Prepared", *(name for name, *_ in _FOLDERS), "Mds", "LitData"}
_INDEX = "index.json"
_ENERGON = ".nv-meta/split.yaml"


@dataclass(frozen=True, slots=True)
class Recognised:
    """How what lies at a path is read."""

    reader: str
    paths: str | Sequence[str]
    """Its files as a pattern, or the folder; several of these where several were named."""
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a message calls it."""
        return self.paths if isinstance(self.paths, str) else f"{self.paths[0]} and {len(self.paths) - 1:,} more"

    def declaration(self) -> dict[str, Any]:
        """As a job file declares it."""
        return {"reader": self.reader, "uri" if self.reader == "Lance" else "paths": self.paths, **self.options}


def recognise(path: str, reader: str | None = None) -> Recognised:
    """What lies at a path; with `reader`, which of its files that one reads."""
    local = os.path.expanduser(path)
    if path.endswith(".metadata.json") and reader in (None, "Iceberg"):
        return Recognised("Iceberg", path)
    if path.rpartition("/")[2] == _INDEX and (found := _indexed(path.rpartition("/")[0] or ".")) in ("Mds", "LitData"):
        return Recognised(reader or found, path)
    is_folder = os.path.isdir(local) if not is_remote(path) else not has_glob(path) and reader_of(path) is None
    if is_folder and (found := _folder(path.rstrip("/") or "/", reader)) is not None:
        return found
    if is_folder and not (is_remote(path) and reader is not None):
        return _by_endings(path, reader)
    name = reader or reader_of(path)
    if name is None and not is_remote(path) and os.path.isfile(local):
        name = _by_content(Path(local))
    if name is None and has_glob(path):
        name = _by_matches(path)
    if name == "Csv":
        return _csv(path)
    if name is None:
        if not is_remote(path) and not has_glob(path) and not os.path.exists(local):
            raise SourceError(f"there is nothing at {path}")
        raise SpecError(
            f"the format of {path} cannot be told from its name or first bytes; say it with --reader, as "
            f"{', '.join(dict.fromkeys(READERS.values()))}"
        )
    return Recognised(name, path)


def recognise_all(paths: Sequence[str], reader: str | None = None) -> Recognised:
    """What lies at several paths, which is to be of one format: as where a shell replaces a pattern by its files."""
    each = [recognise(path, reader) for path in dict.fromkeys(paths)]
    if len(each) == 1:
        return each[0]
    readers = {found.reader: found for found in each}
    if len(readers) > 1:
        listed = ", ".join(f"{found.name} ({name})" for name, found in readers.items())
        raise SpecError(f"these paths are of several formats: {listed}; inspect one at a time, or give --reader")
    if (name := each[0].reader) in _SINGLE:
        raise SpecError(f"{name} reads one folder, and {len(each)} were named: inspect one at a time")
    named = [path for found in each for path in ([found.paths] if isinstance(found.paths, str) else found.paths)]
    if any(found.options != each[0].options for found in each):
        raise SpecError(f"these {name} files need different options: inspect one at a time")
    return replace(each[0], paths=_pattern_of(named) or named, notes=tuple(dict.fromkeys(n for e in each for n in e.notes)))


def _pattern_of(paths: Sequence[str]) -> str | None:
    """The pattern that matches these files and no others, of all files with one ending in one folder; None if none does."""
    folders = {os.path.dirname(path) for path in paths}
    endings = {os.path.basename(path).partition(".")[2] for path in paths}
    if len(folders) > 1 or len(endings) > 1 or any(has_glob(path) or is_remote(path) for path in paths):
        return None
    pattern = os.path.join(folders.pop(), f"*.{endings.pop()}")
    return pattern if set(glob.glob(pattern)) == set(paths) else None


def _folder(path: str, reader: str | None) -> Recognised | None:
    """A folder that one reader reads as a whole."""
    found = _prepared(path) if reader in (None, "Prepared", "Parquet") else None
    if found is not None and reader in (None, found.reader):
        return found
    for name, *files in _FOLDERS:
        if reader in (None, name) and all(_has(path, file) for file in files):
            return Recognised(name, path, _split_of(path) if files == ["dataset_dict.json"] else {})
    indexed = _indexed(path)
    if indexed is not None and reader in (None, indexed):
        return Recognised(indexed, path)
    if reader in (None, "WebDataset") and _has(path, _ENERGON):
        note = f"an Energon dataset, with all of its splits: ol.formats.energon({path!r}) in a Python job reads one"
        return Recognised("WebDataset", f"{path}/**/*.tar", notes=(note,))
    return None


def _prepared(path: str) -> Recognised | None:
    """A prepared source: the folder itself, or the first of those in a folder that `overlord prepare --to` wrote."""
    manifest = _manifest(path)
    if manifest is not None:
        return _prepared_source(path, manifest)
    try:
        listed = [file.path.rpartition("/")[0] for file in Storage().list_files([f"{path}/*/{MANIFEST}"])]
    except StorageError:
        raise
    except SourceError:
        return None
    found = [(folder, manifest) for folder in listed if (manifest := _manifest(folder)) is not None]
    if not found:
        return None
    first = _prepared_source(*found[0])
    if len(found) == 1:
        return first
    others = ", ".join(folder for folder, _ in found[1:])
    note = f"{path} holds {len(found)} prepared sources, and only {found[0][0]} is read; inspect also {others}"
    return replace(first, notes=(note, *first.notes))


def _manifest(folder: str) -> dict[str, Any] | None:
    found = _read_json(f"{folder}/{MANIFEST}")
    return found if isinstance(found, dict) and {"fingerprint", "parts", "num_units"} <= found.keys() else None


def _prepared_source(folder: str, manifest: Mapping[str, Any]) -> Recognised:
    """How a prepared source is read; its manifest says which columns the loss needs."""
    options = {name: manifest[name] for name in ("loss_mask", "loss_weights", "pairs") if manifest.get(name)}
    if manifest.get("packed") is not None:
        note = f"{folder} has packed rows of up to {manifest['packed']:,} tokens: another corpus, not the stream of the job"
        return Recognised("Parquet", f"{folder}/part-*.parquet", options, (note,))
    return Recognised("Prepared", folder, {**options, **({"whole": True} if manifest.get("whole") else {})})


def _has(folder: str, pattern: str) -> bool:
    try:
        return bool(Storage().list_files([f"{folder}/{pattern}"]))
    except StorageError:
        raise
    except SourceError:
        return False


def _read_json(path: str) -> Any:
    """The content of a file; None where there is none, or something else."""
    storage = Storage()
    try:
        (file,) = storage.list_files([path])
        return msgspec.json.decode(storage.read(file, 0, file.num_bytes).to_pybytes())
    except StorageError:
        raise
    except (SourceError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _indexed(folder: str) -> str | None:
    """The reader of a folder with an index of shards or chunks."""
    index = _read_json(f"{folder}/{_INDEX}")
    if not isinstance(index, dict):
        return None
    return "Mds" if "shards" in index else "LitData" if "chunks" in index and "config" in index else None


def _split_of(folder: str) -> dict[str, Any]:
    saved = _read_json(f"{folder}/dataset_dict.json")
    splits = saved.get("splits") if isinstance(saved, dict) else None
    if not isinstance(splits, list) or not splits:
        return {}
    return {"split": "train" if "train" in splits else splits[0]}


def _by_endings(path: str, reader: str | None) -> Recognised:
    """A folder of files: those of the ending that most have."""
    endings: Counter[tuple[str, str]] = Counter()
    for name in islice(_names_under(path), _MOST_LISTED):
        found = reader_of(name)
        if found is not None and reader in (None, found):
            bare = next(ending for ending in (*READERS, ".tgz") if ending in name.lower())
            endings[name[name.lower().rindex(bare) :], found] += 1
    if not endings:
        raise SpecError(f"no file under {path} has an ending that Overlord knows ({', '.join(READERS)}); name the files")
    ((ending, found), _), *others = endings.most_common()
    listed = ", ".join(f"{count:,} {name}" for (name, _), count in others)
    notes = (f"only the files *{ending} are read; under {path} are also {listed}",) if others else ()
    pattern = f"{path.rstrip('/')}/**/*{ending}"
    return _csv(pattern, notes) if found == "Csv" else Recognised(found, pattern, notes=notes)


def _csv(paths: str, notes: tuple[str, ...] = ()) -> Recognised:
    options, further = csv_form(paths)
    return Recognised("Csv", paths, options, (*notes, *further))


def _names_under(path: str) -> Iterator[str]:
    if is_remote(path):
        return (file.path.rpartition("/")[2] for file in Storage().list_files([f"{path.rstrip('/')}/**"]))
    return (name for _, _, names in os.walk(os.path.expanduser(path)) for name in names)


def _by_matches(pattern: str) -> str | None:
    """The reader of all files of a pattern whose own ending says nothing, as *.jsonl*."""
    readers = {reader_of(file.path) for file in islice(Storage().list_files([pattern]), _MOST_LISTED)}
    return readers.pop() if len(readers) == 1 else None


def _by_content(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(1024)
    for magic, place, found in _MAGIC:
        if head[place : place + len(magic)] == magic:
            return found
    return "Jsonl" if head.lstrip()[:1] == b"{" else None
