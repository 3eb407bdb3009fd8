"""The checkpoint: a plain dict of numbers and strings, a few kilobytes, the same on every rank, independent of the mesh.

    {"overlord": 1, "step": 120, "unit": "samples", "fingerprint": {...},
     "sources": {name: [chunk, row, samples, tokens, since, lead, weight, read_once]},
     "carried": {"columns": [...], "rows": [[source, chunk, row, ...], ...]},
     "steered": {"decisions": [[step, name, value], ...], "heard": [...]}}    where something was decided

A state continues the job that wrote it under any mesh, strategy, mixture, engine and number of loaders, and with sources
added or removed. What would change the meaning of a cursor is refused, and said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from overlord.errors import SpecError, StateError
from overlord.file_versions import FileVersions
from overlord.outlier_delay import OutlierDelay
from overlord.planning.learning.steering import Steered
from overlord.planning.progress import Progress
from overlord.spec import Job, Source, Unit

VERSION = 1

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the meaning of a cursor depends on."""

    seed: int
    batch: Mapping[str, Any]
    sources: Mapping[str, tuple[str, str, int]]
    """name to (digest of the declaration, digest of the list of units, number of units)."""
    files: Mapping[str, FileVersions] = field(default_factory=dict)
    """name to the versions of its files, for sources that tell them."""

    @staticmethod
    def of(job: Job, units: Mapping[str, Sequence[Unit]]) -> Fingerprint:
        batch = job.batch
        return Fingerprint(
            seed=job.seed,
            batch={
                "sequence_length": batch.sequence_length,
                "long_documents": batch.long_documents,
                "document_multiple": batch.document_multiple,
                "tokens": batch.tokens,
                "samples": batch.samples,
                "cut_documents": batch.cut_documents,
                "outliers": None if batch.outliers is None else _plain_policy(batch.outliers),
            },
            sources={
                name: (_declaration_digest(source), _units_digest(units[name]), len(units[name]))
                for name, source in job.sources.items()
            },
            files={name: found for name in job.sources if (found := FileVersions.of(units[name])) is not None},
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch": dict(self.batch),
            "sources": {name: list(entry) for name, entry in self.sources.items()},
            "files": {name: versions.to_plain() for name, versions in self.files.items()},
        }

    def differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """What differs from a saved fingerprint: {name to accept it by: what to tell the user}."""
        found = {}
        if saved["seed"] != self.seed:
            found["seed"] = f"seed was {saved['seed']}, is {self.seed}"
        for key, value in self.batch.items():
            if saved["batch"].get(key) != value:
                found[f"batch.{key}"] = f"batch.{key} was {saved['batch'].get(key)!r}, is {value!r}"
        for name, (declaration, units, num_units) in self.sources.items():
            if name not in saved["sources"]:
                continue
            old_declaration, old_units, old_num_units = saved["sources"][name]
            if old_declaration != declaration:
                found[f"sources.{name}"] = (
                    f"source {name!r} is declared differently (reader, paths, columns, transforms, window or shuffle)"
                )
            elif old_units != units:
                found[f"sources.{name}"] = (
                    f"source {name!r} lists other data: {old_num_units} units then, {num_units} now"
                    + (", with other names or sizes" if old_num_units == num_units else "")
                )
        changed = self._changed_files(saved, found)
        if changed:
            found["files"] = "\n  - ".join(changed)
        return found

    def _changed_files(self, saved: Mapping[str, Any], told: Collection[str]) -> list[str]:
        """What to tell of files that were written anew under the same names, in sources of which nothing else is told."""
        known = saved.get("files", {})  # states of earlier releases do not have it
        return [
            f"source {name!r} has files that were written anew since, with the same names and sizes (by their modification "
            f"times or ETags): {changes}; if they were only copied or touched, this may be accepted"
            for name, versions in self.files.items()
            if name in known and f"sources.{name}" not in told and (changes := versions.changes(known[name])) is not None
        ]


def to_state(progress: Progress, unit: str, fingerprint: Mapping[str, Any], steered: Steered | None = None) -> State:
    plain = progress.to_plain()
    state = {
        "overlord": VERSION,
        "step": plain["step"],
        "unit": unit,
        "fingerprint": fingerprint,
        "sources": plain["sources"],
        "carried": plain["carried"],
    }
    return state if steered is None or steered == Steered() else {**state, "steered": steered.to_plain()}


def steered_of(state: Mapping[str, Any]) -> Steered:
    """What had been decided about the run that a state is of."""
    try:
        return Steered.from_plain(state.get("steered", Steered().to_plain()))
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}; use an older checkpoint") from error


def from_state(
    state: Mapping[str, Any], job: Job, fingerprint: Fingerprint, accept_changes: Collection[str] | bool = ()
) -> Progress:
    """The progress that a state holds, for this job.

    Raises StateError when the state is of another job; `accept_changes` names the differences to take all the same
    (as the error lists them), or is True for all.
    """
    if not isinstance(state, Mapping) or "overlord" not in state:
        raise StateError(f"not an Overlord state: a dict with the key 'overlord' is needed, got {type(state).__name__}")
    if state["overlord"] != VERSION:
        raise StateError(f"the state has version {state['overlord']!r}; this release reads version {VERSION}")
    try:
        differences = fingerprint.differences(state["fingerprint"])
        progress = _progress(state, job.mix.unit)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}; use an older checkpoint") from error
    refuse_differences(
        differences,
        accept_changes,
        "the state was saved by a job that differs from this one",
        "(a changed source then goes on from the same chunk and row numbers of its new data).",
    )
    return progress.for_sources(tuple(job.sources))


def refuse_differences(
    differences: Mapping[str, str], accept_changes: Collection[str] | bool, what: str, consequence: str
) -> None:
    """Raise StateError for the differences that were not accepted by name."""
    if isinstance(accept_changes, str):  # a name within it would count as accepted
        raise SpecError(f"accept_changes is True or a sequence of names: write accept_changes=({accept_changes!r},)")
    refused = {} if accept_changes is True else {k: v for k, v in differences.items() if k not in (accept_changes or ())}
    if refused:
        listed = "\n".join(f"  - {text}" for text in refused.values())
        raise StateError(
            f"{what}:\n{listed}\n"
            f"Restore the old declaration, or accept it with accept_changes={sorted(refused)!r} {consequence}"
        )


def _progress(state: Mapping[str, Any], unit: str) -> Progress:
    progress = Progress.from_plain(state)
    if state["unit"] == unit:
        return progress
    # What was drawn in samples says nothing about a balance in tokens.
    zeros = np.zeros(len(progress.names))
    return replace(progress, since=zeros.astype(np.int64), lead=zeros, weights=zeros)


def _plain_policy(policy: OutlierDelay) -> list[Any]:
    return [list(policy.lengths), policy.together, policy.most_steps]


def _declaration_digest(source: Source) -> str:
    transforms = [described(transform) for transform in source.transforms]
    parts = (source.identity(), transforms, described(source.decode), source.tokens, source.loss_mask)
    weights = () if source.loss_weights is None else (source.loss_weights,)
    return _digest(repr((*parts, source.window, source.shuffle, *weights)))


def described(value: Any) -> str:
    """A transform (or an option of one) for the fingerprint: what it is called and set to, not where it lies in memory.

    A function counts by its name: changing its body is not noticed, renaming it is. An object may say more of itself in
    an `identity()` method.
    """
    if value is None or isinstance(value, (str, int, float, bool, bytes)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(described(entry) for entry in value)}]"
    identity = getattr(value, "identity", None)
    if callable(identity):
        return str(identity())
    if isinstance(value, partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(sorted(value.keywords.items()))})"
    if is_dataclass(value) and not isinstance(value, type):
        options = (f"{field.name}={described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({', '.join(options)})"
    to_str = getattr(value, "to_str", None)
    if callable(to_str):  # a tokenizer, whole
        return f"{type(value).__qualname__}({_digest(str(to_str()))})"
    name = getattr(value, "__qualname__", None)
    return name or f"{type(value).__qualname__}({getattr(value, 'name', '')})"


def _units_digest(units: Sequence[Unit]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for unit in units:
        line = f"{unit.path}\0{unit.index}\0{unit.num_rows}\0{unit.num_bytes}\n"
        digest.update(line.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
