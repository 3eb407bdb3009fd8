"""The bad rows of one source: counted against a budget, and listed in a quarantine file if the policy has one."""

from __future__ import annotations

import logging
import os
import stat
import threading
from typing import TYPE_CHECKING, Protocol

import msgspec
import orjson

from overlord.errors import BadRowError, SpecError, StorageError

if TYPE_CHECKING:
    from collections.abc import Collection

    from overlord.declare.source import BadRows

MOST_ERROR_CHARS = 2000

BadRowKey = tuple[str, int | str]
"""Identifies a bad row: its file, and its number in the file, or the error message where the number is unknown."""


class BadRowLog:
    """Counts and reports bad rows, from any thread. A row counts once, however often its chunk is made again.

    Each quarantined row is appended to the file with one write, so that several processes may share it.
    Rows that an earlier run already listed there are not listed again.
    """

    def __init__(self, source_name: str, policy: BadRows) -> None:
        self._source = source_name
        self._policy = policy
        self.fails = policy.policy == "fail"
        """The policy is to stop at the first bad row."""
        self._lock = threading.Lock()
        self._seen: dict[BadRowKey, int] = {}  # the number of rows dropped up to and including this one
        self._listed: set[BadRowKey] = set()
        self._num_dropped = 0
        self._last_error: str | None = None
        if policy.policy == "quarantine":
            assert policy.path is not None  # BadRows checks it
            self._listed = self._read_back(os.fspath(policy.path))

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def dropped(self) -> frozenset[BadRowKey]:
        with self._lock:
            return frozenset(self._seen)

    @property
    def last_error(self) -> str | None:
        """File, row and error of the row dropped last."""
        return self._last_error

    def note_dropped(self, rows: Collection[BadRowKey]) -> None:
        """Count rows that another loader dropped from a chunk that was copied from it. It has listed them, and has checked
        its budget."""
        with self._lock:
            for key in rows:
                if key not in self._seen:
                    self._num_dropped += 1
                    self._seen[key] = self._num_dropped

    def add(self, where: str, row: int, error: str) -> None:
        """Report row `row` of file `where` as bad, -1 where unknown. Raises BadRowError where the policy says so."""
        where, error = _as_utf8(where), _as_utf8(" ".join(error.split())[:MOST_ERROR_CHARS])
        place = f"{where}, row {row}" if row >= 0 else where
        if self.fails:
            raise BadRowError(
                f"source {self._source!r}: {place}: {error}; on_bad_row='skip' drops such rows and counts them"
            )
        with self._lock:
            key = (where, row if row >= 0 else error)
            if key not in self._seen:
                self._num_dropped += 1
                self._seen[key] = self._num_dropped
                self._last_error = f"{place}: {error}"
                if self._policy.policy == "quarantine" and key not in self._listed:
                    self._append({"source": self._source, "file": where, "row": row, "error": error})
            # A row beyond the budget raises each time: the first time its chunk may have been prefetched, where nobody saw
            # the error. Rows within the budget never raise, so a slow rank can still have their chunks made again.
            if self._seen[key] > self._policy.budget:
                raise BadRowError(
                    f"source {self._source!r}: {self._num_dropped} bad rows are more than its budget of "
                    f"{self._policy.budget}; the last is {self._last_error}. Repair the data or "
                    "raise ol.policies.BadRows(budget=)"
                )

    def _append(self, entry: dict[str, str | int]) -> None:
        assert self._policy.path is not None
        self._write(os.fspath(self._policy.path), orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    @staticmethod
    def _write(path: str, line: bytes) -> None:
        try:
            # Opened each time: bad rows are rare, and a log that holds no file can be dropped without closing.
            file = os.open(path, _APPEND, 0o644)
            try:
                written = os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(
                f"cannot add to the quarantine file {path}: {error.strerror}; make room or name another"
            ) from error
        if written != len(line):
            raise StorageError(f"the quarantine file {path} took {written} of {len(line)} bytes; is its disk full?")

    def _read_back(self, path: str) -> set[BadRowKey]:
        """The rows of this source that the file lists already. Raises SpecError where the file cannot be written."""
        try:
            file = os.open(path, _APPEND, 0o644)
            try:
                is_regular = stat.S_ISREG(os.fstat(file).st_mode)
            finally:
                os.close(file)
            if not is_regular:
                return set()  # a device, such as /dev/null, keeps nothing
            with open(path, "rb") as lines:
                content = lines.read()
        except OSError as error:
            raise SpecError(
                f"source {self._source!r}: the quarantine file {path} cannot be written: {error.strerror}; "
                "name a file in a folder that exists"
            ) from error
        if content and not content.endswith(b"\n"):
            self._write(path, b"\n")  # a line cut short by a crash must not spoil the next one
        entries: set[BadRowKey] = set()
        odd: list[int] = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                entry = _ENTRY.decode(line)
            except msgspec.DecodeError:
                if line.strip():
                    odd.append(number)
                continue
            if entry.source == self._source:
                entries.add((entry.file, entry.row if entry.row >= 0 else entry.error))
        if odd:
            _log.warning(
                "the quarantine file %s has %d lines that list no bad row, the first is line %d: they are left as they are, "
                "and rows that they were about may be listed again",
                path,
                len(odd),
                odd[0],
            )
        return entries


class BadRowSink(Protocol):
    """Takes bad rows."""

    @property
    def fails(self) -> bool:
        """The policy is to stop at the first bad row."""
        ...

    def add(self, where: str, row: int, error: str) -> None: ...


class RecordedBadRows:
    """Passes bad rows on to a log, and keeps them."""

    def __init__(self, log: BadRowLog) -> None:
        self._log = log
        self.fails = log.fails
        self.rows: list[tuple[str, int, str]] = []

    def add(self, where: str, row: int, error: str) -> None:
        self.rows.append((where, row, error))
        self._log.add(where, row, error)


class _Entry(msgspec.Struct):
    """A line of a quarantine file; other keys may stand beside these."""

    source: str
    file: str
    row: int
    error: str = ""


_ENTRY = msgspec.json.Decoder(_Entry)
# Without O_NONBLOCK, opening a FIFO in place of the file would block until another process reads from it.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_log = logging.getLogger("overlord.bad_rows")


def _as_utf8(text: str) -> str:
    """The text with lone surrogates as escapes, so that it can be written as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
