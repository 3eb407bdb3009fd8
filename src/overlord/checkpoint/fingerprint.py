"""The fingerprint of a job: what the meaning of a cursor depends on, and what differs from a saved one.

Every field of a declared value counts but those that are named here, so that a field that is added later cannot be
forgotten.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checkpoint.description import Describer, declared_options
from overlord.checkpoint.file_versions import FileVersions
from overlord.checkpoint.first_release import first_declaration_digest
from overlord.checkpoint.source_code import digest_of
from overlord.declare.batch import Batch
from overlord.declare.source import DECLARED_BUFFER, Source, Unit
from overlord.errors import StateError
from overlord.sources.files import codec_of
from overlord.sources.prepared import Prepared
from overlord.sources.unit_parts import UnitParts
from overlord.stream.plain import DamagedError, as_list, as_mapping, short_repr, text, whole, with_keys

if TYPE_CHECKING:
    from overlord.declare.job import Job

FORMAT = 2
"""How values are described in a fingerprint. The first release had none: its descriptions are number 1."""

JOB_MAY_CHANGE = frozenset(
    {
        *("cache", "evals", "mixture", "mesh", "skip", "stage_fields", "cut", "strategy"),
        *("num_workers", "num_processes", "prefetch"),
    }
)
"""The fields of a Job that a state does not depend on. Every other one has its own entry in the fingerprint."""

BATCH_MAY_CHANGE = frozenset({"layout", "pad_to", "micro_tokens", "pad_token", "image_token", "columns", "drop_last"})
"""The fields of a Batch that say how the samples of a step are handed out, and whether a last, partial step comes. Every
other one decides which samples a step has, or how rows are numbered."""

SOURCE_MAY_CHANGE = frozenset(
    {"cache", "repeat", "warn_epochs", "buffer_bytes", "loaders", "on_bad_row", "null_columns", "size_columns"}
)
"""The fields of a Source that say where it ends, who reads it with how much memory and disk, what becomes of bad rows, and
what costs are computed from. The fields that a reader adds are named by its identity(), but for those of
`READER_MAY_CHANGE`."""

READER_MAY_CHANGE = frozenset({"storage_options", "retry"})
"""The fields of readers that say how files are reached."""

_ADDED = ("warm_up",)
"""Options of a batch that are left out of a fingerprint where they are not given, as they were before they existed."""

_PACKED_HINT = (
    "; compressed files were one unit each in earlier releases and are now cut into several: to continue the run exactly, "
    "declare the source with unit_bytes=2**40 and accept that it is declared differently"
)

_log = logging.getLogger("overlord.checkpoint")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the meaning of a cursor depends on."""

    seed: int
    batch: Mapping[str, Any]
    sources: Mapping[str, tuple[str, str, int]]
    """name to (digests of the declaration, digest of the list of units, number of units). The first digest is of the reader
    and its options, then there is one for each transform, with dots between them."""
    files: Mapping[str, FileVersions] = field(default_factory=dict)
    """name to the versions of its files, for sources that tell them."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The installed packages that transforms use, with their versions up to the minor number."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """name to units per chunk: a run that resumes a state takes them over for sources that leave their window open."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """name to about how many bytes a part of a large unit has, for sources with units that are cut; taken over likewise."""
    unseen: tuple[str, ...] = ()
    """What transforms depend on and no fingerprint can see. It is not saved."""
    declared: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """What was described, for comparing it with fingerprints of the first release. It is not saved."""

    @staticmethod
    def of(job: Job, units: Mapping[str, Sequence[Unit]]) -> Fingerprint:
        describer = Describer()
        batch = {
            each.name: _plain_option(getattr(job.batch, each.name), f"batch.{each.name}", describer)
            for each in fields(job.batch)
            if each.name not in BATCH_MAY_CHANGE and not (each.name in _ADDED and getattr(job.batch, each.name) is None)
        }
        sources = {
            name: (_declaration_digests(name, source, describer), units_digest(units[name]), len(units[name]))
            for name, source in job.sources.items()
        }
        return Fingerprint(
            seed=int(job.seed),
            batch=batch,
            sources=sources,
            files={name: found for name in job.sources if (found := FileVersions.of(units[name])) is not None},
            packages=dict(sorted(describer.packages.items())),
            windows={name: source.units_per_chunk for name, source in job.sources.items()},
            parts={name: listed.part_bytes for name in job.sources if isinstance(listed := units[name], UnitParts)},
            unseen=tuple(describer.unseen),
            declared=dict(job.sources),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "seed": self.seed,
            "batch": dict(self.batch),
            "sources": {name: list(entry) for name, entry in self.sources.items()},
            "files": {name: versions.to_plain() for name, versions in self.files.items()},
            "packages": dict(self.packages),
            "windows": dict(self.windows),
            **({"parts": dict(self.parts)} if self.parts else {}),
        }

    def differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """What differs from a saved fingerprint: {name to accept it by: what to tell the user}."""
        check_fingerprint(saved)
        is_first = "format" not in saved
        found = {}
        if saved["seed"] != self.seed:
            found["seed"] = f"seed was {saved['seed']}, is {self.seed}"
        found |= self._changed_options(saved["batch"], is_first)
        for name, version in saved.get("packages", {}).items():
            if self.packages.get(name, version) != version:
                found[f"packages.{name}"] = f"{name} {version} was installed, is {self.packages[name]}; transforms use it"
        found |= self._changed_sources(saved, is_first)
        changed = self._changed_files(saved, found)
        if changed:
            found["files"] = "\n  - ".join(changed)
        return found

    def _changed_options(self, saved: Mapping[str, Any], is_first: bool) -> dict[str, str]:
        found = {}
        now = {**{key: None for key in _ADDED if key in saved}, **self.batch}
        for key, value in now.items():
            if is_first and key not in saved:
                continue  # the first release did not count it
            old = _with_lists(saved[key]) if key in saved else _default_option(key)
            if old != value:
                found[f"batch.{key}"] = f"batch.{key} was {old!r}, is {value!r}"
        return found

    def _changed_sources(self, fingerprint: Mapping[str, Any], is_first: bool) -> dict[str, str]:
        found, described, saved = {}, dict[int, str](), fingerprint["sources"]
        for name, (declaration, units, num_units) in self.sources.items():
            if name not in saved:
                continue
            old_declaration, old_units, old_num_units = saved[name]
            if is_first:
                declaration = first_declaration_digest(self.declared[name], described)
            if old_declaration != declaration:
                what = self._window_change(name, old_declaration, saved_chunks(fingerprint, name)) or _declaration_change(
                    self.declared.get(name), old_declaration, declaration
                )
                found[f"sources.{name}"] = f"source {name!r} is declared differently ({what})"
            elif old_units != units:
                found[f"sources.{name}"] = (
                    f"source {name!r} lists other data: {old_num_units} units then, {num_units} now"
                    + (", with other names or sizes" if old_num_units == num_units else "")
                    + (_PACKED_HINT if old_num_units == self._num_packed(name) < num_units else "")
                    + self._parts_hint(name, saved_chunks(fingerprint, name))
                )
        return found

    def _parts_hint(self, name: str, saved: SavedChunks | None) -> str:
        """What to tell where large units were cut otherwise."""
        if saved is None or saved.part_bytes == self.parts.get(name, 0):
            return ""
        now = self.parts.get(name, 0)
        return (
            f"; large units were {_cut_text(saved.part_bytes)}, and are {_cut_text(now)}: give the state to "
            "start(resume=...), which takes that from it where no window is declared"
        )

    def _window_change(self, name: str, old_declaration: str, saved: SavedChunks | None) -> str | None:
        """What to tell where a source differs from the saved one in its window alone."""
        source = self.declared.get(name)
        window = None if saved is None else saved.window
        if source is None or window in (None, source.units_per_chunk):
            return None
        if _declaration_digests(name, source.with_window(window), Describer()) != old_declaration:
            return None
        return (
            f"window was {window}, is {source.units_per_chunk}: declare window={window}, or give the state to "
            "start(resume=...), which takes the window from it where none is declared"
        )

    def _num_packed(self, name: str) -> int:
        """The number of files of a source whose files are all compressed; 0 of another source."""
        files = self.files[name].versions if name in self.files else {}
        return len(files) if all(map(codec_of, files)) else 0

    def _changed_files(self, saved: Mapping[str, Any], told: Collection[str]) -> list[str]:
        """What to tell of files that were written anew under the same names, in sources of which nothing else is told."""
        known = saved.get("files", {})  # states of earlier releases do not have it
        return [
            f"source {name!r} has files that were written anew since, with the same names and sizes (by their modification "
            f"times or ETags): {changes}; if they were only copied or touched, this may be accepted"
            for name, versions in self.files.items()
            if name in known and f"sources.{name}" not in told and (changes := versions.changes(known[name])) is not None
        ]


@dataclass(frozen=True, slots=True)
class SavedChunks:
    """How a source was divided into chunks, by a saved fingerprint."""

    window: int = 1
    """Units per chunk. Earlier releases did not save it: unless declared, it was 1."""
    part_bytes: int = 0
    """About how many bytes a part of a large unit has; 0 where units are not cut, as in earlier releases."""


def saved_chunks(saved: Any, name: str) -> SavedChunks | None:
    """How a source was divided by a saved fingerprint, also a damaged one; None where it does not have the source."""
    if not isinstance(saved, Mapping) or not isinstance(sources := saved.get("sources"), Mapping) or name not in sources:
        return None
    return SavedChunks(_saved_number(saved, "windows", name, 1), _saved_number(saved, "parts", name, 0))


def _saved_number(saved: Mapping[str, Any], key: str, name: str, default: int) -> int:
    values = saved.get(key, {})
    value = values.get(name, default) if isinstance(values, Mapping) else default
    return value if type(value) is int and value > 0 else default


def _cut_text(part_bytes: int) -> str:
    return f"cut into parts of about {part_bytes:,} bytes" if part_bytes else "not cut"


def differences_of(fingerprint: Fingerprint, saved: Any, damage: str) -> dict[str, str]:
    """What differs from a saved fingerprint; StateError, with `damage` said first, where that is none."""
    try:
        return fingerprint.differences(saved)
    except DamagedError as error:
        raise StateError(f"{damage}: {error}") from None


def check_fingerprint(saved: Any) -> None:
    """Raises DamagedError for what `Fingerprint.to_dict` did not make, in this release or an earlier one."""
    at = "fingerprint"
    with_keys(saved, at, needed=("seed", "batch", "sources"), allowed=("format", "files", "packages", "windows", "parts"))
    if "format" in saved:
        whole(saved["format"], f"{at}.format", least=FORMAT, most=FORMAT)
    if type(saved["seed"]) is not int:
        raise DamagedError(f"{at}.seed must be a whole number, it is {short_repr(saved['seed'])}")
    as_mapping(saved["batch"], f"{at}.batch")
    for name, entry in as_mapping(saved["sources"], f"{at}.sources").items():
        declaration, units, num_units = as_list(entry, f"{at}.sources.{name}", length=3)
        text(declaration, f"{at}.sources.{name}[0]")
        text(units, f"{at}.sources.{name}[1]")
        whole(num_units, f"{at}.sources.{name}[2]", least=1)
    for name, entry in as_mapping(saved.get("files", {}), f"{at}.files").items():
        FileVersions.check(entry, f"{at}.files.{name}")
    for name, version in as_mapping(saved.get("packages", {}), f"{at}.packages").items():
        text(version, f"{at}.packages.{name}")
    for name, window in as_mapping(saved.get("windows", {}), f"{at}.windows").items():
        whole(window, f"{at}.windows.{name}", least=1)
    for name, part_bytes in as_mapping(saved.get("parts", {}), f"{at}.parts").items():
        whole(part_bytes, f"{at}.parts.{name}", least=1)


def warn_of_unseen(fingerprint: Fingerprint) -> None:
    """Say what a saved state will not notice when it changes."""
    for line in fingerprint.unseen:
        _log.warning(
            "%s: the fingerprint of a saved state leaves it out, so a resumed run would not notice that it has changed; "
            "give it an identity() method that names all that it depends on",
            line,
        )


def refuse_differences(
    differences: Mapping[str, str], accept_changes: Collection[str] | bool, what: str, consequence: str
) -> None:
    """Raise StateError for the differences that were not accepted by name."""
    accepted = accepted_names(accept_changes)
    refused = {} if accept_changes is True else {k: v for k, v in differences.items() if k not in accepted}
    if refused:
        listed = "\n".join(f"  - {text}" for text in refused.values())
        raise StateError(
            f"{what}:\n{listed}\n"
            f"Restore the old declaration, or accept it with accept_changes={sorted(refused)!r} {consequence}"
        )


def accepted_names(accept_changes: Collection[str] | bool) -> Collection[str]:
    if isinstance(accept_changes, bool):
        return ()
    return (accept_changes,) if isinstance(accept_changes, str) else accept_changes or ()


def _plain_option(value: Any, path: str, describer: Describer) -> Any:
    """An option of the batch as JSON has it, so that an error can say what it was."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if is_dataclass(value):
        return [_plain_option(getattr(value, each.name), path, describer) for each in fields(value)]
    if isinstance(value, Mapping):
        return [[key, _plain_option(value[key], path, describer)] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [_plain_option(entry, path, describer) for entry in value]
    return describer.digest(value, path)


def _with_lists(value: Any) -> Any:
    """Some ways of saving turn lists into tuples."""
    return [_with_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _default_option(name: str) -> Any:
    """What a state that was saved before the batch had an option means."""
    default = next((each.default for each in fields(Batch) if each.name == name), MISSING)
    return None if default is MISSING else _plain_option(default, name, Describer())


def _declaration_digests(name: str, source: Source, describer: Describer) -> str:
    at = f"sources.{name}"
    parts = [reader_text(source, at, describer)]
    given = declared_options(source)
    # By its value, however it was found: 1, the default of earlier releases, is left out, as it was then.
    given = {**given, "window": source.units_per_chunk} if source.units_per_chunk != 1 else _without_window(given)
    for each in fields(Source):
        if each.name in given and each.name != "transform" and each.name not in SOURCE_MAY_CHANGE:
            parts.append(f"{each.name}={describer.text(given[each.name], f'{at}.{each.name}')}")
    made: list[str] = []
    if isinstance(source, Prepared):  # as its original is declared
        manifest = source.manifest()
        made = manifest.transforms
        describer.packages.update(manifest.packages)
    return ".".join((digest_of(repr(parts))[:8], *made, *transform_digests(name, source, describer)))


def transform_digests(name: str, source: Source, describer: Describer) -> list[str]:
    """A digest of each transform of a source: its code, its options, and what they refer to."""
    at = f"sources.{name}.transform"
    return [digest_of(describer.text(each, f"{at}[{i}]"))[:8] for i, each in enumerate(source.transforms)]


def _without_window(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: option for name, option in options.items() if name != "window"}


def reader_text(source: Source, at: str, describer: Describer) -> str:
    """A reader by its identity(), with the fields of subclasses that identity() does not know. A reader without an
    identity() counts with its code and all of its fields."""
    owner = next(kind for kind in type(source).__mro__ if "identity" in vars(kind))
    if owner.identity is not Source.identity:
        known = {each.name for each in fields(owner)}
        added = {each.name: getattr(source, each.name) for each in fields(source) if each.name not in known}
        return source.identity() + (f" {describer.text(added, at)}" if added else "")
    base = {each.name for each in fields(Source)}
    own = {name: value for name, value in vars(source).items() if name not in base and name != DECLARED_BUFFER}
    return f"{describer.text(type(source), at)} {describer.text(own, at)}"


def _declaration_change(source: Source | None, old: str, new: str) -> str:
    anything = "reader, paths, columns, transforms, window or shuffle"
    before, after = old.split("."), new.split(".")
    if source is None or len(before) != len(after) or len(after) != 1 + len(source.transforms):
        return anything
    changed = [i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    named = [
        f"transform[{i - 1}], {_label(source.transforms[i - 1])}: its code, options, or what they refer to"
        if i
        else "reader, paths, columns, decode, window or shuffle"
        for i in changed
    ]
    return "; ".join(named)


def _label(transform: Any) -> str:
    return getattr(transform, "__qualname__", type(transform).__qualname__)


def units_digest(units: Sequence[Unit]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(units, UnitParts):
        digest.update(f"{units.part_bytes}\0{list(units.counts)}\n".encode())
        units = units.units
    for unit in units:
        line = f"{unit.path}\0{unit.index}\0{unit.num_rows}\0{unit.num_bytes}\n"
        digest.update(line.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
