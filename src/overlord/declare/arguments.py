"""Numbers and switches that users hand over, checked at the door: numpy's are taken for Python's, and text for neither.

A rank that is read from the environment is text, and `"0"` would otherwise be carried along until something far away fails.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from overlord.declare.policies import Log as Log
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable


def column_names(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Column names as a tuple. A lone string would count as one name per letter."""
    if isinstance(names, str):
        raise SpecError(f"{option} is a sequence of column names: write {option}=({names!r},)")
    found = tuple(names)
    wrong = [name for name in found if not isinstance(name, str)]
    if wrong:
        raise SpecError(f"{option} is a sequence of column names, got {wrong[0]!r} among them")
    twice = [name for i, name in enumerate(found) if name in found[:i]]
    if twice:
        raise SpecError(f"{option} names {twice[0]!r} twice")
    return found


_MOST = (1 << 53) - 1  # what the wire and JSON can carry


def whole(value: SupportsIndex, what: str, *, least: int | None = 0) -> int:
    """A whole number from `least` on (None: from anywhere), as an int. True is not 1 here, nor is 1.0."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise SpecError(f"{what} must be a whole number, got {_shown(value)}")
    if least is not None and number < least:
        raise SpecError(f"{what} must be at least {least}, got {_shown(number)}")
    if number > _MOST:
        raise SpecError(f"{what} must be below 2**53, got {_shown(value)}")
    return number


def positive_seconds(value: Any, what: str) -> float:
    """A finite number above 0."""
    seconds = _finite(value)
    if seconds is None or seconds <= 0:
        raise SpecError(f"{what} is a positive number of seconds, got {_shown(value)}")
    return seconds


def seconds_or_none(value: Any, what: str) -> float | None:
    """The same, or None, which sets no limit."""
    if value is None:
        return None
    seconds = _finite(value)
    if seconds is None or seconds <= 0:
        raise SpecError(f"{what} is a positive number of seconds or None, got {_shown(value)}")
    return seconds


def seconds_to_wait(value: Any, what: str) -> float:
    """A finite number from 0 on: 0 looks once and does not wait."""
    seconds = _finite(value)
    if seconds is None or seconds < 0:
        raise SpecError(f"{what} is a number of seconds from 0 on, got {_shown(value)}")
    return seconds


def switch(value: Any, what: str) -> bool:
    """True or False, and nothing that merely counts as one of them: the text "no" would be True."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's, which need not be imported for this
        return bool(value)
    raise SpecError(f"{what} is True or False, got {_shown(value)}")


def _finite(value: Any) -> float | None:
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _shown(value: Any) -> str:
    """The value, with its type where that is what is wrong with it."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits
        text = f"a number of {int(value).bit_length()} bits"
    text = text if len(text) <= 100 else f"{text[:100]}..."
    return text if plain else f"{text} ({type(value).__name__})"
