"""The columns of an MDS shard: what their encodings mean in Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.errors import SchemaError
from overlord.sources.column_types import fit_values
from overlord.sources.packed_samples import IMAGE, PackedColumn, PackedSamples, parse_image, parse_list
from overlord.sources.packed_values import (
    binary_column,
    gather_records,
    list_type,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCALARS = {
    "int": pa.int64(),
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(pa, f"float{bits}")() for bits in (16, 32, 64)},
}
_BYTES = ("bytes", "jpeg", "png", "pkl")
_TEXT = ("str", "json", "str_decimal")
_NUMBERS_AS_TEXT = {"str_int": pa.int64(), "str_float": pa.float64()}
_LISTS = {
    "jpeg_array": pa.list_(pa.binary()),
    "jpegarray": pa.list_(pa.binary()),
    "list[jpeg]": pa.list_(pa.binary()),
    "list[png]": pa.list_(pa.binary()),
    "list[pil]": pa.list_(IMAGE),
}
_DTYPE_OF_CODE = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_CODE_OF_DTYPE = {name: code for code, name in _DTYPE_OF_CODE.items()}


class MdsSamples(PackedSamples):
    """The samples of a shard in memory."""

    def column(self, name: str, type_: pa.DataType) -> Any:
        values = self.values(name, type_)
        kind = values.encoding.partition(":")[0]
        if kind in _SCALARS:
            return self.scalars(values)
        if kind == "ndarray":
            return self._arrays(values)
        stored = binary_column(self.where, self.data, values.starts, values.sizes)
        if kind in _BYTES:
            return stored
        if kind in _TEXT:  # the same bytes, which `validate` checks afterwards
            return pa.Array.from_buffers(pa.string(), len(stored), stored.buffers())
        if kind in _NUMBERS_AS_TEXT:
            return self._parse_numbers(values, stored)
        parse = parse_image if kind == "pil" else lambda value: parse_list(value, kind)
        # A Python loop over samples: images that were not encoded, and lists of images, are rare and large.
        return pa.array([self.parse(values, row, parse, value) for row, value in enumerate(stored.to_pylist())], type_)

    def _arrays(self, values: PackedColumn) -> Any:
        dtype, shape = _array_spec(values.encoding)
        num_levels, value_type = _levels(values.type)
        good = values.good
        at, ends = values.starts.copy(), values.starts + values.sizes
        if dtype is None:
            self.refuse(values, at + 1 > ends, "has no type")
            codes = np.zeros(len(at), np.int64)
            codes[good] = gather_records(self.data, at[good], 1)[:, 0]
            expected = _CODE_OF_DTYPE[np.dtype(value_type.to_pandas_dtype()).name]
            self.refuse(values, codes != expected, f"is not of the type {value_type}, as the first sample's is")
            at += 1
        if shape is None:
            shapes, at = self._read_shapes(values, at, num_levels)
        else:
            shapes = np.tile(np.array(shape, np.int64), (len(at), 1))
        return self.arrays(values, at, shapes, value_type)

    def _read_shapes(
        self, values: PackedColumn, at: NDArray[np.int64], num_levels: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shapes that arrays begin with, and where their values begin."""
        good, ends = values.good, values.starts + values.sizes
        self.refuse(values, at + 1 > ends, "has no shape")
        heads = np.zeros(len(at), np.int64)
        heads[good] = gather_records(self.data, at[good], 1)[:, 0]
        self.refuse(values, heads >> 2 != num_levels, f"does not have {num_levels} dimensions, as the first sample's has")
        widths = 1 << (heads & 3)
        self.refuse(values, at + 1 + num_levels * widths > ends, "is cut off in its shape")
        shapes = np.zeros((len(at), num_levels), np.int64)
        for width in (1, 2, 4, 8):
            rows = np.flatnonzero(good & (widths == width))
            if len(rows):
                found = gather_records(self.data, at[rows] + 1, num_levels * width).view(f"<u{width}")
                shapes[rows] = np.minimum(found.astype(np.uint64), np.uint64(1 << 62)).astype(np.int64)
        return shapes, at + 1 + num_levels * widths

    def _parse_numbers(self, values: PackedColumn, texts: Any) -> Any:
        parse = int if pa.types.is_integer(values.type) else float
        # A Python loop over samples: Arrow reads fewer spellings of a number than Python, which wrote them.
        found = [
            self.parse(values, row, lambda text: parse(text.decode()), text) for row, text in enumerate(texts.to_pylist())
        ]
        column, unfit = fit_values(found, values.type)
        for row, error in unfit.items():
            self.bad.setdefault(row, f"the value of {values.name!r} does not fit {values.type}: {error}")
        return column


def column_type(where: str, name: str, encoding: str, first: bytes | None) -> pa.DataType:
    """What a column is in Arrow. `first` is the first sample's value, needed for arrays whose type or shape it tells."""
    kind = encoding.partition(":")[0]
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind in _BYTES:
        return pa.binary()
    if kind in _TEXT:
        return pa.string()
    if kind in _NUMBERS_AS_TEXT:
        return _NUMBERS_AS_TEXT[kind]
    if kind == "pil":
        return IMAGE
    if kind in _LISTS:
        return _LISTS[kind]
    if kind == "ndarray":
        try:
            return _array_type(*_array_spec(encoding), first)
        except (ValueError, KeyError, IndexError) as error:
            raise SchemaError(
                f"{where} has the column {name!r} of {encoding}, and its type cannot be told from that and the first "
                f"sample: {error}"
            ) from error
    raise SchemaError(
        f"{where} has the column {name!r} of the encoding {encoding!r}, which is not known; leave it out of columns"
    )


def needs_first_sample(encoding: str) -> bool:
    """Whether the type of a column cannot be told from its encoding."""
    return encoding.partition(":")[0] == "ndarray" and encoding.count(":") < 2


def _array_spec(encoding: str) -> tuple[str | None, tuple[int, ...] | None]:
    parts = encoding.split(":")[1:]
    dtype = parts[0] if parts else None
    if dtype is not None and dtype not in _CODE_OF_DTYPE:
        raise ValueError(f"{dtype} is no type of an array")
    shape = tuple(int(size) for size in parts[1].split(",")) if len(parts) > 1 else None
    if shape is not None and min(shape) < 0:
        raise ValueError(f"{parts[1]} is no shape")
    return dtype, shape


def _array_type(dtype: str | None, shape: tuple[int, ...] | None, first: bytes | None) -> pa.DataType:
    at, first = 0, first or b""
    if dtype is None:
        dtype, at = _DTYPE_OF_CODE[first[0]], 1
    num_levels = first[at] >> 2 if shape is None else len(shape)
    if not num_levels:
        raise ValueError("it has no dimension")
    return list_type(getattr(pa, dtype)(), num_levels)


def _levels(type_: Any) -> tuple[int, Any]:
    num_levels = 0
    while pa.types.is_list(type_):
        num_levels, type_ = num_levels + 1, type_.value_type
    return num_levels, type_
