"""What a plan log says, and how a planner that was lost is put together from it. Plain values only.

A segment of the log is a header, a snapshot, and records that follow from it one by one:

    header     {"kind": "header", "version": 1, "job": ..., "era": 0, "unit": "tokens", "fingerprint": {...}}
    snapshot   {"kind": "snapshot", "progress": {...}, "needed": 40, "decisions": [[step, name, value], ...]}
    step       {"kind": "step", "step": 43, "needed": 41, "moved": {"sources": [0, 2], "row": [5, -9], ...}, ...}
    needed     {"kind": "needed", "step": 42}: every step before it was taken by all who read
    readers    {"kind": "readers", "groups": [0, 1]}: the data-parallel groups that somebody reads, or is expected to
    decision   {"kind": "decision", "step": 44, "name": "...", "value": ...}: what holds from that step on
    withdrawn  {"kind": "withdrawn", "step": 44, "name": "..."}: the last such decision was refused, and nobody followed it
    report     {"kind": "report", "step": 41, "rank": 0, "sums": {...}}: losses that a decision may follow from

A snapshot may have, as "behind", an older progress too: that before the oldest step that a rank who is late may ask for.
What lies between the two is drawn again when it is asked for.

A step's record says how the progress moved; the samples of a step follow from the progress before it, and its arrangement
from the samples and the decisions in force. So a record that is lost costs time and nothing else: the step is drawn again,
the same. Only decisions cannot be derived; they must be on storage before anything follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from overlord.errors import StateError
from overlord.planning.learning.feedback import Heard, plain_sums, sums_from_plain
from overlord.planning.progress import COLUMNS, Progress, plain_samples, samples_from_plain
from overlord.spec import Mesh

VERSION = 1
MESH = "mesh"
"""The decision that says which mesh steps are arranged for. It is about trainers, so it does not outlive a run."""
WEIGHTS = "weights"
"""The decision that says by which weights steps are drawn. All of them are kept: a run may go back to an older state."""
COSTS = "costs"
"""The decision that says which learned costs steps are arranged by."""

_COUNTED = frozenset({"chunk", "row", "samples", "tokens", "since"})

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """Whose log it is. `job` is one call of start; `era` counts how often that run was moved to another state or mesh:
    inside an era everything that is drawn follows from its first progress."""

    job: str
    era: int
    unit: str
    fingerprint: Mapping[str, Any]

    def to_record(self) -> dict[str, Any]:
        fields = {"job": self.job, "era": self.era, "unit": self.unit, "fingerprint": self.fingerprint}
        return {"kind": "header", "version": VERSION, **fields}

    @staticmethod
    def from_record(record: Record) -> Header:
        if record.get("kind") != "header":
            raise StateError(f"a segment of a plan log begins with a header, this one with {record.get('kind')!r}")
        if record["version"] != VERSION:
            raise StateError(f"the plan log has version {record['version']!r}; this release reads version {VERSION}")
        return Header(record["job"], record["era"], record["unit"], record["fingerprint"])


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that holds from a step on and follows from nothing that is in the job."""

    step: int
    name: str
    value: Any
    """Numbers, strings, lists and dicts, as JSON has them."""


def mesh_decision(step: int, mesh: Mesh) -> Decision:
    sizes = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "cp", "tp")}
    return Decision(step, MESH, {**sizes, "order": list(mesh.order)})


def in_force(decisions: Iterable[Decision], step: int) -> tuple[Decision, ...]:
    """Those that hold at a step or will later: of each name the latest up to the step, and all after it."""
    latest: dict[str, Decision] = {}
    later = []
    for decision in sorted(decisions, key=lambda d: d.step):  # stable: of two for one step, the one made later holds
        if decision.step <= step:
            latest[decision.name] = decision
        else:
            later.append(decision)
    return (*latest.values(), *later)


def remembered(decisions: Iterable[Decision], step: int) -> tuple[Decision, ...]:
    """What a snapshot keeps: those in force at a step or later, and all about weights."""
    decisions = tuple(decisions)
    kept = in_force(decisions, step)
    older = [d for d in decisions if d.name == WEIGHTS and d not in kept]
    return (*sorted(older, key=lambda d: d.step), *kept)


def snapshot_record(
    progress: Progress,
    needed: int,
    decisions: Iterable[Decision],
    heard: Heard | None = None,
    *,
    behind: Progress | None = None,
    readers: Iterable[int] = (),
) -> dict[str, Any]:
    listed = [[d.step, d.name, d.value] for d in decisions]
    record = {"kind": "snapshot", "progress": progress.to_plain(), "needed": needed, "decisions": listed}
    if behind is not None:
        record["behind"] = behind.to_plain()
    return {**record, "heard": [] if heard is None else heard.to_plain(), "readers": sorted(readers)}


def step_record(before: Progress, after: Progress, needed: int) -> dict[str, Any]:
    """What the step between two progresses changed."""
    record = {"kind": "step", "step": before.step, "needed": needed, "moved": _moved(before, after)}
    carried = plain_samples(after.carried)
    if carried is None:
        return record
    return {**record, "carried": {name: value for name, value in carried.items() if name != "names"}}


def needed_record(step: int) -> dict[str, Any]:
    return {"kind": "needed", "step": step}


def readers_record(groups: Iterable[int]) -> dict[str, Any]:
    return {"kind": "readers", "groups": sorted(groups)}


def decision_record(decision: Decision) -> dict[str, Any]:
    return {"kind": "decision", "step": decision.step, "name": decision.name, "value": decision.value}


def withdrawn_record(decision: Decision) -> dict[str, Any]:
    return {"kind": "withdrawn", "step": decision.step, "name": decision.name}


def report_record(step: int, rank: int, sums: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    return {"kind": "report", "step": step, "rank": rank, "sums": plain_sums(sums)}


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a segment amounts to."""

    before: Mapping[int, Progress]
    """The progress before each step that somebody may still need, and before the first that was never drawn."""
    needed: int
    """Every step before this one was taken by all who read."""
    decisions: tuple[Decision, ...]
    heard: Heard
    readers: frozenset[int] = frozenset()
    """The data-parallel groups that somebody read, or was expected to."""

    @property
    def reached(self) -> int:
        """The first step that was never drawn."""
        return max(self.before)


def fold(records: Sequence[Record], keep: int = 0) -> Recovered:
    """Put a snapshot and what follows it together, with the progress of `keep` steps before the oldest needed one.

    Raises StateError for records that do not follow from one another.
    """
    if not records or records[0].get("kind") != "snapshot":
        raise StateError("a segment of a plan log has a snapshot after its header, and this one has none")
    try:
        return _folded(records, keep)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StateError(f"a record of the plan log is not understood: {type(error).__name__}: {error}") from error


def same(left: Progress, right: Progress) -> bool:
    return (
        left.step == right.step
        and left.names == right.names
        and not _moved(left, right)
        and plain_samples(left.carried) == plain_samples(right.carried)
    )


def _folded(records: Sequence[Record], keep: int) -> Recovered:
    snapshot = records[0]
    progress = Progress.from_plain(snapshot["progress"])
    needed: int = snapshot["needed"]
    decisions = [Decision(step, name, value) for step, name, value in snapshot["decisions"]]
    heard = Heard.from_plain(snapshot["heard"])
    before = {progress.step: progress}
    readers = frozenset(int(group) for group in snapshot.get("readers", ()))  # release 0.1 wrote none
    if "behind" in snapshot:
        behind = Progress.from_plain(snapshot["behind"])
        before[behind.step], needed = behind, behind.step
    for record in records[1:]:
        match record["kind"]:
            case "step":
                if record["step"] != progress.step:
                    raise StateError(
                        f"the plan log goes from step {progress.step - 1} to step {record['step']}: records are missing"
                    )
                progress = _applied(progress, record)
                before[progress.step] = progress
                needed = max(needed, record["needed"])
            case "needed":
                needed = max(needed, record["step"])
            case "readers":
                readers = frozenset(int(group) for group in record["groups"])
            case "decision":
                decisions.append(Decision(record["step"], record["name"], record["value"]))
                if record["name"] == WEIGHTS:
                    heard.forget_before(record["value"].get("until", 0))
            case "withdrawn":
                at = [i for i, d in enumerate(decisions) if (d.step, d.name) == (record["step"], record["name"])]
                del decisions[at[-1]]
            case "report":
                heard.add(record["step"], record["rank"], sums_from_plain(record["sums"]))
            case kind:
                raise StateError(f"the plan log has a record of an unknown kind {kind!r}")
        if needed - keep - min(before) > 2 * keep + 64:  # now and then, so that a long segment does not pile up
            before = _from(before, needed - keep)
    kept = _from(before, needed - keep)
    return Recovered(kept, needed, remembered(decisions, min(needed, *kept)), heard, readers)


def _from(before: Mapping[int, Progress], oldest: int) -> dict[int, Progress]:
    """The progresses from a step on; always the last."""
    last = max(before)
    return {step: progress for step, progress in before.items() if step >= oldest or step == last}


def _moved(before: Progress, after: Progress) -> dict[str, list[Any]]:
    """The sources for which something changed, and for each column that did, by how much (counts) or to what."""
    differs = {column: getattr(before, column) != getattr(after, column) for column in COLUMNS}
    where = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
    if len(where) == 0:
        return {}
    moved = {"sources": where.tolist()}
    for column in [column for column, changed in differs.items() if changed.any()]:
        old, new = getattr(before, column)[where], getattr(after, column)[where]
        moved[column] = (new - old if column in _COUNTED else new).tolist()
    return moved


def _applied(before: Progress, record: Record) -> Progress:
    moved = dict(record["moved"])
    where = moved.pop("sources", [])
    columns = {}
    for column, values in moved.items():
        if column not in COLUMNS:
            raise StateError(f"the plan log moves a column {column!r} that a progress does not have")
        new = getattr(before, column).copy()
        if column in _COUNTED:
            new[where] += np.array(values, np.int64)
        else:
            new[where] = values
        columns[column] = new
    carried = record.get("carried")
    carried = samples_from_plain(carried and {"names": before.names, **carried}, before.names)
    return replace(before, step=before.step + 1, carried=carried, **columns)
