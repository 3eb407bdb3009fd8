"""JSON Lines, plain or compressed: a unit is a byte range of a plain file, or a whole compressed one.

A line belongs to the range that its first byte lies in, so that every line is read exactly once however files
are cut. Lines are parsed one at a time: a bad line is one bad row with its place, and cannot harm its
neighbours. (Arrow's own JSON reader is nearly twice as fast, but accepts an object over several lines, and
crashes the process on a line that is `null`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from overlord.data.read_result import ReadResult
from overlord.data.readers.compression import codec_of, decompressed
from overlord.data.readers.file_source import FileSource
from overlord.data.readers.json_lines import inferred_schema, parsed
from overlord.data.readers.schemas import checked_columns
from overlord.data.storage import Storage, StoredFile
from overlord.errors import SourceError, SpecError
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
    {"text": pa.string(), ...}. All fields of the first unit are read unless given. Missing fields are null.
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
        start, text = _lines(self.storage, detail)
        must_have = () if detail.declared or unit.index else tuple(detail.schema.names)
        return parsed(unit.path, start, text, detail.schema, must_have)

    def identity(self) -> str:
        columns = self.columns
        if isinstance(columns, Mapping):
            columns = {name: str(type_) for name, type_ in columns.items()}
        return f"Jsonl({list(self.patterns)!r}, columns={columns!r}, unit_bytes={self.unit_bytes})"

    def _schema(self, files: Sequence[StoredFile]) -> pa.Schema:
        if isinstance(self.columns, Mapping):
            return pa.schema(list(self.columns.items()))
        for file in files:
            text = _first_text(self.storage, file, self.unit_bytes)
            if text.strip():
                return inferred_schema(file.path, text, self.columns)
        raise SourceError(f"{self.identity()} has files but not a single row in them: check what wrote them")


def _first_text(storage: Storage, file: StoredFile, unit_bytes: int) -> bytes:
    """The lines of the first unit of a file; of a compressed one, as many as fit in a unit."""
    codec = codec_of(file.path)
    if codec is None:
        detail = LineRange(file, 0, min(unit_bytes, file.num_bytes), pa.schema([]), True)
        return _lines(storage, detail)[1]
    with storage.stream(file) as content:
        text = decompressed(file.path, codec, content, unit_bytes).to_pybytes()
    if len(text) == unit_bytes:
        whole, newline, _ = text.rpartition(b"\n")
        if not newline:
            with storage.stream(file) as content:
                return decompressed(file.path, codec, content).to_pybytes().partition(b"\n")[0]
        text = whole
    return text.removeprefix(BYTE_ORDER_MARK)


def _lines(storage: Storage, detail: LineRange) -> tuple[int, bytes]:
    """(offset, text) of the lines of a range: offset counts from the start of the decompressed file."""
    file = detail.file
    if codec := codec_of(file.path):
        with storage.stream(file) as content:
            text = decompressed(file.path, codec, content).to_pybytes()
        return _without_mark(0, text)
    # One byte earlier: a newline there means that a line begins with the first byte of the range.
    begin = max(0, detail.start - 1)
    text = storage.read(file, begin, detail.stop).to_pybytes()
    if detail.start:
        first = text.find(b"\n") + 1
        if not first or begin + first == detail.stop:
            return detail.stop, b""  # one line covers the whole range; it belongs to an earlier one
        begin, text = begin + first, text[first:]
    if not text.endswith(b"\n"):
        text += _rest_of_line(storage, detail)
    return _without_mark(begin, text)


def _rest_of_line(storage: Storage, detail: LineRange) -> bytes:
    """From the end of a range to the end of the line that is open there."""
    parts: list[bytes] = []
    start, step = detail.stop, BEYOND_BYTES
    num_bytes = detail.file.num_bytes
    while start < num_bytes:
        part = storage.read(detail.file, start, min(start + step, num_bytes)).to_pybytes()
        end = part.find(b"\n")
        if end >= 0:
            parts.append(part[: end + 1])
            break
        parts.append(part)
        start, step = start + step, step * 4
    return b"".join(parts)


def _without_mark(offset: int, text: bytes) -> tuple[int, bytes]:
    if offset == 0 and text.startswith(BYTE_ORDER_MARK):
        return len(BYTE_ORDER_MARK), text[len(BYTE_ORDER_MARK) :]
    return offset, text
