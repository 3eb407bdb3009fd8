"""Reading units: the reader that a chunk maker opens and closes, and the result of reading one unit.

A source is a value: it may be compared, pickled and shared by several jobs. Whatever reading leaves open between two units
belongs to a reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from overlord.errors import BadRowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from overlord.declare.source import Source, Unit
    from overlord.sources.storage import MappedFile


class UnitReader(Protocol):
    """Reads units of one source. Any thread may call any method at any time."""

    def read_rows(self, unit: Unit) -> ReadResult: ...

    def close(self) -> None:
        """Close files that are open between units. A call that is still under way ends as if nothing had happened."""
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
        return f"{self.where}: {self.error}"


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`row_numbers[i]` is the row of the unit that row i of `table` is; None when no row is missing."""

    table: pa.Table
    row_numbers: NDArray[np.int64] | None = None
    bad: tuple[BadRow, ...] = ()
    mapped: tuple[MappedFile, ...] = ()
    """Files that the table points into: they do not count as memory in use."""

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
