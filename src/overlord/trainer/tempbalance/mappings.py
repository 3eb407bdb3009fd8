"""Mappings from the alphas of layers to factors on their learning rate. A large alpha (a light tail, little learned so far)
gets a large factor.

A mapping is any function from an array of alphas to an array of factors. The published ones spread factors over their whole
range however close the alphas are, so that noise alone would change rates by half. Hence `min_spread`: where alphas span
less than that, factors are scaled towards 1 in proportion, down to exactly 1 when all alphas are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from overlord.errors import SpecError
from overlord.stream.facts import Floats

Mapping: TypeAlias = Callable[[Floats], Floats]

MIN_SPREAD = 0.05
"""Five times the range of alphas over freshly initialised blocks of RoBERTa-base, which differ by chance alone."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A mapping that is linear in alpha, from `low` at the smallest alpha to `high` at the largest: the published
    default."""

    low: float = 0.5
    high: float = 1.5
    min_spread: float = MIN_SPREAD

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.min_spread)

    def __call__(self, alphas: Floats) -> Floats:
        spread = np.ptp(alphas)
        if spread == 0:
            return np.ones_like(alphas)
        place = (alphas - alphas.min()) / spread
        return _shrink_towards_one(self.low + place * (self.high - self.low), spread, self.min_spread)


@dataclass(frozen=True, slots=True)
class Rank:
    """A mapping by the rank of alpha among the layers: low + (high - low) * rank / layers."""

    low: float = 0.5
    high: float = 1.5
    min_spread: float = MIN_SPREAD

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.min_spread)

    def __call__(self, alphas: Floats) -> Floats:
        rank = np.argsort(np.argsort(alphas, kind="stable"), kind="stable")
        factors = self.low + (self.high - self.low) * rank / len(alphas)
        return _shrink_towards_one(factors, np.ptp(alphas), self.min_spread)


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """The mapping TB_Sigmoid: 10 ** (s * (1 / (1 + exp(-steepness * (alpha - mean))) - 1/2)), from 10 ** (-s/2) to 10 **
    (s/2).

    `strength` is s; `strength_below`, if given, is s for alphas below the mean. It is flat near the mean and needs no
    `min_spread`.
    """

    strength: float = 1.0
    strength_below: float | None = None
    steepness: float = 10.0

    def __post_init__(self) -> None:
        below = self.strength if self.strength_below is None else self.strength_below
        if min(self.strength, below, self.steepness) <= 0:
            raise SpecError(f"a sigmoid's strengths and steepness must be positive, got {self}")

    def __call__(self, alphas: Floats) -> Floats:
        above_mean = alphas - alphas.mean()
        below = self.strength if self.strength_below is None else self.strength_below
        strength = np.where(above_mean >= 0, self.strength, below)
        # tanh is the same sigmoid, without overflow far from the mean
        return 10 ** (strength * 0.5 * np.tanh(0.5 * self.steepness * above_mean))


@dataclass(frozen=True, slots=True)
class Sqrt:
    """A mapping in proportion to sqrt(alpha), with mean 1. Nearly equal alphas get nearly equal factors, without
    `min_spread`."""

    def __call__(self, alphas: Floats) -> Floats:
        return _with_mean_one(np.sqrt(alphas))


@dataclass(frozen=True, slots=True)
class Log2:
    """A mapping in proportion to log2(alpha), with mean 1. Alphas of the Hill estimator are above 1."""

    def __call__(self, alphas: Floats) -> Floats:
        return _with_mean_one(np.log2(alphas))


@dataclass(frozen=True, slots=True)
class Normalised:
    """Another mapping, scaled to the mean 1, so that the mean rate over layers is that of the schedule."""

    mapping: Mapping

    def __call__(self, alphas: Floats) -> Floats:
        return _with_mean_one(self.mapping(alphas))


def compute_factors(mapping: Mapping, alphas: Floats) -> Floats:
    """Call a mapping. Raises SpecError unless it returns one finite factor >= 0 per alpha."""
    factors = np.asarray(mapping(alphas), dtype=np.float64)
    if factors.shape != alphas.shape or not np.all(np.isfinite(factors)) or np.any(factors < 0):
        raise SpecError(
            f"a mapping returns one finite factor >= 0 per alpha; {mapping!r} returned {factors.tolist()} for "
            f"{alphas.tolist()}"
        )
    return factors


def _shrink_towards_one(factors: Floats, spread: float, min_spread: float) -> Floats:
    if spread >= min_spread:
        return factors
    return 1 + (factors - 1) * (spread / min_spread)


def _with_mean_one(factors: Floats) -> Floats:
    return factors / factors.mean()


def _check_range(low: float, high: float, min_spread: float) -> None:
    if not 0 <= low <= high:
        raise SpecError(f"factors go from low to high with 0 <= low <= high, got low={low}, high={high}")
    if min_spread < 0:
        raise SpecError(f"min_spread is a range of alphas >= 0, got {min_spread}")
