"""Mosaic Streaming's MDS: a folder with `index.json` and shards, which may be compressed. A unit is a shard.

A shard keeps whole samples one after the other, so its bytes are all read; only columns that are asked for are decoded and
checked. Hashes that the index records are checked on every read.
"""

from __future__ import annotations

import bz2
import hashlib
import logging
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import BufferTooSmallError, SourceError
from overlord.sources.files import FileSource, check_columns, common_schema, joined_version
from overlord.sources.mds_columns import MdsSamples, column_type, needs_first_sample
from overlord.sources.packed_samples import PackedColumns
from overlord.sources.packed_values import numbers
from overlord.sources.storage import map_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.sources.range_cache import RangeOfFile
    from overlord.sources.reading import ReadResult
    from overlord.sources.storage import StoredFile

_CODECS = {"gz": "gzip", "zstd": "zstd", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}
_log = logging.getLogger("overlord.sources")


class MdsFile(msgspec.Struct, frozen=True):
    """What the index says of a shard's file."""

    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class MdsEntry(msgspec.Struct, frozen=True):
    """What the index says of a shard."""

    format: str
    version: int
    samples: int
    column_names: list[str] = []
    column_encodings: list[str] = []
    column_sizes: list[int | None] = []
    raw_data: MdsFile | None = None
    zip_data: MdsFile | None = None
    compression: str | None = None


class _MdsIndex(msgspec.Struct, frozen=True):
    version: int
    shards: list[MdsEntry]


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard as it is stored: compressed if `codec` is given."""

    file: StoredFile
    columns: PackedColumns
    schema: pa.Schema
    raw_bytes: int
    codec: str
    hashes: tuple[tuple[str, str], ...]
    """(algorithm, digest) of the stored file."""
    raw_hashes: tuple[tuple[str, str], ...]
    """Those of the decompressed shard, where the stored file has none."""


@dataclass(frozen=True)
class Mds(FileSource):
    """Datasets that `streaming.MDSWriter` wrote. `paths` names folders with an `index.json`, or these files; several are
    read one after the other, like streams.

    `columns` names the columns to read, all of them unless given. Texts and JSON are strings, images and pickles are the
    bytes that were stored (nothing is unpickled), arrays are lists, nested for each dimension. `verify` checks the first
    of a file's hashes that this Python knows (those of hashlib, and xxhash where it is installed).
    """

    columns: Sequence[str] | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))

    def units(self) -> list[Unit]:
        indexes = self.storage.list_files([_index_path(path) for path in self.patterns])
        found = [(index, entry) for index in indexes for entry in self._read_index(index) if entry.samples]
        files = self._list_shards(found)
        types: dict[tuple[str, str], pa.DataType] = {}
        schemas = [(file.path, self._schema(file, entry, types)) for file, (_, entry) in zip(files, found, strict=True)]
        if not found:
            return self._check_not_empty([])
        schema = common_schema(schemas, self.columns)
        return [
            Unit(
                file.path,
                0,
                entry.samples,
                _raw(entry).bytes,
                _shard(file, entry, schema),
                joined_version(file, index),
            )
            for file, (index, entry) in zip(files, found, strict=True)
        ]

    def read_rows(self, unit: Unit) -> ReadResult:
        shard: MdsShard = unit.detail
        samples = self._open(shard, unit.num_rows or 0)
        columns = [samples.column(field.name, field.type) for field in shard.schema]
        table = pa.table(columns, schema=shard.schema)
        return samples.result(table, unit.path)

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        shard: MdsShard = unit.detail
        return [(shard.file, 0, shard.file.num_bytes)]

    def identity(self) -> str:
        return f"Mds({list(self.patterns)!r}, columns={self.columns and list(self.columns)!r})"

    def _read_index(self, file: StoredFile) -> list[MdsEntry]:
        data = self.storage.read(file, 0, file.num_bytes).to_pybytes()
        try:
            index = msgspec.json.decode(data, type=_MdsIndex)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{file.path} is not the index of an MDS dataset: {error}; copy or write the dataset again"
            ) from error
        for number, entry in enumerate(index.shards):
            _check_entry(f"shard {number} of {file.path}", entry)
        return index.shards

    def _list_shards(self, found: Sequence[tuple[StoredFile, MdsEntry]]) -> list[StoredFile]:
        """The file of each shard: the compressed one if there is one, else the other, as the library chooses."""

        def find(pair: tuple[StoredFile, MdsEntry]) -> StoredFile:
            index, entry = pair
            folder = index.path.rpartition("/")[0]
            raw = _raw(entry)
            if entry.zip_data is not None:
                try:
                    return self._check_size(self.list_beside([_join(folder, entry.zip_data.basename)])[0], entry.zip_data)
                except SourceError as error:
                    try:
                        return self._check_size(self.list_beside([_join(folder, raw.basename)])[0], raw)
                    except SourceError:
                        raise error from None
            return self._check_size(self.list_beside([_join(folder, raw.basename)])[0], raw)

        files = map_threads(find, found)
        named: dict[str, StoredFile] = {}
        for file, (index, _) in zip(files, found, strict=True):
            if file.path in named:
                raise SourceError(f"{index.path} names the shard {file.path} twice: it would be read twice; write it again")
            named[file.path] = file
        return files

    def _check_size(self, file: StoredFile, entry: MdsFile) -> StoredFile:
        if file.num_bytes != entry.bytes:
            raise SourceError(
                f"{file.path} has {file.num_bytes:,} bytes, and its index.json says {entry.bytes:,}: it was cut off, or "
                "belongs to another index; copy or write it again"
            )
        return file

    def _schema(self, file: StoredFile, entry: MdsEntry, types: dict[tuple[str, str], pa.DataType]) -> pa.Schema:
        """The columns of a shard, with the types of those to read. A type that only data tells is the first shard's."""
        names = list(entry.column_names)
        wanted = [name for name in names if self.columns is None or name in self.columns]
        encodings = dict(zip(names, entry.column_encodings, strict=True))
        for name in wanted:
            key = name, encodings[name]
            if key not in types:
                first = None
                if needs_first_sample(key[1]):
                    samples = self._open(_shard(file, entry, pa.schema([])), entry.samples)
                    (start, *_), (size, *_) = samples.places(name)
                    first = samples.data.slice(int(start), int(size)).to_pybytes()
                types[key] = column_type(file.path, name, key[1], first)
        return pa.schema([(name, types.get((name, encodings[name]), pa.null())) for name in names])

    def _open(self, shard: MdsShard, num_samples: int) -> MdsSamples:
        data = self._read_raw(shard)
        path = shard.file.path
        found = int(numbers(data, "<u4", 1)[0]) if data.size >= 4 else 0
        if found != num_samples or data.size < 8 + 4 * num_samples:
            raise SourceError(
                f"{path} is damaged: it has {found:,} samples in {data.size:,} bytes, and its index.json says "
                f"{num_samples:,}; copy or write it again"
            )
        offsets = numbers(data, "<u4", num_samples + 1, 4).astype(np.int64)
        if offsets[0] < 8 + 4 * num_samples or offsets[-1] > data.size or (np.diff(offsets) < 0).any():
            raise SourceError(
                f"{path} is damaged: its samples do not lie in its {data.size:,} bytes in order; copy or write it again"
            )
        return MdsSamples(data, offsets, shard.columns, path)

    def _read_raw(self, shard: MdsShard) -> pa.Buffer:
        path = shard.file.path
        if shard.raw_bytes > self.most_unit_bytes:
            raise BufferTooSmallError(
                f"{path} has {shard.raw_bytes:,} bytes decompressed, and a unit may take {self.most_unit_bytes:,}; raise "
                f"buffer_bytes, which is {self.buffer_bytes:,}, or write smaller shards (size_limit of MDSWriter)"
            )
        stored = self.storage.read(shard.file, 0, shard.file.num_bytes)
        if self.verify:
            _check_hash(path, stored, shard.hashes)
        if not shard.codec:
            return stored
        try:
            raw = _decompress(stored, shard.codec, shard.raw_bytes)
        except (OSError, EOFError, ValueError) as error:
            raise SourceError(f"{path} is not whole {shard.codec} data: {error}; copy or write it again") from error
        if raw.size != shard.raw_bytes:
            raise SourceError(
                f"{path} has {raw.size:,} bytes decompressed, and its index.json says {shard.raw_bytes:,}; copy or write it "
                "again"
            )
        if self.verify:
            _check_hash(path, raw, shard.raw_hashes)
        return raw


def _decompress(data: pa.Buffer, codec: Any, num_bytes: int) -> pa.Buffer:
    if codec == "bz2":
        unpacker = bz2.BZ2Decompressor()
        return pa.py_buffer(unpacker.decompress(data.to_pybytes(), num_bytes + 1))
    if codec == "snappy":  # Arrow has no streams of it
        return pa.Codec(codec).decompress(data, num_bytes)
    with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
        return stream.read_buffer(num_bytes + 1)


def _check_hash(path: str, data: pa.Buffer, hashes: Sequence[tuple[str, str]]) -> None:
    for name, expected in hashes:
        new = _hash_named(name)
        if new is not None:
            found = new(data).hexdigest()
            if found != expected:
                raise SourceError(
                    f"{path} has the {name} {found}, and its index.json says {expected}: the shard was damaged or replaced; "
                    "copy it again, or write the dataset again (verify=False reads it as it is)"
                )
            return
    if hashes:
        _log.warning(
            "%s has hashes of kinds that are not known here (%s) and is read unchecked: install xxhash, or write the "
            "dataset with hashes=['sha1']",
            path,
            ", ".join(name for name, _ in hashes),
        )


def _hash_named(name: str) -> Any:
    if name in hashlib.algorithms_available and not name.startswith("shake_"):
        return lambda data: hashlib.new(name, data, usedforsecurity=False)
    try:
        xxhash = import_module("xxhash")
    except ImportError:
        return None
    return getattr(xxhash, name, None) if name in xxhash.algorithms_available else None


def _check_entry(where: str, entry: MdsEntry) -> None:
    if entry.format != "mds":
        hint = "; ol.Jsonl reads its .jsonl files" if entry.format == "json" else ""
        raise SourceError(f"{where} has the format {entry.format!r}, and this reads 'mds'{hint}")
    if entry.version != 2:
        raise SourceError(f"{where} has version {entry.version} of the format, and only version 2 is known")
    if len({len(entry.column_names), len(entry.column_encodings), len(entry.column_sizes)}) > 1 or entry.raw_data is None:
        raise SourceError(f"{where} is damaged: it does not describe each of its columns; copy or write the dataset again")
    if entry.samples < 0 or any(size is not None and size < 0 for size in entry.column_sizes):
        raise SourceError(f"{where} is damaged: it has numbers below 0; copy or write the dataset again")
    codec = (entry.compression or "").partition(":")[0]
    if entry.zip_data is not None and codec not in _CODECS:
        raise SourceError(f"{where} is compressed by {entry.compression!r}; known are {', '.join(_CODECS)}")


def _raw(entry: MdsEntry) -> MdsFile:
    assert entry.raw_data is not None  # _check_entry
    return entry.raw_data


def _shard(file: StoredFile, entry: MdsEntry, schema: pa.Schema) -> MdsShard:
    raw = _raw(entry)
    is_packed = entry.zip_data is not None and file.path.endswith(entry.zip_data.basename)
    stored = entry.zip_data if is_packed and entry.zip_data is not None else raw
    codec = _CODECS[(entry.compression or "").partition(":")[0]] if is_packed else ""
    hashes, raw_hashes = tuple(stored.hashes.items()), tuple(raw.hashes.items())
    columns = PackedColumns(tuple(entry.column_names), tuple(entry.column_encodings), tuple(entry.column_sizes))
    return MdsShard(file, columns, schema, raw.bytes, codec, hashes, raw_hashes if is_packed and not hashes else ())


def _index_path(path: str) -> str:
    return path if path.endswith(".json") else f"{path.rstrip('/')}/index.json"


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
