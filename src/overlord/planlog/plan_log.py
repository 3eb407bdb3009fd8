"""The planner's log: when to write what, and what to do when it cannot be written or read.

A log that cannot be written stops no run. Steps that are not in it are drawn again, the same, by a planner that has to
start from an older record; so the planner goes on from memory, says so in a warning, and tries again with every step. Only
a decision, which follows from nothing else, is refused when it cannot be made safe.

One thread at a time may call a `PlanLog`, but for `add_report`, which takes any.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from overlord.checkpoint.fingerprint import Fingerprint, differences_of, refuse_differences, warn_of_unseen
from overlord.checkpoint.state import from_state, steered_of, to_state
from overlord.errors import SpecError, StateError, StorageError
from overlord.planlog.append_log import (
    AppendLog,
    LogPosition,
    SegmentContents,
    read_frames,
)
from overlord.planlog.records import (
    Header,
    Recovered,
    decision_record,
    fold,
    needed_record,
    readers_record,
    report_record,
    snapshot_record,
    step_record,
    withdrawn_record,
)
from overlord.planlog.segments import Segments, segments_at
from overlord.steering.decisions import (
    COSTS,
    MESH,
    Decision,
    Steered,
    decisions_to_keep,
    join_decisions,
    mesh_decision,
)
from overlord.steering.feedback import ReportedLosses
from overlord.stream.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.mesh import Mesh
    from overlord.declare.policies import Log

_log = logging.getLogger("overlord.planlog")


@dataclass(frozen=True, slots=True)
class Era:
    """One era of a run, and where it is logged. A value: a planner that is made anew gets the same one."""

    log: Log
    header: Header
    decisions: tuple[Decision, ...] = ()

    def next_era(self, step: int, mesh: Mesh) -> Era:
        """The next era of the run, which continues with a step, for a mesh."""
        header = replace(self.header, era=self.header.era + 1)
        return Era(self.log, header, (mesh_decision(step, mesh),))


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """The newest segment that could be read."""

    segment: int
    header: Header
    recovered: Recovered


class PlanLog:
    """Writes the log of one planner, after reading what an earlier one of the same era wrote."""

    def __init__(self, era: Era, start: Progress, keep: int, steered: Steered | None = None) -> None:
        """`keep` is how many steps behind the oldest needed one may be asked for again. `steered` is what the era begins
        with, beside its progress."""
        steered = steered or Steered()
        segments = segments_at(era.log.location, era.log.storage_options)
        found = newest_in(segments, era.header.job, era.header.era, keep)
        earlier = found or newest_in(segments, era.header.job) or newest_in(segments)
        self._era = era
        self._location = segments.location
        self._log = AppendLog(segments, earlier.segment if earlier else None, era.log.sync_s)
        own = (*steered.decisions, *era.decisions)
        self._decisions = (
            found.recovered.decisions if found else join_decisions(own, _decisions_of_earlier_eras(earlier, era), start.step)
        )
        self.heard = found.recovered.heard if found else ReportedLosses.from_plain(steered.heard)
        """Reported losses that no decision has followed from yet. Hold `lock` to look at it."""
        self.lock = threading.RLock()
        self._needed = found.recovered.needed if found else start.step
        self._readers: frozenset[int] = found.recovered.readers if found else frozenset()
        self._num_since_snapshot = 0
        self._told_error: str | None = None
        self.before: Mapping[int, Progress] = found.recovered.before if found else {start.step: start}
        """The progress before each step that may be asked for, as far as it was logged."""
        self._last = start
        self._begin([self.before[step] for step in sorted(self.before)])

    @property
    def needed(self) -> int:
        """Every step before this one was taken by all who read."""
        return self._needed

    @property
    def readers(self) -> frozenset[int]:
        """The data-parallel groups that somebody reads, or is expected to."""
        return self._readers

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self._decisions

    @property
    def position(self) -> LogPosition:
        return self._log.position

    def add_step(self, after: Progress, kept: Callable[[], Sequence[Progress]]) -> None:
        """Write down a drawn step. `kept` returns the progress of every step that may be asked for again, in order; there
        may be a gap after the first, which somebody who is late may need."""
        if after.step <= self._last.step:
            return  # drawn again
        if self._num_since_snapshot >= self._era.log.snapshot_every or after.step != self._last.step + 1:
            with self.lock:
                self._begin(kept())
        else:
            self._log.append(_encode(step_record(self._last, after, self._needed)))
            self._num_since_snapshot += 1
            self._last = after
        self._tell_of_trouble()

    def add_needed(self, step: int) -> None:
        """Note that every step before this one was taken by all who read."""
        if step > self._needed:
            self._needed = step
            self._log.append(_encode(needed_record(step)))
            self._tell_of_trouble()

    def add_readers(self, groups: frozenset[int]) -> None:
        """Note which data-parallel groups somebody reads, or is expected to."""
        if groups != self._readers:
            self._readers = groups
            self._log.append(_encode(readers_record(groups)))
            self._tell_of_trouble()

    def add_report(self, step: int, rank: int, sums: Mapping[str, tuple[int, int]]) -> bool:
        """Note the losses that a rank reported for a step; False when they were noted before."""
        with self.lock:
            is_new = self.heard.add(step, rank, sums)
            if is_new:
                self._log.append(_encode(report_record(step, rank, sums)))
            return is_new

    def decide(self, decision: Decision) -> None:
        """Make a decision safe; StorageError when it cannot be, and then it must not be followed."""
        with self.lock:  # the two records must not be parted by a snapshot
            self._log.append(_encode(decision_record(decision)))
            try:
                self._log.sync()
            except StorageError:
                self._log.append(_encode(withdrawn_record(decision)))
                raise
        self._decisions = (*self._decisions, decision)

    def note(self, decision: Decision) -> None:
        """Write a decision that changes nothing down, when that can be done."""
        self._log.append(_encode(decision_record(decision)))
        self._decisions = (*self._decisions, decision)

    def sync(self) -> None:
        self._log.sync()

    def close(self) -> None:
        self._log.close()
        self._tell_of_trouble()

    def _begin(self, kept: Sequence[Progress]) -> None:
        behind = kept[0] if len(kept) > 1 and kept[1].step != kept[0].step + 1 else None
        first, *rest = kept = kept if behind is None else kept[1:]
        self._decisions = decisions_to_keep(self._decisions, first.step if behind is None else behind.step)
        needed = max(self._needed, first.step)
        snapshot = snapshot_record(first, needed, self._decisions, self.heard, behind=behind, readers=self._readers)
        records = [self._era.header.to_record(), snapshot]
        records += [step_record(old, new, self._needed) for old, new in zip(kept, rest, strict=False)]
        self._log.begin([_encode(record) for record in records])
        self._last = kept[-1]
        self._num_since_snapshot = 0

    def _tell_of_trouble(self) -> None:
        error = self._log.error
        if error is not None and self._told_error is None:
            _log.warning(
                "the plan log at %s cannot be written: %s. The run goes on and loses nothing; until the log is written "
                "again, recovering it means drawing the steps from %d on once more",
                self._location,
                error,
                self._needed,
            )
        elif error is None and self._told_error is not None:
            _log.warning("the plan log at %s is written again, up to step %d", self._location, self._last.step)
        self._told_error = error


def starting_point(
    job: Job,
    fingerprint: Fingerprint,
    resume: Mapping[str, Any] | str | bytes | None,
    log: Log | None,
    accept_changes: Collection[str] | bool,
) -> tuple[Progress, Steered, Era | None]:
    """Where a run begins, what steers it, and its place in the log.

    A given state says where, whatever the log says. `resume="log"` goes on with the first step that the log does not know
    to be taken by everyone, and from the beginning where there is no log yet. Without either the run begins at step 0.
    """
    if log is None:
        if resume == "log":
            raise SpecError("resume='log' goes on from a log: say where it is with log=...")
        return *_starting_state(resume, job, fingerprint, accept_changes), None
    found = newest_in(segments_at(log.location, log.storage_options))
    decisions: tuple[Decision, ...] = ()
    if found is not None:
        differences = differences_of(fingerprint, found.header.fingerprint, f"the log at {log.location} is damaged")
        what = f"the log at {log.location} was written by a job that differs from this one"
        refuse_differences(differences, accept_changes, what, "or give another log=...")
        decisions = _lasting(found)
    is_from_log = resume == "log"
    if is_from_log:
        resume = None if found is None else _state_of(found)
    elif resume is None and found is not None and found.recovered.reached > 0:
        _log.warning(
            "the log at %s knows a run up to step %d, but this one begins at step 0; resume='log' would go on with step %d",
            log.location,
            found.recovered.reached,
            found.recovered.needed,
        )
    try:
        progress, steered = _starting_state(resume, job, fingerprint, accept_changes)
    except StateError as error:
        if is_from_log:
            raise StateError(f"the log at {log.location} holds what cannot be gone on with: {error}") from None
        raise
    steered = without_lapsed(job, replace(steered, decisions=join_decisions(steered.decisions, decisions, progress.step)))
    header = Header(uuid4().hex, 0, job.mix.unit, fingerprint.to_dict())
    era = Era(log, header, (mesh_decision(progress.step, job.mesh),))
    _check_writable(era, progress, steered)
    warn_of_unseen(fingerprint)
    return progress, steered, era


def newest_in(segments: Segments, job: str | None = None, era: int | None = None, keep: int = 0) -> RecoveredSegment | None:
    """What the newest segment (of a job, of an era of it) says. Torn ends are cut, with a warning."""
    for number in reversed(segments.numbers()):
        name = segments.name(number)
        try:
            contents = read_frames(segments.read(number))
        except FileNotFoundError:
            continue  # its writer has deleted it just now
        except OSError as error:
            raise StorageError(f"{name} cannot be read: {error}") from error
        _refuse_damage(name, contents)
        try:
            records = [orjson.loads(body) for body in contents.bodies]
            if len(records) < 2:  # its writer was killed before the snapshot was whole
                _log.warning("%s ends before its snapshot, after %d bytes: it is passed over", name, contents.num_bytes)
                continue
            own = Header.from_record(records[0])
            if job not in (None, own.job) or era not in (None, own.era):
                continue
            recovered = fold(records[1:], keep)
        except (StateError, orjson.JSONDecodeError) as error:
            raise StateError(f"{name} cannot be used: {error}; delete it to go on from the one before it") from error
        if contents.good_bytes < contents.num_bytes:
            _log.warning(
                "%s has a torn end: its last %d bytes are cut off, and it goes on with step %d",
                name,
                contents.num_bytes - contents.good_bytes,
                recovered.reached,
            )
        return RecoveredSegment(number, own, recovered)
    return None


def _decisions_of_earlier_eras(earlier: RecoveredSegment | None, era: Era) -> tuple[Decision, ...]:
    """What was decided in earlier eras of the run."""
    return () if earlier is None or earlier.header.job != era.header.job else _lasting(earlier)


def _lasting(found: RecoveredSegment) -> tuple[Decision, ...]:
    """A mesh is about trainers, which a log cannot bring back, and so are learned costs: whoever begins an era says which
    there are."""
    return tuple(decision for decision in found.recovered.decisions if decision.name not in (MESH, COSTS))


def _refuse_damage(name: str, contents: SegmentContents) -> None:
    if contents.num_after_damage:
        raise StateError(
            f"{name} is damaged at byte {contents.good_bytes}: the record there is not what was written, and "
            f"{contents.num_after_damage} good ones follow. Restore the file, or delete it to go on from the one before "
            "it (steps are drawn again, the same; only decisions recorded in this one are lost), or start from a "
            "checkpoint with another log=..."
        )


def _check_writable(era: Era, start: Progress, steered: Steered) -> None:
    """Begin the era here: a log that cannot be written should stop a run before it starts, not warn ever after."""
    log = PlanLog(era, start, 0, steered)
    try:
        log.sync()
    finally:
        log.close()


def _state_of(found: RecoveredSegment) -> dict[str, Any]:
    recovered = found.recovered
    progress = recovered.before[min(recovered.needed, recovered.reached)]
    # What was heard of later steps will be heard again, when they are.
    heard = tuple(entry for entry in recovered.heard.to_plain() if entry[0] < progress.step)
    steered = Steered(tuple(d for d in recovered.decisions if d.name != MESH), heard)
    return to_state(progress, found.header.unit, found.header.fingerprint, steered)


def _starting_state(
    resume: Mapping[str, Any] | str | bytes | None,
    job: Job,
    fingerprint: Fingerprint,
    accept_changes: Collection[str] | bool,
) -> tuple[Progress, Steered]:
    if resume is None:
        return Progress.start(tuple(job.sources)), Steered()
    return from_state(resume, job, fingerprint, accept_changes), without_lapsed(job, steered_of(resume))


def steered_on_return(state: Any, job: Job, known: Sequence[Decision], step: int) -> Steered:
    """What steers a run that returns to a state at `step`: the decisions of the state, and later ones of the run."""
    steered = steered_of(state)
    return without_lapsed(job, replace(steered, decisions=join_decisions(steered.decisions, known, step)))


def without_lapsed(job: Job, steered: Steered) -> Steered:
    """The decisions that still hold for a job. Those about another mixture lapse, with a warning."""
    kept = steered.about(job.mix)
    lapsed = len(steered.decisions) - len(kept.decisions)
    if lapsed:
        _log.warning(
            "%d decisions about weights were made about another mixture than the job declares now: they no longer hold, "
            "the declared one does",
            lapsed,
        )
    return kept


def _encode(record: Mapping[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
