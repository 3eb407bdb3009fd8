"""WebDataset: tar shards whose members are grouped to samples by name. A unit is a shard."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import SchemaError, SourceError, SpecError
from overlord.sources.files import FileSource, check_columns, codec_of, decompress
from overlord.sources.numbers import texts_of
from overlord.sources.reading import BadRow, ReadResult, good_rows
from overlord.sources.storage import (
    FileBytes,
    MappedFile,
    Storage,
    StoredFile,
    is_remote,
    open_local,
)
from overlord.sources.tar_index import Member, read_members
from overlord.sources.views import (
    MOST_BYTES,
    materialize,
    take_rows,
    views_into,
    views_into_file,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.sources.range_cache import RangeOfFile

KEY = "__key__"
HEAD_BYTES = 1 << 20
# The key of a sample is the name up to the first dot of its last part. Names like .hidden and README belong to no sample.
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
# Small, and used by transforms directly: not worth a view.
TEXT = frozenset(("txt", "text", "json", "cls", "cls2", "id", "index", "caption", "transcript", "csv", "tsv", "md"))
_TYPES = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view())


@dataclass(frozen=True, slots=True)
class Shard:
    file: StoredFile
    schema: pa.Schema
    chosen: bool
    """The user named the columns: other members of the shard are ignored."""


@dataclass(frozen=True)
class WebDataset(FileSource):
    """Tar shards (plain, .gz or .zst): a row per key, a column per ending, null where a sample has no such member.

    `columns` names the endings to read, or gives their types as {"jpg": pa.binary(), "txt": pa.string()}; all
    endings of the first shard are read unless given. Texts are binary columns, all others binary_view: these point into
    the shard, so that an image is read, and takes memory, only once it is decoded. See `overlord.sources.views`.
    """

    columns: Sequence[str] | Mapping[str, pa.DataType] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))
        if isinstance(self.columns, Mapping):
            for name, type_ in self.columns.items():
                if type_ not in _TYPES:
                    raise SpecError(f"column {name!r} of a tar is one of {', '.join(map(str, _TYPES))}, not {type_}")
        if self.columns is not None and KEY in self.columns:
            raise SpecError(f"{KEY} is always read; leave it out of columns")

    def units(self) -> list[Unit]:
        files = self.list_files()
        for file in files:
            if not file.num_bytes:
                raise SourceError(f"{file.path} is empty: not a tar archive; copy or write it again")
        schema = self._find_schema(files[0])
        return [
            Unit(file.path, 0, None, file.num_bytes, Shard(file, schema, self.columns is not None), file.version)
            for file in files
        ]

    def read_rows(self, unit: Unit) -> ReadResult:
        shard: Shard = unit.detail
        content = _read_content(self.storage, shard.file, self.most_unit_bytes)
        samples = _group_members(unit.path, content.members)
        wanted = [name for name in shard.schema.names if name != KEY]
        if not shard.chosen and (other := [name for name in samples.places if name not in wanted]):
            raise SchemaError(
                f"{unit.path} has members that end in .{other[0]}, which the first shard has not; say which to read: "
                f"columns={tuple(wanted)!r}"
            )
        if samples.keys and not any(name in samples.places for name in wanted):
            raise SchemaError(f"{unit.path} has no member that ends in any of {wanted}; it has {list(samples.places)}")
        bad: dict[int, str] = {}
        columns: list[pa.Array] = [texts_of(samples.keys)]
        for field in list(shard.schema)[1:]:
            offsets, lengths = samples.column(field.name)
            _check_fits(unit.path, field, lengths)
            columns.append(_cast_values(content.views(offsets, lengths), field, bad))
        table = pa.table(columns, schema=shard.schema)
        mapped = (content.data,) if isinstance(content.data, MappedFile) else ()
        if not bad:
            return ReadResult(table, mapped=mapped)
        reports = tuple(BadRow(i, bad[i], f"{unit.path}, sample {samples.keys[i]!r}") for i in sorted(bad))
        kept = good_rows(len(table), reports)
        return ReadResult(take_rows(table, kept), kept, reports, mapped)

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        shard: Shard = unit.detail
        return [(shard.file, 0, shard.file.num_bytes)]

    def identity(self) -> str:
        columns = self.columns
        if isinstance(columns, Mapping):
            columns = {name: str(type_) for name, type_ in columns.items()}
        return f"WebDataset({list(self.patterns)!r}, columns={columns!r})"

    def _find_schema(self, first: StoredFile) -> pa.Schema:
        if isinstance(self.columns, Mapping):
            return pa.schema([(KEY, pa.string()), *self.columns.items()])
        found = sorted(_read_endings(self.storage, first, self.most_unit_bytes))
        for name in self.columns or ():
            if name not in found:
                raise SchemaError(
                    f"no sample of {first.path} has a member that ends in .{name}; they end in {found}. Declare it with "
                    f"its type if only some shards have it: columns={{{name!r}: pa.binary(), ...}}"
                )
        names = self.columns or found
        return pa.schema([(KEY, pa.string()), *((name, _default_type(name)) for name in names)])


def _default_type(ending: str) -> pa.DataType:
    return pa.binary() if ending.rpartition(".")[2] in TEXT else pa.binary_view()


@dataclass(frozen=True, slots=True)
class _ShardSamples:
    keys: list[str]
    places: dict[str, list[tuple[int, int, int]]]
    """The (sample, offset, number of bytes) of the members of each ending."""

    def column(self, ending: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offset and length of the member of each sample; length -1 where it has none."""
        offsets, lengths = np.zeros(len(self.keys), np.int64), np.full(len(self.keys), -1, np.int64)
        if ending in self.places:
            sample, offset, length = np.array(self.places[ending], np.int64).T
            offsets[sample], lengths[sample] = offset, length
        return offsets, lengths


def _group_members(path: str, found: Sequence[Member]) -> _ShardSamples:
    """Samples in the order of the first appearance of their keys."""
    number: dict[str, int] = {}
    places: dict[str, list[tuple[int, int, int]]] = {}
    seen: set[tuple[int, str]] = set()
    for member in found:
        match = _MEMBER.fullmatch(member.name)
        if match is None:
            continue
        ending = match.group(2).lower()
        sample = number.setdefault(match.group(1), len(number))
        if (sample, ending) in seen:
            raise SourceError(
                f"{path} has the member {member.name!r} twice, again at byte {member.offset:,}: a sample has one member "
                "for each ending; write the archive again"
            )
        if member.fault:
            raise SourceError(
                f"{path} has the member {member.name!r} at byte {member.offset:,}, which {member.fault} and has no "
                "bytes to read: write the archive again with the file itself (tar --dereference), or without the member"
            )
        if member.num_bytes > MOST_BYTES:
            raise SourceError(f"{path} has the member {member.name!r} of {member.num_bytes:,} bytes: the most is 2 GiB")
        seen.add((sample, ending))
        places.setdefault(ending, []).append((sample, member.offset, member.num_bytes))
    return _ShardSamples(list(number), places)


def _read_endings(storage: Storage, file: StoredFile, most_bytes: int) -> set[str]:
    """The endings in a shard. Of a remote shard only the start is fetched, up to the end of its first sample."""
    if codec_of(file.path) or not is_remote(file.path):
        return set(_group_members(file.path, _read_content(storage, file, most_bytes).members).places)
    head_bytes = min(HEAD_BYTES, file.num_bytes)
    while True:
        head = storage.read(file, 0, head_bytes)
        samples = _group_members(file.path, read_members(file.path, head, file.num_bytes))
        if len(samples.keys) > 1 or head_bytes == file.num_bytes:
            return set(samples.places)
        head_bytes = min(head_bytes * 8, file.num_bytes)


@dataclass(frozen=True, slots=True)
class _Content:
    """A shard, in memory or in a local file, and the places of its members."""

    data: pa.Buffer | MappedFile
    members: list[Member]

    def views(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> pa.Array:
        if isinstance(self.data, MappedFile):
            first = {member.offset: member.first for member in self.members}
            return views_into_file(self.data, offsets, lengths, [first.get(offset, b"") for offset in offsets.tolist()])
        return views_into(self.data, offsets, lengths)


def _read_content(storage: Storage, file: StoredFile, most_bytes: int) -> _Content:
    if (codec := codec_of(file.path)) is not None:
        with storage.stream(file) as stream:
            data = decompress(file.path, codec, stream, most_bytes)
    elif is_remote(file.path):
        data = storage.read(file, 0, file.num_bytes)
    else:
        with open_local(file) as descriptor:
            found = read_members(file.path, FileBytes(file, descriptor))
        return _Content(MappedFile(file), found)
    return _Content(data, read_members(file.path, data))


def _check_fits(path: str, field: pa.Field, lengths: NDArray[np.int64]) -> None:
    num_bytes = int(lengths[lengths > 0].sum())
    if num_bytes > MOST_BYTES and field.type in (pa.binary(), pa.string()):
        # Arrow would silently wrap the offsets around.
        raise SourceError(
            f"{path} has {num_bytes:,} bytes in its members that end in .{field.name}, and a column of {field.type} has "
            f"room for 2 GiB: write smaller shards, or declare columns={{{field.name!r}: pa.large_{field.type}(), ...}}"
        )


def _cast_values(views: pa.Array, field: pa.Field, bad: dict[int, str]) -> pa.Array:
    """The values as the declared type. A value of a text column that is not UTF-8 is a bad row."""
    if field.type == pa.binary_view():
        return views
    copied = materialize(views)
    try:
        return copied.cast(field.type)
    except pa.ArrowInvalid:
        values = copied.to_pylist()
        for i, value in enumerate(values):
            if value is not None and (error := _utf8_error(value)):
                bad.setdefault(i, f"the member .{field.name} is not text: {error}")
                values[i] = None
        return pa.array(values, pa.large_binary()).cast(field.type)


def _utf8_error(value: bytes) -> str:
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return str(error)
    return ""
