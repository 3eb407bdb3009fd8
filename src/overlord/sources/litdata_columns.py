"""The columns of a litData dataset: the names and types that its index tells, and the values in its chunks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from overlord.errors import SchemaError
from overlord.sources.column_types import fit_values
from overlord.sources.packed_samples import IMAGE, PackedColumn, PackedSamples, parse_image, parse_list
from overlord.sources.packed_values import binary_column, gather_records, list_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_TEXT = ("str", "text")
_BYTES = (
    *("bytes", "file", "tif", "tiff", "tifffile", "jpeg", "image", "video", "audio", "nifti", "mesh", "pdf"),
    *("graph", "pickle"),
)
_SCALARS = {"int": pa.int64(), "float": pa.float64()}
_NUMPY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_NUMPY_TYPES = {**{code: getattr(pa, name)() for code, name in enumerate(_NUMPY)}, 13: pa.bool_()}
_TORCH_TYPES = {
    **dict.fromkeys((0, 1), pa.float32()), **dict.fromkeys((2, 3), pa.float64()), **dict.fromkeys((8, 9), pa.float16()),
    11: pa.uint8(), 12: pa.int8(), **dict.fromkeys((13, 14), pa.int16()), **dict.fromkeys((15, 16), pa.int32()),
    **dict.fromkeys((17, 18), pa.int64()), 19: pa.bool_(), 20: pa.uint16(),
}  # fmt: skip
"""The numbers by which litData names types. Types that Arrow does not have, bfloat16 and complex numbers, are not among
them."""
_FOOTER_TYPES = {
    "str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "bytes": pa.binary(),
    "null": pa.null(),
}  # fmt: skip
_MOST_LEVELS = 64
"""Of lists in lists. What is deeper is damaged: no row has it."""


class _TreeSpec(msgspec.Struct, frozen=True):
    """How the values of a sample were nested, as PyTorch's pytree writes it."""

    type: str | None = None
    context: Any = None
    children_spec: list[_TreeSpec] = []


def leaf_names(spec: str | None, num_leaves: int, alone: str) -> list[str]:
    """The name of each value of a sample: its key, the keys that lead to it with dots between, or its number in a list. A
    sample that is one value has it under the name `alone`. Raises ValueError where the index does not say that."""
    if spec is None:
        return [alone] if num_leaves == 1 else [str(number) for number in range(num_leaves)]
    protocol, tree = msgspec.json.decode(spec, type=tuple[int, _TreeSpec])
    if protocol != 1:
        raise ValueError(f"its data_spec has version {protocol}, and only version 1 is known")
    names = [".".join(path) or alone for path in _paths(tree, 0)]
    if len(names) != num_leaves:
        raise ValueError(f"its data_spec has {len(names)} values and its data_format {num_leaves}")
    if len(set(names)) < len(names):
        raise ValueError("its data_spec has two values of one name")
    return names


def _paths(tree: _TreeSpec, depth: int) -> list[tuple[str, ...]]:
    if tree.type is None:
        return [()]
    if depth > _MOST_LEVELS:
        raise ValueError("its data_spec is nested too deep")
    keys = _keys(tree)
    if len(keys) != len(tree.children_spec):
        raise ValueError("its data_spec has other keys than values")
    children = zip(keys, tree.children_spec, strict=True)
    return [(key, *path) for key, child in children for path in _paths(child, depth + 1)]


def _keys(tree: _TreeSpec) -> list[str]:
    context = msgspec.json.decode(tree.context) if isinstance(tree.context, str) else tree.context
    if isinstance(context, dict):  # of a defaultdict
        context = context.get("dict_context")
    if tree.type in ("builtins.dict", "collections.OrderedDict", "collections.defaultdict") and isinstance(context, list):
        return [str(key) for key in context]
    return [str(number) for number in range(len(tree.children_spec))]


def footer_schema(types: Any, names: Sequence[str]) -> pa.Schema | None:
    """The columns of a dataset whose chunks are Arrow tables, from the types in its index; None if it is of another kind.
    `names` are those of the values of a sample."""
    if not isinstance(types, dict) or not types or not {name.partition(".")[0] for name in names} <= types.keys():
        return None
    found = {name: _footer_type(kind, 0) for name, kind in types.items()}
    known = {name: type_ for name, type_ in found.items() if type_ is not None}
    return pa.schema(list(known.items())) if len(known) == len(found) else None


def optional_columns(types: Any) -> frozenset[str]:
    """The columns that not every sample has."""
    return frozenset(name for name, kind in types.items() if isinstance(kind, dict) and kind.get("optional"))


def _footer_type(kind: Any, depth: int) -> pa.DataType | None:
    if isinstance(kind, str):
        return _FOOTER_TYPES.get(kind)
    if not isinstance(kind, dict) or depth > _MOST_LEVELS:
        return None
    name = kind.get("type")
    if name == "list":
        value = kind.get("value")
        # A list that is empty in all samples is one of "json".
        inner = pa.null() if value == "json" else _footer_type(value, depth + 1)
        return None if inner is None else pa.list_(inner)
    if name == "struct" and isinstance(fields := kind.get("fields"), dict):
        types = {key: _footer_type(value, depth + 1) for key, value in fields.items()}
        known = {key: type_ for key, type_ in types.items() if type_ is not None}
        return pa.struct(list(known.items())) if len(known) == len(types) else None
    return _FOOTER_TYPES.get(name) if isinstance(name, str) else None


def needs_first_sample(leaf: str) -> bool:
    """Whether the type of a value cannot be told from its format."""
    return leaf in ("numpy", "tensor")


def leaf_type(where: str, name: str, leaf: str, first: bytes | None) -> pa.DataType:
    """What a value is in Arrow. `first` is the first sample's, needed for arrays with headers."""
    kind, _, option = leaf.partition(":")
    if kind in _TEXT or kind == "json":
        return pa.string()
    if kind in _BYTES:
        return pa.binary()
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind == "bool":
        return pa.bool_()
    if kind in ("pil", "jpeg_array"):
        return IMAGE if kind == "pil" else pa.list_(pa.binary())
    try:
        if kind in ("no_header_numpy", "no_header_tensor"):
            return pa.list_(_types_of(kind)[int(option)])
        if kind in ("numpy", "tensor"):
            code, rank = struct.unpack_from(_order(kind, first or b"") + "II", first or b"")
            if rank > _MOST_LEVELS:
                raise ValueError(f"it has {rank:,} dimensions")
            return list_type(_types_of(kind)[code], rank)
    except (ValueError, KeyError, struct.error) as error:
        raise SchemaError(
            f"{where} has the column {name!r} of {leaf!r}, whose type Arrow does not have or the first sample does not tell "
            f"({error}); leave it out of columns"
        ) from error
    raise SchemaError(f"{where} has the column {name!r} of the format {leaf!r}, which is not known; leave it out of columns")


def _types_of(kind: str) -> dict[int, pa.DataType]:
    return _NUMPY_TYPES if kind.endswith("numpy") else _TORCH_TYPES


def _order(kind: str, value: bytes) -> str:
    """The byte order of the header of an array. Releases up to 0.2.50 wrote those of tensors in the order of the machine,
    later ones big-endian; no type of a tensor is written as 0, so that the first byte tells them apart."""
    return ">" if kind == "tensor" and value[:1] == b"\0" else "<"


class LitDataSamples(PackedSamples):
    """The samples of a chunk in memory."""

    def column(self, name: str, type_: pa.DataType) -> Any:
        values = self.values(name, type_)
        kind = values.encoding.partition(":")[0]
        if kind in _SCALARS:
            return self.scalars(values)
        if kind == "bool":
            bytes_ = PackedColumn(name, kind, pa.uint8(), values.starts, values.sizes, values.good)
            return pa.array(self.scalars(bytes_).to_numpy() != 0)
        if kind in ("no_header_numpy", "no_header_tensor"):
            return self._lists(values)
        if kind in ("numpy", "tensor"):
            return self._arrays(values, kind)
        stored = binary_column(self.where, self.data, values.starts, values.sizes)
        if kind in _BYTES:
            return stored
        if kind in _TEXT:  # the same bytes, which `validate` checks afterwards
            return pa.Array.from_buffers(pa.string(), len(stored), stored.buffers())
        rows = enumerate(stored.to_pylist())
        # A Python loop over samples: what is left are images that were not encoded, lists of images, and nested values.
        if kind == "json":
            return self._nested(values, [self.parse(values, row, parse_nested, value) for row, value in rows])
        parse = parse_image if kind == "pil" else lambda value: parse_list(value, kind)
        return pa.array([self.parse(values, row, parse, value) for row, value in rows], type_)

    def _nested(self, values: PackedColumn, found: Sequence[Any]) -> Any:
        if pa.types.is_string(values.type):
            rows = enumerate(found)
            return pa.array([None if row in self.bad else orjson.dumps(value).decode() for row, value in rows], pa.string())
        column, unfit = fit_values(found, values.type)
        for row, error in unfit.items():
            self.bad.setdefault(row, f"the value of {values.name!r} does not fit {values.type}: {error}")
        return column

    def _lists(self, values: PackedColumn) -> Any:
        type_: Any = values.type.value_type
        width = 1 if pa.types.is_boolean(type_) else type_.bit_width // 8
        self.refuse(values, values.sizes % width != 0, f"does not have whole numbers of {width} bytes")
        return self.arrays(values, values.starts, (values.sizes // width)[:, None], type_)

    def _arrays(self, values: PackedColumn, kind: str) -> Any:
        num_levels, value_type = 0, values.type
        while pa.types.is_list(value_type):
            num_levels, value_type = num_levels + 1, value_type.value_type
        head_bytes, good = 8 + 4 * num_levels, values.good
        self.refuse(values, values.sizes < head_bytes, "is cut off in its shape")
        heads = np.zeros((len(good), 2 + num_levels), np.int64)
        for order in ("<", ">"):
            rows = self._rows_of_order(values, kind, order)
            found = gather_records(self.data, values.starts[rows], head_bytes)
            heads[rows] = found.view(f"{order}u4")
        codes = [code for code, type_ in _types_of(kind).items() if type_.equals(value_type)]
        self.refuse(values, ~np.isin(heads[:, 0], codes), f"is not of the type {value_type}, as the first sample's is")
        error = f"does not have {num_levels} dimensions, as the first sample's has"
        self.refuse(values, heads[:, 1] != num_levels, error)
        starts = np.where(good, values.starts + head_bytes, 0)
        if num_levels:
            return self.arrays(values, starts, heads[:, 2:], value_type)
        sizes = np.where(good, values.sizes - head_bytes, 0)
        if pa.types.is_boolean(value_type):
            bytes_ = PackedColumn(values.name, values.encoding, pa.uint8(), starts, sizes, good)
            return pa.array(self.scalars(bytes_).to_numpy() != 0)
        return self.scalars(PackedColumn(values.name, values.encoding, value_type, starts, sizes, good))

    def _rows_of_order(self, values: PackedColumn, kind: str, order: str) -> NDArray[np.int64]:
        """The good rows whose header is in this byte order."""
        rows = np.flatnonzero(values.good)
        firsts = gather_records(self.data, values.starts[rows], 1)[:, 0]
        is_big = (firsts == 0) & (kind == "tensor")
        return rows[is_big == (order == ">")]


def parse_nested(value: bytes) -> Any:
    """A list or mapping in one value: JSON, or litData's own encoding, whose first byte is below all that JSON begins with.
    Raises ValueError."""
    if not value or value[0] > 0x20:
        return orjson.loads(value)
    try:
        found, end = _nested(value, 0, 0)
    except (struct.error, IndexError) as error:
        raise ValueError("it is cut off") from error
    if end != len(value):
        raise ValueError(f"it has {len(value) - end} bytes more than its values")
    return found


def _nested(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1
    if depth > _MOST_LEVELS:
        raise ValueError("it is nested too deep")
    if tag in _NESTED_SCALARS:
        return _scalar(data, at, _NESTED_SCALARS[tag])
    count, at = _count(data, at)
    if tag == 0:
        return orjson.loads(data[at : at + count]), at + count
    if tag == 1:
        texts: list[str] = []
        for _ in range(count):
            text, at = _text(data, at)
            texts.append(text)
        return texts, at
    if tag in (2, 3, 4):
        dtype = ("<i8", "<f8", "?")[tag - 2]
        end = at + count * np.dtype(dtype).itemsize
        if end > len(data):
            raise ValueError("it is cut off")
        return np.frombuffer(data[at:end], dtype, count).tolist(), end
    if tag == 5:
        found: dict[str, Any] = {}
        for _ in range(count):
            key, at = _text(data, at)
            found[key], at = _nested(data, at, depth + 1)
        return found, at
    if tag == 6:
        return _records(data, at, count)
    raise ValueError(f"it has the unknown mark {tag}")


_NESTED_SCALARS = {7: "s", 8: "q", 9: "d", 10: "?", 11: "n"}
_RECORD_SCALARS = {0x10: "n", 0x11: "s", 0x12: "q", 0x13: "d", 0x14: "?"}


def _scalar(data: bytes, at: int, kind: str) -> tuple[Any, int]:
    if kind == "n":
        return None, at
    if kind == "s":
        return _text(data, at)
    return struct.unpack_from(f"<{kind}", data, at)[0], at + struct.calcsize(f"<{kind}")


def _records(data: bytes, at: int, count: int) -> tuple[list[dict[str, Any]], int]:
    num_keys, at = _count(data, at)
    keys: list[str] = []
    for _ in range(num_keys):
        key, at = _text(data, at)
        keys.append(key)
    if not keys and count:
        raise ValueError("it has records without a field")
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        row: dict[str, Any] = {}
        for key in keys:
            if data[at] not in _RECORD_SCALARS:
                raise ValueError(f"it has the unknown mark {data[at]}")
            row[key], at = _scalar(data, at + 1, _RECORD_SCALARS[data[at]])
        rows.append(row)
    return rows, at


def _text(data: bytes, at: int) -> tuple[str, int]:
    count, at = _count(data, at)
    return data[at : at + count].decode(), at + count


def _count(data: bytes, at: int) -> tuple[int, int]:
    """A number of bytes or values, none of which takes no byte."""
    (count,) = struct.unpack_from("<I", data, at)
    if count > len(data) - at - 4:
        raise ValueError("it is cut off")
    return count, at + 4
