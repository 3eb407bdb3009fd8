"""Packs the documents of a part into rows of one length, for trainers that read finished sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.errors import SchemaError
from overlord.stream.packing import best_fit, in_drawn_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.stream.facts import Ints

LENGTHS = "document_lengths"
"""The column with the lengths of the documents in each row, in their order."""


def pack_rows(tables: Sequence[pa.Table], columns: Sequence[str], capacity: int, where: str) -> pa.Table | None:
    """Rows of at most `capacity` tokens: whole documents by best fit, and documents that are longer cut into pieces first.
    `columns` are lists with one entry per token, the tokens first; other columns are left out. None without documents."""
    lists: dict[str, list[Any]] = {name: [] for name in columns}
    for table in tables:
        for name in columns:
            if name not in table.column_names or not pa.types.is_list(table.column(name).type):
                raise SchemaError(
                    f"{where}: packing needs the column {name!r} as lists of numbers; it has {table.column_names}"
                )
            lists[name] += table.column(name).chunks
    offsets = _offsets(lists[columns[0]])
    begin, end = _pieces(offsets, capacity)
    if not len(begin):
        return None
    lengths = end - begin
    rows = in_drawn_order(best_fit(lengths, len(lengths), capacity))
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    row_ends = np.concatenate([[0], np.cumsum(np.bincount(rows, lengths).astype(np.int64))])
    # Where each token of the packed rows comes from.
    ends = np.cumsum(lengths[order])
    places = np.arange(int(ends[-1])) + np.repeat(begin[order] - (ends - lengths[order]), lengths[order])
    packed: dict[str, Any] = {}
    for name in columns:
        if not np.array_equal(_offsets(lists[name]), offsets):
            raise SchemaError(f"{where}: {name!r} must have one entry per token of {columns[0]!r}")
        values = pa.concat_arrays([chunk.flatten() for chunk in lists[name]]).to_numpy(zero_copy_only=False)
        packed[name] = pa.ListArray.from_arrays(pa.array(row_ends, pa.int32()), pa.array(values[places]))
    firsts = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    packed[LENGTHS] = pa.ListArray.from_arrays(firsts, pa.array(lengths[order].astype(np.int32)))
    return pa.table(packed)


def _offsets(chunks: Sequence[Any]) -> Ints:
    """Where each list ends among the values of all, after a 0."""
    lengths = [chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]), dtype=np.int64)])


def _pieces(offsets: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Begin and end of each document, of a long one in pieces. Documents without tokens are left out."""
    lengths = np.diff(offsets)
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = offsets[document] + piece * capacity
    return begin, np.minimum(begin + capacity, offsets[document + 1])
