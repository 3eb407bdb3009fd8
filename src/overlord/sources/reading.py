"""Reading units: the reader that a chunk maker opens and closes, the result of reading one unit, and its validation.

A source is a value: it may be compared, pickled and shared by several jobs. Whatever reading leaves open between two units
belongs to a reader.

`validate` checks what Arrow skips for speed: offsets, dictionary indices, buffer sizes and UTF-8. Without these checks a
damaged file would yield wrong documents, an error in some transform, or a segmentation fault. Values cannot be checked
without a checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from overlord.errors import BadRowError, SourceError
from overlord.sources.numbers import numbers_of
from overlord.sources.views import take_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.declare.source import Source, Unit
    from overlord.sources.storage import MappedFile


class UnitReader(Protocol):
    """Reads units of one source. Any thread may call any method at any time."""

    def read_rows(self, unit: Unit) -> ReadResult: ...

    def close(self) -> None:
        """Close files that are open between units. A call that is still under way ends as if nothing had happened."""
        ...


@runtime_checkable
class TogetherReader(Protocol):
    """A reader to which several units at once cost less than one after the other."""

    def read_together(self, units: Sequence[Unit]) -> pa.Table | None:
        """The rows of all units, as `UnitReader.read_rows` reads those of each; None where they have to be read one by one,
        so that an error names its unit."""
        ...


class SourceReader:
    """Reads by the source's own methods: `read_rows` where it has one, or `read`, which every source has."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read_rows = getattr(source, "read_rows", None)

    def read_rows(self, unit: Unit) -> ReadResult:
        return ReadResult(self._source.read(unit)) if self._read_rows is None else self._read_rows(unit)

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read. `row` counts the rows of its unit from 0, good and bad together."""

    row: int
    error: str
    where: str
    """The file and the place in it: a byte offset, a member of a tar."""

    def __str__(self) -> str:
        return f"{self.where}: {self.error}" if self.where else self.error


@dataclass(frozen=True, slots=True)
class MadeRows:
    """Says that the first transforms have run already on the rows of a unit."""

    num_read: int
    """The rows of the unit before them."""
    origin: NDArray[np.int64] | None
    """The row, before them, that each row was made from, or -1; None: row i from row i."""
    num_stages: int
    """How many they are."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`row_numbers[i]` is the row of the unit that row i of `table` is; None when no row is missing."""

    table: pa.Table
    row_numbers: NDArray[np.int64] | None = None
    bad: tuple[BadRow, ...] = ()
    mapped: tuple[MappedFile, ...] = ()
    """Files that the table points into: they do not count as memory in use."""
    made: MadeRows | None = None
    """None for rows as they were read."""

    @property
    def unit_rows(self) -> NDArray[np.int64]:
        """The row of the unit that each row of the table was read from; -1 where a transform lost it."""
        rows = np.arange(self.table.num_rows)
        if self.made is not None and self.made.origin is not None:
            rows = self.made.origin
        return rows if self.row_numbers is None else np.where(rows < 0, -1, self.row_numbers[rows])

    def strict(self) -> pa.Table:
        """The table, or BadRowError for the first bad row."""
        if self.bad:
            raise BadRowError(f"{self.bad[0]}; on_bad_row='skip' drops such rows and counts them")
        return self.table


def table_bytes(table: pa.Table, mapped: Sequence[MappedFile] = ()) -> int:
    """The memory of a table: each buffer counts once, those in mapped files do not count."""
    files = [(file.start, file.stop) for file in mapped]
    sizes: dict[int, int] = {}
    for column in table.columns:
        for chunk in column.chunks:
            for data in chunk.buffers():
                if data is not None and not any(start <= data.address < stop for start, stop in files):
                    sizes[data.address] = max(data.size, sizes.get(data.address, 0))
    return sum(sizes.values())


def good_rows(num_rows: int, bad: Sequence[BadRow]) -> NDArray[np.int64]:
    """The numbers of the rows that are not bad."""
    keep = np.ones(num_rows, bool)
    keep[[row.row for row in bad]] = False
    return np.flatnonzero(keep).astype(np.int64)


def validate(table: pa.Table, where: str | Sequence[str], mapped: tuple[MappedFile, ...] = ()) -> ReadResult:
    """The rows whose text is UTF-8; the others are bad rows. Raises SourceError where a whole column is damaged.

    `where` names the part of the file that was read, for the whole table or for each chunk of its columns. Offsets, indices
    and text are checked, numbers and binary values are not.
    """
    bad: dict[int, BadRow] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        first = 0
        for i, chunk in enumerate(column.chunks):
            try:
                chunk.validate(full=True)
            except pa.ArrowException:
                place = where if isinstance(where, str) else where[i]
                for row, error in _rows_at_fault(chunk, place, name).items():
                    text = f"column {name!r} is not UTF-8 text: {error}"
                    bad.setdefault(first + row, BadRow(first + row, text, place))
            first += len(chunk)
    if not bad:
        return ReadResult(table, mapped=mapped)
    reports = tuple(bad[row] for row in sorted(bad))
    kept = good_rows(table.num_rows, reports)
    return ReadResult(take_rows(table, kept), kept, reports, mapped)


def _rows_at_fault(array: pa.Array, where: str, name: str) -> dict[int, str]:
    try:
        return _rows_without_utf8(array)
    except pa.ArrowException as error:
        raise SourceError(
            f"{where} is damaged in column {name!r}: {_one_line(error)}; copy or write the file again"
        ) from error


def _rows_without_utf8(array: Any) -> dict[int, str]:
    """The rows whose text is not UTF-8, with Arrow's error for each. Raises Arrow's error where there is other damage."""
    array.validate()  # the code below reads offsets, whose buffers must be long enough
    try:
        array.validate(full=True)
    except pa.ArrowException as error:
        if pa.types.is_dictionary(array.type):
            raise  # dropping the rows that use the bad entry would leave the entry in the column
        found = _rows_of_children(array)
        if found is None:
            found = _rows_of_text(array)
        if not found:
            raise error
        return found
    return {}


def _rows_of_children(array: Any) -> dict[int, str] | None:
    """The bad rows of nested arrays, from their children; None for an array without children."""
    kind = array.type
    if pa.types.is_struct(kind):
        found: dict[int, str] = {}
        for i in range(kind.num_fields):
            found |= _rows_without_utf8(array.field(i))
        return found
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = numbers_of(array.offsets)
        if offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] > len(array.values):
            return {}
        values = _rows_without_utf8(array.values)
        rows = np.searchsorted(offsets, list(values), side="right") - 1
        return {row: error for row, error in zip(rows.tolist(), values.values(), strict=True) if 0 <= row < len(array)}
    return None


def _rows_of_text(array: pa.Array) -> dict[int, str]:
    found: dict[int, str] = {}
    for row in range(len(array)):  # only columns that are known to be bad
        try:
            array.slice(row, 1).validate(full=True)
        except pa.ArrowException as error:
            if "UTF8" not in str(error):
                raise
            found[row] = _one_line(error)
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
