"""The planner's log: when records are written, and how errors of reading and writing are handled.

A write error does not stop the run. A planner that recovers from an older record draws the missing steps again, identically;
so the planner continues from memory, logs a warning, and retries with every step. Only a decision, which cannot be derived
from anything else, is refused when it cannot be made durable.

One thread at a time may call a `PlanLog`, except for `add_report`, which is thread-safe.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from overlord.checkpoint.fingerprint import Fingerprint, differences_of, refuse_differences, saved_chunks, warn_of_unseen
from overlord.checkpoint.form import contents_of
from overlord.checkpoint.state import from_state, steered_of, to_state
from overlord.errors import SharedUseError, StateError, StorageError
from overlord.planlog.append_log import (
    AppendLog,
    SegmentContents,
    read_frames,
)
from overlord.planlog.log_lock import this_process
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
from overlord.planlog.segments import LogTable, Segments, TableSegments, segments_at
from overlord.runtime.recorder import current_recorder
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

    from overlord.checkpoint.fingerprint import SavedChunks
    from overlord.declare.job import Job
    from overlord.declare.mesh import Mesh
    from overlord.declare.policies import Log
    from overlord.status import LogPosition

_log = logging.getLogger("overlord.planlog")


@dataclass(frozen=True, slots=True)
class ClusterLog:
    """The log of a run on a cluster whose user named no other place: in the cluster's own table. A planner that is lost
    continues from it on any node; it ends with the cluster."""

    table: LogTable
    snapshot_every: int = 64
    """Fewer steps than in files, because every batch of records is an entry that recovery reads by itself."""
    sync_s: float = 0.1

    @property
    def location(self) -> str:
        return self.table.location


def open_segments(log: Log | ClusterLog) -> Segments:
    return TableSegments(log.table) if isinstance(log, ClusterLog) else segments_at(log.location, log.storage_options)


@dataclass(frozen=True, slots=True)
class Era:
    """One era of a run, and where it is logged. A value: a restarted planner gets the same one."""

    log: Log | ClusterLog
    header: Header
    decisions: tuple[Decision, ...] = ()

    @property
    def is_wanted(self) -> bool:
        """True if the user asked for the log, and so may resume from it later."""
        return not isinstance(self.log, ClusterLog)

    @property
    def has_lineage(self) -> bool:
        """True if the documents of each step are recorded beside the log."""
        return not isinstance(self.log, ClusterLog) and self.log.lineage

    def next_era(self, step: int, mesh: Mesh, fingerprint: Fingerprint | None = None) -> Era:
        """The next era of the run, which continues at `step` on `mesh`, with a source more if it has another fingerprint."""
        known = self.header.fingerprint if fingerprint is None else fingerprint.to_dict()
        header = replace(self.header, era=self.header.era + 1, fingerprint=known)
        return Era(self.log, header, (mesh_decision(step, mesh),))


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """A segment, and the planner state recovered from it."""

    segment: int
    header: Header
    recovered: Recovered


class PlanLog:
    """Writes the log of one planner. It first recovers the log of an earlier planner of the same era."""

    def __init__(self, era: Era, start: Progress, keep: int, steered: Steered | None = None) -> None:
        """`keep` is how many steps before the oldest needed one may be requested again. `steered` is what the era begins
        with, in addition to its progress."""
        steered = steered or Steered()
        segments = open_segments(era.log)
        found = read_newest(segments, era.header.job, era.header.era, keep)
        earlier = found or read_newest(segments, era.header.job) or read_newest(segments)
        self._era = era
        self._segments = segments
        self._location = segments.location
        self._other_run: str | None = None  # once this writer was replaced: by whom, or "" by another planner of this run
        self._log = AppendLog(segments, earlier.segment if earlier else None, era.log.sync_s)
        own = (*steered.decisions, *era.decisions)
        self._decisions = (
            found.recovered.decisions if found else join_decisions(own, _decisions_of_earlier_eras(earlier, era), start.step)
        )
        self.heard = found.recovered.heard if found else ReportedLosses.from_plain(steered.heard)
        """Reported losses that no decision is based on yet. Hold `lock` to read it."""
        self.lock = threading.RLock()
        self._needed = found.recovered.needed if found else start.step
        self._readers: frozenset[int] = found.recovered.readers if found else frozenset()
        self._num_since_snapshot = 0
        self._logged_error: str | None = None
        self._events = current_recorder().events
        self.before: Mapping[int, Progress] = found.recovered.before if found else {start.step: start}
        """The progress before each step that may be requested, as far as it was logged."""
        self._last = start
        self._begin([self.before[step] for step in sorted(self.before)])

    @property
    def needed(self) -> int:
        """Every step before this one was taken by all readers."""
        return self._needed

    @property
    def readers(self) -> frozenset[int]:
        """The data-parallel groups that have a reader, or expect one."""
        return self._readers

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self._decisions

    @property
    def position(self) -> LogPosition:
        return self._log.position

    def add_step(self, after: Progress, kept: Callable[[], Sequence[Progress]]) -> None:
        """Record a drawn step. `kept` returns the progress of every step that may be requested again, in order. There may be
        a gap after the first, which is kept for a rank that is late."""
        if after.step <= self._last.step:
            return  # drawn again
        if self._num_since_snapshot >= self._era.log.snapshot_every or after.step != self._last.step + 1:
            with self.lock:
                self._begin(kept())
        else:
            self._log.append(_encode(step_record(self._last, after, self._needed)))
            self._num_since_snapshot += 1
            self._last = after
        self._log_write_errors()

    def add_needed(self, step: int) -> None:
        """Record that every step before this one was taken by all readers."""
        if step > self._needed:
            self._needed = step
            self._log.append(_encode(needed_record(step)))
            self._log_write_errors()

    def add_readers(self, groups: frozenset[int]) -> None:
        """Record which data-parallel groups have a reader, or expect one."""
        if groups != self._readers:
            self._readers = groups
            self._log.append(_encode(readers_record(groups)))
            self._log_write_errors()

    def add_report(self, step: int, rank: int, sums: Mapping[str, tuple[int, int]]) -> bool:
        """Record the losses that a rank reported for a step; False when they were recorded before."""
        with self.lock:
            is_new = self.heard.add(step, rank, sums)
            if is_new:
                self._log.append(_encode(report_record(step, rank, sums)))
            return is_new

    def decide(self, decision: Decision) -> None:
        """Write a decision durably. On StorageError the decision must not be applied."""
        with self.lock:  # no snapshot may come between the two records
            self._log.append(_encode(decision_record(decision)))
            try:
                self._log.sync()
            except StorageError:
                self._log.append(_encode(withdrawn_record(decision)))
                raise
        self._decisions = (*self._decisions, decision)

    def note(self, decision: Decision) -> None:
        """Record a decision that changes nothing, without waiting until it is durable."""
        self._log.append(_encode(decision_record(decision)))
        self._decisions = (*self._decisions, decision)

    def sync(self) -> None:
        self._log.sync()

    def check_own(self) -> None:
        """Raise SharedUseError once another run has taken the log over. One that is made again for this run may have."""
        if self._find_other_run():
            raise SharedUseError(
                f"the log at {self._location} was taken over by another run ({self._other_run}) while this one wrote to it: "
                f"this run plans no step from {self._last.step} on, because neither could recover from a log of both. Stop "
                "one of them; start the one that goes on with resume='log', or give it another log=..."
            )

    def _find_other_run(self) -> str:
        """Who has taken the log over; empty if nobody has."""
        if not self._log.is_replaced:
            return ""
        if self._other_run is None:
            try:
                newest = read_newest(self._segments)
            except (StorageError, StateError):
                return ""  # looked at again with the next step
            if newest is None:
                return ""
            header = newest.header
            self._other_run = "" if header.job == self._era.header.job else header.writer or f"its id is {header.job}"
            if self._other_run:
                what = f"another run ({self._other_run}) has taken over the plan log at {self._location}: this one stops"
                self._events.note("log", what)
                _log.error("%s", what)
        return self._other_run

    def close(self) -> None:
        self._log.close()
        self._log_write_errors()

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

    def _log_write_errors(self) -> None:
        error = self._log.error
        if self._log.is_replaced and (self._find_other_run() or self._other_run is not None):
            return  # it was told, or the other is a planner of this run
        if error is not None and self._logged_error is None:
            self._events.note("log", f"the plan log at {self._location} cannot be written: {error}")
            _log.warning(
                "the plan log at %s cannot be written: %s. The run continues and loses nothing; until the log is written "
                "again, a restarted planner must draw the steps from %d on again",
                self._location,
                error,
                self._needed,
            )
        elif error is None and self._logged_error is not None:
            self._events.note("log", f"the plan log at {self._location} is written again")
            _log.warning("the plan log at %s is written again, up to step %d", self._location, self._last.step)
        self._logged_error = error


def chunks_of_saved(
    resume: Mapping[str, Any] | str | bytes | None, log: Log | ClusterLog | None, names: Collection[str]
) -> dict[str, SavedChunks]:
    """How sources are divided into chunks in the state that a run continues from, or in its log. Whether these are whole is
    checked when the run begins."""
    saved: Any = None
    if resume is not None and resume != "log":
        saved = contents_of(resume).get("fingerprint")
    elif log is not None and (found := read_newest(open_segments(log))) is not None:
        saved = found.header.fingerprint
    return {name: chunks for name in names if (chunks := saved_chunks(saved, name)) is not None}


def begin_run(
    job: Job,
    fingerprint: Fingerprint,
    resume: Mapping[str, Any] | str | bytes | None,
    log: Log | ClusterLog | None,
    accept_changes: Collection[str] | bool,
) -> tuple[Progress, Steered, Era | None]:
    """Begin a run: return its first progress, what steers it, and its era, which is written to the log.

    A state takes precedence over the log. `resume="log"` continues at the first step that the log does not record as taken
    by all readers, or at step 0 if there is no log yet. Without either the run begins at step 0.
    """
    if log is None:
        return *_starting_state(resume, job, fingerprint, accept_changes), None
    found = read_newest(open_segments(log))
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
            "the log at %s has a run up to step %d, but this run begins at step 0; resume='log' would continue at step %d",
            log.location,
            found.recovered.reached,
            found.recovered.needed,
        )
    try:
        progress, steered = _starting_state(resume, job, fingerprint, accept_changes)
    except StateError as error:
        if is_from_log:
            raise StateError(f"the log at {log.location} has a state that the run cannot continue from: {error}") from None
        raise
    steered = drop_lapsed(job, replace(steered, decisions=join_decisions(steered.decisions, decisions, progress.step)))
    header = Header(uuid4().hex, 0, job.mix.unit, fingerprint.to_dict(), this_process())
    era = Era(log, header, (mesh_decision(progress.step, job.mesh),))
    write_first_segment(era, progress, steered)
    if era.is_wanted:
        warn_of_unseen(fingerprint)
    return progress, steered, era


def read_newest(
    segments: Segments, job: str | None = None, era: int | None = None, keep: int = 0
) -> RecoveredSegment | None:
    """Read the newest segment, of a job or of one era of it. A torn end is dropped, with a warning."""
    for number in reversed(segments.numbers()):
        name = segments.name(number)
        try:
            contents = read_frames(segments.read(number))
        except FileNotFoundError:
            continue  # its writer has just deleted it
        except OSError as error:
            raise StorageError(f"{name} cannot be read: {error}") from error
        _refuse_damage(name, contents)
        try:
            records = [orjson.loads(body) for body in contents.bodies]
            if len(records) < 2:  # its writer was killed before the snapshot was complete
                _log.warning("%s ends before its snapshot, after %d bytes: it is skipped", name, contents.num_bytes)
                continue
            own = Header.from_record(records[0])
            if job not in (None, own.job) or era not in (None, own.era):
                continue
            recovered = fold(records[1:], keep)
        except (StateError, orjson.JSONDecodeError) as error:
            raise StateError(f"{name} cannot be used: {error}; delete it to continue from the one before it") from error
        if contents.good_bytes < contents.num_bytes:
            _log.warning(
                "%s has a torn end: its last %d bytes are dropped, and it continues at step %d",
                name,
                contents.num_bytes - contents.good_bytes,
                recovered.reached,
            )
        return RecoveredSegment(number, own, recovered)
    return None


def _decisions_of_earlier_eras(earlier: RecoveredSegment | None, era: Era) -> tuple[Decision, ...]:
    """The decisions of earlier eras of the run."""
    return () if earlier is None or earlier.header.job != era.header.job else _lasting(earlier)


def _lasting(found: RecoveredSegment) -> tuple[Decision, ...]:
    """The decisions that hold beyond their era. The mesh and learned costs depend on the trainers, so the caller that begins
    an era passes them again."""
    return tuple(decision for decision in found.recovered.decisions if decision.name not in (MESH, COSTS))


def _refuse_damage(name: str, contents: SegmentContents) -> None:
    if contents.num_after_damage:
        raise StateError(
            f"{name} is damaged at byte {contents.good_bytes}: the record there differs from what was written, and "
            f"{contents.num_after_damage} good ones follow. Restore the file, or delete it to continue from the one before "
            "it (steps are drawn again, the same; only decisions recorded in this one are lost), or start from a "
            "checkpoint with another log=..."
        )


def write_first_segment(era: Era, start: Progress, steered: Steered) -> None:
    """Write the first segment of an era durably, so that a log that cannot be written stops it before it begins."""
    log = PlanLog(era, start, 0, steered)
    try:
        log.sync()
    finally:
        log.close()


def _state_of(found: RecoveredSegment) -> dict[str, Any]:
    recovered = found.recovered
    progress = recovered.before[min(recovered.needed, recovered.reached)]
    # Later steps are taken again, and their losses will be reported again.
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
    return from_state(resume, job, fingerprint, accept_changes), drop_lapsed(job, steered_of(resume))


def steered_on_return(state: Any, job: Job, known: Sequence[Decision], step: int) -> Steered:
    """What steers a run that is moved to a state at `step`: the decisions of the state, and later ones of the run."""
    steered = steered_of(state)
    return drop_lapsed(job, replace(steered, decisions=join_decisions(steered.decisions, known, step)))


def drop_lapsed(job: Job, steered: Steered) -> Steered:
    """Drop the decisions about another mixture than the job's, with a warning."""
    kept = steered.about(job.mix)
    lapsed = len(steered.decisions) - len(kept.decisions)
    if lapsed:
        _log.warning(
            "%d decisions about weights were made for another mixture than the job declares now: they are dropped, and "
            "the declared mixture applies",
            lapsed,
        )
    return kept


def _encode(record: Mapping[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
