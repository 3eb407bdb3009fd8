"""Makes one part of a prepared source: reads some units, runs the transforms on each, and writes the rows as Parquet.

A part is done when its record is there. The record is written last, so a process may be killed at any time: what it left is
written again. Also the main function of worker processes that make parts.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
import numpy as np
import pyarrow as pa

from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk import Lineage
from overlord.chunks.transforms.apply import Reporter, Transforms, name_of
from overlord.chunks.transforms.outcome import Context
from overlord.chunks.workers.process import receive, send
from overlord.declare.source import BadRows
from overlord.errors import OverlordError, SchemaError, SpecError, StorageError
from overlord.preparing.packing import pack_rows
from overlord.runtime.interpreters import belong_to
from overlord.runtime.transport import ErrorEnvelope
from overlord.sources.column_types import cast_table, has_null_type
from overlord.sources.files import open_reader
from overlord.sources.prepared import ROW_ORIGIN, wider_types
from overlord.sources.views import compact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.declare.source import Source, Unit
    from overlord.sources.reading import UnitReader
    from overlord.stream.facts import Ints

RECORD = "part-{number:06d}.json"
_FILE = "part-{number:06d}-{file}.parquet"
_FIRST_OF_ONE = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class PartTask:
    """A part to make. It pickles."""

    name: str
    source: bytes
    """The source, pickled."""
    num_stages: int
    """How many of its transforms to run."""
    units: tuple[Unit, ...]
    folder: str
    number: int
    digest: str
    """Of everything that the part depends on."""
    pack: int | None = None
    """Pack documents into rows of so many tokens."""

    @property
    def record_path(self) -> Path:
        return Path(self.folder) / RECORD.format(number=self.number)


class UnitRecord(msgspec.Struct, frozen=True):
    """Where the rows of a unit are."""

    file: int
    """The number of the file among those of the part; -1 where no row is left."""
    group: int
    num_read: int
    bad: list[tuple[int, str, bool]]
    """(row, error, whether it could not even be read)."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a part."""

    name: str
    num_bytes: int
    num_rows: int
    num_tokens: int | None
    schema: bytes


class PartRecord(msgspec.Struct, frozen=True):
    """A part that is done."""

    digest: str
    units: list[UnitRecord]
    files: list[FileRecord]


def read_record(path: Path, digest: str) -> PartRecord | None:
    """The record of a part; None where there is none, or it is of another declaration."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=PartRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    is_whole = all((path.parent / file.name).is_file() for file in found.files)
    return found if found.digest == digest and is_whole else None


def make_part(task: PartTask) -> PartRecord:
    """Read, transform and write the units of a part."""
    source = _load(task.source)
    reader = open_reader(source, release_gil=False)
    try:
        made = [_make_unit(task, source, reader, unit) for unit in task.units]
    finally:
        reader.close()
    record = _write(task, source, made) if task.pack is None else _write_packed(task, source, made)
    write_whole(task.record_path, msgspec.json.encode(record))
    return record


@functools.lru_cache(maxsize=4)
def _load(pickled: bytes) -> Source:
    return cloudpickle.loads(pickled)


@dataclass(frozen=True, slots=True)
class _MadeUnit:
    table: pa.Table | None
    """None where no row is left."""
    origin: Ints
    num_read: int
    bad: list[tuple[int, str, bool]]


class _CollectedRows(BadRowLog):
    """The bad rows of one unit. Where the policy is to fail, the first one is raised."""

    def __init__(self, name: str, policy: BadRows) -> None:
        super().__init__(name, policy if policy.policy == "fail" else BadRows("skip", budget=1 << 62))
        self.found: list[tuple[int, str, bool]] = []
        self.is_reading = True

    def add(self, where: str, row: int, error: str) -> None:
        super().add(where, row, error)
        self.found.append((row, error, self.is_reading))


def _make_unit(task: PartTask, source: Source, reader: UnitReader, unit: Unit) -> _MadeUnit:
    bad = _CollectedRows(task.name, source.bad_rows)
    try:
        result = reader.read_rows(unit)
        for each in result.bad:
            bad.add(str(unit), each.row, str(each))
        bad.is_reading = False
        table = result.table
        origin: Ints = np.arange(table.num_rows, dtype=np.int64)
        where = Lineage((unit,), _FIRST_OF_ONE, (result.row_numbers,), result.mapped).where
        # A new object for each unit: types are compared over the whole source, at the end.
        transforms = Transforms(source.transforms[: task.num_stages])
        table, origin = transforms.run(table, Context(task.name, 0, 0), origin, Reporter(bad, where))
    except Exception as error:
        error.add_note(f"while preparing {unit} of source {task.name!r}")
        raise
    if task.num_stages < len(source.transforms) and len(origin) and int(origin.min()) < 0:
        raise SpecError(
            f"source {task.name!r} cannot be prepared: its transforms before {name_of(source.transforms[task.num_stages])}, "
            "which gets a random generator for each row, lose track of their rows; keep the column '__origin__' in them"
        )
    made = compact(table).replace_schema_metadata(None) if table.num_rows else None
    return _MadeUnit(made, origin, result.table.num_rows, bad.found)


def _write(task: PartTask, source: Source, made: Sequence[_MadeUnit]) -> PartRecord:
    """Write a file for each schema, nearly always one, with a row group for each unit."""
    keeps_rows = all(unit.table is None or _is_identity(unit) for unit in made)
    tables = [None if unit.table is None else _table_of(unit, keeps_rows) for unit in made]
    schemas = [table.schema for table in tables if table is not None]
    if schemas and wider_types(schemas) is None:
        other = next(schema for schema in schemas if wider_types([schemas[0], schema]) is None)
        raise SchemaError(
            f"source {task.name!r}: transforms returned {schemas[0].to_string()!r} for one unit of part {task.number} and "
            f"{other.to_string()!r} for another; they must return the same columns and types for every unit"
        )
    tables = _fill_null_types(tables, schemas)
    distinct: list[pa.Schema] = []
    for table in tables:
        if table is not None and not any(table.schema.equals(each) for each in distinct):
            distinct.append(table.schema)
    places: dict[int, tuple[int, int]] = {}
    files: list[FileRecord] = []
    for number, schema in enumerate(distinct):
        chosen = [(i, t) for i, t in enumerate(tables) if t is not None and t.schema.equals(schema)]
        places |= {i: (number, group) for group, (i, _) in enumerate(chosen)}
        name = _FILE.format(number=task.number, file=number)
        files.append(_write_file(Path(task.folder) / name, schema, [table for _, table in chosen], source.tokens))
    units = [UnitRecord(*places.get(i, (-1, -1)), unit.num_read, unit.bad) for i, unit in enumerate(made)]
    return PartRecord(task.digest, units, files)


def _write_packed(task: PartTask, source: Source, made: Sequence[_MadeUnit]) -> PartRecord:
    """Write the documents of all units as packed rows, in one row group."""
    assert task.pack is not None
    columns = [name for name in (source.tokens, source.loss_mask, source.loss_weights) if name is not None]
    tables = [unit.table for unit in made if unit.table is not None]
    rows = pack_rows(tables, columns, task.pack, f"source {task.name!r}, part {task.number}")
    files = []
    if rows is not None:
        path = Path(task.folder) / _FILE.format(number=task.number, file=0)
        files.append(_write_file(path, rows.schema, [rows], source.tokens))
    return PartRecord(task.digest, [UnitRecord(-1, -1, unit.num_read, unit.bad) for unit in made], files)


def _is_identity(unit: _MadeUnit) -> bool:
    return len(unit.origin) == unit.num_read and bool((unit.origin == np.arange(unit.num_read)).all())


def _table_of(unit: _MadeUnit, keeps_rows: bool) -> pa.Table:
    assert unit.table is not None
    return unit.table if keeps_rows else unit.table.append_column(ROW_ORIGIN, pa.array(unit.origin, pa.int64()))


def _fill_null_types(tables: Sequence[pa.Table | None], schemas: Sequence[pa.Schema]) -> list[pa.Table | None]:
    """The tables with types that their rows do not show (all nulls, or empty lists) taken from the others."""
    known = wider_types(schemas)
    if known is None:
        return list(tables)
    filled: list[pa.Table | None] = []
    for table in tables:
        if table is not None:
            fields = [(f.name, known.field(f.name).type if has_null_type(f.type) else f.type) for f in table.schema]
            table = cast_table(table, pa.schema(fields))
        filled.append(table)
    return filled


def _write_file(path: Path, schema: pa.Schema, tables: Sequence[pa.Table], tokens: str | None) -> FileRecord:
    import pyarrow.parquet as pq

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with pq.ParquetWriter(
            draft, schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
        ) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=table.num_rows)
        num_bytes = draft.stat().st_size
        _sync_and_move(draft, path)
    except (OSError, pa.ArrowException) as error:
        draft.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error}; make room, or name another folder, and run it again"
        ) from error
    num_tokens = None
    if tokens in schema.names and pa.types.is_list(schema.field(str(tokens)).type):
        num_tokens = sum(_num_tokens(table.column(str(tokens))) for table in tables)
    return FileRecord(
        path.name,
        num_bytes,
        sum(table.num_rows for table in tables),
        num_tokens,
        schema.serialize().to_pybytes(),
    )


def _num_tokens(column: Any) -> int:
    return sum(int(chunk.offsets[-1].as_py() - chunk.offsets[0].as_py()) for chunk in column.chunks if len(chunk))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one piece: it is there as a whole, or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        _sync_and_move(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error.strerror}; make room, or name another folder") from error


def _sync_and_move(draft: Path, path: Path) -> None:
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def try_part(task: PartTask) -> PartRecord | ErrorEnvelope:
    """Make a part for another process. An error of a user's code brings its traceback along."""
    try:
        return make_part(task)
    except OverlordError as error:
        return ErrorEnvelope.of(error)
    except Exception as error:  # noqa: BLE001 - a transform may raise anything
        return ErrorEnvelope.pickling(error, "in a worker process")


def main(descriptor: int, parent: int) -> None:
    """What a worker process runs: it makes the parts that its parent sends, until that closes the connection."""
    belong_to(parent, "overlord-prep")
    pa.set_cpu_count(1)  # there is a worker per core already
    connection = socket.socket(fileno=descriptor)
    try:
        send(connection, "ready")
        while True:
            task, _ = receive(connection)
            send(connection, try_part(task))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent is gone, or has no more parts
