"""What the blocks of a lineage refer to, recorded once per job and once per planner: the units of every source, the
fingerprint, and the mesh that steps were arranged for. With it a step is explained without listing a single file."""

from __future__ import annotations

import hashlib
import logging
import struct
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa

from overlord.declare.source import RowPart, Unit
from overlord.errors import OverlordError, SpecError, StateError
from overlord.planlog.lineage import LineageWriter
from overlord.planlog.lineage_files import LineageFiles, lineage_at
from overlord.steering.decisions import mesh_decision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.declare.mesh import Mesh
    from overlord.declare.policies import Skip
    from overlord.planlog.plan_log import Era

_log = logging.getLogger("overlord.lineage")
_LENGTHS = struct.Struct("<II")  # of the contents: compressed, and as they are


def record_units(era: Era, units: Mapping[str, Sequence[Unit]]) -> None:
    """Record the units of every source beside the log, unless they are there already."""
    files = _files(era)
    try:
        files.put(_name(era.header.fingerprint), _encode(era.header.fingerprint, units))
    except (OSError, OverlordError) as error:
        _log.warning("the lineage of this run is not written: %s: %s", files.place, error)


def begin_lineage(era: Era, mesh: Mesh, step: int) -> LineageWriter | None:
    """A writer for a planner that begins at `step`; None, with a warning, where storage does not take it."""
    files = _files(era)
    run = {
        "units": _name(era.header.fingerprint),
        "unit": era.header.unit,
        "mesh": mesh_decision(step, mesh).value,
        "job": era.header.job,
        "step": step,
    }
    try:
        return LineageWriter(files, files.begin(orjson.dumps(run)))
    except (OSError, OverlordError) as error:
        _log.warning("the lineage of this run is not written: %s: %s", files.place, error)
        return None


def read_run(files: LineageFiles, writer: int) -> dict[str, Any]:
    """What is known of a writer's run: the name of its units, the mesh, the unit of the mixture."""
    name = f"{writer:08}.run"
    try:
        found = orjson.loads(files.get(name))
        return {key: found[key] for key in ("units", "unit", "mesh", "job", "step")}
    except FileNotFoundError:
        raise StateError(f"{files.place}/{name} is gone: the lineage of its steps cannot be used") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{files.place}/{name} is damaged: {error}; the lineage of its steps cannot be used") from error


@dataclass(frozen=True)
class RecordedUnits:
    """The units of a job's sources as they were when it ran, and its fingerprint. Units are read source by source."""

    contents: Mapping[str, Any]
    parts: bytes
    place: str

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.contents["fingerprint"]

    def of(self, source: str) -> SourceUnits:
        begin, packed, plain = self.contents["sources"][source]
        try:
            found = orjson.loads(_decompress(self.parts[begin : begin + packed], plain))
            return SourceUnits(**found)
        except (OSError, ValueError, TypeError) as error:
            raise StateError(f"{self.place} is damaged: {error}") from error


@dataclass(frozen=True)
class SourceUnits:
    """The units of one source: entry i of each column is unit i."""

    paths: list[str]
    path: list[int]
    """Which of `paths`."""
    index: list[int]
    num_rows: list[int | None]
    follows: list[int]
    """The units that follow the one before them."""
    parts: list[list[int]] = field(default_factory=list[list[int]])
    """For each unit that is a part of a larger one, which has the same index: the number of the part, of how many, and 1
    where it has every n-th row. Empty for another unit, and as a whole where there are no parts."""

    def unit(self, number: int) -> Unit:
        return Unit(
            self.paths[self.path[number]],
            self.index[number],
            self.num_rows[number],
            follows=number in self._follows,
            part=self.part(number),
        )

    def part(self, number: int) -> RowPart | None:
        part = self.parts[number] if self.parts else []
        return RowPart(part[0], part[1], bool(part[2])) if part else None

    def parts_of(self, number: int) -> range:
        """The units that are parts of the same larger unit; one where units are not cut."""
        part = self.part(number)
        return range(number, number + 1) if part is None else range(number - part.index, number - part.index + part.of)

    def rows_in_whole(self, number: int) -> int | None:
        """The rows of a unit and of the other parts of the larger one."""
        rows = [self.num_rows[each] for each in self.parts_of(number)]
        known = [count for count in rows if count is not None]
        return sum(known) if len(known) == len(rows) else None

    def with_row(self, number: int, row: int) -> int:
        """The unit that has a row of the larger one that a unit is a part of."""
        part = self.part(number)
        if part is None:
            return number
        # A unit that does not say how many rows it has is only cut into parts of every n-th row.
        num_rows = self.rows_in_whole(number) or 0
        return self.parts_of(number)[RowPart.with_row(row, num_rows, part.of, is_strided=part.is_strided)]

    def all(self) -> list[Unit]:
        return [self.unit(number) for number in range(len(self.path))]

    def of_file(self, file: str) -> list[int]:
        """The units of a file, in order, by its path or by the end of it."""
        exact = [i for i, path in enumerate(self.paths) if path == file]
        found = exact or [i for i, path in enumerate(self.paths) if path.endswith("/" + file.lstrip("./"))]
        return [] if not found else [number for number, path in enumerate(self.path) if path == found[0]]

    def first_row(self, number: int) -> int | None:
        """The row of the file that a unit begins with; None where the units before it do not say how many rows they have."""
        before = [i for i in self.of_file(self.paths[self.path[number]]) if self.index[i] < self.index[number]]
        rows = [self.num_rows[i] for i in before]
        known = [count for count in rows if count is not None]
        has_all = len(known) == len(rows) and len({self.index[i] for i in before}) == self.index[number]
        return sum(known) if has_all else None

    @cached_property
    def _follows(self) -> frozenset[int]:
        return frozenset(self.follows)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A row of a source: the number of its unit, and the row in it; of a part, the row in the whole unit."""

    unit: int
    row: int


def locate_row(units: SourceUnits, name: str, file: str, row: int) -> RowPlace:
    """The unit and row of row `row` of a file. `file` is a path, or the end of one; path#3 is its unit number 3, and the row
    then counts from the beginning of that unit."""
    path, _, index = file.rpartition("#")
    if path and index.isdecimal() and not units.of_file(file):
        found = [number for number in units.of_file(path) if units.index[number] == int(index)]
        if not found:
            raise SpecError(f"source {name!r} has no unit {file}")
        rows = units.rows_in_whole(found[0])
        if rows is not None and row >= rows:
            raise SpecError(f"source {name!r}: {file} has {rows:,} rows; there is no row {row:,}")
        return RowPlace(units.with_row(found[0], row), row)
    of_file = units.of_file(file)
    if not of_file:
        raise SpecError(f"source {name!r} has no file {file}; `overlord trace` prints the names that it has")
    of_file = [number for number in of_file if units.parts_of(number)[0] == number]
    if len(of_file) == 1 and units.num_rows[of_file[0]] is None:
        return RowPlace(units.with_row(of_file[0], row), row)
    first = 0
    for number in of_file:
        rows = units.rows_in_whole(number)
        if rows is None:
            raise SpecError(
                f"source {name!r}: {file} is read in {len(of_file)} parts, and how many rows each has is not known before "
                f"it is read: name the part as `overlord trace` prints it, {file}#1, with the row in it"
            )
        if row < first + rows:
            return RowPlace(units.with_row(number, row - first), row - first)
        first += rows
    raise SpecError(f"source {name!r}: {file} has {first:,} rows; there is no row {row:,}")


def skip_value(skip: Skip, units: Sequence[Unit]) -> dict[str, Any]:
    """What to leave out of a source with these units, as the value of a decision."""
    rows: list[list[Any]] | None = None
    if skip.file is not None:
        listed = SourceUnits(**columns_of(units))
        if skip.rows is not None:
            by_unit: dict[int, list[int]] = {}
            for row in skip.rows:
                place = locate_row(listed, skip.source, skip.file, row)
                by_unit.setdefault(place.unit, []).append(place.row)
            rows = [[unit, sorted(found)] for unit, found in sorted(by_unit.items())]
        else:
            first = locate_row(listed, skip.source, skip.file, 0) if "#" in skip.file else None
            of_file = listed.of_file(skip.file) or ([] if first is None else listed.parts_of(first.unit))
            if not of_file:
                raise SpecError(f"source {skip.source!r} has no file {skip.file}; `overlord trace` prints its names")
            rows = [[unit, None] for unit in of_file]
    return {"source": skip.source, "rows": rows, "file": skip.file or ""}


def read_units(files: LineageFiles, name: str) -> RecordedUnits:
    try:
        data = files.get(name)
    except FileNotFoundError:
        raise StateError(f"{files.place}/{name} is gone: the lineage that refers to it cannot be used") from None
    place = f"{files.place}/{name}"
    try:
        packed, plain = _LENGTHS.unpack_from(data)
        contents = orjson.loads(_decompress(data[_LENGTHS.size : _LENGTHS.size + packed], plain))
        return RecordedUnits(contents, data[_LENGTHS.size + packed :], place)
    except (struct.error, OSError, ValueError) as error:
        raise StateError(f"{place} is damaged: {error}") from error


def _encode(fingerprint: Mapping[str, Any], units: Mapping[str, Sequence[Unit]]) -> bytes:
    plain = {name: orjson.dumps(columns_of(listed)) for name, listed in units.items()}
    packed = {name: _compress(part) for name, part in plain.items()}
    begins = accumulate((len(part) for part in packed.values()), initial=0)
    sources = {name: [begin, len(packed[name]), len(plain[name])] for name, begin in zip(packed, begins, strict=False)}
    contents = orjson.dumps({"fingerprint": fingerprint, "sources": sources})
    head = _compress(contents)
    return _LENGTHS.pack(len(head), len(contents)) + head + b"".join(packed.values())


def columns_of(units: Sequence[Unit]) -> dict[str, Any]:
    """The fields of `SourceUnits`."""
    number = {path: i for i, path in enumerate(dict.fromkeys(unit.path for unit in units))}
    return {
        "paths": list(number),
        "path": [number[unit.path] for unit in units],
        "index": [unit.index for unit in units],
        "num_rows": [unit.num_rows for unit in units],
        "follows": np.flatnonzero([unit.follows for unit in units]).tolist(),
        **({"parts": [_part_columns(unit.part) for unit in units]} if any(unit.part for unit in units) else {}),
    }


def _part_columns(part: RowPart | None) -> list[int]:
    return [] if part is None else [part.index, part.of, int(part.is_strided)]


def _files(era: Era) -> LineageFiles:
    assert era.has_lineage  # only then is there a place beside the log
    return lineage_at(era.log.location, getattr(era.log, "storage_options", None))


def _name(fingerprint: Mapping[str, Any]) -> str:
    plain = orjson.dumps(fingerprint, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return f"run-{hashlib.blake2b(plain, digest_size=8).hexdigest()}"


def _compress(data: bytes) -> bytes:
    return pa.Codec("zstd", compression_level=3).compress(data, asbytes=True)


def _decompress(data: bytes, num_bytes: int) -> bytes:
    return pa.Codec("zstd").decompress(data, decompressed_size=num_bytes, asbytes=True)
