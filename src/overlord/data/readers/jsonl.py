"""JSON Lines, plain or compressed: a unit is a byte range of a plain file, or a whole compressed one.

A line belongs to the range that its first byte lies in, so that every line is read exactly once however files
are cut. Lines are parsed one at a time: a bad line is one bad row with its place, and cannot harm its
neighbours. (Arrow's own JSON reader is nearly twice as fast, but accepts an object over several lines, and
crashes the process on a line that is `null`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from overlord.data.read_result import ReadResult
from overlord.data.readers.compression import BLOCK_BYTES, codec_of, decompressed_blocks
from overlord.data.readers.file_source import FileSource
from overlord.data.readers.json_lines import JsonRows, inferred_schema
from overlord.data.readers.schemas import checked_columns
from overlord.data.storage import StoredFile
from overlord.errors import BufferTooSmallError, SourceError, SpecError
from overlord.spec import MIB, Unit

BEYOND_BYTES = 64 << 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineRange:
    """The lines that begin in the bytes [start, stop) of a file."""

    file: StoredFile
    start: int
    stop: int
    schema: pa.Schema
    declared: bool
    """The user gave the types: then a column may be missing in every row."""


@dataclass(frozen=True)
class Jsonl(FileSource):
    """JSON Lines: .jsonl, and .gz or .zst of it. Blank lines are no rows; fields that are not read are ignored.

    `columns` names the fields to read, with their types inferred from the first unit, or gives the types as
    {"text": pa.string(), ...}. All fields of the first unit are read unless given. Missing fields are null, and keys
    of nested objects are like fields. A value is never changed to fit its type: a row with one that does not fit is a bad
    row. The type `pa.json_()` takes values of any kind, as a column of their JSON text.
    """

    columns: Sequence[str] | Mapping[str, pa.DataType] | None = None
    unit_bytes: int = 8 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", checked_columns(self.columns))
        if self.unit_bytes < 1:
            raise SpecError(f"unit_bytes must be positive, got {self.unit_bytes}")

    def units(self) -> list[Unit]:
        files = [file for file in self.files() if file.num_bytes]
        schema = self._schema(files)
        units: list[Unit] = []
        for file in files:
            size = file.num_bytes if codec_of(file.path) else self.unit_bytes
            for i, start in enumerate(range(0, file.num_bytes, size)):
                stop = min(start + size, file.num_bytes)
                detail = LineRange(file, start, stop, schema, isinstance(self.columns, Mapping))
                units.append(Unit(file.path, i, None, stop - start, detail, file.version))
        return self._some(units)

    def read(self, unit: Unit) -> pa.Table:
        return self.read_rows(unit).strict()

    def read_rows(self, unit: Unit) -> ReadResult:
        detail: LineRange = unit.detail
        must_have = () if detail.declared or unit.index else tuple(detail.schema.names)
        rows = JsonRows(unit.path, detail.schema, must_have, self.most_unit_bytes)
        for offset, text in self._texts(unit.path, detail):
            rows.add(offset, text)
        return rows.result()

    def identity(self) -> str:
        columns = self.columns
        if isinstance(columns, Mapping):
            columns = {name: str(type_) for name, type_ in columns.items()}
        return f"Jsonl({list(self.patterns)!r}, columns={columns!r}, unit_bytes={self.unit_bytes})"

    def _schema(self, files: Sequence[StoredFile]) -> pa.Schema:
        if isinstance(self.columns, Mapping):
            return pa.schema(list(self.columns.items()))
        for file in files:
            text = self._first_text(file)
            if text.strip():
                return inferred_schema(file.path, text, self.columns)
        raise SourceError(f"{self.identity()} has files but not a single row in them: check what wrote them")

    def _first_text(self, file: StoredFile) -> bytes:
        """The lines of the first unit of a file; of a compressed one, as many as fit in a unit, and at least one."""
        codec = codec_of(file.path)
        if codec is None:
            detail = LineRange(file, 0, min(self.unit_bytes, file.num_bytes), pa.schema([]), True)
            return next(self._texts(file.path, detail))[1]
        text = b""
        with self.storage.stream(file) as content:
            for block in decompressed_blocks(file.path, codec, content, self.unit_bytes):
                text += block
                if len(block) < self.unit_bytes:
                    break
                whole, newline, _ = text.rpartition(b"\n")
                if newline:
                    text = whole if len(text) == len(block) else text.partition(b"\n")[0]
                    break
                self._check_line(file.path, 0, len(text))
        return text.removeprefix(BYTE_ORDER_MARK)

    def _texts(self, path: str, detail: LineRange) -> Iterator[tuple[int, bytes]]:
        """(offset, text) of the lines of a range, some at a time: offset counts from the start of the decompressed file."""
        if codec := codec_of(path):
            with self.storage.stream(detail.file) as content:
                yield from self._whole_lines(path, decompressed_blocks(path, codec, content, BLOCK_BYTES))
            return
        # One byte earlier: a newline there means that a line begins with the first byte of the range.
        begin = max(0, detail.start - 1)
        text = self.storage.read(detail.file, begin, detail.stop).to_pybytes()
        if detail.start:
            first = text.find(b"\n") + 1
            if not first or begin + first == detail.stop:
                return  # one line covers the whole range; it belongs to an earlier one
            begin, text = begin + first, text[first:]
        if not text.endswith(b"\n"):
            text += self._rest_of_line(path, detail)
        yield _without_mark(begin, text)

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
            parts, held = [block[end:]], len(block) - end  # before the text is used: a long line is not held twice
            yield _without_mark(offset, text)
            offset += len(text)
        if held:
            yield _without_mark(offset, b"".join(parts))

    def _rest_of_line(self, path: str, detail: LineRange) -> bytes:
        """From the end of a range to the end of the line that is open there."""
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
                f"{self.most_unit_bytes:,}: is it JSON Lines? If it is, raise buffer_bytes, which is {self.buffer_bytes:,}"
            )


def _without_mark(offset: int, text: bytes) -> tuple[int, bytes]:
    if offset == 0 and text.startswith(BYTE_ORDER_MARK):
        return len(BYTE_ORDER_MARK), text[len(BYTE_ORDER_MARK) :]
    return offset, text
