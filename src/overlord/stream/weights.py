"""The mixture weights in force at each step: the declared schedule, and changes made during the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.declare.mixture import Mixture
    from overlord.stream.facts import (
        Floats,
    )


_KEPT = 32


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
        self._removed: list[tuple[int, int]] = []  # step, source
        self._added: list[tuple[int, int, float]] = []  # step, source, share
        self._rest: dict[tuple[int, int, int], tuple[Floats, Floats]] = {}  # of weights: with added and without removed ones
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

    def remove(self, step: int, source: str) -> None:
        """Leave a source out from a step on, which must not have been drawn yet: the others share its weight."""
        if source in self._names:
            self._removed.append((step, self._names.index(source)))
            self.constant = None

    def add(self, step: int, source: str, share: float) -> None:
        """Give a source a share from a step on, which must not have been drawn yet: the others keep their proportions.
        Weights that are set from that step on or later hold as they are."""
        if source in self._names:
            self._added.append((step, self._names.index(source), share))
            self.constant = None

    def added_at(self, step: int) -> dict[str, float]:
        """The shares that were given to added sources and hold at a step, in the order of adding."""
        changed = bisect_right(self._changed_at, step) - 1
        set_at = self._changed_at[changed] if changed >= 0 and self._changed_to[changed] is not None else -1
        return {self._names[source]: share for since, source, share in self._added if set_at < since <= step}

    def at(self, step: int) -> Floats:
        """The weights of a step."""
        weights = self._declared(step)
        if not self._removed and not self._added:
            return weights
        removed = [source for since, source in self._removed if since <= step]
        added = self.added_at(step)
        if not removed and not added:
            return weights
        key = id(weights), len(removed), len(added)
        known = self._rest.get(key)
        if known is not None and known[0] is weights:
            return known[1]
        rest = weights.copy()
        for name, share in added.items():
            rest *= 1 - share
            rest[self._names.index(name)] = share
        rest[removed] = 0.0
        if rest.sum() <= 0:
            raise SpecError(
                f"nothing is left to draw at step {step}: every source with a weight is skipped; give another one a weight"
            )
        rest /= rest.sum()
        if len(self._rest) > _KEPT:
            self._rest.clear()
        self._rest[key] = weights, rest
        return rest

    def _declared(self, step: int) -> Floats:
        """The weights of a step before sources are left out."""
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


def mixture_in_force(mixture: Mixture, changes: Sequence[Change], added: Sequence[tuple[int, str, float]] = ()) -> Mixture:
    """The mixture with changes written into its schedule. Of two changes for one step the later one counts. `added`: the
    step, the name and the share of each source that was added."""
    changed = dict(changes)
    if not changed and not added:
        return mixture
    steps = sorted({0, *changed, *(step for step, _, _ in added), *(step for step, _ in mixture.schedule)})
    if mixture.ramp == "linear":  # a change is a jump, but a schedule ramps: so the step before it is an entry too
        steps = sorted({*steps, *(step - 1 for step in steps if step > 0)})

    def weights(step: int) -> Mapping[str, float]:
        set_at = max((at for at in changed if at <= step), default=-1)
        given = changed.get(set_at)
        weights = dict(mixture.declared_at(step) if given is None else given)
        total = sum(weights.values())
        for since, name, share in added:
            if (-1 if given is None else set_at) < since <= step:
                weights = {other: weight * (1 - share) for other, weight in weights.items()} | {name: share * total}
        return weights

    return replace(mixture, weights={step: weights(step) for step in steps}, feedback=None)
