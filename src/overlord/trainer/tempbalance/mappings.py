"""From the alphas of layers to factors on the learning rate. A large alpha (a light tail: little learned so far) gets more.

A mapping is any function from an array of alphas to an array of factors. Those published spread factors over their
whole range however close the alphas are, so that noise alone moves rates by half. Hence `min_spread`: below that
range of alphas the factors are drawn towards 1 in proportion, down to exactly 1 when all alphas are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from overlord.errors import SpecError

Floats: TypeAlias = NDArray[np.float64]
Mapping: TypeAlias = Callable[[Floats], Floats]

MIN_SPREAD = 0.05
"""Fresh blocks of RoBERTa-base's shape, which differ by chance alone, have alphas within 0.01; five times that."""


@dataclass(frozen=True, slots=True)
class Linear:
    """From `low` at the smallest alpha to `high` at the largest: the published default."""

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
        return _guarded(self.low + place * (self.high - self.low), spread, self.min_spread)


@dataclass(frozen=True, slots=True)
class Rank:
    """From `low` upwards in equal steps by rank: low + (high - low) * rank / layers, the largest alpha last."""

    low: float = 0.5
    high: float = 1.5
    min_spread: float = MIN_SPREAD

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.min_spread)

    def __call__(self, alphas: Floats) -> Floats:
        rank = np.argsort(np.argsort(alphas, kind="stable"), kind="stable")
        factors = self.low + (self.high - self.low) * rank / len(alphas)
        return _guarded(factors, np.ptp(alphas), self.min_spread)


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """TB_Sigmoid: 10 ** (s * (1 / (1 + exp(-steepness * (alpha - mean))) - 1/2)), so 10 ** (-s/2) to 10 ** (s/2).

    `strength` is s; `strength_below`, where given, is s for alphas below the mean. Near the mean it is flat by itself
    and needs no guard.
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
    """In proportion to sqrt(alpha), with mean 1. Nearly equal alphas give nearly equal factors, so it has no guard."""

    def __call__(self, alphas: Floats) -> Floats:
        return _with_mean_one(np.sqrt(alphas))


@dataclass(frozen=True, slots=True)
class Log2:
    """In proportion to log2(alpha), with mean 1. Alphas are above 1 by the Hill formula, so logarithms are positive."""

    def __call__(self, alphas: Floats) -> Floats:
        return _with_mean_one(np.log2(alphas))


@dataclass(frozen=True, slots=True)
class Normalised:
    """Another mapping, scaled so that the mean rate over layers is the schedule's."""

    mapping: Mapping

    def __call__(self, alphas: Floats) -> Floats:
        return _with_mean_one(self.mapping(alphas))


def checked_factors(mapping: Mapping, alphas: Floats) -> Floats:
    """What a mapping gives, refused when it is no set of learning rate factors."""
    factors = np.asarray(mapping(alphas), dtype=np.float64)
    if factors.shape != alphas.shape or not np.all(np.isfinite(factors)) or np.any(factors < 0):
        raise SpecError(
            f"a mapping gives one finite factor >= 0 per alpha; {mapping!r} gave {factors.tolist()} for {alphas.tolist()}"
        )
    return factors


def _guarded(factors: Floats, spread: float, min_spread: float) -> Floats:
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
