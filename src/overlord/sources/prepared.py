"""A corpus that `overlord prepare` wrote: the rows of another source after its transforms, unit by unit.

A folder has Parquet files, with one row group for each unit of the original that has rows left, `units.parquet`, which lists
those units, and `manifest.json`, which is written last. The source lists the units of the original, and its chunks hold the
rows that the original's transforms return: the stream and its lineage are those of the original, and a state of one resumes
with the other.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from overlord.declare.source import Unit
from overlord.errors import SourceError, SpecError
from overlord.sources.column_types import cast_table, has_null_type, wider_schema
from overlord.sources.files import FileSource
from overlord.sources.numbers import numbers_of
from overlord.sources.parquet import Parquet, ParquetReader
from overlord.sources.reading import BadRow, MadeRows, ReadResult, good_rows
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.sources.storage import Storage, StoredFile

FORMAT = 1
MANIFEST = "manifest.json"
UNITS = "units.parquet"
_SPECIAL = re.compile(r"[\[*?{]")
ROW_ORIGIN = "__origin__"
"""The column that says which row of the unit each row was made from; files of rows that were kept one for one lack it."""


class PreparedPart(msgspec.Struct, frozen=True):
    """One file of a prepared source."""

    file: str
    num_bytes: int
    num_rows: int
    num_tokens: int | None
    schema: int
    """The number of its schema among those of the manifest."""


class Manifest(msgspec.Struct, frozen=True):
    """What a folder of prepared rows holds, and what it was made from."""

    format: int
    source: str
    """The name under which it was prepared."""
    fingerprint: str
    """Of everything that the rows depend on: reader, files, transforms, packages."""
    reader: str
    """The identity of the original reader."""
    transforms: list[str]
    """A digest of each transform that was run, in their order."""
    transform_names: list[str]
    packages: dict[str, str]
    num_units: int
    num_rows: int
    num_tokens: int | None
    num_bad_rows: int
    parts: list[PreparedPart]
    schemas: list[bytes]
    """Arrow schemas, serialised."""
    units_checksum: int
    """CRC-32 of `units.parquet`."""
    packed: int | None = None
    """The tokens of a row, where documents were packed."""
    loss_mask: str | None = None
    loss_weights: str | None = None
    pairs: str | None = None
    """These three as the original declares them."""
    whole: bool = False
    """Whether rows mean nothing without their beginning."""
    keeps_rows_apart: bool = False
    """Whether its transforms are known to treat rows independently, so that the original cuts large units into parts."""
    checksum: int | None = None
    """CRC-32 of all of the above; None in manifests of earlier releases."""


def encode_manifest(manifest: Manifest) -> bytes:
    """As it is written, with its checksum."""
    content = msgspec.json.decode(msgspec.json.encode(manifest))
    return msgspec.json.format(msgspec.json.encode({**content, "checksum": _checksum(content)}), indent=1)


def _checksum(content: dict[str, Any]) -> int:
    """Of the values of a manifest, also of those that only a later release knows, whatever lies between them."""
    return zlib.crc32(msgspec.json.encode({name: value for name, value in content.items() if name != "checksum"}))


@dataclass(frozen=True, slots=True)
class _Corpus:
    """What all units of a prepared source share."""

    num_stages: int
    schema: pa.Schema
    """The types that hold the values of every part."""


@dataclass(frozen=True, slots=True)
class _PreparedUnit:
    """How to read the rows of a unit."""

    corpus: _Corpus
    group: Unit | None
    """The row group with its rows; None where none is left."""
    num_read: int
    decoded_bytes: int
    bad: tuple[BadRow, ...] = ()
    unread: tuple[int, ...] = ()
    """The rows among the bad ones that could not even be read."""


@dataclass(frozen=True)
class Prepared(FileSource):
    """The corpus of one source in a folder that `overlord prepare` (or `ol.prepare`) wrote: the same stream without the cost
    of its transforms. `paths` is the folder, by just its name. Further transforms run after those that were prepared."""

    whole: bool = False
    """Its rows mean nothing without their beginning, because a transform that was prepared made conversations of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.paths, str):
            raise SpecError(
                f"Prepared reads one folder, the one of its source that `overlord prepare` wrote; got {self.paths!r}"
            )

    @property
    def is_whole(self) -> bool:
        return self.whole or super().is_whole

    @property
    def folder(self) -> str:
        return self.patterns[0].rstrip("/")

    def manifest(self) -> Manifest:
        file = self._find(MANIFEST)
        return _decode_manifest(file, self.storage)

    def units(self) -> list[Unit]:
        manifest = self.manifest()
        if manifest.packed is not None:
            raise SpecError(
                f"{self.folder} holds packed rows of {manifest.packed:,} tokens, which are not the stream of the original; "
                f"read them with ol.Parquet('{self.folder}/part-*.parquet')"
            )
        self._check_declared(manifest)
        table = self._read_units(manifest)
        groups = self._row_groups(manifest)
        corpus = _Corpus(len(manifest.transforms), _wide_schema(manifest, self.folder))
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        units: list[Unit] = []
        # A Python loop over units, as in every reader.
        for values in zip(*(columns[name] for name in UNIT_COLUMNS), strict=True):
            row = dict(zip(UNIT_COLUMNS, values, strict=True))
            group = None
            if row["group"] >= 0:
                group = groups.get((row["part"], row["group"]))
                if group is None:
                    raise SourceError(
                        f"{self.folder} is not whole: part {row['part']} has no row group {row['group']}; run `overlord "
                        "prepare` again"
                    )
            bad, unread = _decode_bad(row["bad"])
            detail = _PreparedUnit(corpus, group, row["num_read"], row["decoded_bytes"], bad, unread)
            path = row["path"].decode("utf-8", "surrogatepass")
            units.append(Unit(path, row["index"], row["num_rows"], row["num_bytes"], detail, row["version"], row["follows"]))
        return self._check_not_empty(units)

    def _check_declared(self, manifest: Manifest) -> None:
        """Refuse to train on all tokens of rows whose loss the original leaves to a column, and to cut its conversations."""
        names = ("loss_mask", "loss_weights", "pairs")
        missing = {name: getattr(manifest, name) for name in names if getattr(manifest, name) and not getattr(self, name)}
        if self.loss_mask or self.loss_weights:  # the user's own choice of what counts
            missing = {name: column for name, column in missing.items() if name == "pairs"}
        options = [f"{name}={column!r}" for name, column in missing.items()]
        options += ["whole=True"] if manifest.whole and not self.is_whole and "pairs" not in missing else []
        if options:
            raise SpecError(
                f"{self.folder} was prepared from a source whose rows are not plain documents; declare what its columns "
                f"mean: ol.Prepared({self.folder!r}, {', '.join(options)})"
            )

    def decoded_bytes(self, unit: Unit) -> int:
        """Those of the original, so that chunks have as many units."""
        return unit.detail.decoded_bytes

    def read_rows(self, unit: Unit) -> ReadResult:
        reader = self.open_reader(release_gil=False)
        try:
            return reader.read_rows(unit)
        finally:
            reader.close()

    def open_reader(self, *, release_gil: bool) -> PreparedReader:
        return PreparedReader(ParquetReader(self._parquet(), release_gil=release_gil))

    def identity(self) -> str:
        """That of the original reader: its rows are the same."""
        return self.manifest().reader

    def _find(self, name: str) -> StoredFile:
        try:
            return self.storage.list_files([_literal(f"{self.folder}/{name}")])[0]
        except SourceError as error:
            raise SourceError(
                f"{self.folder} is not a prepared source, or its preparation has not ended: it has no {name} ({error}). "
                "Name the folder of one source, and run `overlord prepare` again if it was stopped"
            ) from None

    def _read_units(self, manifest: Manifest) -> pa.Table:
        import pyarrow.parquet as pq

        file = self._find(UNITS)
        data = self.storage.read(file, 0, file.num_bytes)
        if zlib.crc32(memoryview(data)) != manifest.units_checksum:
            raise SourceError(f"{file.path} is damaged, or of another preparation: its checksum is wrong; prepare it again")
        return pq.read_table(pa.BufferReader(data), use_threads=False)

    def _row_groups(self, manifest: Manifest) -> dict[tuple[int, int], Unit]:
        """(part, row group in it) to the unit of its Parquet file. Parts of one schema are listed together."""
        found: dict[tuple[int, int], Unit] = {}
        names = [schema.names for schema in schemas_of(manifest)]
        for schema in range(len(manifest.schemas)):
            numbers = {f"{self.folder}/{part.file}": n for n, part in enumerate(manifest.parts) if part.schema == schema}
            sizes = {f"{self.folder}/{part.file}": part.num_bytes for part in manifest.parts if part.schema == schema}
            for unit in self._parquet(tuple(numbers)).units():
                if unit.detail.file.num_bytes != sizes[unit.path]:
                    raise SourceError(
                        f"{unit.path} has {unit.detail.file.num_bytes:,} bytes, its manifest says {sizes[unit.path]:,}: it "
                        "was cut off or replaced; delete it and run `overlord prepare` again"
                    )
                if unit.detail.schema.names != names[schema]:
                    raise SourceError(f"{unit.path} has other columns than its manifest says: prepare it again")
                found[numbers[unit.path], unit.index] = unit
        return found

    def _parquet(self, paths: tuple[str, ...] | None = None) -> Parquet:
        return Parquet(
            [_literal(path) for path in paths or ()] or self.folder,
            storage_options=self.storage_options,
            retry=self.retry,
            buffer_bytes=self.declared_buffer_bytes,
        )


def _literal(path: str) -> str:
    """A pattern for just this path. A local file that exists is taken under its name as it is."""
    return _SPECIAL.sub(r"[\g<0>]", path) if is_remote(path) else path


class PreparedReader:
    """Reads the rows of units from the row groups that hold them."""

    def __init__(self, parquet: ParquetReader) -> None:
        self._parquet = parquet

    def read_rows(self, unit: Unit) -> ReadResult:
        detail: _PreparedUnit = unit.detail
        origin: NDArray[np.int64] | None = np.zeros(0, np.int64)
        table = detail.corpus.schema.empty_table()
        if detail.group is not None:
            table = self._parquet.read_rows(detail.group).strict()
            origin = None
            if ROW_ORIGIN in table.column_names:
                origin = numbers_of(table.column(ROW_ORIGIN)).astype(np.int64)
                table = table.drop_columns([ROW_ORIGIN])
            table = _with_known_types(table, detail.corpus.schema)
        rows = None
        if detail.unread:
            unread = [bad for bad in detail.bad if bad.row in detail.unread]
            rows = good_rows(detail.num_read + len(unread), unread)
        return ReadResult(table, rows, detail.bad, made=MadeRows(detail.num_read, origin, detail.corpus.num_stages))

    def close(self) -> None:
        self._parquet.close()


UNIT_COLUMNS = (
    *("path", "index", "num_rows", "num_bytes", "version", "follows"),
    *("decoded_bytes", "part", "group", "num_read", "bad"),
)
UNIT_SCHEMA = pa.schema(
    [
        ("path", pa.binary()),
        ("index", pa.int64()),
        ("num_rows", pa.int64()),
        ("num_bytes", pa.int64()),
        ("version", pa.string()),
        ("follows", pa.bool_()),
        ("decoded_bytes", pa.int64()),
        ("part", pa.int32()),
        ("group", pa.int32()),
        ("num_read", pa.int64()),
        ("bad", pa.binary()),
    ]
)


def encode_bad(bad: Sequence[tuple[int, str, bool]]) -> bytes | None:
    """Bad rows of a unit as (row, error, whether it could not even be read)."""
    return msgspec.json.encode(bad) if bad else None


def _decode_bad(data: bytes | None) -> tuple[tuple[BadRow, ...], tuple[int, ...]]:
    if data is None:
        return (), ()
    found = msgspec.json.decode(data, type=list[tuple[int, str, bool]])
    return tuple(BadRow(row, error, "") for row, error, _ in found), tuple(row for row, _, unread in found if unread)


def wider_types(schemas: Sequence[pa.Schema]) -> pa.Schema | None:
    """The columns of all schemas with types that hold the values of each; None where there are none."""
    found: pa.Schema | None = None
    for schema in schemas:
        found = schema if found is None else wider_schema(found, schema)
        if found is None:
            return None
    return found


def _wide_schema(manifest: Manifest, folder: str) -> pa.Schema:
    plain = [
        schema.remove(i) if (i := schema.get_field_index(ROW_ORIGIN)) >= 0 else schema for schema in schemas_of(manifest)
    ]
    found = wider_types(plain)
    if plain and found is None:
        raise SourceError(f"{folder} has parts with columns that do not go together; prepare it again")
    return pa.schema([]) if found is None else found


def schemas_of(manifest: Manifest) -> list[pa.Schema]:
    return [pa.ipc.read_schema(pa.py_buffer(each)) for each in manifest.schemas]


def _with_known_types(table: pa.Table, known: pa.Schema) -> pa.Table:
    """The table with types that its rows do not show (all nulls, or empty lists) taken from other parts."""
    if not any(has_null_type(type_) for type_ in table.schema.types):
        return table
    fields = [(f.name, known.field(f.name).type if has_null_type(f.type) else f.type) for f in table.schema]
    return cast_table(table, pa.schema(fields))


@lru_cache(maxsize=2048)
def _decode_manifest(file: StoredFile, storage: Storage) -> Manifest:
    data = memoryview(storage.read(file, 0, file.num_bytes))
    try:
        found = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{file.path} is not a manifest of prepared rows: {error}; prepare the source again") from None
    if found.format != FORMAT:
        raise SourceError(
            f"{file.path} is of format {found.format}, this release reads {FORMAT}: prepare the source again, or use the "
            "release that wrote it"
        )
    try:
        is_whole = found.checksum is None or found.checksum == _checksum(msgspec.json.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):  # in what this release does not know
        is_whole = False
    if not is_whole:
        raise SourceError(f"{file.path} is damaged, or was changed by hand: its checksum is wrong; prepare the source again")
    if wrong := _fault(found):
        raise SourceError(f"{file.path} is damaged: {wrong}; prepare the source again")
    return found


def _fault(manifest: Manifest) -> str:
    """What makes no sense in a manifest; nothing in all that were written."""
    names = [part.file for part in manifest.parts]
    if any(not name or "/" in name or "\0" in name for name in names) or len(set(names)) < len(names):
        return "its parts are not files of this folder, or one is named twice"
    if any(part.num_bytes < 0 or not 0 <= part.schema < len(manifest.schemas) for part in manifest.parts):
        return "its parts have sizes or schemas that cannot be"
    try:
        for schema in schemas_of(manifest):
            _ = [field.name for field in schema]
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"a schema of it cannot be read: {' '.join(str(error).split())}"
    return ""
