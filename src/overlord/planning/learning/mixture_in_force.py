"""The mixture as it holds while a run goes on: as declared, and as it was changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overlord.spec import Mixture

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
