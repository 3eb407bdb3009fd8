"""A cost whose coefficients are learned while a run goes on. The value declares where to begin; what holds at a step comes
with the step's graph, so that a strategy stays a pure function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.stream.facts import Floats, Samples

ALONE = "model"
"""The name of the module where there is one."""


class LinearCost(Protocol):
    """A cost that is a sum of features, each times a coefficient. `TransformerCost` is one."""

    @property
    def coefficients(self) -> tuple[float, ...]: ...

    def features(self, samples: Samples) -> Floats:
        """A row per sample, a column per coefficient."""
        ...

    def with_coefficients(self, coefficients: tuple[float, ...]) -> Self: ...

    def __call__(self, samples: Samples) -> Floats: ...


@dataclass(frozen=True, slots=True)
class CostsInForce:
    """What was learned, as it holds at a step."""

    of: str
    """The digest of the `LearnedCost` it was learned for."""
    modules: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    """How much longer a data-parallel group takes for the same work, where that is not 1."""


def slowness(learned: CostsInForce | None, num_groups: int) -> Floats | None:
    """How much longer each group takes for the same work; None where all are alike."""
    known = {} if learned is None else {group: factor for group, factor in learned.slow.items() if group < num_groups}
    if not known:
        return None
    factors = np.ones(num_groups)
    factors[list(known)] = list(known.values())
    return factors


@dataclass(frozen=True, slots=True)
class LearnedCost:
    """A cost that is refitted to the times that trainers report (`Client.feedback(seconds=...)`).

    `initial` is what holds until then: a `TransformerCost`, or one for each module of the model. As a plain cost function it
    gives the initial costs.
    """

    initial: LinearCost | Mapping[str, LinearCost]
    every: int = 10
    """Steps between two fits."""
    speeds: bool = True
    """Whether ranks that are slower than others get less to do."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SpecError(f"every is a number of steps, at least 1, got {self.every}")
        for name, cost in self.modules.items():
            if not (callable(cost) and hasattr(cost, "features") and hasattr(cost, "with_coefficients")):
                raise SpecError(
                    f"a LearnedCost begins with a TransformerCost, or one for each module; module {name!r} is a "
                    f"{type(cost).__name__}"
                )

    @property
    def modules(self) -> Mapping[str, LinearCost]:
        return self.initial if isinstance(self.initial, Mapping) else {ALONE: self.initial}

    @property
    def digest(self) -> str:
        return digest_of([(name, cost.coefficients) for name, cost in self.modules.items()])

    def __call__(self, samples: Samples) -> dict[str, Floats]:
        return {name: cost(samples) for name, cost in self.modules.items()}

    def features(self, samples: Samples) -> Floats:
        """Those of all modules, side by side."""
        return np.column_stack([cost.features(samples) for cost in self.modules.values()])

    def as_learned(self, learned: CostsInForce | None) -> LearnedCost:
        """The same with the coefficients that were learned, where they were learned for this cost."""
        if learned is None or learned.of != self.digest or not learned.modules:
            return self
        modules = {name: cost.with_coefficients(tuple(learned.modules[name])) for name, cost in self.modules.items()}
        return LearnedCost(modules, self.every, self.speeds)

    def split(self, coefficients: Floats) -> dict[str, list[float]]:
        """The coefficients of all modules, side by side, by module."""
        parts: dict[str, Any] = {}
        first = 0
        for name, cost in self.modules.items():
            end = first + len(cost.coefficients)
            parts[name] = coefficients[first:end].tolist()
            first = end
        return parts


def digest_of(*parts: object) -> str:
    """A short name for a declaration, by which a decision says what it was made about."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
