"""Thrift's compact protocol, as far as Parquet's page headers and footers use it.

A structure is read into a dict from field numbers to values. To write one, name the type of each value: `{1: i32(7)}`.
Only i32 numbers are decoded: all fields that we use of page headers are i32. Numbers of other types stay encoded, because
Arrow ignores a field of the wrong type, so it must not be taken for a number here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 8, 9, 10, 12


class Encoded(NamedTuple):
    kind: int
    data: bytes


def i32(number: int) -> Encoded:
    return Encoded(_I32, varint(_zigzag(number)))


def i64(number: int) -> Encoded:
    return Encoded(_I64, varint(_zigzag(number)))


def boolean(value: bool) -> Encoded:
    return Encoded(_TRUE if value else _FALSE, b"")


def binary(data: bytes) -> Encoded:
    return Encoded(_BINARY, varint(len(data)) + data)


def sequence(*items: Encoded, of: Encoded | None = None) -> Encoded:
    """A list of items of one type, which `of` tells where there may be none."""
    kind = (of or items[0]).kind
    return Encoded(_LIST, _sequence_head(len(items), kind) + b"".join(item.data for item in items))


def structures(items: Sequence[bytes]) -> Encoded:
    """A list of structures that are encoded already."""
    return Encoded(_LIST, _sequence_head(len(items), _STRUCT) + b"".join(items))


def _sequence_head(num_items: int, kind: int) -> bytes:
    return bytes([num_items << 4 | kind]) if num_items < 0xF else bytes([0xF0 | kind]) + varint(num_items)


def structure(fields: Mapping[int, Encoded], after: int = 0) -> Encoded:
    """Fields in the order of their numbers, which are at most 15 apart; `after` is the number of a field before them."""
    parts, last = [], after
    for number, (kind, data) in fields.items():
        parts.append(bytes([number - last << 4 | kind]) + data)
        last = number
    return Encoded(_STRUCT, b"".join(parts) + b"\0")


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_structure(data: Sequence[int], at: int) -> tuple[dict[int, Any], int]:
    """The structure that begins at `at`, and the offset of its end. Raises ValueError or IndexError where it is damaged."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_zigzag(data, at)
        fields[number], at = _read(data, at, head & 0xF)
    return fields, at + 1


def end_of_field(data: Sequence[int], last: int) -> int:
    """The offset of the end of field `last` of a structure at the beginning of the data. Raises ValueError or IndexError
    where the structure is damaged, or its fields are not in the order of their numbers."""
    at = number = 0
    while number < last:
        head = data[at]
        if not head >> 4 or number + (head >> 4) > last:
            raise ValueError(f"field {last} does not follow field {number}")
        number += head >> 4
        _, at = _read(data, at + 1, head & 0xF)
    return at


def read_varint(data: Sequence[int], at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := data[at]) > 0x7F:
        number |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
    return number | byte << shift, at + 1


def _read(data: Sequence[int], at: int, kind: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _I32:
        return _read_zigzag(data, at)
    if kind in (_BYTE, _I16, _I64):
        end = at + 1 if kind == _BYTE else read_varint(data, at)[1]
        return Encoded(kind, bytes(data[at:end])), end
    if kind == _BINARY:
        size, at = read_varint(data, at)
        return data[at : at + size], at + size
    if kind == _STRUCT:
        return read_structure(data, at)
    if kind in (_LIST, _SET):
        return _read_sequence(data, at)
    raise ValueError(f"no field of a Parquet header has the type {kind}")


def _read_sequence(data: Sequence[int], at: int) -> tuple[list[Any], int]:
    size, kind = data[at] >> 4, data[at] & 0xF
    at += 1
    if size == 0xF:
        size, at = read_varint(data, at)
    items = []
    for _ in range(size):
        item, at = (data[at] == 1, at + 1) if kind in (_TRUE, _FALSE) else _read(data, at, kind)
        items.append(item)
    return items, at


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else ~number << 1 | 1


def _read_zigzag(data: Sequence[int], at: int) -> tuple[int, int]:
    number, at = read_varint(data, at)
    return number >> 1 ^ -(number & 1), at
