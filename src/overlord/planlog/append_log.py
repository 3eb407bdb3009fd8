"""A checksummed append-only log in segments, on any filesystem or object store.

Each segment begins with records that replace all earlier ones. So the newest readable segment is enough to recover, and
older ones are deleted (all but one). A record is a marker, its length, a checksum, and its bytes.

Promises: `begin` and `append` never raise when storage fails, and never wait for slow storage. Records that cannot be
written are buffered, for at most one segment, and retried with the next record; `error` has the reason. `sync` waits until
all records are durable, and raises if that fails. Files are written immediately, so a killed process loses nothing. A crash
of the machine (on object stores also a kill) may lose the records since the last sync; one runs in the background every
`sync_s` seconds.

A writer never appends to a segment that it did not create. If another writer has created the next segment, this writer was
replaced: it stops writing for good. It notices that with its next sync.
"""

from __future__ import annotations

import struct
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.errors import SourceError, StorageError
from overlord.status import LogPosition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.planlog.segments import Segment, Segments

_MARK = b"\xf5OLr"
_HEAD = struct.Struct("<4sII")  # marker, length, checksum of the length and the bytes


def frame(body: bytes) -> bytes:
    return _HEAD.pack(_MARK, len(body), _checksum(body)) + body


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """The records of a segment up to the first that is damaged."""

    bodies: list[bytes]
    num_bytes: int
    good_bytes: int
    """Where the first damaged record begins; the whole size when none is."""
    num_after_damage: int
    """Good records after a damaged one. 0 means a torn end, as after a crash in the middle of a write."""


def read_frames(data: bytes) -> SegmentContents:
    bodies = []
    offset = 0
    while (body := _record_at(data, offset)) is not None:
        bodies.append(body)
        offset += _HEAD.size + len(body)
    num_after = 0
    search = data.find(_MARK, offset + 1) if offset < len(data) else -1
    while search >= 0:
        found = _record_at(data, search)
        num_after += found is not None
        search = data.find(_MARK, search + (1 if found is None else _HEAD.size + len(found)))
    return SegmentContents(bodies, len(data), offset, num_after)


@dataclass(slots=True)
class _OpenSegment:
    """The segment that is being written. It is created on storage with its first write."""

    number: int
    waiting: bytearray
    segment: Segment | None = None
    num_bytes: int = 0
    was_touched: bool = False
    is_durable: bool = True


class AppendLog:
    """Writes a log. One thread at a time may call it; a background thread uses the storage too."""

    def __init__(self, segments: Segments, follows: int | None = None, sync_s: float = 1.0) -> None:
        """`follows` is the segment that was recovered from. It stays until the second segment after it is durable."""
        self._segments = segments
        self._sync_s = sync_s
        self._kept = follows
        self._open = _OpenSegment(max(segments.numbers(), default=-1), bytearray(), was_touched=True)
        self._retired: list[_OpenSegment] = []
        # Acquired in this order. The first is held during slow storage calls, so `append` must not need it.
        self._sync_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._pruned_to: int | None = None
        self._replaced = False
        self._closed = False
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """Why the last write failed; None if it succeeded."""
        return self._error

    @property
    def is_replaced(self) -> bool:
        """True once another writer is known to have created the next segment."""
        return self._replaced

    @property
    def position(self) -> LogPosition:
        with self._lock:
            current = self._open
            name = self._segments.name(max(current.number, 0))
            return LogPosition(name, current.num_bytes, len(current.waiting), self._error)

    def begin(self, bodies: Sequence[bytes]) -> None:
        """Begin a segment with records that replace all before it."""
        waiting = bytearray(b"".join(frame(body) for body in bodies))
        with self._lock:
            old = self._open
            if old.was_touched:
                self._retired.append(old)
                self._open = _OpenSegment(old.number + 1, waiting)
            else:  # never created, because storage failed: the new records replace the buffered ones
                old.waiting = waiting
        self._write_or_schedule()

    def append(self, body: bytes) -> None:
        with self._lock:
            self._open.waiting += frame(body)
        self._write_or_schedule()

    def sync(self) -> None:
        """Wait until all records are durable. Raises StorageError if that fails."""
        self._attempt(self._make_durable)
        if self._error is not None:
            raise StorageError(f"the log at {self._segments.location} cannot be written: {self._error}")

    def close(self) -> None:
        """Try once to write the buffered records, and stop."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._attempt(self._make_durable)
        with self._sync_lock:
            self._retired.append(self._open)
            self._close_retired()

    def _write_or_schedule(self) -> None:
        if self._segments.writes_at_once:
            self._attempt(self._write)
        with self._lock:
            if self._timer is None and not self._closed and not self._replaced:
                # One shot, so that an idle log that is never closed leaves no thread behind.
                self._timer = threading.Timer(self._sync_s, self._sync_in_background)
                self._timer.daemon = True
                self._timer.start()

    def _sync_in_background(self) -> None:
        with self._lock:
            self._timer = None
            if self._closed:
                return
        self._attempt(self._make_durable)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._replaced:
            return
        try:
            action()
        except FileExistsError:
            self._replaced = True
            self._error = f"another writer has created a segment of {self._segments.location}: this one was replaced"
        except (OSError, SourceError) as error:
            self._error = str(error)
        else:
            self._error = None

    def _write(self) -> None:
        """Hand the buffered records to storage."""
        with self._write_lock:
            with self._lock:
                current = self._open
                data = bytes(current.waiting)
                if not data or self._replaced:
                    return
                current.was_touched = True
            if current.segment is None:
                try:
                    current.segment = self._segments.create(current.number)
                except OSError:
                    current.was_touched = False
                    raise
            current.segment.append(data)
            with self._lock:
                del current.waiting[: len(data)]
                current.num_bytes += len(data)
                current.is_durable = False

    def _make_durable(self) -> None:
        with self._sync_lock:
            self._write()
            self._close_retired()
            current = self._open
            if current.segment is None or current.is_durable:
                return
            self._find_successor()
            current.is_durable = True  # set before the sync: an append during it clears the flag again
            try:
                current.segment.sync()
            except OSError:
                current.is_durable = False
                raise
            self._delete_older(current.number)

    def _find_successor(self) -> None:
        """Raise FileExistsError if another writer has created the segment after the one that is being written."""
        with self._write_lock:  # so that it is not one that this writer has just created
            current = self._open
            if current.segment is not None and self._segments.exists(current.number + 1):
                raise FileExistsError(self._segments.name(current.number + 1))

    def _close_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
        for old in retired:
            if old.segment is not None:
                old.segment.close()
                old.segment = None

    def _delete_older(self, newest: int) -> None:
        """Once a new segment is durable, only it and the one before it are needed."""
        if self._pruned_to == newest:
            return
        for number in self._segments.numbers():
            if number < newest and number != self._kept:
                self._segments.delete(number)
        self._kept = self._pruned_to = newest


def _checksum(body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(len(body).to_bytes(4, "little")))


def _record_at(data: bytes, offset: int) -> bytes | None:
    if len(data) - offset < _HEAD.size:
        return None
    mark, length, checksum = _HEAD.unpack_from(data, offset)
    begin = offset + _HEAD.size
    if mark != _MARK or begin + length > len(data):
        return None
    body = data[begin : begin + length]
    return body if _checksum(body) == checksum else None
