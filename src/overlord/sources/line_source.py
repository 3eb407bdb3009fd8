"""Files of lines, plain or compressed: a unit is a byte range of a file, counted in its decompressed bytes.

How many units a compressed file has follows from its compressed size, so that listing reads no file: where they begin is
found when the file is first read. A line belongs to the range that contains its first byte, so that every line is read
exactly once for any ranges.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import BufferTooSmallError
from overlord.sources.files import BLOCK_BYTES, FileSource, codec_of, decompress_blocks
from overlord.sources.unpacking import UnpackedFile, open_packed
from overlord.stream.chunk_order import MOST_LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlord.sources.range_cache import RangeOfFile
    from overlord.sources.reading import ReadResult, UnitReader
    from overlord.sources.storage import StoredFile

BEYOND_BYTES = 64 << 10
PACKED_RATIO = 4
"""Bytes of text for each compressed byte, about: it decides how many units a file has."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineRange:
    """The lines that begin in the bytes [start, stop) of a file."""

    file: StoredFile
    start: int
    stop: int
    schema: pa.Schema
    declared: bool
    """The user declared the types: a column may then be missing in every row."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """The lines that begin in one of equal parts of a compressed file's decompressed bytes."""

    file: StoredFile
    num_parts: int
    schema: pa.Schema
    declared: bool


class LineRows(Protocol):
    """Collects the rows of one unit from pieces of its text, each of whole lines."""

    def add(self, offset: int, text: bytes) -> None: ...

    def result(self) -> ReadResult: ...


@dataclass(frozen=True)
class LineSource(FileSource):
    """What readers of lines share. They say how many bytes a unit has, and make rows of lines."""

    kind = "text"
    """What a file of very long lines is asked to be."""

    @property
    def range_bytes(self) -> int:
        raise NotImplementedError

    def collect_rows(self, unit: Unit) -> LineRows:
        raise NotImplementedError

    def line_units(self, files: Sequence[StoredFile], schema: pa.Schema, *, declared: bool) -> list[Unit]:
        units: list[Unit] = []
        for file in files:
            is_packed = codec_of(file.path) is not None
            num_parts = -(-file.num_bytes * PACKED_RATIO // self.range_bytes) if is_packed else 1
            if num_parts > 1:
                part, num_bytes = PackedPart(file, num_parts, schema, declared), file.num_bytes * PACKED_RATIO // num_parts
                units += [Unit(file.path, i, None, num_bytes, part, file.version, i > 0) for i in range(num_parts)]
                continue
            size = file.num_bytes if is_packed else self.range_bytes
            for i, start in enumerate(range(0, file.num_bytes, size)):
                stop = min(start + size, file.num_bytes)
                detail = LineRange(file, start, stop, schema, declared)
                units.append(Unit(file.path, i, None, stop - start, detail, file.version))
        return self._check_not_empty(units)

    def read_rows(self, unit: Unit) -> ReadResult:
        return self.read_with(unit, self.unpack)

    def open_reader(self, *, release_gil: bool) -> UnitReader:
        if type(self).read_rows is not LineSource.read_rows:  # a subclass has a reading of its own
            return super().open_reader(release_gil=release_gil)
        return LineReader(self)

    def read_with(self, unit: Unit, unpack: Callable[[PackedPart], UnpackedFile]) -> ReadResult:
        """The rows of one unit. `unpack` returns the compressed file that the unit is a part of."""
        detail: LineRange | PackedPart = unit.detail
        rows = self.collect_rows(unit)
        if isinstance(detail, PackedPart):
            texts = self._read_part(unit, detail, unpack(detail))
        else:
            texts = self._read_texts(unit.path, detail)
        for offset, text in texts:
            rows.add(offset, text)
        return rows.result()

    def unpack(self, part: PackedPart) -> UnpackedFile:
        codec = codec_of(part.file.path)
        assert codec is not None  # only compressed files have parts
        return open_packed(self.storage, part.file, codec, part.num_parts * self.most_unit_bytes)

    def _read_part(self, unit: Unit, part: PackedPart, file: UnpackedFile) -> Iterator[tuple[int, bytes]]:
        size = file.size()
        start, stop = (size * k // part.num_parts for k in (unit.index, unit.index + 1))
        offset, text = file.read_lines(start, stop, lambda at, num_bytes: self._check_line(unit.path, at, num_bytes))
        offset, text = _strip_mark(offset, text)
        begin = 0
        while begin < len(text):  # in pieces, because parsed lines take far more memory than their text
            end = text.rfind(b"\n", begin, begin + BLOCK_BYTES) + 1 or text.find(b"\n", begin) + 1 or len(text)
            yield offset + begin, text[begin:end]
            begin = end

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        detail: LineRange | PackedPart = unit.detail
        if isinstance(detail, PackedPart):
            return ()
        if codec_of(unit.path):
            return [(detail.file, 0, detail.file.num_bytes)]
        return [(detail.file, max(0, detail.start - 1), detail.stop)]

    def decoded_bytes(self, unit: Unit) -> int:
        # A compressed file that is one unit is listed with its compressed size.
        is_whole = codec_of(unit.path) is not None and isinstance(unit.detail, LineRange)
        return unit.num_bytes * (PACKED_RATIO if is_whole else 1)

    def read_first_text(self, file: StoredFile) -> bytes:
        """The lines of the first unit of a file. For a compressed file: the lines that fit in `unit_bytes`, at least one."""
        codec = codec_of(file.path)
        if codec is None:
            detail = LineRange(file, 0, min(self.range_bytes, file.num_bytes), pa.schema([]), True)
            return next(self._read_texts(file.path, detail))[1]
        text = b""
        with self.storage.stream(file) as content:
            for block in decompress_blocks(file.path, codec, content, self.range_bytes):
                text += block
                if len(block) < self.range_bytes:
                    break
                whole, newline, _ = text.rpartition(b"\n")
                if newline:
                    text = whole if len(text) == len(block) else text.partition(b"\n")[0]
                    break
                self._check_line(file.path, 0, len(text))
        return text.removeprefix(BYTE_ORDER_MARK)

    def _read_texts(self, path: str, detail: LineRange) -> Iterator[tuple[int, bytes]]:
        """Pairs of offset and text with the lines of a range. Offsets are those of the decompressed file."""
        if codec := codec_of(path):
            with self.storage.stream(detail.file) as content:
                yield from self._whole_lines(path, decompress_blocks(path, codec, content, BLOCK_BYTES))
            return
        # From one byte earlier: a newline there means that a line begins with the first byte of the range.
        begin = max(0, detail.start - 1)
        text = self.storage.read(detail.file, begin, detail.stop).to_pybytes()
        if detail.start:
            first = text.find(b"\n") + 1
            if not first or begin + first == detail.stop:
                return  # one line covers the whole range; it belongs to an earlier one
            begin, text = begin + first, text[first:]
        if not text.endswith(b"\n"):
            text += self._read_rest_of_line(path, detail)
        yield _strip_mark(begin, text)

    def _whole_lines(self, path: str, blocks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        offset, parts, held = 0, list[bytes](), 0
        for block in blocks:
            end = block.rfind(b"\n") + 1
            if not end:
                parts.append(block)
                held += len(block)
                self._check_line(path, offset, held)
                continue
            text = b"".join([*parts, block[:end]])
            parts, held = [block[end:]], len(block) - end  # before the yield, so that a long line is not in memory twice
            yield _strip_mark(offset, text)
            offset += len(text)
        if held:
            yield _strip_mark(offset, b"".join(parts))

    def _read_rest_of_line(self, path: str, detail: LineRange) -> bytes:
        """The bytes from the end of a range to the end of the line that crosses it."""
        parts: list[bytes] = []
        start, step = detail.stop, BEYOND_BYTES
        while start < detail.file.num_bytes:
            part = self.storage.read(detail.file, start, min(start + step, detail.file.num_bytes)).to_pybytes()
            end = part.find(b"\n")
            if end >= 0:
                parts.append(part[: end + 1])
                break
            parts.append(part)
            start, step = start + step, min(step * 4, BLOCK_BYTES)
            self._check_line(path, detail.stop, start - detail.stop)
        return b"".join(parts)

    def _check_line(self, path: str, offset: int, num_bytes: int) -> None:
        if num_bytes > self.most_unit_bytes:
            raise BufferTooSmallError(
                f"{path} has no end of a line in the {num_bytes:,} bytes from byte {offset:,} on, and a line may have "
                f"{self.most_unit_bytes:,}: is it {self.kind}? If it is, raise buffer_bytes, which is {self.buffer_bytes:,}"
            )


class LineReader:
    """Reads units, and keeps the compressed files open that were read last: their next units are read from there."""

    def __init__(self, source: LineSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._files: OrderedDict[StoredFile, UnpackedFile] = OrderedDict()

    def read_rows(self, unit: Unit) -> ReadResult:
        return self._source.read_with(unit, self._unpack)

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def _unpack(self, part: PackedPart) -> UnpackedFile:
        with self._lock:
            found = self._files.pop(part.file, None) or self._source.unpack(part)
            self._files[part.file] = found
            while len(self._files) > MOST_LANES:
                self._files.popitem(last=False)
            return found


def _strip_mark(offset: int, text: bytes) -> tuple[int, bytes]:
    if offset == 0 and text.startswith(BYTE_ORDER_MARK):
        return len(BYTE_ORDER_MARK), text[len(BYTE_ORDER_MARK) :]
    return offset, text
