"""Reads plain values that may be damaged: each is what it should be, or an error says where it stands and what it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

MOST = 2**62
"""No count of a run comes near it, and sums of a few stay within 64 bits."""


class DamagedError(ValueError):
    """A plain value is not what was written. Whoever reads knows what it is part of, and raises StateError."""


def whole(value: Any, at: str, *, least: int = 0, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        upper = "" if most == MOST else f" to {most}"
        raise DamagedError(f"{at} must be a whole number from {least}{upper}, it is {shown(value)}")
    return value


def number(value: Any, at: str, *, least: float = -math.inf) -> float:
    if type(value) not in (int, float) or not least <= value < math.inf or value == -math.inf:
        lower = "" if least == -math.inf else f" from {least:g} on"
        raise DamagedError(f"{at} must be a finite number{lower}, it is {shown(value)}")
    return float(value)


def text(value: Any, at: str, among: Collection[str] | None = None) -> str:
    if not isinstance(value, str) or (among is not None and value not in among):
        raise DamagedError(f"{at} must be {'text' if among is None else ' or '.join(among)}, it is {shown(value)}")
    return value


def listed(value: Any, at: str, *, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
        what = "a list" if length is None else f"a list of {length}"
        raise DamagedError(f"{at} must be {what}, it is {shown(value)}")
    return value


def mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise DamagedError(f"{at} must be a dict with text for keys, it is {shown(value)}")
    return value


def keyed(value: Any, at: str, *, needed: Collection[str], allowed: Collection[str] = ()) -> Mapping[str, Any]:
    """A dict with certain keys and no others."""
    found = mapping(value, at)
    missing = [key for key in needed if key not in found]
    unknown = [key for key in found if key not in needed and key not in allowed]
    if missing or unknown:
        parts = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"has {', '.join(map(shown, unknown))}, which does not belong there"] if unknown else []
        raise DamagedError(f"{at} {' and '.join(parts)}")
    return found


def shown(value: Any) -> str:
    """A value in an error: short, whatever it is."""
    given = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return given if len(given) <= 60 else f"{given[:57]}..."
