"""Datasets that are Python objects: any map-style dataset (of torch, of Grain, a list), and iterables made seekable.

The source holds a function that opens the dataset, never the open dataset: the function travels to other processes, and each
reader opens a dataset of its own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc

from overlord.declare.source import Source, Unit
from overlord.errors import DataError, OverlordError, SchemaError, SourceError, SpecError
from overlord.sources.column_types import UNFIT, fit_values
from overlord.sources.files import check_columns
from overlord.sources.packed_values import list_type
from overlord.sources.reading import BadRow, ReadResult, UnitReader, good_rows

FIRST_ROWS = 16
"""Types are inferred from as many."""
_INDEX = "index.json"
_SPOOL_UNITS = 64


@dataclass(frozen=True)
class _OpenedSource(Source):
    """Its fields are not part of a state; those of its subclasses are, with the code of the function."""

    thread_safe: bool = field(default=False, kw_only=True)

    def identity(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class MapDataset(_OpenedSource):
    """Any dataset with `__len__` and `__getitem__`. `factory` is a picklable function that opens it: a class or function of
    a module, or `functools.partial(MyDataset, "data/")`.

    A row may be a dict, a tuple (`columns` names its entries), or a single value (`columns` names it). `columns` otherwise
    chooses from the keys, or gives types as {"tokens": pa.list_(pa.int32())}; types that are not given are inferred from the
    first rows. A row that raises an error is a bad row. The dataset is used by one thread at a time unless it is
    `thread_safe`.
    """

    factory: Callable[[], Any]
    columns: Sequence[str] | Mapping[str, pa.DataType] | None = None
    unit_rows: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factory(self.factory, "MapDataset")
        object.__setattr__(self, "columns", check_columns(self.columns))
        if self.unit_rows < 1:
            raise SpecError(f"unit_rows must be positive, got {self.unit_rows}")

    def units(self) -> list[Unit]:
        reader, label = MapReader(self), factory_label(self.factory)
        num_rows = reader.num_rows()
        if not num_rows:
            raise SourceError(f"{label} has no rows: check what it opens")
        head = reader.fetch(range(min(FIRST_ROWS, num_rows)))
        good = [row for row in head if not isinstance(row, _Raised)]
        if not good and isinstance(self.columns, Mapping):
            schema, row_bytes = pa.schema(list(self.columns.items())), 0
        else:
            if not good:
                raise SourceError(f"{label} raises an error for each of its first rows: {head[0]}")
            table = rows_to_table(good, find_schema(good, self.columns, label), self.columns, label).table
            schema, row_bytes = table.schema, table.nbytes // max(table.num_rows, 1)
        return [
            Unit(label, index, stop - start, row_bytes * (stop - start), RowRange(start, stop, schema))
            for index, (start, stop) in enumerate(_ranges(num_rows, self.unit_rows))
        ]

    def read(self, unit: Unit) -> pa.Table:
        return self.read_rows(unit).strict()

    def read_rows(self, unit: Unit) -> ReadResult:
        return MapReader(self).read_rows(unit)

    def open_reader(self, *, release_gil: bool) -> UnitReader:
        del release_gil
        return MapReader(self)


@dataclass(frozen=True, slots=True)
class RowRange:
    start: int
    stop: int
    schema: pa.Schema


class MapReader:
    """Opens the dataset when it first reads, and keeps it."""

    def __init__(self, source: MapDataset) -> None:
        self._source = source
        self._lock = threading.RLock()
        self._dataset: Any = None

    def num_rows(self) -> int:
        with self._lock:
            dataset = self._open()
            try:
                return len(dataset)
            except TypeError as error:
                raise SpecError(
                    f"{factory_label(self._source.factory)} returns a {type(dataset).__name__}, which has no length; a map "
                    "dataset has __len__ and __getitem__, and formats.Iterated takes an iterable"
                ) from error

    def fetch(self, rows: Sequence[int]) -> list[Any]:
        """The rows, with what was raised in place of those that cannot be had."""
        with self._lock:
            dataset = self._open()
        if self._source.thread_safe:
            return _fetch(dataset, rows)
        with self._lock:
            return _fetch(dataset, rows)

    def read_rows(self, unit: Unit) -> ReadResult:
        detail: RowRange = unit.detail
        rows = self.fetch(range(detail.start, detail.stop))
        return rows_to_table(rows, detail.schema, self._source.columns, unit.path, detail.start)

    def close(self) -> None:
        with self._lock:
            self._dataset = None

    def _open(self) -> Any:
        if self._dataset is None:
            self._dataset = self._source.factory()
        return self._dataset


@dataclass(frozen=True, slots=True)
class _Raised:
    text: str

    def __str__(self) -> str:
        return self.text


def _fetch(dataset: Any, rows: Sequence[int]) -> list[Any]:
    several = getattr(dataset, "__getitems__", None)  # torch's name for many rows at once
    if several is not None:
        try:
            found = list(several(list(rows)))
            if len(found) == len(rows):
                return found
        except Exception:  # noqa: BLE001 - the rows are tried one by one, and theirs are the errors that count
            pass
    return [_fetch_one(dataset, row) for row in rows]


def _fetch_one(dataset: Any, row: int) -> Any:
    try:
        return dataset[row]
    except OverlordError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a dataset of a user raises is a fault of that row
        return _Raised(f"{type(error).__name__}: {error}")


def rows_to_table(rows: Sequence[Any], schema: pa.Schema, columns: Any, label: str, first_row: int = 0) -> ReadResult:
    """The rows as a table; those that were raised, or do not fit the types, as bad rows."""
    bad: dict[int, str] = {row: value.text for row, value in enumerate(rows) if isinstance(value, _Raised)}
    plain = [{} if row in bad else _as_mapping(value, columns, label) for row, value in enumerate(rows)]
    arrays = []
    for each in schema:
        values = [_plain_value(row.get(each.name)) for row in plain]
        for row, mapping in enumerate(plain):
            if each.name not in mapping:
                bad.setdefault(row, f"it has no {each.name!r}")
        array, unfit = fit_values(values, each.type)
        for row, error in unfit.items():
            bad.setdefault(row, f"{each.name!r} does not fit its type {each.type}: {error}")
        arrays.append(array)
    table = pa.table(arrays, schema=schema)
    if not bad:
        return ReadResult(table)
    reports = tuple(BadRow(row, bad[row], f"{label}, row {first_row + row}") for row in sorted(bad))
    kept = good_rows(len(table), reports)
    return ReadResult(table.take(kept), kept, reports)


def find_schema(rows: Sequence[Any], columns: Any, label: str) -> pa.Schema:
    if isinstance(columns, Mapping):
        return pa.schema(list(columns.items()))
    first = _as_mapping(rows[0], columns, label)
    fields = []
    for name in columns or list(first):
        values = [_plain_value(_as_mapping(row, columns, label).get(name)) for row in rows]
        if name not in first:
            raise SchemaError(f"the first row of {label} has no {name!r}; it has {', '.join(map(repr, first))}")
        try:
            type_ = _array_type(first.get(name)) or pa.array(values).type
        except UNFIT as error:
            raise SchemaError(
                f"the type of {name!r} cannot be inferred from the first rows of {label}, where it is "
                f"{type(values[0]).__name__}: {error}; give it, columns={{{name!r}: ...}}, or leave it out of columns"
            ) from error
        if pa.types.is_null(type_):
            raise SchemaError(f"{name!r} is None in the first rows of {label}: give its type, columns={{{name!r}: ...}}")
        fields.append((name, type_))
    return pa.schema(fields)


def _as_mapping(row: Any, columns: Any, label: str) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    given = list(columns) if columns is not None else None
    names = getattr(row, "_fields", None)  # of a named tuple
    if isinstance(row, tuple) and names is not None:
        return dict(zip(names, row, strict=True))
    if given is None:
        kind = "tuples" if isinstance(row, tuple) else type(row).__name__
        raise SpecError(f"{label} has rows that are {kind}, not dicts: name their entries in order, columns=('tokens',)")
    if isinstance(row, tuple) and (len(given) > 1 or len(row) == 1):
        if len(row) != len(given):
            raise SchemaError(f"{label} has rows of {len(row)} entries, and columns names {len(given)}: {given}")
        return dict(zip(given, row, strict=True))
    if len(given) != 1:
        raise SchemaError(f"{label} has rows that are single values, and columns names {len(given)} of them: {given}")
    return {given[0]: row}


def _array_type(value: Any) -> pa.DataType | None:
    """The type of an array of several dimensions, whose lists do not tell it."""
    dtype, num_levels = getattr(value, "dtype", None), getattr(value, "ndim", 0)
    if num_levels < 2 or not isinstance(dtype, np.dtype):
        return None
    return list_type(pa.from_numpy_dtype(dtype), num_levels)


def _plain_value(value: Any) -> Any:
    """What Arrow understands: a tensor as an array, an array of several dimensions as lists."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = value.detach().cpu().numpy()
    elif type(value).__module__.startswith("jax"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return value.tolist()
    return value


def factory_label(factory: Any) -> str:
    """What lineage and errors call the dataset."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    return f"{getattr(factory, '__module__', type(factory).__module__)}.{name}"


def _check_factory(factory: Any, name: str) -> None:
    if not callable(factory):
        raise SpecError(
            f"{name} takes a function that opens the dataset, not a {type(factory).__name__}: each process opens its own; "
            f"write {name}(functools.partial(MyDataset, 'data/'))"
        )
    try:
        pickle.dumps(factory)
    except Exception as error:
        raise SpecError(
            f"{name} takes a function that can be pickled, and {factory_label(factory)} cannot: {error}; use a function or "
            "class of a module, or functools.partial of one, with paths and options instead of open files"
        ) from error


def _ranges(num_rows: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


class IndexedPart(msgspec.Struct, frozen=True):
    """A unit of an iterable, as its index keeps it."""

    num_rows: int
    num_bytes: int
    digest: str
    state: Any = None
    """What the iterable saved before its first row; None where it starts afresh, or rows are kept."""


class _IterableIndex(msgspec.Struct, frozen=True):
    overlord_index: int
    kept: Literal["states", "rows"]
    label: str
    unit_rows: int
    schema: bytes
    parts: list[IndexedPart]
    checksum: str = ""


@dataclass(frozen=True)
class _IndexedSource(_OpenedSource):
    folder: str | os.PathLike[str] = field(default="", kw_only=True)
    """Where the index is kept. It may be moved or copied."""

    def identity(self) -> str:  # here again, so that `folder` is no part of a state
        return type(self).__name__


@dataclass(frozen=True)
class Iterated(_IndexedSource):
    """An iterable, made seekable by an index in `folder`. `factory` is a picklable function that returns it anew.

    The first start runs through it once, and writes the index; later ones read that. With `keep="states"` the index has
    what the iterable's `state_dict()` (or its iterator's, or `get_state()` of Grain) says every `unit_rows` rows, and a unit
    is read from there on. With `keep="rows"` it has the rows themselves, as Arrow files, for an iterable that cannot be
    started in the middle. `most_rows` ends one that is endless. Rows and `columns` are like those of `MapDataset`.
    """

    factory: Callable[[], Iterable[Any]]
    columns: Sequence[str] | Mapping[str, pa.DataType] | None = None
    unit_rows: int = 1024
    keep: Literal["states", "rows"] = "states"
    most_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factory(self.factory, "Iterated")
        object.__setattr__(self, "columns", check_columns(self.columns))
        if not os.fspath(self.folder):
            raise SpecError(
                "an iterable starts at its beginning; to start it anywhere, Iterated(factory, folder='indexes/web') keeps "
                "an index in that folder"
            )
        object.__setattr__(self, "folder", os.path.expanduser(os.fspath(self.folder)))
        if self.keep not in ("states", "rows"):
            raise SpecError(f"keep must be 'states' or 'rows', not {self.keep!r}")
        if self.unit_rows < 1 or (self.most_rows is not None and self.most_rows < 1):
            raise SpecError(f"unit_rows and most_rows must be positive, got {self.unit_rows} and {self.most_rows}")

    def units(self) -> list[Unit]:
        index = self._load_index() or self._write_index()
        schema = pa.ipc.read_schema(pa.py_buffer(index.schema))
        version = str(int(index.checksum[:12], 16))
        return [
            Unit(index.label, number, part.num_rows, part.num_bytes, (number, part, schema), version)
            for number, part in enumerate(index.parts)
        ]

    def read(self, unit: Unit) -> pa.Table:
        number, part, schema = unit.detail
        if self.keep == "rows":
            table = self._read_spool(number)
        else:
            rows = _take(_resume(self.factory, part.state, unit.path), part.num_rows)
            table = rows_to_table(rows, schema, self.columns, unit.path, number * self.unit_rows).strict()
        if _digest(table) != part.digest:
            place = (
                self._spool_path(number)
                if self.keep == "rows"
                else f"{unit.path}, rows from {number * self.unit_rows:,} on,"
            )
            raise DataError(
                f"{place} gives other rows than when the index in {self.folder} was written: an iterable must return the "
                "same rows each time; where it has changed, delete the folder, and the index is written again"
            )
        return table

    def _path(self, name: str) -> Path:
        return Path(os.fspath(self.folder)) / name

    def _spool_path(self, number: int) -> Path:
        return self._path(f"rows-{number // _SPOOL_UNITS:05}.arrow")

    def _read_spool(self, number: int) -> pa.Table:
        path = self._spool_path(number)
        try:
            with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
                table = pa.Table.from_batches([reader.get_batch(number % _SPOOL_UNITS)])
                table.validate(full=True)  # offsets that lead elsewhere would end the process
                return table
        except (OSError, ValueError, pa.ArrowException) as error:
            raise SourceError(f"{path} cannot be read: {error}; delete {self.folder}, and it is written again") from error

    def _load_index(self) -> _IterableIndex | None:
        path = self._path(_INDEX)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        way_out = f"delete {self.folder}, and the index is written again"
        try:
            index = msgspec.json.decode(data, type=_IterableIndex)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceError(f"{path} is not the index of an iterable: {error}; {way_out}") from error
        if index.overlord_index != 1 or index.checksum != _checksum(index):
            raise SourceError(f"{path} is damaged, or of another release: its checksum does not fit; {way_out}")
        mine = factory_label(self.factory), self.unit_rows, self.keep
        theirs = index.label, index.unit_rows, index.kept
        if mine != theirs:
            raise SourceError(
                f"{path} is the index of {theirs[0]} with unit_rows={theirs[1]}, keep={theirs[2]!r}, and the source is "
                f"{mine[0]} with unit_rows={mine[1]}, keep={mine[2]!r}: name another folder, or {way_out}"
            )
        return index

    def _write_index(self) -> _IterableIndex:
        """Run through the iterable once. Files get their names when they are whole, the index comes last."""
        label = factory_label(self.factory)
        self._path("").mkdir(parents=True, exist_ok=True)
        iterable = self.factory()
        iterator = iter(iterable)
        if self.keep == "states":
            _saved_state(iterable, iterator, label)  # refuses what cannot be seekable, before hours are spent
        schema: pa.Schema | None = None
        parts: list[IndexedPart] = []
        tables: list[pa.Table] = []
        left = self.most_rows
        while True:
            state = _saved_state(iterable, iterator, label) if self.keep == "states" and parts else None
            rows = _take(iterator, self.unit_rows if left is None else min(self.unit_rows, left))
            if not rows:
                break
            left = None if left is None else left - len(rows)
            schema = schema or find_schema(rows[:FIRST_ROWS], self.columns, label)
            table = rows_to_table(rows, schema, self.columns, label, len(parts) * self.unit_rows).strict()
            parts.append(IndexedPart(len(rows), table.nbytes, _digest(table), state))
            if self.keep == "rows":
                tables.append(table.combine_chunks())
                if len(tables) == _SPOOL_UNITS:
                    self._spool(len(parts) - 1, tables)
                    tables = []
            if len(rows) < self.unit_rows:
                break
        if schema is None:
            raise SourceError(f"{label} has no rows: check what it opens")
        if tables:
            self._spool(len(parts) - 1, tables)
        index = _IterableIndex(1, self.keep, label, self.unit_rows, schema.serialize().to_pybytes(), parts)
        index = msgspec.structs.replace(index, checksum=_checksum(index))
        self._put(_INDEX, msgspec.json.encode(index))
        found = self._load_index()
        assert found is not None  # it was just written
        return found

    def _spool(self, last: int, tables: list[pa.Table]) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
        self._put(self._spool_path(last).name, sink.getvalue())

    def _put(self, name: str, data: Any) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path(""), prefix=f".{name}.", delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self._path(name))


def _take(iterator: Iterator[Any], most: int) -> list[Any]:
    rows = []
    while len(rows) < most:
        try:
            rows.append(next(iterator))
        except StopIteration:
            break
    return rows


def _saved_state(iterable: Any, iterator: Any, label: str) -> Any:
    for owner in (iterator, iterable):
        for name in ("state_dict", "get_state"):
            if hasattr(owner, name):
                state = getattr(owner, name)()
                try:
                    return (
                        {"bytes": base64.b64encode(state).decode()}
                        if isinstance(state, bytes)
                        else {"json": _as_json(state)}
                    )
                except (msgspec.MsgspecError, TypeError) as error:
                    raise SpecError(
                        f"the {name}() of {label} has what JSON cannot hold ({error}), so it cannot be kept in an index; "
                        "keep='rows' keeps the rows instead"
                    ) from error
    raise SpecError(
        f"{label} is an iterable that can only be started at its beginning: it has no state_dict() and load_state_dict(). "
        "Give it these, or use Iterated(..., keep='rows'), which writes its rows once and reads them from there"
    )


def _as_json(state: Any) -> str:
    text = msgspec.json.encode(state).decode()
    if msgspec.json.decode(text) != state:
        raise TypeError("keys that are not text, or tuples")
    return text


def _resume(factory: Callable[[], Any], state: Any, label: str) -> Iterator[Any]:
    iterable = factory()
    if state is None:
        return iter(iterable)
    saved = base64.b64decode(state["bytes"]) if "bytes" in state else msgspec.json.decode(state["json"])
    if hasattr(iterable, "load_state_dict"):
        iterable.load_state_dict(saved)
        return iter(iterable)
    iterator = iter(iterable)
    for name in ("load_state_dict", "set_state"):
        if hasattr(iterator, name):
            getattr(iterator, name)(saved)
            return iterator
    raise SpecError(f"{label} has a state_dict() and no load_state_dict() to go back to it")


def _digest(table: pa.Table) -> str:
    digest = hashlib.blake2b(digest_size=16)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    digest.update(sink.getvalue())
    return digest.hexdigest()


def _checksum(index: _IterableIndex) -> str:
    plain = msgspec.json.encode(msgspec.structs.replace(index, checksum=""))
    return hashlib.blake2b(plain, digest_size=16).hexdigest()
