"""How much of each source a step holds: weights, schedules, functions, and weights that follow reported losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from overlord.errors import SpecError

Weights = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MixtureProgress:
    """How far a run is before a step, for mixtures that are functions of it. Every mapping has 0 for other names."""

    samples: Mapping[str, int] = field(default_factory=Counter[str])
    """The samples drawn from each source so far."""
    tokens: Mapping[str, int] = field(default_factory=Counter[str])
    """The tokens drawn from each source so far."""
    epochs: Mapping[str, int] = field(default_factory=Counter[str])
    """The epoch that each source is in, from 0."""


WeightFunction = Callable[[int, MixtureProgress], Weights]
"""(step, progress before it) to the weights from that step on."""


@dataclass(frozen=True, slots=True)
class Epochs:
    """A schedule by epochs, for `Mixture(weights=...)`: {epoch: {source: weight}}.

    A phase begins with the first step before which `of` has begun that epoch. Without `of`, all sources that have weight in
    the phase before must have begun it.
    """

    weights: Mapping[int, Weights]
    of: str | None = None

    def __post_init__(self) -> None:
        if not self.weights or any(not isinstance(epoch, int) or epoch < 0 for epoch in self.weights):
            raise SpecError(f"Epochs takes {{epoch: weights}} with epochs from 0 on, got {self.weights!r}")
        if min(self.weights) != 0:
            raise SpecError(f"a schedule by epochs begins with epoch 0, this one with {min(self.weights)}")
        for epoch, weights in self.weights.items():
            if not isinstance(weights, Mapping):
                raise SpecError(f"Epochs takes {{epoch: {{source: weight}}}}, got {weights!r} for epoch {epoch}")
            _check_weights(weights, f"in epoch {epoch}")

    def __call__(self, step: int, progress: MixtureProgress) -> Weights:
        """The weights of the phase that a run is in."""
        del step
        phases = sorted(self.weights.items())
        _, now = phases[0]
        for epoch, weights in phases[1:]:
            waits_for = [self.of] if self.of is not None else [name for name, weight in now.items() if weight > 0]
            if any(progress.epochs[name] < epoch for name in waits_for):
                break
            now = weights
        return now


Stop = Literal["first_exhausted", "all_exhausted", "drop_exhausted"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How much of each source a step holds.

    Sources are drawn in turn by virtual time, so that each stays within a few samples of its share at every step.
    """

    weights: Weights | Mapping[int, Weights] | WeightFunction
    """Source to weight; a schedule {step: {source: weight}}; `policies.Epochs`; or a function (step, progress) -> {source:
    weight}. A source that an entry leaves out has weight 0 there."""
    unit: Literal["samples", "tokens"] = "samples"
    """What weights are shares of."""
    ramp: Literal["hold", "linear"] = "hold"
    """Between two entries of a schedule: hold the weights of the first, or interpolate linearly."""
    stop: Stop = "drop_exhausted"
    """When sources are finite. first_exhausted: end with the first that runs out. all_exhausted: restart those that run out
    until all have been read once. drop_exhausted: continue without them until none is left."""
    feedback: Feedback | None = None
    """Moves the weights by the losses that trainers report."""
    every: int = 100
    """How often a function is called: before each step that this divides. Each result is written down before it is used, so
    that a step that is drawn again has the weights that it had."""
    _first: Weights | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.unit not in ("samples", "tokens"):
            raise SpecError(f"a mixture's unit is samples or tokens, not {self.unit!r}")
        if self.ramp not in ("hold", "linear"):
            raise SpecError(f"a mixture's ramp is hold or linear, not {self.ramp!r}")
        if self.stop not in ("first_exhausted", "all_exhausted", "drop_exhausted"):
            raise SpecError(f"stop must be first_exhausted, all_exhausted or drop_exhausted, not {self.stop!r}")
        self._check_function()
        schedule = self.schedule
        if not schedule:
            raise SpecError("a mixture needs at least one weight")
        if schedule[0][0] != 0:
            raise SpecError(f"a mixture's schedule must begin at step 0, it begins at {schedule[0][0]}")
        for step, weights in schedule:
            _check_weights(weights, f"at step {step}")
        if self.feedback is not None and len(schedule) > 1:
            raise SpecError("a mixture is moved by its schedule or by feedback, not by both: give one set of weights")

    def _check_function(self) -> None:
        if not isinstance(self.weights, Mapping) and not callable(self.weights):
            raise SpecError(f"a mixture's weights are {{source: weight}}, a schedule or a function, got {self.weights!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise SpecError(f"every is a number of steps, at least 1, got {self.every!r}")
        if self.function is not None:
            if self.feedback is not None or self.ramp != "hold":
                raise SpecError("a mixture that is a function has neither feedback nor a ramp: the function decides alone")
            object.__setattr__(self, "_first", self.function(0, MixtureProgress()))
            if not isinstance(self._first, Mapping):
                raise SpecError(f"a function of (step, progress) returns {{source: weight}}, it returned {self._first!r}")

    @property
    def function(self) -> WeightFunction | None:
        """The function that returns the weights; None where they are declared."""
        return None if isinstance(self.weights, Mapping) else self.weights

    @property
    def schedule(self) -> tuple[tuple[int, Weights], ...]:
        """(step, weights), in order of steps. Of a function only the weights that it begins with."""
        entries: dict[int, Weights] = {}
        flat: dict[str, float] = {}
        declared = self.weights if isinstance(self.weights, Mapping) else {0: self._first or {}}
        for key, value in declared.items():
            if isinstance(value, Mapping):
                if not isinstance(key, int) or key < 0:
                    raise SpecError(f"a mixture's schedule is {{step: weights}} with steps >= 0, got step {key!r}")
                entries[key] = value
                if key == 0:
                    flat.clear()  # what is declared later holds
            elif isinstance(key, str):
                flat[key] = value
            else:
                raise SpecError(f"a mixture is {{source: weight}} or {{step: {{source: weight}}}}, got {key!r}: {value!r}")
        if flat:
            entries[0] = {**entries.get(0, {}), **flat}
        return tuple(sorted(entries.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, weights in self.schedule for name in weights))

    def declared_at(self, step: int) -> Mapping[str, float]:
        """The weights of a step in the scale in which they were declared. A linear ramp interpolates these."""
        schedule = self.schedule
        index = max(i for i, (start, _) in enumerate(schedule) if start <= step)
        start, weights = schedule[index]
        if self.ramp == "hold" or index + 1 == len(schedule):
            return weights
        end, following = schedule[index + 1]
        share = (step - start) / (end - start)
        names = dict.fromkeys((*weights, *following))
        return {name: (1 - share) * weights.get(name, 0.0) + share * following.get(name, 0.0) for name in names}

    def at(self, step: int) -> dict[str, float]:
        """The weights of a step, summing to 1. Sources with weight 0 are left out."""
        weights = self.declared_at(step)
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight > 0}


def _check_weights(weights: Weights, when: str) -> None:
    for name, weight in weights.items():
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
            raise SpecError(f"the weight of {name!r} {when} must be a number >= 0, got {weight!r}")
    if not any(weights.values()):
        raise SpecError(f"{when} every weight is 0: nothing to train on")


Rule = Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]]
"""(weights that hold, mean loss of each source that was reported) to the weights to come. It must be deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplicativeWeights:
    """Sources whose loss is above the others' get more weight: each weight is multiplied by exp(rate x excess).

    The excess of a source is its loss less its `reference` (a loss known from a smaller model, say; 0 unless given), less
    the mean of that over all reported sources. One decision changes a weight by at most the factor `bound`, and no source
    that has weight falls below the share `floor`.
    """

    rate: float = 0.2
    bound: float = 1.25
    floor: float = 0.01
    reference: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise SpecError(f"rate is a number >= 0, got {self.rate!r}")
        if not (math.isfinite(self.bound) and self.bound >= 1):
            raise SpecError(f"bound is the largest factor of one decision, at least 1, got {self.bound!r}")
        if not 0 <= self.floor < 1:
            raise SpecError(f"floor is a share from 0 to 1, got {self.floor!r}")

    def __call__(self, weights: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
        excess = {name: loss - self.reference.get(name, 0.0) for name, loss in losses.items() if weights.get(name, 0) > 0}
        reported = math.fsum(weights[name] for name in excess)
        if reported == 0:
            return dict(weights)
        mean = math.fsum(weights[name] * value for name, value in excess.items()) / reported
        furthest = math.log(self.bound)
        moved = {
            name: weight * math.exp(min(max(self.rate * (excess[name] - mean), -furthest), furthest))
            if name in excess
            else weight
            for name, weight in weights.items()
        }
        return _with_floor(shares(moved), self.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Moves the weights of a mixture by reported losses, see `Client.feedback`."""

    rule: Rule = field(default_factory=MultiplicativeWeights)
    """A deterministic function of (weights, losses), or `MultiplicativeWeights(...)`."""
    every: int = 100
    """Steps in a window: how often weights move."""
    lag: int = 8
    """Steps between the end of a window and the first step that follows from it. Steps are drawn ahead of the trainers, so
    it must be more than the job's `prefetch`."""

    def __post_init__(self) -> None:
        if not callable(self.rule):
            raise SpecError(f"a feedback rule is a function (weights, losses) -> weights, got {self.rule!r}")
        if self.every < 1:
            raise SpecError(f"every is a number of steps, at least 1, got {self.every}")
        if self.lag < 1:
            raise SpecError(f"lag is a number of steps, at least 1, got {self.lag}")

    def window_before(self, step: int) -> tuple[int, int] | None:
        """The window whose decision holds from exactly this step on; None where no window's does."""
        end = step - self.lag
        return (end - self.every, end) if end > 0 and end % self.every == 0 else None

    def window_of(self, step: int) -> tuple[int, int]:
        first = step - step % self.every
        return first, first + self.every


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights that are not 0, summing to 1."""
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight > 0}


def _with_floor(weights: Mapping[str, float], floor: float) -> dict[str, float]:
    """Shares raised to a floor; those above it give in proportion."""
    floor = min(floor, 1 / len(weights))
    low: set[str] = set()
    while True:
        left = 1 - floor * len(low)
        above = math.fsum(weight for name, weight in weights.items() if name not in low)
        found = {n: floor if n in low else left * weight / above for n, weight in weights.items()}
        under = {name for name, weight in found.items() if weight < floor}
        if not under:
            return found
        low |= under
