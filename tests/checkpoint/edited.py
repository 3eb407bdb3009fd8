"""Every way to edit a saved state by one value: what people, tools and broken disks do to JSON."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_OTHERS = (None, True, -1, 0, 1, 2**70, 1.5, float("nan"), float("inf"), "", "x", [], {}, [1], {"a": 1})


def edited(plain: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, a copy with it done): each value replaced, moved by one, removed, doubled or swapped with the next."""
    for path in list(_paths(plain)):
        value = _at(plain, path)
        for other in _replacements(value):
            yield f"{_shown(path)} = {other!r}", _with(plain, path, other)
        if path:
            yield f"{_shown(path)} removed", _without(plain, path)
            yield f"{_shown(path)} added to", _with_more(plain, path)
    for path, swapped in _swapped(plain):
        yield f"{_shown(path)} swapped", swapped


def _replacements(value: Any) -> Iterator[Any]:
    given = [*_OTHERS]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        given += [value + 1, value - 1, -value, value * 1000, str(value), value + 0.5]
    if isinstance(value, str):
        given += [value + "0", value[:-1], value.encode(), value.upper()]
    for other in given:
        if type(other) is not type(value) or other != value:
            yield other


def _paths(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from _paths(value, (*path, key))
    elif isinstance(plain, list):
        for index, value in enumerate(plain):
            yield from _paths(value, (*path, index))


def _swapped(plain: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for path in list(_paths(plain)):
        value = _at(plain, path)
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        for one, other in pairwise(keys):
            if value[one] != value[other]:
                changed = copy.deepcopy(plain)
                inside = _at(changed, path)
                inside[one], inside[other] = inside[other], inside[one]
                yield (*path, one), changed


def _at(plain: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        plain = plain[key]
    return plain


def _with(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(plain)
    _at(changed, path[:-1])[path[-1]] = value
    return changed


def _without(plain: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(plain)
    del _at(changed, path[:-1])[path[-1]]
    return changed


def _with_more(plain: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(plain)
    around = _at(changed, path[:-1])
    if isinstance(around, list):
        around.insert(path[-1], copy.deepcopy(around[path[-1]]))
    else:
        around[f"{path[-1]} "] = copy.deepcopy(around[path[-1]])
    return changed


def _shown(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "all of it"
