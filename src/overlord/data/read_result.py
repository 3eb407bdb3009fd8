"""What reading one unit gave: its good rows, where they stood in the unit, and the rows that could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from overlord.errors import BadRowError

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.data.storage import MappedFile


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
    """Files that the table points into: not memory that we hold."""

    def strict(self) -> pa.Table:
        """The table, or BadRowError for the first bad row."""
        if self.bad:
            raise BadRowError(f"{self.bad[0]}; on_bad_row='skip' drops such rows and counts them")
        return self.table


def held_bytes(table: pa.Table, mapped: Sequence[MappedFile] = ()) -> int:
    """The memory that a table holds, each buffer counted once and what lies in mapped files not at all."""
    files = [(file.start, file.stop) for file in mapped]
    sizes: dict[int, int] = {}
    for column in table.columns:
        for chunk in column.chunks:
            for data in chunk.buffers():
                if data is not None and not any(start <= data.address < stop for start, stop in files):
                    sizes[data.address] = max(data.size, sizes.get(data.address, 0))
    return sum(sizes.values())


def kept_rows(num_rows: int, bad: Sequence[BadRow]) -> NDArray[np.int64]:
    """The row numbers that are left of `num_rows` without the bad ones."""
    keep = np.ones(num_rows, bool)
    keep[[row.row for row in bad]] = False
    return np.flatnonzero(keep).astype(np.int64)
