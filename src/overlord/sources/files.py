"""The base of all sources made of files: how files are named and listed, decompressed, and held to one schema."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa

from overlord.declare.source import Source, Unit
from overlord.errors import BufferTooSmallError, SchemaError, SourceError, SpecError
from overlord.sources.object_store import Retry
from overlord.sources.reading import ReadResult, SourceReader, UnitReader
from overlord.sources.row_limit import LimitedReader, limit_units, rows_in
from overlord.sources.storage import Storage, StoredFile

if TYPE_CHECKING:
    from overlord.sources.range_cache import RangeOfFile


@dataclass(frozen=True)
class FileSource(Source):
    """`paths` is one or more local paths (as text or `pathlib.Path`, `~` is the home folder) or URLs (s3://, gs://, az://,
    http://, https://, file://), with globs (`*`, `?`, `[ab]`, `**`) and ranges (`{000..099}`, `{a,b}`). A local file
    that exists under just that name is taken as it is; elsewhere a character that has a meaning is put in brackets to
    stand for itself: `[[]`, `[*]`, `[{]`. Files are data in the order of their names.
    """

    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    storage_options: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    """Endpoint, region and credentials of an object store, as obstore names them. Not part of the stream."""
    retry: Retry = field(default_factory=Retry, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = self.paths
        given = (paths,) if isinstance(paths, (str, bytes, os.PathLike)) else tuple(paths)
        named = tuple(os.fspath(path) if isinstance(path, os.PathLike) else path for path in given)
        if not named or not all(isinstance(path, str) and path for path in named):
            raise SpecError(f"paths must be one or more paths, as text or pathlib.Path, got {paths!r}")
        object.__setattr__(self, "paths", named[0] if isinstance(paths, (str, os.PathLike)) else named)

    @property
    def patterns(self) -> tuple[str, ...]:
        # __post_init__ made text of all paths.
        return (self.paths,) if isinstance(self.paths, str) else cast("tuple[str, ...]", self.paths)

    @property
    def storage(self) -> Storage:
        cache = self.cache
        if cache is None or cache.is_remote or cache.files is False:
            return Storage(tuple(sorted(self.storage_options.items())), self.retry)
        keeps_data = cache.files is True or not self.transforms
        return Storage(tuple(sorted(self.storage_options.items())), self.retry, cache, keeps_data)

    def list_files(self) -> tuple[StoredFile, ...]:
        return self.storage.list_files(self.patterns)

    def list_beside(self, paths: Sequence[str]) -> tuple[StoredFile, ...]:
        """Files that another file names: none of their characters is a pattern."""
        return self.storage.list_files([literal_pattern(path) for path in paths])

    def byte_ranges(self, unit: Unit) -> Sequence[RangeOfFile]:
        """What reading a unit requests from remote storage, so that it can be fetched ahead; empty where that is not known
        before."""
        del unit
        return ()

    def read(self, unit: Unit) -> pa.Table:
        """The rows of one unit; BadRowError where one of them cannot be read."""
        return self.read_rows(unit).strict()

    def read_rows(self, unit: Unit) -> ReadResult:
        """The rows of one unit, with the bad ones reported one by one."""
        raise NotImplementedError(f"{type(self).__name__} must define read_rows(unit)")

    def open_reader(self, *, release_gil: bool) -> UnitReader:
        """A reader of many units. Override it where reading keeps files or findings between units.

        `release_gil`: other threads contend for the GIL, so prefer code that releases it over code that is merely faster.
        """
        del release_gil
        return SourceReader(self)

    def identity(self) -> str:
        return f"{type(self).__name__}({list(self.patterns)!r})"

    def _check_not_empty(self, units: list[Unit]) -> list[Unit]:
        if not units:
            raise SourceError(f"{self.identity()} has files but not a single row in them: check what wrote them")
        return units


def needed_library(module: str, extra: str, reader: str) -> Any:
    """The library that a reader needs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise SpecError(
            f"{reader} needs the library {module}, which cannot be imported ({error}): pip install "
            f"'overlord-dataloader[{extra}]'"
        ) from error


def literal_pattern(path: str) -> str:
    """The pattern that names just this file. A local file that exists under the name needs no brackets."""
    return re.sub(r"([*?[{])", r"[\1]", path) if "://" in path else path


def joined_version(*files: StoredFile) -> str:
    """The version of a unit that is read from several files: the newest time of local files, or all tags."""
    versions = [file.version for file in files]
    if not all(versions):
        return ""
    return "+".join(versions) if any("://" in file.path for file in files) else max(versions, key=int)


Compression = Literal["gzip", "zstd"]
CODECS: dict[str, Compression] = {".gz": "gzip", ".gzip": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd"}

BLOCK_BYTES = 8 << 20
"""The size of blocks in decompression."""


def codec_of(path: str) -> Compression | None:
    return next((codec for ending, codec in CODECS.items() if path.lower().endswith(ending)), None)


def decompress_blocks(path: str, codec: Compression, content: pa.NativeFile, block_bytes: int) -> Iterator[bytes]:
    """Decompress in blocks of at most `block_bytes`, since the total size is unknown. Concatenated frames or members are one
    content."""
    try:
        with pa.CompressedInputStream(content, codec) as stream:
            while block := stream.read_buffer(block_bytes).to_pybytes():  # read() leaks its memory when it raises
                yield block
    except OSError as error:
        raise SourceError(
            f"{path} is not whole {codec} data: {error}; it was cut off or damaged, copy or write it again"
        ) from error


def decompress(path: str, codec: Compression, content: pa.NativeFile, most_bytes: int) -> pa.Buffer:
    """Decompress the whole content; BufferTooSmallError beyond `most_bytes`."""
    whole = pa.BufferOutputStream()
    for block in decompress_blocks(path, codec, content, BLOCK_BYTES):
        if whole.tell() + len(block) > most_bytes:
            raise BufferTooSmallError(
                f"{path} has more than {most_bytes:,} bytes decompressed, which is more than one unit may "
                "take; raise buffer_bytes, or write it as several smaller files"
            )
        whole.write(block)
    return whole.getvalue()


Columns = Sequence[str] | None
TypedColumns = Sequence[str] | Mapping[str, pa.DataType] | None


def check_columns(columns: TypedColumns) -> tuple[str, ...] | dict[str, pa.DataType] | None:
    if columns is None:
        return None
    if isinstance(columns, str):
        raise SpecError(f"columns is a sequence of names: write columns=({columns!r},)")
    if not columns:
        raise SpecError("columns must name at least one column; leave it out to read all of them")
    if isinstance(columns, Mapping):
        for name, type_ in columns.items():
            if not isinstance(type_, pa.DataType):
                raise SpecError(
                    f"columns gives the column {name!r} the type {type_!r}; a type is a pyarrow one, as pa.string()"
                )
        return dict(columns)
    if len(set(columns)) < len(columns):
        raise SpecError(f"columns names a column twice: {list(columns)}")
    return tuple(columns)


def common_schema(schemas: Iterable[tuple[str, pa.Schema]], columns: Columns) -> pa.Schema:
    """The schema of the columns to read, checked in every file. `schemas` are pairs of file and schema."""
    first: tuple[str, pa.Schema] | None = None
    for path, schema in schemas:
        if first is None:
            first = path, _select(path, schema, columns)
        elif columns is None and (extra := [n for n in schema.names if n not in first[1].names]):
            raise SchemaError(
                f"{path} has the column {extra[0]!r}, which {first[0]} has not; say which columns to read: "
                f"columns={_tuple_text(first[1].names)}"
            )
        else:
            _check_same(path, schema, *first)
    assert first is not None  # listing fails before this when there are no files
    return first[1]


def missing_column(path: str, name: str, names: Sequence[str]) -> SchemaError:
    return SchemaError(f"{path} has no column {name!r}; it has {_tuple_text(names)}")


def _select(path: str, schema: pa.Schema, columns: Columns) -> pa.Schema:
    names = schema.names if columns is None else columns
    for name in names:
        if name not in schema.names:
            raise missing_column(path, name, schema.names)
        if schema.names.count(name) > 1:
            raise SchemaError(f"{path} has the column {name!r} {schema.names.count(name)} times; columns need one name each")
    return pa.schema([schema.field(name) for name in names])


def _check_same(path: str, schema: pa.Schema, first_path: str, expected: pa.Schema) -> None:
    for name in expected.names:
        if name not in schema.names:
            raise SchemaError(
                f"{missing_column(path, name, schema.names)}, while {first_path} has that column; leave it out if it is not "
                f"needed, {_option_without(expected.names, name)}, or rewrite one of the files"
            )
    found = _select(path, schema, expected.names)
    for have, want in zip(found, expected, strict=True):
        if have.type != want.type:
            raise SchemaError(
                f"{path} has the column {want.name!r} as {have.type}, but {first_path} has it as {want.type}; leave it out "
                f"if it is not needed, {_option_without(expected.names, want.name)}, rewrite one of the files, or make "
                "them two sources"
            )


def _tuple_text(names: Sequence[str]) -> str:
    return "(" + ", ".join(repr(name) for name in names) + (",)" if len(names) == 1 else ")")


def _option_without(names: Sequence[str], unwanted: str) -> str:
    return f"columns={_tuple_text([name for name in names if name != unwanted])}"


def type_text(type_: Any) -> str:
    """The Python expression for a type."""
    if pa.types.is_list(type_):
        return f"pa.list_({type_text(type_.value_type)})"
    if pa.types.is_struct(type_):
        return "pa.struct({" + ", ".join(f"{field.name!r}: {type_text(field.type)}" for field in type_) + "})"
    return {"double": "pa.float64()", "float": "pa.float32()", "bool": "pa.bool_()"}.get(str(type_), f"pa.{type_}()")


def open_reader(source: Source, *, release_gil: bool) -> UnitReader:
    """The reader of any source; see `FileSource.open_reader`. The caller closes it."""
    opened = getattr(source, "open_reader", None)
    reader = SourceReader(source) if opened is None else opened(release_gil=release_gil)
    return reader if source.max_rows is None else LimitedReader(reader)


def units_of(source: Source) -> Sequence[Unit]:
    """The units of any source, within its `max_rows`."""
    units = source.units()
    if source.max_rows is None:
        return units
    reader = open_reader(source, release_gil=False)
    try:
        return limit_units(units, source.max_rows, lambda unit: rows_in(reader.read_rows(unit)))
    finally:
        reader.close()
