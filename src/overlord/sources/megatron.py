"""Megatron's indexed datasets: a `.bin` file with tokens and nothing else, and an `.idx` file that tells where they are.

A unit is a run of documents of about `unit_bytes`. Listing reads and checks the whole index; a unit only knows its place in
it, and reads its part of the index again, so that a corpus of a billion documents makes no billion-entry list of units.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from overlord.declare.source import MIB, Unit
from overlord.errors import BufferTooSmallError, SourceError, SpecError
from overlord.sources.files import FileSource, check_columns, common_schema, joined_version
from overlord.sources.packed_values import list_column, number_column, numbers, offsets_of
from overlord.sources.reading import ReadResult
from overlord.sources.storage import StoredFile, is_remote, map_threads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
VALUE_TYPES: dict[int, pa.DataType] = {
    1: pa.uint8(),
    2: pa.int8(),
    3: pa.int16(),
    4: pa.int32(),
    5: pa.int64(),
    6: pa.float64(),
    7: pa.float32(),
    8: pa.uint16(),
}
COLUMNS = ("tokens", "sequence_lengths", "modes")


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """Where the arrays of an `.idx` file lie."""

    file: StoredFile
    value_type: pa.DataType
    num_sequences: int
    num_boundaries: int
    """The number of document boundaries: one more than there are documents."""
    has_modes: bool

    @property
    def item_bytes(self) -> int:
        return self.value_type.bit_width // 8

    def lengths(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of the lengths, in tokens, of the sequences [first, stop)."""
        return _HEADER.size + 4 * first, _HEADER.size + 4 * stop

    def pointers(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of the places in the `.bin` file of these sequences."""
        at = _HEADER.size + 4 * self.num_sequences
        return at + 8 * first, at + 8 * stop

    def boundaries(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of some document boundaries: document i has the sequences from boundary i to boundary i + 1."""
        at = _HEADER.size + 12 * self.num_sequences
        return at + 8 * first, at + 8 * stop

    def modes(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of the modes of these sequences."""
        at = _HEADER.size + 12 * self.num_sequences + 8 * self.num_boundaries
        return at + first, at + stop


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """The sequences of a unit and, where rows are documents, the documents that they make."""

    bin: StoredFile
    index: MegatronIndex
    schema: pa.Schema
    first_sequence: int
    stop_sequence: int
    first_document: int = -1
    stop_document: int = -1


@dataclass(frozen=True)
class MegatronBin(FileSource):
    """Megatron-LM's preprocessed data. `paths` names pairs of files by their prefix, as Megatron does (`data/web_document`),
    or by one of the two (`data/*.idx`).

    A row is a document, of all its sequences; with `rows="sequences"` it is a sequence. `columns` chooses from `tokens`,
    `sequence_lengths` (of each document, as a list) and `modes` (of a multimodal dataset: one for each sequence).
    """

    columns: Sequence[str] = ("tokens",)
    rows: Literal["documents", "sequences"] = "documents"
    unit_bytes: int = 8 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))
        if unknown := [name for name in self.columns if name not in COLUMNS]:
            raise SpecError(f"a Megatron dataset has the columns {', '.join(COLUMNS)}, not {unknown[0]!r}")
        if self.rows not in ("documents", "sequences"):
            raise SpecError(f"rows must be 'documents' or 'sequences', not {self.rows!r}")
        if self.unit_bytes < 1:
            raise SpecError(f"unit_bytes must be positive, got {self.unit_bytes}")

    def units(self) -> list[Unit]:
        indexes = self.storage.list_files([_index_path(path) for path in self.patterns])
        bins = self.list_beside([file.path.removesuffix(".idx") + ".bin" for file in indexes])
        found = map_threads(lambda pair: self._list_pair(*pair), zip(indexes, bins, strict=True))
        schemas = [(bin_.path, self._schema(index)) for bin_, (index, _) in zip(bins, found, strict=True)]
        schema = common_schema(schemas, self.columns)
        units: list[Unit] = []
        for bin_, (index, parts) in zip(bins, found, strict=True):
            version = joined_version(bin_, index.file)
            for number, part in enumerate(parts):
                if self.rows == "documents":
                    places = part.first_sequence, part.stop_sequence, part.first_row, part.stop_row
                else:
                    places = part.first_sequence, part.stop_sequence
                detail = SequenceRange(bin_, index, schema, *places)
                num_rows = part.stop_row - part.first_row
                units.append(Unit(bin_.path, number, num_rows, part.num_bytes, detail, version))
        return self._check_not_empty(units)

    def read_rows(self, unit: Unit) -> ReadResult:
        detail: SequenceRange = unit.detail
        index = detail.index
        first, stop = detail.first_sequence, detail.stop_sequence
        if unit.num_bytes > self.most_unit_bytes:
            raise BufferTooSmallError(
                f"{unit} has {unit.num_bytes:,} bytes of tokens, and a unit may take "
                f"{self.most_unit_bytes:,}; raise "
                f"buffer_bytes, which is {self.buffer_bytes:,}, or lower unit_bytes (a document is never cut)"
            )
        wanted = [index.lengths(first, stop), index.pointers(first, stop)]
        is_documents = detail.first_document >= 0
        if is_documents:
            wanted.append(index.boundaries(detail.first_document, detail.stop_document + 1))
        if "modes" in detail.schema.names:
            wanted.append(index.modes(first, stop))
        parts = self._read_parts(index.file, wanted)
        lengths = numbers(parts[0], np.int32).astype(np.int64)
        ends = offsets_of(lengths)
        rows = numbers(parts[2], np.int64) - first if is_documents else np.arange(stop - first + 1)
        is_ordered = rows[0] == 0 and rows[-1] == len(lengths) and (np.diff(rows) >= 0).all()
        if (lengths < 0).any() or int(ends[-1]) * index.item_bytes != unit.num_bytes or not is_ordered:
            raise _corrupt(index.file, "it names other sequences than when it was listed")
        columns: dict[str, Any] = {}
        for name in detail.schema.names:
            if name == "tokens":
                values = self._read_tokens(detail, lengths, numbers(parts[1], np.int64))
                columns[name] = list_column(unit.path, ends[rows], values)
            elif name == "sequence_lengths":
                columns[name] = list_column(unit.path, rows, pa.array(lengths.astype(np.int32)))
            else:
                columns[name] = list_column(unit.path, rows, pa.array(numbers(parts[-1], np.int8)))
        return ReadResult(pa.table(columns, schema=detail.schema))

    def identity(self) -> str:
        columns = list(self.columns)
        return f"MegatronBin({list(self.patterns)!r}, columns={columns!r}, rows={self.rows}, unit_bytes={self.unit_bytes})"

    def _schema(self, index: MegatronIndex) -> pa.Schema:
        types = {"tokens": index.value_type, "sequence_lengths": pa.int32(), "modes": pa.int8()}
        names = [name for name in COLUMNS if name != "modes" or index.has_modes]
        return pa.schema([(name, pa.list_(types[name])) for name in names])

    def _read_parts(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> list[pa.Buffer]:
        def read(place: tuple[int, int]) -> pa.Buffer:
            return self.storage.read(file, *place)

        return map_threads(read, ranges) if is_remote(file.path) else [read(place) for place in ranges]

    def _read_tokens(self, detail: SequenceRange, lengths: NDArray[np.int64], pointers: NDArray[np.int64]) -> pa.Array:
        sizes = lengths * detail.index.item_bytes
        total = int(sizes.sum())
        if not total:
            return pa.array([], detail.index.value_type)
        if (pointers[1:] == pointers[:-1] + sizes[:-1]).all():  # as Megatron writes them
            data = self.storage.read(detail.bin, int(pointers[0]), int(pointers[0]) + total)
        else:
            places = [(at, at + size) for at, size in zip(pointers.tolist(), sizes.tolist(), strict=True) if size]
            pieces = self._read_parts(detail.bin, places)
            data = pa.py_buffer(b"".join(memoryview(piece) for piece in pieces))
        return number_column(detail.index.value_type, data, total // detail.index.item_bytes)

    def _list_pair(self, index_file: StoredFile, bin_: StoredFile) -> tuple[MegatronIndex, list[_RowRun]]:
        """The index of a pair, and its units."""
        index, lengths, pointers, boundaries = self._read_index(index_file)
        sizes = lengths.astype(np.int64) * index.item_bytes
        if (lengths < 0).any() or (pointers < 0).any():
            raise _corrupt(index_file, "a sequence has a length or a place below 0")
        last = int((pointers + sizes).max(initial=0))
        if last > bin_.num_bytes:
            raise SourceError(
                f"{bin_.path} has {bin_.num_bytes:,} bytes and its index, {index_file.path}, names tokens up to byte "
                f"{last:,}: it was cut off, or belongs to another index; copy or write the pair again"
            )
        if self.rows == "sequences":
            boundaries = np.arange(len(lengths) + 1)
        elif len(boundaries) < 2 and len(lengths):
            raise SourceError(
                f"{index_file.path} has {len(lengths):,} sequences and no document, so whatever wrote it did not end its "
                "documents; rows='sequences' reads each sequence as a row"
            )
        elif len(lengths) and (boundaries[0] != 0 or boundaries[-1] != len(lengths) or (np.diff(boundaries) < 0).any()):
            raise _corrupt(index_file, "its document boundaries do not cover its sequences in order")
        offsets = offsets_of(sizes)[boundaries] if len(lengths) else np.zeros(1, np.int64)
        return index, _parts(boundaries, offsets, self.unit_bytes)

    def _read_index(self, file: StoredFile) -> tuple[MegatronIndex, NDArray[Any], NDArray[Any], NDArray[Any]]:
        head = self.storage.read(file, 0, min(_HEADER.size, file.num_bytes)).to_pybytes()
        if not head.startswith(MAGIC):
            raise SourceError(
                f"{file.path} is not the index of a Megatron dataset (it begins with {head[:9]!r}, not with {MAGIC!r}); "
                "name the .idx file, or the prefix that .bin and .idx share"
            )
        if len(head) < _HEADER.size:
            raise _corrupt(file, f"it has {file.num_bytes} bytes, less than its header")
        _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
        if version != 1:
            raise SourceError(f"{file.path} has version {version} of Megatron's index, and only version 1 is known")
        if code not in VALUE_TYPES:
            raise _corrupt(file, f"it names the type {code} of tokens, and there are 1 to {len(VALUE_TYPES)}")
        whole = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if file.num_bytes not in (whole, whole + num_sequences):
            raise _corrupt(
                file,
                f"it has {file.num_bytes:,} bytes, and {num_sequences:,} sequences in {max(num_boundaries - 1, 0):,} "
                f"documents take {whole:,} (or {whole + num_sequences:,} with modes)",
            )
        has_modes = num_sequences > 0 and file.num_bytes > whole
        index = MegatronIndex(file, VALUE_TYPES[code], num_sequences, num_boundaries, has_modes)
        data = self.storage.read(file, _HEADER.size, whole)
        lengths = numbers(data, np.int32, num_sequences)
        pointers = numbers(data, np.int64, num_sequences, 4 * num_sequences)
        return index, lengths, pointers, numbers(data, np.int64, num_boundaries, 12 * num_sequences)


@dataclass(frozen=True, slots=True)
class _RowRun:
    """A unit of a pair; a row is a document or a sequence."""

    first_row: int
    stop_row: int
    first_sequence: int
    stop_sequence: int
    num_bytes: int


def _parts(boundaries: NDArray[np.int64], offsets: NDArray[np.int64], unit_bytes: int) -> list[_RowRun]:
    """The rows in units: rows that begin in the same `unit_bytes` of the data are one unit."""
    num_rows = len(boundaries) - 1
    if num_rows < 1:
        return []
    bins = offsets[:-1] // unit_bytes
    starts = [0, *(np.flatnonzero(np.diff(bins)) + 1).tolist()]
    return [
        _RowRun(first, stop, int(boundaries[first]), int(boundaries[stop]), int(offsets[stop] - offsets[first]))
        for first, stop in zip(starts, [*starts[1:], num_rows], strict=True)
    ]


def _index_path(path: str) -> str:
    for ending in (".bin", ".idx"):
        if path.endswith(ending):
            return f"{path.removesuffix(ending)}.idx"
    return f"{path}.idx"


def _corrupt(file: StoredFile, what: str) -> SourceError:
    return SourceError(f"{file.path} is damaged: {what}; copy or write it again")
