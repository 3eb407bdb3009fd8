"""Large units in parts, so that the first step need not wait until all rows of a unit are transformed.

The parts of a unit are chunks of their own, which follow each other. Of a shuffled source a part has every n-th row of its
unit, so that documents that lie side by side do not stay together; of another it has a range of rows. A unit is read once
for all of its parts: the reader keeps the rows until the last part has been taken.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, overload

import numpy as np

from overlord.declare.source import RowPart, Unit
from overlord.sources.reading import MadeRows, ReadResult, UnitReader, table_bytes
from overlord.sources.row_limit import rows_in
from overlord.sources.views import take_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


class UnitParts(Sequence[Unit]):
    """The units of a source of which some are cut into parts. A part is made when it is asked for: there may be millions."""

    def __init__(self, units: Sequence[Unit], counts: Sequence[int], part_bytes: int, *, is_strided: bool) -> None:
        """`counts[i]`: the number of parts of unit i. `part_bytes`: what they follow from, for a state of the run."""
        self.units = units
        self.counts = counts
        self.part_bytes = part_bytes
        self.is_strided = is_strided
        self._ends = list(accumulate(counts))

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.units, self.counts, self.part_bytes, self.is_strided)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...
    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        at = bisect.bisect_right(self._ends, number)
        unit, count = self.units[at], self.counts[at]
        if count == 1:
            return unit
        part = RowPart(number - (self._ends[at] - count), count, self.is_strided)
        return Unit(
            unit.path,
            unit.index,
            None if unit.num_rows is None else len(part.rows(unit.num_rows)),
            -(-unit.num_bytes // count),
            unit.detail,
            unit.version,
            follows=part.index > 0,
            whole=unit,
            part=part,
        )


def _restore(units: Sequence[Unit], counts: Sequence[int], part_bytes: int, is_strided: bool) -> UnitParts:
    return UnitParts(units, counts, part_bytes, is_strided=is_strided)


@dataclass(slots=True)
class _WholeUnit:
    """A unit whose parts are being taken."""

    left: set[int]
    """The parts that were not taken yet."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    result: ReadResult | None = None
    num_bytes: int = 0


class PartReader:
    """Reads units and parts of units. Threads that need parts of one unit at the same time read it once."""

    def __init__(self, reader: UnitReader, most_bytes: int) -> None:
        """Rows of units whose parts are not all taken are kept within `most_bytes`; those of one unit always."""
        self._reader = reader
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], _WholeUnit] = OrderedDict()
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """The memory of the rows that are kept."""
        with self._lock:
            return sum(each.num_bytes for each in self._kept.values())

    def read_rows(self, unit: Unit) -> ReadResult:
        part, whole = unit.part, unit.whole
        if part is None or whole is None:
            return self._reader.read_rows(unit)
        key = whole.path, whole.index
        with self._lock:
            found = self._kept.pop(key, None) or _WholeUnit(set(range(part.of)))
            if not self._is_closed:
                self._kept[key] = found
        with found.lock:
            if found.result is None:
                try:
                    found.result = self._reader.read_rows(whole)
                except BaseException:
                    with self._lock:
                        self._kept.pop(key, None)
                    raise
                found.num_bytes = table_bytes(found.result.table, found.result.mapped)
        result = _rows_of(found.result, part)
        self._note_taken(key, found, part.index)
        return result

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._kept.clear()
        self._reader.close()

    def _note_taken(self, key: tuple[str, int], taken: _WholeUnit, part: int) -> None:
        with self._lock:
            taken.left.discard(part)
            if not taken.left and self._kept.get(key) is taken:
                del self._kept[key]
            while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > self._most_bytes:
                self._kept.popitem(last=False)


def _rows_of(result: ReadResult, part: RowPart) -> ReadResult:
    """The rows of a part, in the order of the unit."""
    wanted = part.rows(rows_in(result))
    bad = tuple(each for each in result.bad if each.row in wanted)
    made = result.made
    num_read = result.table.num_rows if made is None else made.num_read
    of_unit = np.arange(num_read) if result.row_numbers is None else result.row_numbers
    taken = np.flatnonzero(_is_in(of_unit, wanted))  # of the rows that were read
    if made is None:
        return replace(result, table=take_rows(result.table, taken), row_numbers=of_unit[taken], bad=bad)
    origin = np.arange(result.table.num_rows) if made.origin is None else made.origin
    is_taken = np.zeros(num_read, bool)
    is_taken[taken] = True
    # Rows that a transform lost are of no part; they stay with the first one.
    kept = np.flatnonzero(np.where(origin < 0, part.index == 0, is_taken[np.maximum(origin, 0)]))
    place = np.cumsum(is_taken) - 1
    own = np.where(origin[kept] < 0, -1, place[np.maximum(origin[kept], 0)])
    of_part = MadeRows(len(taken), own, made.num_stages)
    return replace(result, table=take_rows(result.table, kept), row_numbers=of_unit[taken], bad=bad, made=of_part)


def _is_in(rows: NDArray[np.int64], wanted: range) -> NDArray[np.bool_]:
    return (rows >= wanted.start) & (rows < wanted.stop) & ((rows - wanted.start) % wanted.step == 0)
