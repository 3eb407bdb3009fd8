"""The records of a plan log, and how they are replayed to recover a planner. Plain values only.

A segment of the log is a header, a snapshot, and records that follow from it one by one:

    header     {"kind": "header", "version": 1, "job": ..., "era": 0, "unit": "tokens", "fingerprint": {...}}
    snapshot   {"kind": "snapshot", "progress": {...}, "needed": 40, "decisions": [[step, name, value], ...]}
    step       {"kind": "step", "step": 43, "needed": 41, "moved": {"sources": [0, 2], "row": [5, -9], ...}, ...}
    needed     {"kind": "needed", "step": 42}: every step before it was taken by all readers
    readers    {"kind": "readers", "groups": [0, 1]}: the data-parallel groups that have a reader, or expect one
    decision   {"kind": "decision", "step": 44, "name": "...", "value": ...}: it holds from that step on
    withdrawn  {"kind": "withdrawn", "step": 44, "name": "..."}: the last such decision was refused and never applied
    report     {"kind": "report", "step": 41, "rank": 0, "sums": {...}}: losses that a decision may be based on

A snapshot may also have an older progress, "behind": the one before the oldest step that a late rank may request. The steps
between the two are drawn again on request.

A step's record says how the progress moved. The samples of a step are a function of the progress before it, and its
arrangement one of the samples and the decisions in force. So losing a record costs only time: the step is drawn again,
identically. Only decisions cannot be derived, so they must be durable before they are applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import StateError
from overlord.steering.decisions import WEIGHTS, decision_from_plain, decisions_to_keep
from overlord.steering.feedback import ReportedLosses, plain_sums, sums_from_plain
from overlord.stream.plain import (
    MOST,
    DamagedError,
    as_list,
    as_mapping,
    short_repr,
    text,
    whole,
    with_keys,
)
from overlord.stream.progress import COLUMNS, Progress, plain_samples

if TYPE_CHECKING:
    from overlord.messages import Decision

VERSION = 1
_COUNTED = frozenset({"chunk", "row", "samples", "tokens", "since"})

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """Identifies the run of a segment. `job` is one call of `start`; `era` counts how often that run was moved to another
    state or mesh. All draws of an era are a function of its first progress."""

    job: str
    era: int
    unit: str
    fingerprint: Mapping[str, Any]
    writer: str = ""
    """The process that started the run, for messages."""

    def to_record(self) -> dict[str, Any]:
        fields = {"job": self.job, "era": self.era, "unit": self.unit, "fingerprint": self.fingerprint}
        if self.writer:
            fields["writer"] = self.writer
        return {"kind": "header", "version": VERSION, **fields}

    @staticmethod
    def from_record(record: Record) -> Header:
        if not isinstance(record, Mapping) or record.get("kind") != "header":
            begins = record.get("kind") if isinstance(record, Mapping) else record
            raise StateError(f"a segment of a plan log begins with a header, this one with {short_repr(begins)}")
        if record.get("version") != VERSION:
            raise StateError(f"the plan log has version {record.get('version')!r}; this release reads version {VERSION}")
        try:
            needed = ("kind", "version", "job", "era", "unit", "fingerprint")
            with_keys(record, "the header", needed=needed, allowed=("writer",))
            return Header(
                text(record["job"], "the header's job"),
                whole(record["era"], "the header's era"),
                text(record["unit"], "the header's unit", among=("samples", "tokens")),
                as_mapping(record["fingerprint"], "the header's fingerprint"),
                text(record.get("writer", ""), "the header's writer"),
            )
        except DamagedError as error:
            raise StateError(f"the header of the plan log is not understood: {error}") from None


def snapshot_record(
    progress: Progress,
    needed: int,
    decisions: Iterable[Decision],
    heard: ReportedLosses | None = None,
    *,
    behind: Progress | None = None,
    readers: Iterable[int] = (),
) -> dict[str, Any]:
    decided = [decision.to_plain() for decision in decisions]
    record = {"kind": "snapshot", "progress": progress.to_plain(), "needed": needed, "decisions": decided}
    if behind is not None:
        record["behind"] = behind.to_plain()
    return {**record, "heard": [] if heard is None else heard.to_plain(), "readers": sorted(readers)}


def step_record(before: Progress, after: Progress, needed: int) -> dict[str, Any]:
    """The record of the step between two progresses."""
    record = {"kind": "step", "step": before.step, "needed": needed, "moved": _changes_between(before, after)}
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
    """The state of a planner after replaying a segment."""

    before: Mapping[int, Progress]
    """The progress before each step that may still be requested, and before the first that was never drawn."""
    needed: int
    """Every step before this one was taken by all readers."""
    decisions: tuple[Decision, ...]
    heard: ReportedLosses
    readers: frozenset[int] = frozenset()
    """The data-parallel groups that had a reader, or expected one."""

    @property
    def reached(self) -> int:
        """The first step that was never drawn."""
        return max(self.before)


def fold(records: Sequence[Record], keep: int = 0) -> Recovered:
    """Replay a snapshot and the records after it. Keeps the progress of `keep` steps before the oldest needed one.

    Raises StateError for records that are inconsistent.
    """
    if not records or not isinstance(records[0], Mapping) or records[0].get("kind") != "snapshot":
        raise StateError("a segment of a plan log has a snapshot after its header, and this one has none")
    try:
        return _replay(records, keep)
    except DamagedError as error:
        raise StateError(f"a record of the plan log is not understood: {error}") from None
    except KeyError as error:
        raise StateError(f"a record of the plan log is not understood: it lacks {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise StateError(f"a record of the plan log is not understood: {type(error).__name__}: {error}") from error


def same(left: Progress, right: Progress) -> bool:
    return (
        left.step == right.step
        and left.names == right.names
        and not _changes_between(left, right)
        and plain_samples(left.carried) == plain_samples(right.carried)
    )


def _groups(plain: Any, at: str) -> frozenset[int]:
    return frozenset(whole(group, f"{at}[{i}]") for i, group in enumerate(as_list(plain, at)))


def _progress(snapshot: Record, key: str) -> Progress:
    return Progress.from_plain(with_keys(snapshot[key], key, needed=("step", "sources", "carried")))


def _progress_behind(snapshot: Record, progress: Progress) -> Progress:
    behind = _progress(snapshot, "behind")
    if behind.step >= progress.step or behind.names != progress.names:
        raise DamagedError(
            f"behind must be of an earlier step than {progress.step} and of the same sources, it is of step "
            f"{behind.step} and of {', '.join(map(repr, behind.names))}"
        )
    return behind


def _withdraw(decisions: list[Decision], record: Record) -> None:
    at = [i for i, d in enumerate(decisions) if (d.step, d.name) == (record["step"], record["name"])]
    del decisions[at[-1]]


def _replay(records: Sequence[Record], keep: int) -> Recovered:
    snapshot = records[0]
    progress = _progress(snapshot, "progress")
    needed = whole(snapshot["needed"], "needed")
    decided = as_list(snapshot["decisions"], "decisions")
    decisions = [decision_from_plain(plain, f"decisions[{i}]") for i, plain in enumerate(decided)]
    heard = ReportedLosses.from_plain(snapshot["heard"])
    before = {progress.step: progress}
    readers = _groups(snapshot.get("readers", []), "readers")  # release 0.1 wrote none
    if "behind" in snapshot:
        behind = _progress_behind(snapshot, progress)
        before[behind.step], needed = behind, behind.step
    for record in records[1:]:
        match as_mapping(record, "a record")["kind"]:
            case "step":
                if record["step"] != progress.step:
                    raise StateError(
                        f"the plan log goes from step {progress.step - 1} to step {record['step']}: records are missing"
                    )
                progress = _apply_changes(progress, record)
                before[progress.step] = progress
                needed = max(needed, whole(record["needed"], "needed"))
            case "needed":
                needed = max(needed, whole(record["step"], "step"))
            case "readers":
                readers = _groups(record["groups"], "groups")
            case "decision":
                plain = [record["step"], record["name"], record["value"]]
                decisions.append(decision_from_plain(plain, "a decision"))
                if record["name"] == WEIGHTS:
                    heard.forget_before(record["value"].get("until", 0))
            case "withdrawn":
                _withdraw(decisions, record)
            case "report":
                step, rank = whole(record["step"], "step"), whole(record["rank"], "rank")
                heard.add(step, rank, sums_from_plain(record["sums"]))
            case kind:
                raise StateError(f"the plan log has a record of an unknown kind {kind!r}")
        if needed - keep - min(before) > 2 * keep + 64:  # pruned now and then, so that a long segment stays small in memory
            before = _from(before, needed - keep)
    kept = _from(before, needed - keep)
    return Recovered(kept, needed, decisions_to_keep(decisions, min(needed, *kept)), heard, readers)


def _from(before: Mapping[int, Progress], oldest: int) -> dict[int, Progress]:
    """The progresses from step `oldest` on, and always the last."""
    last = max(before)
    return {step: progress for step, progress in before.items() if step >= oldest or step == last}


def _changes_between(before: Progress, after: Progress) -> dict[str, list[Any]]:
    """The sources that changed, and for each column that changed the differences (of counts) or the new values."""
    differs = {column: getattr(before, column) != getattr(after, column) for column in COLUMNS}
    where = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
    if len(where) == 0:
        return {}
    moved = {"sources": where.tolist()}
    for column in [column for column, changed in differs.items() if changed.any()]:
        old, new = getattr(before, column)[where], getattr(after, column)[where]
        moved[column] = (new - old if column in _COUNTED else new).tolist()
    return moved


def _apply_changes(before: Progress, record: Record) -> Progress:
    moved = dict(as_mapping(record["moved"], "moved"))
    where = [
        whole(i, "moved.sources", most=len(before.names) - 1) for i in as_list(moved.pop("sources", []), "moved.sources")
    ]
    columns: dict[str, Any] = {}
    for column, values in moved.items():
        if column not in COLUMNS:
            raise StateError(f"the plan log moves a column {column!r} that a progress does not have")
        values = as_list(values, f"moved.{column}", length=len(where))
        new = getattr(before, column).copy()
        if column in _COUNTED:
            new[where] += np.array([whole(value, f"moved.{column}", least=-MOST) for value in values], np.int64)
        else:
            new[where] = values
        if not np.isfinite(new).all() or (column != "lead" and (new < 0).any()):
            raise DamagedError(f"moved.{column} moves a source to {new[where].tolist()}")
        columns[column] = new
    carried = record.get("carried")
    after = replace(before, step=before.step + 1, **columns)
    return replace(after, carried=after.carried_from_plain(carried and {"names": before.names, **carried}))
