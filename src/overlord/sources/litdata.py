"""litData's optimised datasets: a folder with `index.json` and chunks, which may be compressed. A unit is a chunk.

Samples lie one after the other in a chunk, or in an Arrow table at its end. A chunk is read whole; only columns that are
asked for are decoded and checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import BufferTooSmallError, SchemaError, SourceError, StorageError
from overlord.sources.arrow_ipc import decode_table
from overlord.sources.column_types import cast_table
from overlord.sources.files import FileSource, check_columns, common_schema, joined_version
from overlord.sources.litdata_columns import (
    LitDataSamples,
    footer_schema,
    leaf_names,
    leaf_type,
    needs_first_sample,
    optional_columns,
)
from overlord.sources.packed_samples import PackedColumns
from overlord.sources.packed_values import numbers, offsets_of
from overlord.sources.reading import validate
from overlord.sources.storage import map_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.sources.range_cache import RangeOfFile
    from overlord.sources.reading import ReadResult
    from overlord.sources.storage import StoredFile

_FRAMED = b"LDFZ01\0\0"
_FRAMED_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("start", "<u8"), ("size", "<u4"), ("raw", "<u4")])
_FOOTER = b"LDARW01\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OTHER_LOADERS = {
    "ParquetLoader": "it is an index of Parquet files: ol.Parquet reads these",
    "TemporalArrayLoader": "its records of frames are cut by litData's own loader: write them as arrays",
}


class LitDataChunk(msgspec.Struct, frozen=True):
    """What the index says of a chunk."""

    filename: str
    chunk_bytes: int
    """Of the file; of the content where the whole file is compressed. Early releases did not count the offsets."""
    chunk_size: int
    """Its samples."""
    dim: int | None = None


class LitDataConfig(msgspec.Struct, frozen=True):
    """What the index says of all chunks."""

    compression: str | None = None
    compression_level: str | None = None
    data_format: list[str] | None = None
    data_spec: str | None = None
    types: Any = None
    encryption: Any = None
    item_loader: str | None = None


class _LitDataIndex(msgspec.Struct, frozen=True):
    chunks: list[LitDataChunk]
    config: LitDataConfig


@dataclass(frozen=True, slots=True)
class _Dataset:
    """What the chunks of an index have in common."""

    columns: PackedColumns
    """The values of samples."""
    has_tables: bool
    """Chunks end with an Arrow table, in place of values one after the other; some may not, where Arrow had no type."""
    optional: frozenset[str] = frozenset()
    """Columns that not every one of these tables has."""


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk as it is stored."""

    file: StoredFile
    dataset: _Dataset
    schema: pa.Schema
    """The columns to read."""
    num_samples: int
    raw_bytes: int
    """As the index says."""
    wrapping: str
    """What is compressed: nothing, the whole `file`, or each `batch` or `sample` in it."""

    @classmethod
    def of(cls, file: StoredFile, dataset: _Dataset, config: LitDataConfig, entry: LitDataChunk) -> ChunkFile:
        wrapping = _wrapping(config, file.path)
        return cls(file, dataset, pa.schema([]), entry.chunk_size, entry.chunk_bytes, wrapping)


@dataclass(frozen=True)
class LitData(FileSource):
    """Datasets that `litdata.optimize` wrote. `paths` names folders with an `index.json`, or these files; several are read
    one after the other.

    `columns` names the columns to read, all of them unless given: the keys of samples, with dots between the keys of
    nested ones, and numbers in lists and tuples. A sample that is one value has the column `item`, or `tokens` where it was
    written for litData's TokensLoader; a row is a sample as it was written, not a block of tokens. Tensors and arrays are
    lists, nested for each dimension. Images, files and pickles are the bytes that were stored (nothing is unpickled); nested
    values are JSON text, unless all columns are plain ones: these are read as they are.
    """

    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))

    def units(self) -> list[Unit]:
        indexes = self.storage.list_files([_index_path(path) for path in self.patterns])
        listed = [(index, *self._read_index(index)) for index in indexes]
        found = [(index, config, chunk) for index, config, chunks in listed for chunk in chunks if chunk.chunk_size]
        if not found:
            return self._check_not_empty([])
        chunks: list[tuple[StoredFile, ChunkFile]] = []
        schemas: list[tuple[str, pa.Schema]] = []
        scales: dict[str, float] = {}
        dataset = _Dataset(PackedColumns((), (), ()), False)
        for file, (index, config, entry) in zip(self._list_chunks(found), found, strict=True):
            if index.path not in scales:
                dataset, schema = self._open_dataset(index.path, config, ChunkFile.of(file, dataset, config, entry))
                schemas.append((index.path, schema))
                scales[index.path] = self._scale(ChunkFile.of(file, dataset, config, entry))
            chunks.append((index, ChunkFile.of(file, dataset, config, entry)))
        schema = common_schema(schemas, self.columns)
        return [
            Unit(
                chunk.file.path,
                0,
                chunk.num_samples,
                round(chunk.raw_bytes * scales[index.path]),
                replace(chunk, schema=schema),
                joined_version(chunk.file, index),
            )
            for index, chunk in chunks
        ]

    def read_rows(self, unit: Unit) -> ReadResult:
        chunk: ChunkFile = unit.detail
        data = self._read_file(chunk)
        result = self._read_table(chunk, data) if chunk.dataset.has_tables else None
        if result is not None:
            return result
        samples = self._unpack(chunk, data)
        columns = [_column(chunk, samples, field) for field in chunk.schema]
        return samples.result(pa.table(columns, schema=chunk.schema), unit.path)

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        chunk: ChunkFile = unit.detail
        return [(chunk.file, 0, chunk.file.num_bytes)]

    def identity(self) -> str:
        return f"LitData({list(self.patterns)!r}, columns={self.columns and list(self.columns)!r})"

    def _read_index(self, file: StoredFile) -> tuple[LitDataConfig, list[LitDataChunk]]:
        data = self.storage.read(file, 0, file.num_bytes).to_pybytes()
        try:
            index = msgspec.json.decode(data, type=_LitDataIndex)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            hint = "; ol.formats.Mds reads it" if b'"shards"' in data else "; copy or write the dataset again"
            raise SourceError(f"{file.path} is not the index of a litData dataset: {error}{hint}") from error
        config = index.config
        if config.item_loader in _OTHER_LOADERS:
            raise SourceError(f"{file.path} was written for the {config.item_loader}; {_OTHER_LOADERS[config.item_loader]}")
        if config.encryption:
            raise SourceError(f"{file.path} says that its chunks are encrypted: write the dataset without encryption")
        if not config.data_format:
            raise SourceError(f"{file.path} is damaged: it does not describe samples; copy or write the dataset again")
        if config.compression is not None and config.compression.partition(":")[0] != "zstd":
            raise SourceError(f"{file.path} says that chunks are compressed by {config.compression!r}; known is zstd")
        if config.compression_level not in (None, "", "chunk", "batch", "sample"):
            raise SourceError(f"{file.path} has the compression_level {config.compression_level!r}, which is not known")
        for number, chunk in enumerate(index.chunks):
            if chunk.chunk_size < 0 or chunk.chunk_bytes < 0:
                raise _damaged(f"chunk {number} of {file.path}", "it has numbers below 0")
        return config, index.chunks

    def _list_chunks(self, found: Sequence[tuple[StoredFile, LitDataConfig, LitDataChunk]]) -> list[StoredFile]:
        def find(entry: tuple[StoredFile, LitDataConfig, LitDataChunk]) -> StoredFile:
            index, config, chunk = entry
            folder = index.path.rpartition("/")[0]
            names = [chunk.filename]
            if _wrapping(config, chunk.filename) == "file":  # litData leaves such a chunk decompressed once it has read it
                names.append(chunk.filename.replace(f".{config.compression}.", "."))
            file = self._find([f"{folder}/{name}" if folder else name for name in names])
            is_packed = _wrapping(config, file.path) == "file"
            if not is_packed and file.num_bytes not in _sizes(chunk.chunk_bytes, chunk.chunk_size):
                raise SourceError(
                    f"{file.path} has {file.num_bytes:,} bytes, and its index.json says {chunk.chunk_bytes:,}: it was cut "
                    "off, or belongs to another index; copy or write it again"
                )
            return file

        files = map_threads(find, found)
        named: set[str] = set()
        for file, (index, _, _) in zip(files, found, strict=True):
            if file.path in named:
                raise SourceError(f"{index.path} names the chunk {file.path} twice: it would be read twice; write it again")
            named.add(file.path)
        return files

    def _find(self, paths: Sequence[str]) -> StoredFile:
        """The first of these files that is there."""
        try:
            return self.list_beside(paths[:1])[0]
        except StorageError:
            raise
        except SourceError as error:
            for path in paths[1:]:
                try:
                    return self.list_beside([path])[0]
                except SourceError:
                    raise error from None
            raise

    def _open_dataset(self, where: str, config: LitDataConfig, first: ChunkFile) -> tuple[_Dataset, pa.Schema]:
        """What chunks have in common, and the columns. A type that only data tells is that of the first sample."""
        formats = config.data_format or []
        is_tokens = config.item_loader == "TokensLoader"
        try:
            names = leaf_names(config.data_spec, len(formats), "tokens" if is_tokens else "item")
        except (msgspec.MsgspecError, ValueError) as error:
            raise SourceError(f"{where} is damaged: {error}; copy or write the dataset again") from error
        columns = PackedColumns(tuple(names), tuple(formats), () if is_tokens else (None,) * len(names))
        if is_tokens and len(names) > 1:
            raise SourceError(f"{where} is damaged: it has tokens of {len(names)} values; copy or write the dataset again")
        table = footer_schema(config.types, names)
        size = first.file.num_bytes
        if table is not None and self.storage.read(first.file, max(0, size - 8), size).to_pybytes() == _FOOTER:
            return _Dataset(columns, True, optional_columns(config.types)), table
        dataset = _Dataset(columns, False)
        types: dict[str, pa.DataType] = {}
        samples: LitDataSamples | None = None
        for name, leaf in zip(names, formats, strict=True):
            if self.columns is not None and name not in self.columns:
                types[name] = pa.null()
                continue
            value = None
            if needs_first_sample(leaf):
                if samples is None:
                    whole = replace(first, dataset=dataset)
                    samples = self._unpack(whole, self._read_file(whole))
                (start, *_), (size, *_) = samples.places(name)
                value = samples.data.slice(int(start), int(size)).to_pybytes()
            types[name] = leaf_type(first.file.path, name, leaf, value)
        return dataset, pa.schema(list(types.items()))

    def _scale(self, chunk: ChunkFile) -> float:
        """How much larger chunks are once they are decompressed, by the first one."""
        if chunk.wrapping not in ("batch", "sample") or chunk.dataset.has_tables:
            return 1.0
        return max(1.0, self._unpack(chunk, self._read_file(chunk)).data.size / max(chunk.raw_bytes, 1))

    def _read_file(self, chunk: ChunkFile) -> pa.Buffer:
        """The content of a chunk, decompressed if all of it is compressed."""
        path = chunk.file.path
        most = max(_sizes(chunk.raw_bytes, chunk.num_samples)) if chunk.wrapping == "file" else chunk.file.num_bytes
        self._check_bytes(path, most)
        stored = self.storage.read(chunk.file, 0, chunk.file.num_bytes)
        if chunk.wrapping != "file":
            return stored
        try:
            with pa.CompressedInputStream(pa.BufferReader(stored), "zstd") as stream:
                return stream.read_buffer(most + 1)
        except (OSError, EOFError, ValueError) as error:
            raise SourceError(f"{path} is not whole zstd data: {error}; copy or write it again") from error

    def _check_bytes(self, path: str, num_bytes: int) -> None:
        if num_bytes > self.most_unit_bytes:
            raise BufferTooSmallError(
                f"{path} has {num_bytes:,} bytes decompressed, and a unit may take {self.most_unit_bytes:,}; raise "
                f"buffer_bytes, which is {self.buffer_bytes:,}, or write smaller chunks (chunk_bytes of litdata.optimize)"
            )

    def _read_table(self, chunk: ChunkFile, data: pa.Buffer) -> ReadResult | None:
        """The Arrow table at the end of a chunk, if it has one."""
        if data.size < 12 or data[-8:].to_pybytes() != _FOOTER:
            return None
        path = chunk.file.path
        size = int.from_bytes(data[-12:-8].to_pybytes(), "little")
        found = int(numbers(data, "<u4", 1)[0])
        if not 0 < size <= data.size - 12 or found != chunk.num_samples:
            raise _damaged(path, f"it has {found:,} samples, and its index.json says {chunk.num_samples:,}")
        try:
            table = decode_table(path, data.slice(data.size - 12 - size, size), self.most_unit_bytes)
            if table.num_rows != chunk.num_samples:
                raise _damaged(path, f"it has {table.num_rows:,} rows, and its index.json says {chunk.num_samples:,}")
            names = [name for name in chunk.schema.names if table.column_names.count(name) == 1]
            if missing := sorted({*chunk.schema.names} - {*names} - chunk.dataset.optional):
                raise _damaged(path, f"its table does not have the column {missing[0]!r}")
            result = validate(table.select(names), path)  # before the cast, which trusts it
            return replace(result, table=cast_table(result.table, chunk.schema))
        except (pa.ArrowException, OSError, EOFError, struct.error, ValueError, IndexError) as error:
            raise _damaged(path, f"its table cannot be read: {error}") from error

    def _unpack(self, chunk: ChunkFile, data: pa.Buffer) -> LitDataSamples:
        if chunk.wrapping == "batch":
            return self._unpack_frames(chunk, data)
        path, num_samples = chunk.file.path, chunk.num_samples
        _check_count(chunk, int(numbers(data, "<u4", 1)[0]) if data.size >= 4 else 0, data, 8 + 4 * num_samples)
        if chunk.wrapping == "file" and data.size not in _sizes(chunk.raw_bytes, num_samples):
            raise _damaged(path, f"it has {data.size:,} bytes decompressed, and its index.json says {chunk.raw_bytes:,}")
        offsets = numbers(data, "<u4", num_samples + 1, 4).astype(np.int64)
        if offsets[0] < 8 + 4 * num_samples or offsets[-1] > data.size or (np.diff(offsets) < 0).any():
            raise _damaged(path, f"its samples do not lie in its {data.size:,} bytes in order")
        if offsets[-1] == offsets[0] and offsets[-1] < data.size:
            raise _damaged(path, "its samples are empty, and the table that should have them cannot be found at its end")
        if chunk.wrapping == "sample":
            return self._unpack_samples(chunk, data, offsets)
        return LitDataSamples(data, offsets, chunk.dataset.columns, path)

    def _unpack_frames(self, chunk: ChunkFile, data: pa.Buffer) -> LitDataSamples:
        """A chunk whose samples are compressed some hundred at a time, each frame for itself."""
        path, num_samples = chunk.file.path, chunk.num_samples
        if data.size < _FRAMED_HEAD.size or data[:8].to_pybytes() != _FRAMED:
            raise _damaged(path, "it does not begin like a chunk of compressed batches, as its index.json says")
        _, version, _, found, _, num_frames = _FRAMED_HEAD.unpack_from(data)
        if version != 1:
            raise SourceError(f"{path} has version {version} of compressed batches, and only version 1 is known")
        body = _FRAMED_HEAD.size + 4 * (num_samples + 1) + _FRAME.itemsize * num_frames
        _check_count(chunk, found, data, body)
        offsets = numbers(data, "<u4", num_samples + 1, _FRAMED_HEAD.size).astype(np.int64)
        frames = numbers(data, _FRAME, num_frames, _FRAMED_HEAD.size + 4 * (num_samples + 1))
        firsts, items = frames["first"].astype(np.int64), frames["items"].astype(np.int64)
        raw = frames["raw"].astype(np.int64)
        is_whole = num_frames > 0 and (firsts == offsets_of(items)[:-1]).all() and firsts[-1] + items[-1] == num_samples
        if not is_whole or offsets[0] or (np.diff(offsets) < 0).any() or (offsets_of(raw) != offsets[[*firsts, -1]]).any():
            raise _damaged(path, "its batches do not have its samples in order")
        self._check_bytes(path, int(raw.sum()))
        parts: list[Any] = []
        for first, start, size, raw_bytes in zip(firsts, frames["start"], frames["size"], raw, strict=True):
            if start < body or int(start) + int(size) > data.size:
                raise _damaged(path, f"the batch of sample {first:,} lies outside of its {data.size:,} bytes")
            try:
                parts.append(_inflate(data.slice(int(start), int(size)), int(raw_bytes)))
            except (OSError, ValueError) as error:
                raise _damaged(path, f"the batch of sample {first:,} is not whole zstd data: {error}") from error
        joined = parts[0] if len(parts) == 1 else pa.py_buffer(b"".join(parts))
        return LitDataSamples(joined, offsets, chunk.dataset.columns, path)

    def _unpack_samples(self, chunk: ChunkFile, data: pa.Buffer, offsets: NDArray[np.int64]) -> LitDataSamples:
        """A chunk whose samples are compressed one by one. A Python loop over samples: each has a size of its own."""
        parts: list[Any] = []
        bad: dict[int, str] = {}
        num_bytes = 0
        for row, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            try:
                piece = data.slice(start, stop - start)
                num_bytes += _inflated_bytes(piece)
                self._check_bytes(chunk.file.path, num_bytes)
                parts.append(_inflate(piece, _inflated_bytes(piece)))
            except (OSError, ValueError) as error:
                bad[row] = f"it is not whole zstd data: {error}"
                parts.append(b"")
        sizes = np.array([len(part) for part in parts], np.int64)
        columns = chunk.dataset.columns
        return LitDataSamples(pa.py_buffer(b"".join(parts)), offsets_of(sizes), columns, chunk.file.path, bad)


def _inflated_bytes(frame: pa.Buffer) -> int:
    """What a frame of zstd says that its content has. Raises ValueError where it does not say it."""
    head = frame[:18].to_pybytes()
    if head[:4] != _ZSTD or len(head) < 6:
        raise ValueError("it has no frame of zstd")
    flags = head[4]
    is_single = bool(flags & 0x20)
    width = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    if not width or len(head) < at + width:
        raise ValueError("it does not say its size")
    return int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)


def _inflate(frame: pa.Buffer, num_bytes: int) -> pa.Buffer:
    if _inflated_bytes(frame) != num_bytes:  # Arrow would leave the rest of its memory as it was
        raise ValueError(f"it says that it has {_inflated_bytes(frame):,} bytes, and its index {num_bytes:,}")
    return pa.Codec("zstd").decompress(frame, num_bytes) if num_bytes else pa.py_buffer(b"")


def _damaged(path: str, how: str) -> SourceError:
    return SourceError(f"{path} is damaged: {how}; copy or write it again")


def _sizes(num_bytes: int, num_samples: int) -> tuple[int, int]:
    """The sizes that a chunk of `num_bytes` may have: early releases counted the samples alone."""
    return num_bytes, num_bytes + 8 + 4 * num_samples


def _check_count(chunk: ChunkFile, found: int, data: pa.Buffer, head_bytes: int) -> None:
    if found != chunk.num_samples or data.size < head_bytes:
        size = f"{found:,} samples in {data.size:,} bytes"
        raise _damaged(chunk.file.path, f"it has {size}, and its index.json says {chunk.num_samples:,}")


def _wrapping(config: LitDataConfig, path: str) -> str:
    if config.compression is None:
        return ""
    if config.compression_level in ("batch", "sample"):
        return config.compression_level
    # Chunks with tables are not compressed as files.
    return "file" if f".{config.compression}." in path.rpartition("/")[2] else ""


def _column(chunk: ChunkFile, samples: LitDataSamples, field: pa.Field[Any]) -> Any:
    """A column of a chunk without a table. Where other chunks have tables, its types are those of the tables."""
    if not chunk.dataset.has_tables:
        return samples.column(field.name, field.type)
    columns = chunk.dataset.columns
    if field.name not in columns.names:
        raise SchemaError(
            f"{chunk.file.path} has no table, unlike other chunks, and its samples have the column {field.name!r} in parts "
            "or not at all; leave it out of columns, or write the dataset again"
        )
    leaf = columns.encodings[columns.names.index(field.name)]
    own = field.type if leaf == "json" else leaf_type(chunk.file.path, field.name, leaf, None)
    column = samples.column(field.name, own)
    return column if column.type.equals(field.type) else column.cast(field.type)


def _index_path(path: str) -> str:
    return path if path.endswith(".json") else f"{path.rstrip('/')}/index.json"
