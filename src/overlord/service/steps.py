"""One rank's part of a step as regions of memory with a description, and back.

A *region* is the memory of one large array, or of many small ones, concatenated. `wire.Contents` says where each array is.
Regions travel as Arrow record batches (`flight_steps.py`) or, to a trainer on the same host, as shared memory, without a
copy (`local_steps.py`). Unpacking copies an array, into a reused arena, only if it was split or arrived misaligned.

A trainer on the service's host that gets only numbers never imports Arrow: that is two thirds of what its process would
otherwise take.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from overlord.errors import OverlordError
from overlord.messages import Delivery
from overlord.service.lean_fields import Sent, derive
from overlord.service.wire import (
    Array,
    Column,
    Contents,
    Derived,
    Field,
    Ragged,
    Scalar,
    Shapes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Fields
    from overlord.service.arrow_columns import Regions

SMALL_BYTES = 1 << 14
"""Arrays up to this size are copied together into one region."""
ALIGNMENT = 64
_PADDING = bytes(ALIGNMENT)
_NUMBERS = re.compile(r"[|<>]b1|[|<>][iu][1248]|[<>]f(2|4|8|12|16)|[<>]c(8|16|24|32)")
"""numpy's names for types of numbers; types with pointers are excluded."""


def pack_fields(regions: Regions, fields: Fields, derived: Mapping[str, NDArray[Any] | None]) -> list[Field]:
    """Describe the fields of a microbatch, and add their arrays to `regions`, except those that are derived."""
    return [
        _pack_derived(regions, name, value.shape, derived[name]) if name in derived else _pack_field(regions, name, value)
        for name, value in fields.items()
    ]


def _pack_derived(regions: Regions, name: str, shape: tuple[int, ...], exceptions: NDArray[Any] | None) -> Derived:
    return Derived(name, shape, None if exceptions is None else regions.add(name, exceptions))


def sendable_type(name: str, array: NDArray[Any]) -> str:
    """The name of an array's type on the wire. OverlordError for one that is not of numbers."""
    found = _name_of(array.dtype)
    if found is None:
        raise OverlordError(f"field {name!r} has dtype {array.dtype}, which cannot be sent to another process; numbers can")
    return found


@lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str | None:
    return dtype.str if dtype.kind in "biufc" else None


@lru_cache(maxsize=64)
def number_type(name: str) -> np.dtype[Any]:
    """The type of numbers of that name. Raises ValueError for anything else: objects are pointers."""
    if _NUMBERS.fullmatch(name) is None:
        raise ValueError(f"has dtype {name!r}, which is no type of numbers")
    return np.dtype(name)


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of an array; a copy only where it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class SmallArrays:
    """Small arrays, to be copied together into one region."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._contents: list[bytes] = []

    def add(self, array: NDArray[Any]) -> int:
        """Returns the offset of the array in the region."""
        offset, padding = self.num_bytes, -array.nbytes % ALIGNMENT
        self._contents += (array.tobytes(), _PADDING[:padding])
        self.num_bytes += array.nbytes + padding
        return offset

    def joined(self) -> bytes:
        return b"".join(self._contents)


def _pack_field(regions: Regions, name: str, value: Any) -> Field:
    if isinstance(value, np.ndarray):
        return regions.add(name, cast("NDArray[Any]", value))
    if isinstance(value, list):
        return Ragged(name, [regions.add(name, array) for array in cast("list[NDArray[Any]]", value)])
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value)
        listed: dict[str, Any] = {entry: shape if isinstance(shape, list) else [shape] for entry, shape in value.items()}
        return Shapes(name, listed, [entry for entry, shape in value.items() if isinstance(shape, list)])
    if isinstance(value, np.generic):
        value = cast("Any", value.item())
    if value is None or isinstance(value, (int, float, str)):
        return Scalar(name, value)
    from overlord.service.arrow_columns import is_column, pack_column

    if is_column(value):
        return pack_column(regions, name, value)
    raise OverlordError(f"field {name!r} is of type {type(value).__name__}, which cannot be sent to another process")


class DamagedStepError(ValueError):
    """The data cannot come from a service. The caller, which knows the sender, raises ServiceError."""


class BuildError(Exception):
    """A step that came unbuilt could not be built here. The service, which is asked for it built, says why if it cannot
    either."""


def unpack_step(contents: Contents, regions: Sequence[NDArray[np.uint8]], arenas: Arenas) -> Delivery:
    """Return the step that was packed. Its arrays are read-only, as the regions are.

    `wire` has checked the bounds of single numbers in `contents`. Here they are checked against one another and against the
    regions; DamagedStepError if they do not match.
    """
    microbatches = tuple(_unpack_fields(fields, regions, arenas) for fields in contents.microbatches)
    return Delivery(contents.step, contents.loss_tokens, microbatches)


def _unpack_fields(listed: Sequence[Field], regions: Sequence[NDArray[np.uint8]], arenas: Arenas) -> Fields:
    fields: Fields = {}
    derived: dict[str, Sent] = {}
    for field in listed:
        if isinstance(field, Derived):
            exceptions = None if field.exceptions is None else array_at(field.exceptions, regions, arenas)
            derived[field.name] = Sent(tuple(field.shape), exceptions)
            fields[field.name] = None  # to keep the order of fields
        else:
            fields[field.name] = _unpack_field(field, regions, arenas)
            derived.pop(field.name, None)
    if derived:
        try:
            computed = derive(fields, derived, arenas)
            fields |= {name: computed[name] for name in derived}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DamagedStepError(f"fields {', '.join(derived)} do not follow from those that came: {error}") from None
        for array in computed.values():
            array.setflags(write=False)
    return fields


def _unpack_field(field: Field, regions: Sequence[NDArray[np.uint8]], arenas: Arenas) -> Any:
    match field:
        case Array():
            return array_at(field, regions, arenas)
        case Scalar():
            return field.value
        case Ragged():
            return [array_at(array, regions, arenas) for array in field.arrays]
        case Column():
            from overlord.service.arrow_columns import unpack_column

            try:
                return unpack_column(field, array_at(field.stream, regions, arenas))
            except ValueError as error:
                raise DamagedStepError(str(error)) from None
        case Shapes():
            return {name: _shapes(field, name, shapes) for name, shapes in field.shapes.items()}
        case Derived():
            raise DamagedStepError(f"field {field.name!r} is derived")  # `_unpack_fields` takes these


def _shapes(field: Shapes, name: str, shapes: list[Any]) -> Any:
    if name in field.ragged:
        return shapes
    if len(shapes) != 1:
        raise DamagedStepError(f"field {field.name!r} has {len(shapes)} shapes for {name!r}, which is one array")
    return shapes[0]


def array_at(array: Array, regions: Sequence[NDArray[np.uint8]], arenas: Arenas) -> NDArray[Any]:
    """The array; a copy only where it was split or is misaligned. Raises DamagedStepError where it lies in no region."""
    try:
        dtype = number_type(array.dtype)
    except ValueError as error:
        raise DamagedStepError(f"field {array.name!r} {error}") from None
    num_bytes = math.prod(array.shape) * dtype.itemsize
    held = regions[array.region : array.region + array.num_regions]
    if len(held) != array.num_regions:
        raise DamagedStepError(
            f"field {array.name!r} lies in {array.num_regions} regions from number {array.region} on, and "
            f"{len(regions)} came"
        )
    # Checked before memory is allocated: a damaged number must not allocate terabytes.
    held_bytes = len(held[0]) if len(held) == 1 else sum(map(len, held))
    end = array.offset + num_bytes
    if end > held_bytes or (len(held) > 1 and (array.offset or end != held_bytes)):
        raise DamagedStepError(
            f"field {array.name!r} of shape {array.shape} takes bytes {array.offset} to {end} of regions that have "
            f"{held_bytes}"
        )
    try:
        if len(held) == 1:
            found: NDArray[Any] = np.ndarray(array.shape, dtype, held[0], array.offset)
            if found.flags.aligned:
                return found
        memory = np.empty(num_bytes, np.uint8) if num_bytes <= SMALL_BYTES else arenas.lease(num_bytes)
        pieces = [held[0][array.offset : end]] if len(held) == 1 else held
        joined = np.concatenate(pieces, out=memory).view(dtype).reshape(array.shape)
    except ValueError as error:  # a dimension that is too long for numpy, next to one of 0
        raise DamagedStepError(f"field {array.name!r} has shape {array.shape}: {error}") from None
    joined.setflags(write=False)
    return joined
