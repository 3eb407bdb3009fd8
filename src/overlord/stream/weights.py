"""The mixture weights in force at each step: the declared schedule, and changes made during the run."""

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
    """The weights of each step, one entry per source: those of the mixture, overridden from the step of each `change` on.

    `at` returns the same array for as long as the weights stay the same.
    """

    def __init__(self, mixture: Mixture, names: Sequence[str]) -> None:
        self._mixture = mixture
        self._names = names
        self._starts = [step for step, _ in mixture.schedule]
        self._held: dict[int, Floats] = {}
        self._changed_at: list[int] = []
        self._changed_to: list[Floats | None] = []
        self.constant: Floats | None = self.at(0) if len(self._starts) == 1 else None
        """The weights of every step, as long as they never change."""

    def change(self, step: int, weights: Mapping[str, float] | None) -> None:
        """Set the weights from a step on, which must not have been drawn yet; None restores the mixture's. Of two changes
        for one step the later one counts."""
        at = bisect_right(self._changed_at, step)
        self.constant = None
        found = None if weights is None else self._to_array(weights)
        before = self._changed_to[at - 1] if at else None
        if found is not None and before is not None and np.array_equal(found, before):
            found = before  # the same array: nothing has to be drawn anew
        self._changed_at.insert(at, step)
        self._changed_to.insert(at, found)

    def at(self, step: int) -> Floats:
        """The weights of a step."""
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
        return self._to_array(self._mixture.at(step))

    def _to_array(self, weights: Mapping[str, float]) -> Floats:
        return np.array([weights.get(name, 0.0) for name in self._names])


Change = tuple[int, Mapping[str, float] | None]
"""A step and the weights from that step on; None for those declared."""


def mixture_in_force(mixture: Mixture, changes: Sequence[Change]) -> Mixture:
    """The mixture with changes written into its schedule. Of two changes for one step the later one counts."""
    changed = dict(changes)
    if not changed:
        return mixture
    steps = sorted({0, *changed, *(step for step, _ in mixture.schedule)})
    if mixture.ramp == "linear":  # a change is a jump, but a schedule ramps: so the step before it is an entry too
        steps = sorted({*steps, *(step - 1 for step in steps if step > 0)})

    def weights(step: int) -> Mapping[str, float]:
        given = changed[max(at for at in changed if at <= step)] if min(changed) <= step else None
        return mixture.declared_at(step) if given is None else given

    return replace(mixture, weights={step: weights(step) for step in steps}, feedback=None)
