"""Validators for plain values (from JSON) that may be damaged. Each returns the value with its type, or raises DamagedError
with the place of the value and what is there instead."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

MOST = 2**62
"""The largest integer accepted. No count of a run comes near it, and sums of a few of them fit in 64 bits."""


class DamagedError(ValueError):
    """A plain value is not one that was written. The caller, who knows what it is part of, raises StateError from it."""


def whole(value: Any, at: str, *, least: int = 0, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        upper = "" if most == MOST else f" to {most}"
        raise DamagedError(f"{at} must be a whole number from {least}{upper}, it is {short_repr(value)}")
    return value


def number(value: Any, at: str, *, least: float = -math.inf) -> float:
    if type(value) not in (int, float) or not least <= value < math.inf or value == -math.inf:
        lower = "" if least == -math.inf else f" from {least:g} on"
        raise DamagedError(f"{at} must be a finite number{lower}, it is {short_repr(value)}")
    return float(value)


def text(value: Any, at: str, among: Collection[str] | None = None) -> str:
    if not isinstance(value, str) or (among is not None and value not in among):
        raise DamagedError(f"{at} must be {'text' if among is None else ' or '.join(among)}, it is {short_repr(value)}")
    return value


def as_list(value: Any, at: str, *, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or (length is not None and len(cast("Sequence[Any]", value)) != length):
        what = "a list" if length is None else f"a list of {length}"
        raise DamagedError(f"{at} must be {what}, it is {short_repr(value)}")
    return cast("Sequence[Any]", value)


def as_mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in cast("Mapping[Any, Any]", value)):
        raise DamagedError(f"{at} must be a dict with text for keys, it is {short_repr(value)}")
    return cast("Mapping[str, Any]", value)


def with_keys(value: Any, at: str, *, needed: Collection[str], allowed: Collection[str] = ()) -> Mapping[str, Any]:
    """A dict with all of the needed keys, and besides them only allowed ones."""
    found = as_mapping(value, at)
    missing = [key for key in needed if key not in found]
    unknown = [key for key in found if key not in needed and key not in allowed]
    if missing or unknown:
        parts = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"has {', '.join(map(short_repr, unknown))}, which does not belong there"] if unknown else []
        raise DamagedError(f"{at} {' and '.join(parts)}")
    return found


def short_repr(value: Any) -> str:
    """A short form of any value, for an error message."""
    given = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return given if len(given) <= 60 else f"{given[:57]}..."
