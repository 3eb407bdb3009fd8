"""Takes the transformed rows of a chunk from a cache, and keeps what it does not have.

Rows are kept before they are shuffled, unit by unit: the next epoch has the same units in other chunks. Rows whose
transforms draw random numbers differ from chunk to chunk, and are kept chunk by chunk: for a run that resumes, for shadows,
and for other jobs with the same seed. So are the rows of a transform that is found not to treat rows independently of each
other.

A cache in which nothing is found must not slow a job down, however little its transforms cost: looking up and keeping rows
takes at most a twentieth of the CPU time of making them, chunk by chunk from the first one on. Whatever is not looked up or
not kept is made as without a cache, all units of a chunk at once.

Bad rows are kept with the others, and are reported whenever their unit is taken from the cache.
"""

from __future__ import annotations

import io
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from overlord.caches.folder import digest_key
from overlord.checkpoint.cache_keys import KIND, PlaceText, unit_key
from overlord.chunks.chunk import Lineage
from overlord.chunks.transforms.apply import InProcesses, Reporter, Transforms
from overlord.chunks.transforms.outcome import Context
from overlord.errors import SchemaError
from overlord.loaders.shadowing import FILE, CopyCost, is_copied
from overlord.runtime.threads import cpu_time
from overlord.sources.column_types import merge_tables
from overlord.sources.storage import map_threads
from overlord.stream.chunk_order import UnitRuns, chunk_of_unit, chunks_per_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.chunks.bad_rows import BadRowLog
    from overlord.declare.source import Source, Unit
    from overlord.stream.facts import Ints

_ALIGNMENT = 64
_SAMPLE_ROWS = (8, 32)
_SAMPLE_PART = 16
"""One row in so many is compared, so that small units are not made several times over."""
_SMALL_BYTES = 4096
_CHUNK_S = 10.0  # from one chunk of a source to the next, until it is measured
_KEEPING_SHARE = 0.05
_KEEPING = CopyCost(request_s=0.0003, byte_s=1.5e-9)  # CPU seconds of an entry, until they are measured
_log = logging.getLogger("overlord.cache")

if TYPE_CHECKING:
    MakeRows = Callable[[int, Sequence[int]], "TransformedRows"]

BadReport = tuple[str, int, str]
"""File, row in it, and error."""


class EntryStore(Protocol):
    """Where entries are kept: a folder, or a bucket of an object store. None of its methods raises when storage fails."""

    @property
    def is_far(self) -> bool:
        """Whether a request takes so long that several are better made side by side."""
        ...

    def get(self, key: str, needed_in_s: float | None = None) -> pa.Buffer | None: ...

    def put(self, key: str, parts: Sequence[bytes | memoryview], needed_in_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class TransformedRows:
    """Rows of units after their transforms, in reading order."""

    table: pa.Table
    origin: Ints
    """The number of each row among the rows that were read, -1 where a transform lost it."""
    lineage: Lineage
    num_read: int
    """Rows that were read."""
    bad: tuple[BadReport, ...] = ()
    is_uniform: bool = True
    """Whether all units were read with the same columns and types."""

    def by_unit(self) -> list[TransformedRows] | None:
        """The rows of each unit, as slices; None if they cannot be told apart, or might have other types alone."""
        lineage, origin = self.lineage, self.origin
        names = [str(unit) for unit in lineage.units]
        is_in_order = len(origin) == 0 or (origin[0] >= 0 and bool((origin[1:] >= origin[:-1]).all()))
        if not self.is_uniform or not is_in_order or any(where not in names for where, _, _ in self.bad):
            return None
        first = [*lineage.first.tolist(), self.num_read]
        cuts = np.searchsorted(origin, first).tolist()
        return [
            TransformedRows(
                self.table.slice(cuts[i], cuts[i + 1] - cuts[i]),
                origin[cuts[i] : cuts[i + 1]] - first[i],
                lineage.of_unit(i),
                first[i + 1] - first[i],
                tuple(report for report in self.bad if report[0] == name),
            )
            for i, name in enumerate(names)
        ]


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """Where the units of a source come in its stream."""

    name: str
    seed: int
    units: Sequence[Unit]
    runs: UnitRuns
    window: int
    shuffle: bool

    def chunks_until(self, unit: int, number: int) -> int:
        """How many chunks after this one the unit comes again."""
        epoch = number // chunks_per_epoch(self.runs.num_units, self.window) + 1
        again = chunk_of_unit(
            self.seed, self.name, self.runs, window=self.window, shuffle=self.shuffle, unit=unit, epoch=epoch
        )
        return again - number


class NextNeeds:
    """Tells when a unit of a chunk comes again, by the pace of chunks so far. Thread-safe."""

    def __init__(self, order: UnitOrder) -> None:
        self.order = order
        self._first: tuple[float, int] | None = None

    def in_s(self, unit: int, number: int) -> float:
        """Seconds until a unit of this chunk comes again."""
        now = time.monotonic()
        first_at, first_number = self._first = self._first or (now, number)
        chunk_s = (now - first_at) / (number - first_number) if number > first_number else _CHUNK_S
        return self.order.chunks_until(unit, number) * chunk_s


class KeepingBudget:
    """How much CPU time may go into looking up and keeping rows: a twentieth of what making rows has taken, and what finding
    them has saved.

    Rows that cost much to make are all kept at once. Those that cost little are kept little by little, and faster once some
    are found. Several threads use it without a lock: a number may miss what one of two threads added at once.
    """

    def __init__(self) -> None:
        self._left_s = 0.0
        self._has_made = False
        self._make_s_a_row = 0.0
        self._make_s_a_unit = 0.0
        self._bytes_a_unit = 0.0
        self._cost = _KEEPING

    @property
    def allows_lookup(self) -> bool:
        """Always before anything was made: a run that resumes must find what it needs first."""
        return not self._has_made or self._left_s >= 0

    def allows_keeping(self, num_bytes: float) -> bool:
        """Whether an entry of so many bytes can be paid for."""
        return self._left_s >= self._cost.of(num_bytes)

    def may_keep(self, num_units: int) -> bool:
        """Whether units that are about to be made can be kept, by what the last ones took."""
        left_s = self._left_s + num_units * _KEEPING_SHARE * self._make_s_a_unit
        return not self._has_made or left_s >= num_units * self._cost.of(self._bytes_a_unit)

    def add_made(self, seconds: float, num_rows: int, num_bytes: int, num_units: int = 1) -> None:
        self._has_made = True
        self._left_s += _KEEPING_SHARE * seconds
        self._make_s_a_row = seconds / max(num_rows, 1)
        self._make_s_a_unit = seconds / num_units
        self._bytes_a_unit = num_bytes / num_units

    def add_found(self, cpu_s: float, num_rows: int) -> None:
        self._left_s += max(self._make_s_a_row * num_rows - cpu_s, 0.0)

    def add_kept(self, cpu_s: float, num_bytes: int) -> None:
        self._left_s -= cpu_s
        self._cost = self._cost.with_measured(cpu_s, num_bytes)

    def take(self, cpu_s: float) -> None:
        self._left_s -= cpu_s


class RowCache:
    """The kept rows of one source. Thread-safe."""

    def __init__(
        self,
        store: EntryStore,
        key: str,
        source: Source,
        needs: NextNeeds,
        *,
        transforms: Transforms | None,
        bad_rows: BadRowLog,
    ) -> None:
        """`key` is what rows depend on beside their unit."""
        self._store = store
        self._key = key
        self._source = source
        self._needs = needs
        self._order = needs.order
        self._bad_rows = bad_rows
        self._has_transforms = transforms is not None
        self._is_random = transforms is not None and transforms.wants_context
        self._by_unit = not self._is_random
        self._must_check = transforms is not None and self._by_unit and not transforms.slices_freely
        self._is_per_row = transforms is not None and transforms.has_per_row
        # Overlord's own transforms make the same rows of the same types, whatever other units they get along with them.
        self._at_once = self._by_unit and (transforms is None or (transforms.slices_freely and not self._is_per_row))
        self._unit_keys: dict[int, str | None] = {}
        self._place_text = PlaceText()
        self._has_warned = False
        self._in_processes = any(isinstance(fn, InProcesses) for fn in source.transforms)
        self._budget = KeepingBudget()

    def obtain(self, number: int, chosen: Sequence[int], make: MakeRows) -> TransformedRows:
        """The rows of these units, which make a chunk. `make` makes the rows of some of its units."""
        if not self._budget.allows_lookup:
            return self._make(number, chosen, make)[0]
        keys = self._keys_of(chosen)
        if keys is None:
            return make(number, chosen)
        if not self._by_unit:
            return self._obtain_whole(number, chosen, make, keys)
        found = self._look_up(number, chosen, keys)
        missing = [unit for unit in chosen if unit not in found]
        if len(missing) == len(chosen) and not self._budget.may_keep(len(missing)):
            return self._make(number, chosen, make)[0]
        if self._must_check and len(missing) > 1 and not self._treats_rows_alone(number, missing[:2]):
            return self._obtain_whole(number, chosen, make, keys)
        if self._at_once and missing:
            rows, is_worth = self._make(number, missing, make)
            parts = self._keep_units(number, rows, keys) if is_worth else None
            if len(missing) == len(chosen):
                return rows
            parts = parts or rows.by_unit()
            self._at_once = parts is not None
            found |= zip(missing, parts or (), strict=False)
        for unit in missing:
            if unit not in found:
                found[unit] = self._make_and_keep(number, [unit], make, keys[unit])
        return found[chosen[0]] if len(chosen) == 1 else self._join([found[unit] for unit in chosen])

    def _obtain_whole(self, number: int, chosen: Sequence[int], make: MakeRows, keys: Mapping[int, str]) -> TransformedRows:
        at = (str(self._order.seed), self._order.name, str(number)) if self._is_random else ()
        key = digest_key(KIND, "whole", *at, *keys.values())
        return self._load(key, chosen, 0.0) or self._make_and_keep(number, chosen, make, key)

    def _make(self, number: int, chosen: Sequence[int], make: MakeRows) -> tuple[TransformedRows, bool]:
        """Make rows, and say whether they are worth keeping if that costs nothing."""
        began, began_cpu = time.monotonic(), cpu_time()
        rows = make(number, chosen)
        seconds, cpu_s = time.monotonic() - began, cpu_time() - began_cpu
        # What transforms take in other processes is not known here: the clock tells.
        self._budget.add_made(seconds if self._in_processes else cpu_s, rows.num_read, rows.table.nbytes, len(chosen))
        share = 1 / len(chosen)
        return rows, self._has_transforms or is_copied(
            share * cpu_s, share * max(seconds - cpu_s, 0.0), share * rows.table.nbytes, FILE
        )

    def _make_and_keep(self, number: int, chosen: Sequence[int], make: MakeRows, key: str) -> TransformedRows:
        rows, is_worth = self._make(number, chosen, make)
        if is_worth:
            self._keep(number, rows, key)
        return rows

    def _keep_units(self, number: int, rows: TransformedRows, keys: Mapping[int, str]) -> list[TransformedRows] | None:
        """Keep as many units as the budget allows. Returns the rows of each; None if none is kept."""
        if rows.lineage.mapped or not self._budget.allows_keeping(rows.table.nbytes // len(rows.lineage.units)):
            return None
        parts = rows.by_unit()
        self._at_once = parts is not None
        for part in parts or ():
            self._keep(number, part, keys[part.lineage.unit_numbers[0]])
        return parts

    def _keep(self, number: int, rows: TransformedRows, key: str) -> None:
        num_bytes = rows.table.nbytes
        if not self._budget.allows_keeping(num_bytes):
            return
        began_cpu = cpu_time()
        parts = encode_rows(rows)
        if parts is not None:
            needed_in_s = self._needs.in_s(rows.lineage.unit_numbers[0], number) if self._by_unit else 0.0
            self._store.put(key, parts, needed_in_s)
        self._budget.add_kept(cpu_time() - began_cpu, num_bytes)

    def _look_up(self, number: int, chosen: Sequence[int], keys: Mapping[int, str]) -> dict[int, TransformedRows]:
        def load(unit: int) -> TransformedRows | None:
            return self._load(keys[unit], [unit], self._needs.in_s(unit, number))

        loaded = map_threads(load, chosen) if self._store.is_far else map(load, chosen)
        return {unit: rows for unit, rows in zip(chosen, loaded, strict=True) if rows is not None}

    def _load(self, key: str, chosen: Sequence[int], needed_in_s: float) -> TransformedRows | None:
        began_cpu = cpu_time()
        data = self._store.get(key, needed_in_s)
        if data is None:
            self._budget.take(cpu_time() - began_cpu)
            return None
        rows = decode_rows(data, [self._order.units[unit] for unit in chosen], chosen)
        if rows is None or (rows.bad and self._bad_rows.fails):
            return None  # bad rows are found again, so that the error is the same as without a cache
        for where, row, error in rows.bad:
            self._bad_rows.add(where, row, error)
        self._budget.add_found(cpu_time() - began_cpu, rows.num_read)
        return rows

    def _join(self, parts: Sequence[TransformedRows]) -> TransformedRows:
        """The rows of all units as one table. Its types are those that it would have if it had been made at once."""
        tables = [part.table for part in parts if part.table.num_rows] or [parts[0].table]
        schema = tables[0].schema.remove_metadata()
        if any(not table.schema.remove_metadata().equals(schema) for table in tables[1:]):
            tables = [self._merge(tables, parts)]
        first = np.cumsum([0, *(part.num_read for part in parts)], dtype=np.int64)
        origin = [np.where(part.origin >= 0, part.origin + start, -1) for part, start in zip(parts, first, strict=False)]
        lineage = Lineage(
            tuple(unit for part in parts for unit in part.lineage.units),
            first[:-1],
            tuple(numbers for part in parts for numbers in part.lineage.row_numbers),
            tuple(mapped for part in parts for mapped in part.lineage.mapped),
            tuple(number for part in parts for number in part.lineage.unit_numbers),
        )
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        return TransformedRows(table, np.concatenate(origin), lineage, int(first[-1]))

    def _merge(self, tables: Sequence[pa.Table], parts: Sequence[TransformedRows]) -> pa.Table:
        has_same = all(sorted(table.column_names) == sorted(tables[0].column_names) for table in tables)
        merged = merge_tables(tables) if has_same or self._is_per_row else None
        if merged is None:
            units = ", ".join(str(unit) for part in parts for unit in part.lineage.units)
            shown = " and ".join(dict.fromkeys(str(table.schema.remove_metadata()).replace("\n", ", ") for table in tables))
            raise SchemaError(
                f"source {self._order.name!r}: the rows of {units} have different columns or types: {shown}; transforms "
                "must return the same columns and types for every row"
            )
        return merged

    def _treats_rows_alone(self, number: int, chosen: Sequence[int]) -> bool:
        """Whether a sample of two units comes out of the transforms together as it does one by one. If not, chunks are kept
        as a whole from now on."""
        self._must_check = False
        began_cpu = cpu_time()
        try:
            return self._compare_samples(number, chosen)
        finally:
            self._budget.take(cpu_time() - began_cpu)

    def _compare_samples(self, number: int, chosen: Sequence[int]) -> bool:
        samples = [_first_rows(self._source.read(self._order.units[unit])) for unit in chosen]
        context = Context(self._order.name, number, self._order.seed)

        def run(table: pa.Table) -> pa.Table:
            transforms = Transforms(self._source.transforms)
            return transforms.run(table, context, np.arange(table.num_rows), Reporter(_Silent(), lambda row: ("", row)))[0]

        try:
            alone = [run(sample) for sample in samples]
            self._by_unit = all(
                _are_equal(pa.concat_tables(alone[::step]), run(pa.concat_tables(samples[::step]))) for step in (1, -1)
            )
        except (pa.ArrowException, SchemaError):
            return True  # of types that differ from row to row: the rows themselves tell
        if not self._by_unit:
            _log.warning(
                "a transform of source %r does not treat rows independently of each other: its chunks are kept in the cache "
                "as a whole, so that later epochs make them again",
                self._order.name,
            )
        return self._by_unit

    def _keys_of(self, chosen: Sequence[int]) -> dict[int, str] | None:
        """The keys of units; None if one has none."""
        began_cpu = cpu_time()
        keys: dict[int, str] = {}
        for unit in chosen:
            if unit not in self._unit_keys:
                self._unit_keys[unit] = unit_key(self._key, self._order.units[unit], self._place_text)
            key = self._unit_keys[unit]
            if key is None:
                self._warn_of_no_version(unit)
                return None
            keys[unit] = key
        self._budget.take(cpu_time() - began_cpu)
        return keys

    def _warn_of_no_version(self, unit: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the rows of source %r are not kept in its cache: %s has no version, so that a change of it would go "
                "unnoticed; give Unit(version=...) something that changes with it",
                self._order.name,
                self._order.units[unit],
            )


class _Silent:
    """Takes the bad rows of a sample."""

    fails = False

    def add(self, where: str, row: int, error: str) -> None:
        """They are reported when their unit is made."""


def _first_rows(table: pa.Table) -> pa.Table:
    fewest, most = _SAMPLE_ROWS
    return table.slice(0, min(max(table.num_rows // _SAMPLE_PART, fewest), most))


def _are_equal(one: pa.Table, other: pa.Table) -> bool:
    return one.column_names == other.column_names and bool(one.cast(other.schema).equals(other))


class _RowsHead(msgspec.Struct, frozen=True):
    """What is known of kept rows before their arrays."""

    num_read: int
    first: list[int]
    """The number of each unit's first row among those that were read."""
    has_all: bool
    """Each row that was read is one row, in its order."""
    row_numbers: list[bool]
    """Whether rows of a unit are missing, so that the numbers of the others are kept."""
    bad: list[BadReport]
    lengths: list[int]
    """Bytes of the table, then of each array."""


def encode_rows(rows: TransformedRows) -> list[bytes | memoryview] | None:
    """The parts of an entry. None for rows that lie in mapped files: reading them again costs as much."""
    table = rows.table
    if rows.lineage.mapped or any(_is_view(field.type) for field in table.schema):
        return None
    stream = _Pieces()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    has_all = rows.num_read == len(rows.origin) and np.array_equal(rows.origin, np.arange(rows.num_read))
    arrays = [] if has_all else [rows.origin]
    arrays += [numbers for numbers in rows.lineage.row_numbers if numbers is not None]
    bodies = [stream.end(), *([np.ascontiguousarray(each, np.int64).data.cast("B")] for each in arrays)]
    lengths = [sum(map(len, body)) for body in bodies]
    head = msgspec.json.encode(
        _RowsHead(
            rows.num_read,
            rows.lineage.first.tolist(),
            has_all,
            [numbers is not None for numbers in rows.lineage.row_numbers],
            list(rows.bad),
            lengths,
        )
    )
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little"), head]
    for body, length in zip(bodies, lengths, strict=True):
        parts += [*body, bytes(-length % _ALIGNMENT)]
    return parts


class _Pieces(io.RawIOBase):
    """What Arrow writes, in pieces: large buffers are not copied."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[bytes | memoryview] = []
        self._small = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if len(data) < _SMALL_BYTES:
            self._small += data
        else:
            self._done += [bytes(self._small), memoryview(data)]
            self._small.clear()
        return len(data)

    def end(self) -> list[bytes | memoryview]:
        return [*self._done, bytes(self._small)]


def decode_rows(data: pa.Buffer, units: Sequence[Unit], unit_numbers: Sequence[int]) -> TransformedRows | None:
    """The rows of an entry, as views of it; None if it is not what `encode_rows` makes."""
    try:
        length = int.from_bytes(memoryview(data)[:8], "little")
        head = msgspec.json.decode(memoryview(data)[8 : 8 + length], type=_RowsHead)
        place, bodies = 8 + length, list[pa.Buffer]()
        for size in head.lengths:
            bodies.append(data.slice(place, size))
            place += size + -size % _ALIGNMENT
        with pa.ipc.open_stream(bodies[0]) as reader:
            table = reader.read_all()
    except (msgspec.DecodeError, pa.ArrowException, IndexError):
        return None
    arrays = iter([np.frombuffer(memoryview(body), np.int64) for body in bodies[1:]])
    origin = np.arange(head.num_read, dtype=np.int64) if head.has_all else next(arrays)
    numbers: list[NDArray[np.int64] | None] = [next(arrays) if has_some else None for has_some in head.row_numbers]
    lineage = Lineage(tuple(units), np.array(head.first, np.int64), tuple(numbers), unit_numbers=tuple(unit_numbers))
    return TransformedRows(table, origin, lineage, head.num_read, tuple(head.bad))


def _is_view(type_: pa.DataType) -> bool:
    return pa.types.is_binary_view(type_) or pa.types.is_string_view(type_)
