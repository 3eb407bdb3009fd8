"""The weights in force at each step: the mixture's schedule, and what was decided while the run ran."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from overlord.declare.mixture import Mixture
    from overlord.stream.facts import (
        Floats,
    )


class WeightSchedule:
    """The weights of each step, one entry per source; the same array for as long as they stay the same.

    They are those of the mixture, and from each `change` on those that it gives (None: the mixture's again).
    """

    def __init__(self, mixture: Mixture, names: Sequence[str]) -> None:
        self._mixture = mixture
        self._names = names
        self._starts = [step for step, _ in mixture.schedule]
        self._held: dict[int, Floats] = {}
        self._changed_at: list[int] = []
        self._changed_to: list[Floats | None] = []

    def change(self, step: int, weights: Mapping[str, float] | None) -> None:
        """Let these weights hold from a step on, which must not have been drawn yet. Of two for one step the later holds."""
        at = bisect_right(self._changed_at, step)
        self._changed_at.insert(at, step)
        self._changed_to.insert(at, None if weights is None else self._listed(weights))

    def at(self, step: int) -> Floats:
        changed = bisect_right(self._changed_at, step) - 1
        if changed >= 0 and (weights := self._changed_to[changed]) is not None:
            return weights
        segment = bisect_right(self._starts, step) - 1
        ramping = self._mixture.ramp == "linear" and segment + 1 < len(self._starts)
        if ramping:
            return self._array(step)
        if segment not in self._held:
            self._held[segment] = self._array(step)
        return self._held[segment]

    def _array(self, step: int) -> Floats:
        return self._listed(self._mixture.at(step))

    def _listed(self, weights: Mapping[str, float]) -> Floats:
        return np.array([weights.get(name, 0.0) for name in self._names])


Change = tuple[int, Mapping[str, float] | None]
"""From a step on, these weights hold; None: those declared."""


def mixture_in_force(mixture: Mixture, changes: Sequence[Change]) -> Mixture:
    """A mixture with the weights of each step that it has after changes, of which the later of two for one step holds."""
    changed = dict(changes)
    if not changed:
        return mixture
    steps = sorted({0, *changed, *(step for step, _ in mixture.schedule)})
    if mixture.ramp == "linear":  # a change is a jump, where a schedule ramps: the step before it is an entry too
        steps = sorted({*steps, *(step - 1 for step in steps if step > 0)})

    def weights(step: int) -> Mapping[str, float]:
        given = changed[max(at for at in changed if at <= step)] if min(changed) <= step else None
        return _declared(mixture, step) if given is None else given

    return replace(mixture, weights={step: weights(step) for step in steps}, feedback=None)


def _declared(mixture: Mixture, step: int) -> Mapping[str, float]:
    """The weights of a step as they were written, not brought to a sum of 1: a ramp is straight between those."""
    schedule = mixture.schedule
    index = max(i for i, (start, _) in enumerate(schedule) if start <= step)
    start, weights = schedule[index]
    if mixture.ramp == "hold" or index + 1 == len(schedule):
        return weights
    end, following = schedule[index + 1]
    share = (step - start) / (end - start)
    names = dict.fromkeys((*weights, *following))
    return {name: (1 - share) * weights.get(name, 0.0) + share * following.get(name, 0.0) for name in names}
