"""Weights of many sources: in groups, and from their sizes by temperature or UniMax. Pure functions of numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping


def grouped(groups: Mapping[str, Mapping[str, float]], weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Weights of sources from weights of groups and weights within each: {group: {source: weight}} and {group: weight}, by
    default equal. They sum to 1. A source may be in several groups, and then has the sum of its shares."""
    shares = dict.fromkeys(groups, 1.0) if weights is None else dict(weights)
    if set(shares) != set(groups):
        raise SpecError(f"groups are {', '.join(groups)}, and the weights of groups are of {', '.join(shares)}")
    total = _total(shares, "groups")
    found: dict[str, float] = {}
    for group, members in groups.items():
        inside = _total(members, f"sources in the group {group!r}") if shares[group] else 1.0
        for name, weight in members.items():
            found[name] = found.get(name, 0.0) + shares[group] / total * weight / inside
    return found


def temperature(sizes: Mapping[str, float], value: float) -> dict[str, float]:
    """Weights in proportion to size ** (1 / value), summing to 1. At 1 they are the shares of the sizes; the higher, the
    more the small sources get."""
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"a temperature is a number above 0, got {value!r}")
    _total(sizes, "sizes")
    largest = max(sizes.values())
    scaled = {name: (size / largest) ** (1 / value) if size else 0.0 for name, size in sizes.items()}
    total = math.fsum(scaled.values())
    return {name: weight / total for name, weight in scaled.items()}


def unimax(sizes: Mapping[str, float], budget: float, *, max_epochs: float = 4.0) -> dict[str, float]:
    """Weights as uniform as a budget allows (UniMax): each source gets an equal part of `budget`, in the unit of the sizes,
    but none is read more than `max_epochs` times; what the small ones leave is shared by the others. They sum to 1."""
    _total(sizes, "sizes")
    if not (math.isfinite(budget) and budget > 0):
        raise SpecError(f"budget is how much the run reads in all, in the unit of the sizes, got {budget!r}")
    if not (math.isfinite(max_epochs) and max_epochs > 0):
        raise SpecError(f"max_epochs is a number above 0, got {max_epochs!r}")
    left = float(budget)
    amounts: dict[str, float] = {}
    for place, (name, size) in enumerate(sorted(sizes.items(), key=lambda item: (item[1], item[0]))):
        amounts[name] = min(left / (len(sizes) - place), max_epochs * size)
        left -= amounts[name]
    total = math.fsum(amounts.values())
    return {name: amounts[name] / total for name in sizes}


def _total(weights: Mapping[str, float], what: str) -> float:
    for name, weight in weights.items():
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
            raise SpecError(f"the {what} have numbers from 0 on, got {weight!r} for {name!r}")
    total = math.fsum(weights.values())
    if not total:
        raise SpecError(f"all {what} have 0: nothing to share out")
    return total
