"""Compressed files by offset: the bytes of a long gzip or zstd file from the middle, without all that comes before.

A decoder only goes forward. `UnpackedFile` keeps one where it stopped, because the next unit of a file begins there, and
copies of it on the way, as far as the format allows: of gzip anywhere, of zstd between frames. The first use of a file runs
through all of it, which finds its size, checks its checksums, and leaves copies to start from.
"""

from __future__ import annotations

import bisect
import io
import threading
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from overlord.errors import BufferTooSmallError, SourceError
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from overlord.sources.files import Compression
    from overlord.sources.storage import Storage, StoredFile

LOCAL_BYTES = 1 << 20
REMOTE_BYTES = 8 << 20
"""How much of a compressed file is read at once."""
STEP_BYTES = 1 << 20
"""How much is decompressed at once."""
COPY_EVERY = 4 << 20
MOST_COPIES = 64
"""A gzip decoder takes about 40 KB, so those of a file take 2.5 MB at most."""
SKIPPED_BYTES = 32 << 20
"""Threads may read the units of a file slightly out of order: as much that was passed over is kept for a while."""


class PackedBytes:
    """The compressed bytes of a file from an offset on. Every read checks that the file is unchanged."""

    def __init__(self, storage: Storage, file: StoredFile, piece_bytes: int, at: int = 0) -> None:
        self._storage = storage
        self._piece_bytes = piece_bytes
        self._piece = memoryview(b"")
        self._piece_start = at
        self.file = file
        self.at = at
        """Where the next bytes come from. It may be set to an earlier place."""

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes, at least one and at most so many; none at the end of the file."""
        if not self._piece_start <= self.at < self._piece_start + len(self._piece) and self.at < self.file.num_bytes:
            stop = min(self.at + self._piece_bytes, self.file.num_bytes)
            self._piece = memoryview(self._storage.read(self.file, self.at, stop)).cast("B")
            self._piece_start = self.at
        begin = self.at - self._piece_start
        taken = self._piece[begin : begin + num_bytes]
        self.at += len(taken)
        return taken

    def copy(self) -> PackedBytes:
        return PackedBytes(self._storage, self.file, self._piece_bytes, self.at)


class Decoder(Protocol):
    position: int
    """How much it has decompressed."""

    def read(self, num_bytes: int) -> bytes:
        """At most so many bytes; none only at the end. SourceError for damaged data."""
        ...

    def copy(self) -> Decoder | None:
        """A decoder that goes on from here; None where that is impossible."""
        ...


class GzipDecoder:
    """Members of gzip, one after the other."""

    def __init__(self, packed: PackedBytes, position: int = 0) -> None:
        self.position = position
        self._packed = packed
        self._member = zlib.decompressobj(31)
        self._is_fresh = True
        self._is_first = True

    def read(self, num_bytes: int) -> bytes:
        while True:
            data = self._packed.take(64 << 10)
            if self._is_fresh and not self._is_first:
                data = data.tobytes().lstrip(b"\0")  # some writers pad the file
                if not data and self._packed.at < self._packed.file.num_bytes:
                    continue
            if not data and self._is_fresh and not self._is_first:
                return b""
            try:
                out = self._member.decompress(data, num_bytes)
            except zlib.error as error:
                raise damage_error(self._packed.file, "gzip", str(error), self.position) from error
            self._is_fresh = self._is_first = False
            if not data and not out and not self._member.eof:
                raise damage_error(self._packed.file, "gzip", "Truncated compressed stream", self.position)
            if self._member.eof:
                self._packed.at -= len(self._member.unused_data)
                self._member, self._is_fresh = zlib.decompressobj(31), True
            else:
                self._packed.at -= len(self._member.unconsumed_tail)
            if out:
                self.position += len(out)
                return out

    def copy(self) -> GzipDecoder:
        made = GzipDecoder(self._packed.copy(), self.position)
        made._member = self._member.copy()
        made._is_fresh, made._is_first = self._is_fresh, self._is_first
        return made


class ZstdDecoder:
    """Frames of zstd, one after the other. Between frames it can be copied."""

    def __init__(self, packed: PackedBytes, position: int = 0) -> None:
        self.position = position
        self._packed = packed
        self._frame: pa.CompressedInputStream | None = None

    def read(self, num_bytes: int) -> bytes:
        file = self._packed.file
        try:
            while self._frame is not None or self._packed.at < file.num_bytes:
                if self._frame is None:
                    self._frame = pa.CompressedInputStream(pa.PythonFile(_Frame(self._packed), mode="r"), "zstd")
                out = self._frame.read_buffer(num_bytes).to_pybytes()  # read() leaks its memory when it raises
                if len(out) < num_bytes:
                    self._frame = None
                if out:
                    self.position += len(out)
                    return out
        except OSError as error:
            raise damage_error(file, "zstd", str(error), self.position) from error
        return b""

    def copy(self) -> ZstdDecoder | None:
        return None if self._frame is not None else ZstdDecoder(self._packed.copy(), self.position)


_FRAME = bytes.fromhex("28b52ffd")
_CHECKSUM_BYTES = 4
_RLE = 1


class _Frame(io.RawIOBase):
    """One frame of zstd as a file for Arrow. It follows the headers of blocks to find the end of the frame; data that are
    no frame, or damaged, are handed on up to their end, and Arrow says what is wrong with them."""

    def __init__(self, packed: PackedBytes) -> None:
        super().__init__()
        self._packed = packed
        self._left = 0  # bytes to hand on before the next header
        self._next: Callable[[], bytes] = self._frame_header
        self._has_checksum = False

    def read(self, size: int = -1, /) -> bytes:
        while not self._left:
            header = self._next()
            if header or self._next == self._end:
                return header
        data = self._packed.take(min(size, self._left) if size >= 0 else self._left).tobytes()
        self._left -= len(data)
        if not data:
            self._left, self._next = 0, self._end
        return data

    def readable(self) -> bool:
        return True

    def _take(self, num_bytes: int) -> bytes:
        parts = b""
        while len(parts) < num_bytes and (part := self._packed.take(num_bytes - len(parts)).tobytes()):
            parts += part
        return parts

    def _frame_header(self) -> bytes:
        header = self._take(5)
        if header[1:4] == b"\x2a\x4d\x18" and header[:1] and header[0] >> 4 == 5:  # a frame to be skipped
            header += self._take(3)
            self._left, self._next = int.from_bytes(header[4:8], "little"), self._end
            return header
        if len(header) < 5 or header[:4] != _FRAME:
            self._left = self._packed.file.num_bytes
            return header
        flags = header[4]
        is_single, self._has_checksum = bool(flags & 0x20), bool(flags & 0x04)
        size_bytes = (int(is_single), 2, 4, 8)[flags >> 6]
        header += self._take((not is_single) + (0, 1, 2, 4)[flags & 3] + size_bytes)
        self._next = self._block_header
        return header

    def _block_header(self) -> bytes:
        header = self._take(3)
        bits = int.from_bytes(header, "little")
        self._left = 1 if bits >> 1 & 3 == _RLE else bits >> 3
        if bits & 1 or len(header) < 3:
            self._left += _CHECKSUM_BYTES * self._has_checksum
            self._next = self._end
        return header

    def _end(self) -> bytes:
        return b""


def open_packed(storage: Storage, file: StoredFile, codec: Compression, most_bytes: int) -> UnpackedFile:
    """The decompressed bytes of a file, which may have so many of them."""
    packed = PackedBytes(storage, file, REMOTE_BYTES if is_remote(file.path) else LOCAL_BYTES)
    decoder = GzipDecoder(packed) if codec == "gzip" else ZstdDecoder(packed)
    return UnpackedFile(decoder, file, most_bytes, (storage, file))


_sizes: OrderedDict[Hashable, int] = OrderedDict()
"""The sizes of files that this process has run through, whichever reader did."""
_MOST_SIZES = 65_536


class UnpackedFile:
    """The decompressed bytes of a file by offset. Any thread may read; reading forward costs least."""

    def __init__(self, decoder: Decoder, file: StoredFile, most_bytes: int, key: Hashable) -> None:
        """`most_bytes`: the file may have so many, decompressed. `key` tells it from all other files."""
        self._file = file
        self._most_bytes = most_bytes
        self._key = key
        self._lock = threading.Lock()
        self._decoder = decoder
        first = decoder.copy()
        assert first is not None  # before anything was read
        self._first = first
        self._copies: list[Decoder] = []
        self._every = COPY_EVERY
        self._recent: list[bytes] = []  # what was decompressed last, up to the decoder's position
        self._recent_start = 0
        self.num_decompressed = 0
        """Bytes that were decompressed so far, several times where they were needed again."""

    def size(self) -> int:
        with self._lock:
            found = _sizes.get(self._key)
            if found is None:
                found = _sizes[self._key] = self._run_through()
                while len(_sizes) > _MOST_SIZES:
                    _sizes.popitem(last=False)
            return found

    def _run_through(self) -> int:
        self._restart(self._first.copy())
        while self._advance():
            self._recent, self._recent_start = [], self._decoder.position
            if self._decoder.position > self._most_bytes:
                raise BufferTooSmallError(
                    f"{self._file.path} ({self._file.num_bytes:,} bytes) has more than {self._most_bytes:,} bytes "
                    "decompressed, which is more than its units may take; raise buffer_bytes, or write it as several "
                    "smaller files"
                )
        return self._decoder.position

    def read_lines(self, start: int, stop: int, check_line: Callable[[int, int], None]) -> tuple[int, bytes]:
        """The lines that begin in the bytes [start, stop), and the offset of the first. `check_line(offset, num_bytes)` is
        called for a line that goes far beyond the end."""
        if start == stop:
            return start, b""
        with self._lock:
            # From one byte earlier: a newline there means that a line begins with the first byte of the range.
            begin = max(0, start - 1)
            text = self._read(begin, stop)
            if start:
                first = text.find(b"\n") + 1
                if not first or begin + first == stop:
                    return stop, b""  # one line covers the whole range; it belongs to an earlier one
                begin, text = begin + first, text[first:]
            parts, end, step = [text], stop, 64 << 10
            while not parts[-1].endswith(b"\n"):
                more = self._read(end, end + step, keep_from=stop - 1)
                if not more:
                    break
                newline = more.find(b"\n") + 1
                parts.append(more[:newline] if newline else more)
                end, step = end + len(more), min(4 * step, STEP_BYTES)
                check_line(stop, end - stop)
            return begin, b"".join(parts)

    def _read(self, start: int, stop: int, keep_from: int | None = None) -> bytes:
        """The bytes [start, stop), as far as there are. What comes from `keep_from` on is likely to be read again."""
        was_at = self._decoder.position
        if start < self._recent_start or start > was_at:
            self._seek(start)
        while self._decoder.position < stop and self._advance():
            if self._decoder.position <= start and start - was_at > SKIPPED_BYTES:
                self._recent, self._recent_start = [], self._decoder.position
        recent = b"".join(self._recent)
        found = recent[max(start - self._recent_start, 0) : stop - self._recent_start]
        keep = stop - 1 if keep_from is None else keep_from
        if was_at < start <= was_at + SKIPPED_BYTES:
            keep = min(keep, max(was_at - 1, self._recent_start))
        drop = min(max(keep - self._recent_start, 0), len(recent))
        self._recent, self._recent_start = [recent[drop:]], self._recent_start + drop
        return found

    def _seek(self, start: int) -> None:
        """Put the decoder at or before an offset, as near to it as possible."""
        at = bisect.bisect_right(self._copies, start, key=lambda copy: copy.position)
        nearest = self._copies[at - 1] if at else self._first
        if self._decoder.position > start or nearest.position > self._decoder.position:
            self._restart(nearest.copy())

    def _restart(self, decoder: Decoder | None) -> None:
        assert decoder is not None  # copies were made where that is possible
        self._decoder, self._recent, self._recent_start = decoder, [], decoder.position

    def _advance(self) -> bool:
        out = self._decoder.read(STEP_BYTES)
        if not out:
            return False
        self._recent.append(out)
        self.num_decompressed += len(out)
        last = self._copies[-1].position if self._copies else 0
        if self._decoder.position >= last + self._every and (copied := self._decoder.copy()) is not None:
            self._copies.append(copied)
            if len(self._copies) > MOST_COPIES:
                self._every *= 2
                self._copies = self._copies[1::2]
        return True


def damage_error(file: StoredFile, codec: str, error: str, position: int) -> SourceError:
    return SourceError(
        f"{file.path} is not whole {codec} data: {error}, after {position:,} bytes decompressed; it was cut off or damaged, "
        "copy or write it again"
    )
