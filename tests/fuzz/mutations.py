"""Ways to damage bytes and plain values. Everything is drawn from the generator that is passed in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Region(NamedTuple):
    start: int
    stop: int


NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**53,
    2**63 - 1,
)
"""At or beside the limits of the fields that numbers are kept in."""
VALUES = (*NUMBERS, -(2**63), 2**63, 2**64, 0.5, -0.0, 1e308, True, False, None, "", "0", "a", "\x00", [], {}, [0], {"a": 1})


def damaged(rng: random.Random, data: bytes, regions: Sequence[Region] = (), others: Sequence[bytes] = ()) -> bytes:
    """One to four small changes; half of the time inside a region."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        inside = [r for r in regions if r.start < r.stop <= len(data)]
        region = rng.choice(inside) if inside and rng.random() < 0.5 else Region(0, len(data))
        if rng.random() < 0.08 and others:
            data = spliced(rng, data, rng.choice(others))
        else:
            data = rng.choice(_ON_BYTES)(rng, data, region)
    return data


def flip_bit(rng: random.Random, data: bytes, region: Region) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[_place(rng, region)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_byte(rng: random.Random, data: bytes, region: Region) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[_place(rng, region)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def truncate(rng: random.Random, data: bytes, region: Region) -> bytes:
    return data[: _place(rng, region)]


def drop_start(rng: random.Random, data: bytes, region: Region) -> bytes:
    return data[_place(rng, region) :]


def cut_out(rng: random.Random, data: bytes, region: Region) -> bytes:
    start, stop = _stretch(rng, region)
    return data[:start] + data[stop:]


def duplicate(rng: random.Random, data: bytes, region: Region) -> bytes:
    start, stop = _stretch(rng, region)
    return data[:stop] + data[start:stop] + data[stop:]


def zero(rng: random.Random, data: bytes, region: Region) -> bytes:
    """As a disk that lost a stretch of a file gives it back."""
    start, stop = _stretch(rng, region)
    return data[:start] + bytes(stop - start) + data[stop:]


def insert(rng: random.Random, data: bytes, region: Region) -> bytes:
    place = _place(rng, region)
    return data[:place] + rng.randbytes(rng.choice((1, 4, 8, 64))) + data[place:]


def set_integer(rng: random.Random, data: bytes, region: Region) -> bytes:
    """A fixed-width integer at a limit of its kind, or near what was there."""
    width = rng.choice((2, 4, 4, 8))
    if len(data) < width:
        return data
    place = min(_place(rng, region), len(data) - width)
    place -= rng.random() < 0.5 and place % 4  # formats align their numbers
    order = rng.choice(("little", "little", "big"))
    old = int.from_bytes(data[place : place + width], order)
    number = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, len(data), len(data) - place))
    return data[:place] + (number % (1 << 8 * width)).to_bytes(width, order) + data[place + width :]


def set_varint(rng: random.Random, data: bytes, region: Region) -> bytes:
    """Another number in place of what may be a variable-length one, plain or zigzag; what follows moves."""
    place = _place(rng, region)
    end = place
    while end < len(data) and data[end] & 0x80 and end - place < 9:
        end += 1
    number = rng.choice(NUMBERS)
    zigzag = (number << 1) ^ (number >> 63)
    return data[:place] + varint(zigzag if rng.random() < 0.7 else number % (1 << 64)) + data[end + 1 :]


def spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The start of one input and the end of another."""
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_ON_BYTES: tuple[Callable[[random.Random, bytes, Region], bytes], ...] = (
    flip_bit,
    flip_bit,
    change_byte,
    change_byte,
    truncate,
    drop_start,
    cut_out,
    duplicate,
    zero,
    insert,
    set_integer,
    set_integer,
    set_varint,
)


def edited(rng: random.Random, value: Any) -> Any:
    """A copy of a tree of dicts, lists and plain values with one to three edits, as by hand or by another program."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value, None, None))
        parent, key = rng.choice(places)
        if parent is None:
            if len(places) == 1:
                value = rng.choice(VALUES)
            continue
        rng.choice(_ON_PLACES)(rng, parent, key)
    return value


def _places(value: Any, parent: Any, key: Any) -> Any:
    yield parent, key
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _places(entry, value, name)
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _places(entry, value, i)


def _replace(rng: random.Random, parent: Any, key: Any) -> None:
    parent[key] = copy.deepcopy(rng.choice(VALUES))


def _nudge(rng: random.Random, parent: Any, key: Any) -> None:
    old = parent[key]
    if isinstance(old, bool):
        parent[key] = not old
    elif isinstance(old, int):
        parent[key] = rng.choice((old + 1, old - 1, -old, old * 2, float(old), str(old)))
    elif isinstance(old, float):
        parent[key] = rng.choice((old + 1, -old, old * 2, float("inf"), float("nan"), str(old)))
    elif isinstance(old, str):
        parent[key] = rng.choice((old + "x", old[:-1], old.upper(), old * 100, f"{old}\x00"))
    elif isinstance(old, list):
        parent[key] = rng.choice((old[:-1], old + old[-1:], old[::-1], [old], old * 2))
    elif isinstance(old, dict):
        parent[key] = rng.choice((list(old.items()), dict(list(old.items())[::-1]), dict(list(old.items())[:-1])))


def _delete(rng: random.Random, parent: Any, key: Any) -> None:
    del parent[key]


def _add(rng: random.Random, parent: Any, key: Any) -> None:
    new = copy.deepcopy(rng.choice((*VALUES, parent[key])))
    if isinstance(parent, dict):
        parent[rng.choice(("extra", "", "a", f"{key}x", "kind", "step"))] = new
    else:
        parent.insert(key, new)


def _rename(rng: random.Random, parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        items = [(f"{name}x" if name == key else name, entry) for name, entry in parent.items()]
        parent.clear()
        parent.update(items)


def _swap(rng: random.Random, parent: Any, key: Any) -> None:
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


_ON_PLACES: tuple[Callable[[random.Random, Any, Any], None], ...] = (
    _replace,
    _replace,
    _nudge,
    _nudge,
    _nudge,
    _delete,
    _add,
    _rename,
    _swap,
)


def _place(rng: random.Random, region: Region) -> int:
    return rng.randrange(region.start, max(region.stop, region.start + 1))


def _stretch(rng: random.Random, region: Region) -> tuple[int, int]:
    start = _place(rng, region)
    return start, min(start + rng.choice((1, 2, 4, 8, 16, 64, 512, 4096)), max(region.stop, start))
