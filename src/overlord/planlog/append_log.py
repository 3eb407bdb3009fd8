"""A checksummed append-only log in segments, on any filesystem or object store.

Each segment begins with records that stand for all before it, so the newest one that can be read is enough, and older
ones are deleted (all but one). A record is a marker, its length, a checksum, and its bytes.

What it promises: `begin` and `append` never raise for storage that fails and never wait for storage that is slow. What
cannot be written is kept, at most for one segment, and tried again with the next record; `error` says why. `sync` waits
until everything is safe, and raises when it cannot be. Files are written at once, so a process that is killed loses
nothing; what a crash of the machine may lose (or, on object stores, a kill) is what came after the last sync in the
background, one every `sync_s` seconds.

A writer never appends to a segment that it did not create. When somebody else has created the segment that comes next,
this writer was replaced: it stops for good.
"""

from __future__ import annotations

import struct
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.errors import SourceError, StorageError

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
    """Good records after a damaged one. 0: only the end is torn, as by a crash in the middle of a write."""


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


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a log has come."""

    segment: str
    num_bytes: int
    """Handed to storage, in this segment."""
    num_waiting: int
    """Bytes that storage has not taken yet."""
    error: str | None


@dataclass(slots=True)
class _Open:
    """The segment that records go to. It is created when the first of them is written."""

    number: int
    waiting: bytearray
    segment: Segment | None = None
    num_bytes: int = 0
    was_touched: bool = False
    is_safe: bool = True


class AppendLog:
    """Writes a log. One thread at a time may call it; storage is also used from a thread in the background."""

    def __init__(self, segments: Segments, follows: int | None = None, sync_s: float = 1.0) -> None:
        """`follows` is the segment that was recovered from: it stays until one more after the next is safe."""
        self._segments = segments
        self._sync_s = sync_s
        self._kept = follows
        self._open = _Open(max(segments.numbers(), default=-1), bytearray(), was_touched=True)
        self._retired: list[_Open] = []
        # Taken in this order. The first is held while storage is slow, so nobody who appends may need it.
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
        """Why something is not written; None when all is well."""
        return self._error

    @property
    def position(self) -> LogPosition:
        with self._lock:
            current = self._open
            name = self._segments.name(max(current.number, 0))
            return LogPosition(name, current.num_bytes, len(current.waiting), self._error)

    def begin(self, bodies: Sequence[bytes]) -> None:
        """Begin a segment with records that stand for all before it."""
        waiting = bytearray(b"".join(frame(body) for body in bodies))
        with self._lock:
            old = self._open
            if old.was_touched:
                self._retired.append(old)
                self._open = _Open(old.number + 1, waiting)
            else:  # never created, since storage failed: what waited is stood for now
                old.waiting = waiting
        self._go_on()

    def append(self, body: bytes) -> None:
        with self._lock:
            self._open.waiting += frame(body)
        self._go_on()

    def sync(self) -> None:
        """Wait until everything is safe; StorageError when it cannot be."""
        self._attempt(self._make_safe)
        if self._error is not None:
            raise StorageError(f"the log at {self._segments.location} cannot be written: {self._error}")

    def close(self) -> None:
        """Write what is left, once, and stop."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._attempt(self._make_safe)
        with self._sync_lock:
            self._retired.append(self._open)
            self._close_retired()

    def _go_on(self) -> None:
        if self._segments.writes_at_once:
            self._attempt(self._write)
        with self._lock:
            if self._timer is None and not self._closed and not self._replaced:
                # One shot, so that a log that nobody writes to or closes leaves no thread behind.
                self._timer = threading.Timer(self._sync_s, self._sync_in_background)
                self._timer.daemon = True
                self._timer.start()

    def _sync_in_background(self) -> None:
        with self._lock:
            self._timer = None
            if self._closed:
                return
        self._attempt(self._make_safe)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._replaced:
            return
        try:
            action()
        except FileExistsError:
            self._replaced = True
            self._error = f"another writer has created {self._segments.name(self._open.number)}: this one was replaced"
        except (OSError, SourceError) as error:
            self._error = str(error)
        else:
            self._error = None

    def _write(self) -> None:
        """Hand to storage what waits."""
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
                current.is_safe = False

    def _make_safe(self) -> None:
        with self._sync_lock:
            self._write()
            self._close_retired()
            current = self._open
            if current.segment is None or current.is_safe:
                return
            current.is_safe = True  # what is appended from here on is not
            try:
                current.segment.sync()
            except OSError:
                current.is_safe = False
                raise
            self._delete_older(current.number)

    def _close_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
        for old in retired:
            if old.segment is not None:
                old.segment.close()
                old.segment = None

    def _delete_older(self, newest: int) -> None:
        """Once a new segment is safe, only it and the one before it are needed."""
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
