"""`Source(max_rows=...)`: the same part of a source in every epoch, without reading the rest of it.

Which rows: files in the order of a hash of their names, each from its first unit on, until there are enough. A file that is
added takes its place in that order and pushes out at most what stands behind it, so a subset changes by the share of new
files. A data set that is moved to another folder keeps its subset. Files are used from their beginnings, so that `overlord
trace` and `find` number their rows as without a limit.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.sources.reading import MadeRows, ReadResult, UnitReader
from overlord.sources.views import take_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.declare.source import Unit


def limit_units(units: Sequence[Unit], max_rows: int, count_rows: Callable[[Unit], int]) -> list[Unit]:
    """The units with the first `max_rows` rows, in the order in which they are listed; of the last one only a part may be
    used. `count_rows` reads a unit that does not say how many rows it has."""
    of_file: dict[str, list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        of_file[unit.path].append(number)
    chosen: dict[int, Unit] = {}
    left = max_rows
    for path in sorted(of_file, key=_place):  # a stable sort: files with one name stay in the order of their folders
        for number in of_file[path]:
            unit = units[number]
            rows = count_rows(unit) if unit.num_rows is None else unit.num_rows
            chosen[number] = unit if rows <= left else _first_of(unit, rows, left)
            left -= min(rows, left)
            if not left:
                return [chosen[number] for number in sorted(chosen)]
    return list(units)


def _place(path: str) -> bytes:
    """By the file's own name, so that a data set may move."""
    name = path.rstrip("/").rpartition("/")[2]
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _first_of(unit: Unit, rows: int, limit: int) -> Unit:
    return replace(unit, num_rows=limit, num_bytes=-(-unit.num_bytes * limit // rows), whole=unit)


def rows_in(result: ReadResult) -> int:
    """How many rows a unit has, good and bad together."""
    num_read = result.table.num_rows if result.made is None else result.made.num_read
    if result.row_numbers is None:
        return num_read
    return 1 + max(int(result.row_numbers.max(initial=-1)), max((bad.row for bad in result.bad), default=-1))


class LimitedReader:
    """Reads units of which only the first rows may be used."""

    def __init__(self, reader: UnitReader) -> None:
        self._reader = reader

    def read_rows(self, unit: Unit) -> ReadResult:
        if unit.whole is None or unit.num_rows is None:
            return self._reader.read_rows(unit)
        return _first_rows(self._reader.read_rows(unit.whole), unit.num_rows)

    def close(self) -> None:
        self._reader.close()


def _first_rows(result: ReadResult, limit: int) -> ReadResult:
    of_unit, bad = result.unit_rows, tuple(bad for bad in result.bad if bad.row < limit)
    numbers = result.row_numbers
    if numbers is not None:
        numbers = numbers[numbers < limit]
    if result.made is None:
        num_rows = int(of_unit.searchsorted(limit))  # rows are in the order of the file
        return replace(result, table=result.table.slice(0, num_rows), row_numbers=numbers, bad=bad)
    made, kept = result.made, np.flatnonzero((of_unit >= 0) & (of_unit < limit))
    origin = kept if made.origin is None else made.origin[kept]
    num_read = min(made.num_read, limit) if numbers is None else len(numbers)
    of_first = MadeRows(num_read, origin, made.num_stages)
    return replace(result, table=take_rows(result.table, kept), row_numbers=numbers, bad=bad, made=of_first)
