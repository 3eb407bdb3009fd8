"""`LearnedCost`: a cost whose coefficients are refitted during a run. It declares the initial coefficients; those in force
at a step come with the step's graph, so that a strategy stays a pure function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
    from overlord.stream.facts import Floats, Samples

ALONE = "model"
"""The module's name in the state of a cost that is not split by module."""
ENCODER = "encoder"
"""The module that encodes images: only the first stage of a pipeline runs it."""
COMMUNICATION = "communication"
"""The name under which the cost of receiving the keys and values of a token in a ring is learned."""


class LinearCost(Protocol):
    """A cost function that is linear in its coefficients, such as `TransformerCost` and `MeasuredCost`."""

    @property
    def coefficients(self) -> tuple[float, ...]: ...

    def features(self, samples: Samples) -> Floats:
        """The factor of each coefficient: a row per sample, a column per coefficient."""
        ...

    def with_coefficients(self, coefficients: tuple[float, ...]) -> Self: ...

    def __call__(self, samples: Samples) -> Floats: ...


@dataclass(frozen=True, slots=True)
class CostsInForce:
    """The learned coefficients and speeds that are in force at a step."""

    of: str
    """The digest of the `LearnedCost` that they were learned for."""
    modules: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """The coefficients of each module, and of `COMMUNICATION` where rings were learned from."""
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    """The time that a rank takes over that of others for the same work, where it is not 1."""


def slowness(learned: CostsInForce | None, place: ClientPlaceTree, axis: Bucket) -> Floats | None:
    """The time that each group along an axis takes for the same work, relative to the others: that of its slowest rank.
    None where all are equally fast."""
    if learned is None or not learned.slow:
        return None
    factors = np.ones(place.num_groups(axis))
    for group in {place.group_of(rank, axis) for rank in learned.slow if rank < place.world_size}:
        factors[group] = max(learned.slow.get(rank, 1.0) for rank in place.ranks_of_group(axis, group))
    return None if (factors == 1.0).all() else factors


@dataclass(frozen=True, slots=True)
class LearnedCost:
    """A cost function that is refitted during the run to the step times that trainers report
    (`Client.feedback(seconds=...)`).

    Pass it to a strategy in place of a fixed cost. Called directly, it returns the initial costs.
    """

    initial: LinearCost | Mapping[str, LinearCost]
    """The cost until the first fit: a `TransformerCost` or a `MeasuredCost`, or a dict with one for each module of the
    model."""
    every: int = 10
    """Steps between two fits."""
    speeds: bool = True
    """Give slower ranks less work: data-parallel groups, ranks of a pool (`strategies.hdp`) and ranks that encode
    images."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SpecError(f"every is a number of steps, at least 1, got {self.every}")
        for name, cost in self.modules.items():
            if not is_linear(cost):
                raise SpecError(
                    "LearnedCost.initial is a TransformerCost or a MeasuredCost, or a dict with one for each module; module "
                    f"{name!r} is a {type(cost).__name__}"
                )
            if name == COMMUNICATION:
                raise SpecError(
                    f"{COMMUNICATION!r} is what is learned about the messages of rings; give the module another name"
                )

    @property
    def modules(self) -> Mapping[str, LinearCost]:
        """The initial cost of each module."""
        return self.initial if isinstance(self.initial, Mapping) else {ALONE: self.initial}

    @property
    def digest(self) -> str:
        """A short hash of the initial coefficients. Learned coefficients apply only to the cost that they were learned
        for."""
        return digest_of([(name, cost.coefficients) for name, cost in self.modules.items()])

    def __call__(self, samples: Samples) -> dict[str, Floats]:
        return {name: cost(samples) for name, cost in self.modules.items()}

    def features(self, samples: Samples) -> Floats:
        """The features of all modules, side by side."""
        return np.column_stack([cost.features(samples) for cost in self.modules.values()])

    def as_learned(self, learned: CostsInForce | None) -> LearnedCost:
        """The cost with the learned coefficients, if they were learned for this cost; otherwise itself."""
        if learned is None or learned.of != self.digest or not learned.modules:
            return self
        modules = {name: cost.with_coefficients(tuple(learned.modules[name])) for name, cost in self.modules.items()}
        return LearnedCost(modules, self.every, self.speeds)

    def columns_of(self, module: str) -> slice:
        """The columns of a module in `features`; none if there is no such module."""
        first = 0
        for name, cost in self.modules.items():
            end = first + len(cost.coefficients)
            if name == module:
                return slice(first, end)
            first = end
        return slice(first, first)

    def split(self, coefficients: Floats) -> dict[str, list[float]]:
        """Split the coefficients of all modules, side by side as in `features`, by module."""
        parts: dict[str, Any] = {}
        first = 0
        for name, cost in self.modules.items():
            end = first + len(cost.coefficients)
            parts[name] = coefficients[first:end].tolist()
            first = end
        return parts


def is_linear(cost: object) -> bool:
    """Whether a cost can be refitted: it is linear in coefficients that it tells."""
    return callable(cost) and hasattr(cost, "features") and hasattr(cost, "with_coefficients")


def digest_of(*parts: object) -> str:
    """A short hash of a declaration. A recorded decision names the declaration that it belongs to by it."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
