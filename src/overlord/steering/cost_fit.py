"""Fits costs, and the slowness of each rank, to the times that trainers report: robust, non-negative least squares.

The model of a rank's time for a piece of work (a microbatch, or its part of a step) is

    slowness of the rank x (sum over modules of coefficients . features + per microbatch + per piece)

with no coefficient below 0. The last two terms stand for overhead that does not depend on documents: kernel launches, the
optimiser's step. They are fitted so that the others are unbiased, and then dropped. Outliers (a garbage collection, a
checkpoint, a wrong unit) are down-weighted: first by Huber's weights, whose problem is convex, then by Tukey's, which give
far outliers no weight at all. Older times count less. A ridge prior centred at the known coefficients keeps the fit stable
where times do not determine a coefficient (all ranks had the same work).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.balancing import bin_sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from overlord.stream.facts import Floats, Ints

HALF_LIFE = 32  # steps after which the weight of a time is halved
_KEPT = (16, 128)  # least and most times that are kept of each rank
_KEPT_OF_ALL = 32_768
_MOST = 8192  # times that one fit uses
_FEWEST_OF_RANK = 5  # times that are needed to estimate the slowness of a rank
_NUM_ROUNDS = 4  # each fits the coefficients, then the slowness of ranks
_HUBER, _TUKEY = 1.345, 4.685  # in robust standard deviations: 95 % efficient for normal errors
_LEAST_NOISE = 0.01  # of the median time: no model is more exact, so smaller residuals are no outliers
_PRIOR_SPREAD = 0.3  # standard deviation of the prior, as a share of the whole cost


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The result of a fit."""

    coefficients: Floats
    """One per column of features."""
    slowness: Mapping[int, float]
    """Of each rank, relative to the median rank. 1.0 for ranks with too few times."""
    error: float
    """The median of |predicted - reported| / reported."""
    num_times: int


@dataclass(frozen=True, slots=True)
class _Times:
    """The kept measurements as columns."""

    features: Floats
    seconds: Floats
    rank: Ints
    weight: Floats


class CostFit:
    """Keeps recent times and fits costs to them. The same times in the same order yield the same coefficients."""

    def __init__(self, num_features: int, num_ranks: int = 1) -> None:
        self._num_features = num_features
        self._kept = min(max(_KEPT_OF_ALL // num_ranks, _KEPT[0]), _KEPT[1])
        self._slowness: dict[int, float] = {}
        self._of_rank: dict[int, deque[tuple[int, Floats, float]]] = {}

    def add(self, step: int, rank: int, features: Floats, seconds: float) -> None:
        """Keep the time that a rank took for a piece of work. `features` are the sums over its documents, followed by the
        number of microbatches."""
        self._of_rank.setdefault(rank, deque(maxlen=self._kept)).append((step, features, seconds))

    @property
    def num_times(self) -> int:
        return sum(len(times) for times in self._of_rank.values())

    def solve(self, known: Floats, slowness: Mapping[int, float] | None = None) -> FittedCosts | None:
        """Coefficients and slowness from the kept measurements; None while there are too few.

        `known` are the coefficients in use, in any unit, and `slowness` is the known slowness of ranks. Both are starting
        points: steps that were balanced by them took all ranks equally long, so their times tell nothing about either.
        """
        times = self._columns()
        if len(times.seconds) < 4 * (self._num_features + 2):
            return None
        unit = float(np.median(times.seconds))
        design = np.column_stack([times.features, np.ones(len(times.seconds))])
        size = design.mean(axis=0)
        used = size > 0
        if not used[: self._num_features].any():
            return None
        scaled = design[:, used] / size[used]
        prior = _prior(known, size, used)
        ranks, of = np.unique(times.rank, return_inverse=True)
        begin = {**(slowness or {}), **self._slowness}
        slow = np.array([begin.get(rank, 1.0) for rank in ranks.tolist()])
        found = prior
        for _ in range(_NUM_ROUNDS):
            found = _robust(scaled, times.seconds / unit / slow[of], times.weight, prior)
            slow = _slowness(times.seconds / unit / np.maximum(scaled @ found, 1e-12), of, len(ranks))
        coefficients = np.zeros(len(size))
        coefficients[used] = found / size[used] * unit
        predicted = scaled @ found * slow[of] * unit
        error = float(np.median(np.abs(predicted - times.seconds) / times.seconds))
        self._slowness = dict(zip(ranks.tolist(), slow.tolist(), strict=True))
        return FittedCosts(coefficients[: self._num_features], dict(self._slowness), error, len(times.seconds))

    def _columns(self) -> _Times:
        entries = [(step, rank, f, s) for rank, times in sorted(self._of_rank.items()) for step, f, s in times]
        if len(entries) > _MOST:  # evenly over ranks and steps
            entries = [entries[i] for i in np.linspace(0, len(entries) - 1, _MOST).astype(int).tolist()]
        steps = np.array([entry[0] for entry in entries], np.int64)
        age = steps.max(initial=0) - steps
        return _Times(
            features=np.array([entry[2] for entry in entries]).reshape(len(entries), self._num_features + 1),
            seconds=np.array([entry[3] for entry in entries]),
            rank=np.array([entry[1] for entry in entries], np.int64),
            weight=0.5 ** (age / HALF_LIFE),
        )


def fit_times(features: Floats, seconds: Floats, known: Floats | None = None) -> tuple[Floats, float]:
    """Coefficients for features and times of one machine, and the constant time of a piece of work. For times that were
    measured one after the other, as `overlord calibrate` does."""
    size = np.append(features.mean(axis=0), 1.0)
    used = size > 0
    # Divided by the time, to minimise relative errors.
    scaled = np.column_stack([features, np.ones(len(seconds))])[:, used] / size[used]
    known = np.ones(features.shape[1]) / size[:-1].clip(1e-300) if known is None else known
    prior = _prior(known, size, used) * float(np.median(seconds))
    found = _robust(scaled / seconds[:, None], np.ones(len(seconds)), np.ones(len(seconds)), prior, strength=1e-6)
    coefficients = np.zeros(len(size))
    coefficients[used] = found / size[used]
    return coefficients[:-1], float(coefficients[-1])


def _prior(known: Floats, size: Floats, used: NDArray[np.bool_]) -> Floats:
    """Known coefficients as shares of the cost of a mean piece of work. The terms of overhead have a prior of 0."""
    padded = np.zeros(len(size))
    padded[: len(known)] = known
    shares = (padded * size)[used]
    total = shares.sum()
    return shares / total if total > 0 else np.full(len(shares), 1 / len(shares))


def _robust(scaled: Floats, times: Floats, weight: Floats, prior: Floats, strength: float | None = None) -> Floats:
    """Non-negative coefficients for columns of mean 1 and times of median 1."""
    found = prior
    noise = 1.0
    for turn in range(24):
        residual = times - scaled @ found
        noise = max(1.4826 * float(np.median(np.abs(residual))), _LEAST_NOISE)
        off = np.abs(residual) / noise
        if turn < 18:
            trust = np.minimum(1.0, _HUBER / np.maximum(off, 1e-12))
        else:
            trust = np.square(1 - np.square(np.minimum(off / _TUKEY, 1.0)))
        root = np.sqrt(weight * trust)[:, None]
        gram = (scaled * root).T @ (scaled * root)
        # Ridge prior: keeps the fit stable where there are too few measurements.
        ridge = (noise / _PRIOR_SPREAD) ** 2 if strength is None else strength
        target = (scaled * root).T @ (times[:, None] * root)[:, 0] + ridge * prior
        found = _non_negative(gram + ridge * np.eye(len(prior)), target)
    return found


def _non_negative(gram: Floats, target: Floats) -> Floats:
    """The non-negative minimum of a quadratic form, by an active-set method: negative coefficients are fixed at 0, and freed
    again where that lowers the form."""
    n = len(target)
    free = np.ones(n, bool)
    found = np.zeros(n)
    for _ in range(3 * n):
        found = np.zeros(n)
        found[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
        if (found < 0).any():
            free[int(found.argmin())] = False
            if not free.any():
                return np.zeros(n)
            continue
        better = np.where(free, 0.0, target - gram @ found)
        if better.max() <= 1e-9 * np.abs(target).max():
            break
        free[int(better.argmax())] = True
    return np.maximum(found, 0.0)


def _slowness(ratio: Floats, of: NDArray[np.integer], num_ranks: int) -> Floats:
    """The median of reported / predicted time of each rank, relative to the median rank."""
    order = np.lexsort((ratio, of))
    held = np.bincount(of, minlength=num_ranks)
    first = np.cumsum(held) - held
    ordered = ratio[order]
    middle = (ordered[first + (held - 1) // 2] + ordered[first + held // 2]) / 2
    middle = np.where(held >= _FEWEST_OF_RANK, middle, np.nan)
    known = middle[np.isfinite(middle)]
    usual = float(np.median(known)) if len(known) else 1.0
    return np.clip(np.nan_to_num(middle / usual, nan=1.0), 1e-3, 1e3)


def summed_features(features: Floats, micro: Ints, num_micro: int) -> Floats:
    """Features of samples, summed over each microbatch."""
    return np.column_stack([bin_sums(micro, column, num_micro) for column in features.T])
