"""Samples that lie one after the other in a block of bytes, each with the sizes of its values before the values: the layout
that MDS shards and the chunks of litData share.

Nothing of a sample is believed: a value that lies outside of its sample, or is not what its column says, makes a bad row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.sources.packed_values import gather, gather_records, nested_lists, number_column, numbers, read_uint32
from overlord.sources.reading import BadRow, ReadResult, good_rows, validate
from overlord.sources.views import MOST_BYTES, take_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

IMAGE = pa.struct([("width", pa.uint32()), ("height", pa.uint32()), ("mode", pa.string()), ("data", pa.binary())])
"""Pixels that were not encoded."""


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """The columns of samples, in the order in which a sample has them."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    """The bytes of a value; None where each sample tells them. Empty where a sample is the value of the only column."""


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """The values of one column: where they lie, and whether their samples are good so far."""

    name: str
    encoding: str
    type: Any
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    good: NDArray[np.bool_]


@dataclass(slots=True)
class PackedSamples:
    """Samples in memory. `offsets` has one more than there are samples. `bad` may have samples that are bad already."""

    data: pa.Buffer
    offsets: NDArray[np.int64]
    columns: PackedColumns
    where: str
    bad: dict[int, str] = field(default_factory=dict)
    """The first fault of each bad sample."""

    def places(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and size of a column's value in every sample. In samples without room for it both are 0, and the sample is
        bad."""
        begins, ends = self.offsets[:-1], self.offsets[1:]
        if not self.columns.sizes:
            return begins, ends - begins
        head_bytes = 4 * sum(not size for size in self.columns.sizes)
        self.mark(ends - begins < head_bytes, f"it has less than the {head_bytes} bytes of its sizes")
        has_head = np.ones(len(begins), bool)
        has_head[list(self.bad)] = False
        starts, at = begins + head_bytes, np.where(has_head, begins, 0)
        for column, size in zip(self.columns.names, self.columns.sizes, strict=True):
            if size:
                sizes = np.full(len(begins), size)
            else:
                sizes = np.zeros(len(begins), np.int64)
                sizes[has_head] = read_uint32(self.data, at[has_head])
                at = at + 4
            if column == name:
                outside = starts + sizes > ends
                self.mark(outside & has_head, f"the value of {name!r} goes beyond the end of the sample")
                inside = has_head & ~outside
                return np.where(inside, starts, 0), np.where(inside, sizes, 0)
            starts = starts + sizes
        raise AssertionError(name)

    def values(self, name: str, type_: pa.DataType) -> PackedColumn:
        starts, sizes = self.places(name)
        good = np.ones(len(starts), bool)
        good[list(self.bad)] = False
        encoding = self.columns.encodings[self.columns.names.index(name)]
        return PackedColumn(name, encoding, type_, starts, sizes, good)

    def scalars(self, values: PackedColumn) -> Any:
        width = values.type.bit_width // 8
        is_whole = values.good & (values.sizes == width)
        self.mark(values.good & ~is_whole, f"the value of {values.name!r} does not have {width} bytes")
        records = np.zeros((len(is_whole), width), np.uint8)
        records[is_whole] = gather_records(self.data, values.starts[is_whole], width)
        return number_column(values.type, pa.py_buffer(records.data), len(records))

    def arrays(self, values: PackedColumn, at: NDArray[np.int64], shapes: NDArray[np.int64], value_type: Any) -> Any:
        """A column of arrays, whose values begin at `at` and go on to the ends of the column's values."""
        is_bool = pa.types.is_boolean(value_type)
        width, good = 1 if is_bool else value_type.bit_width // 8, values.good
        # In floating point, where the sizes of a damaged shape do not overflow to a plausible number.
        products = np.cumprod(shapes.astype(np.float64), axis=1)
        is_fit = products[:, -1] * width == values.starts + values.sizes - at
        self.refuse(values, ~is_fit | (products.max(axis=1) > MOST_BYTES), "does not have the bytes of its shape")
        shapes = np.where(good[:, None], shapes, 0)
        num_values = shapes.prod(axis=1)
        data, count = gather(self.data, np.where(good, at, 0), num_values * width), int(num_values.sum())
        found = pa.array(numbers(data, np.uint8) != 0) if is_bool else number_column(value_type, data, count)
        return nested_lists(self.where, found, shapes)

    def refuse(self, values: PackedColumn, rows: NDArray[np.bool_], error: str) -> None:
        self.mark(rows & values.good, f"the value of {values.name!r} {error}")
        values.good[rows] = False

    def parse(self, values: PackedColumn, row: int, parse: Callable[[bytes], Any], value: bytes) -> Any:
        if row in self.bad:
            return None
        try:
            return parse(value)
        except ValueError as error:
            self.bad[row] = f"the value of {values.name!r} is no {values.encoding}: {error}"
            return None

    def mark(self, rows: NDArray[np.bool_], error: str) -> None:
        for row in np.flatnonzero(rows).tolist():
            self.bad.setdefault(row, error)

    def result(self, table: pa.Table, path: str) -> ReadResult:
        """The good rows of a table of all samples, and reports of the bad ones."""
        reports = tuple(BadRow(row, self.bad[row], f"{path}, sample {row}") for row in sorted(self.bad))
        kept = good_rows(len(table), reports) if reports else None
        result = validate(table if kept is None else take_rows(table, kept), path)
        if kept is None:
            return result
        numbers_left = kept if result.row_numbers is None else kept[result.row_numbers]
        others = tuple(BadRow(int(kept[bad.row]), bad.error, bad.where) for bad in result.bad)
        bad = tuple(sorted((*reports, *others), key=lambda each: each.row))
        return ReadResult(result.table, numbers_left, bad)


def parse_image(value: bytes) -> dict[str, Any]:
    if len(value) < 12:
        raise ValueError("it is cut off")
    width, height, mode_bytes = np.frombuffer(value[:12], "<u4").tolist()
    if len(value) < 12 + mode_bytes:
        raise ValueError("it is cut off")
    return {"width": width, "height": height, "mode": value[12 : 12 + mode_bytes].decode(), "data": value[12 + mode_bytes :]}


def parse_list(value: bytes, kind: str) -> list[Any]:
    at = 4 if kind.startswith("list[") else 0  # a number that is kept for later versions of the format
    if len(value) < at + 4:
        raise ValueError("it is cut off")
    count = int.from_bytes(value[at : at + 4], "little")
    at += 4
    if len(value) < at + 4 * count:
        raise ValueError("it is cut off")
    ends = at + 4 * count + np.cumsum(np.frombuffer(value[at : at + 4 * count], "<u4").astype(np.int64))
    begins = [at + 4 * count, *ends.tolist()]
    if begins[-1] > len(value):
        raise ValueError("it is cut off")
    parts = [value[begin:end] for begin, end in pairwise(begins)]
    return [parse_image(part) for part in parts] if kind == "list[pil]" else parts
