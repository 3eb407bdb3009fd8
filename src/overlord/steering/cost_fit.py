"""Fits costs, and the slowness of each rank, to the times that trainers report: robust, non-negative least squares.

The model of a rank's time for a piece of work (a microbatch, or its part of a step) is

    slowness of the rank x (sum over modules of coefficients . features + per microbatch + per piece)

with no coefficient below 0. Work that several ranks do together (a ring) takes as long as on the slowest of them. The last
two terms stand for overhead that does not depend on documents: kernel launches, the
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from overlord.stream.facts import Floats, Ints

HALF_LIFE = 32  # steps after which the weight of a time is halved
_KEPT = (16, 128)  # least and most times that are kept of each rank
_KEPT_OF_ALL = 32_768
_KEPT_OF_RINGS = 2048
_SHORTEST = 0.05  # of the median time: shorter work counts as this long
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
    weight: Floats
    ranks: Ints
    """The ranks of all times, one after the other."""
    held: Ints
    """How many ranks each time is of."""

    def slowest(self, of_ranks: Floats) -> Floats:
        """The largest number among the ranks of each time; `of_ranks` has one for each entry of `ranks`."""
        return np.maximum.reduceat(of_ranks, np.cumsum(self.held) - self.held)


class CostFit:
    """Keeps recent times and fits costs to them. The same times in the same order yield the same coefficients."""

    def __init__(self, num_features: int, num_ranks: int = 1) -> None:
        self._num_features = num_features
        self._kept = min(max(_KEPT_OF_ALL // num_ranks, _KEPT[0]), _KEPT[1])
        self._slowness: dict[int, float] = {}
        self._of_rank: dict[int, deque[tuple[int, Floats, float]]] = {}
        self._of_rings: deque[tuple[int, tuple[int, ...], Floats, float]] = deque(maxlen=_KEPT_OF_RINGS)

    def add(self, step: int, rank: int, features: Floats, seconds: float) -> None:
        """Keep the time that a rank took for a piece of work. `features` are the sums over its documents, followed by the
        number of microbatches."""
        self._of_rank.setdefault(rank, deque(maxlen=self._kept)).append((step, features, seconds))

    def add_ring(self, step: int, ranks: tuple[int, ...], features: Floats, seconds: float) -> None:
        """Keep the time that several ranks took together; `features` are those of one of them."""
        self._of_rings.append((step, ranks, features, seconds))

    @property
    def num_times(self) -> int:
        return sum(len(times) for times in self._of_rank.values()) + len(self._of_rings)

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
        size = np.abs(design).mean(axis=0)
        used = size > 0
        if not used[: self._num_features].any():
            return None
        scaled = design[:, used] / size[used]
        prior = _prior(known, size, used)
        ranks, of = np.unique(times.ranks, return_inverse=True)
        begin = {**(slowness or {}), **self._slowness}
        slow = np.array([begin.get(rank, 1.0) for rank in ranks.tolist()])
        found = prior
        for _ in range(_NUM_ROUNDS):
            even = times.seconds / unit / times.slowest(slow[of])
            # Between absolute errors, by which many short microbatches would make the few long ones outliers, and relative
            # ones, by which the overhead of the shortest would count most.
            root = 1 / np.sqrt(np.maximum(even, _SHORTEST))
            found = _robust(scaled * root[:, None], even * root, times.weight, prior)
            slow = _slowness(times.seconds / unit / np.maximum(scaled @ found, 1e-12), times, of, len(ranks))
        coefficients = np.zeros(len(size))
        coefficients[used] = found / size[used] * unit
        predicted = scaled @ found * times.slowest(slow[of]) * unit
        error = float(np.median(np.abs(predicted - times.seconds) / times.seconds))
        self._slowness = dict(zip(ranks.tolist(), slow.tolist(), strict=True))
        return FittedCosts(coefficients[: self._num_features], dict(self._slowness), error, len(times.seconds))

    def _columns(self) -> _Times:
        entries: list[tuple[int, tuple[int, ...], Floats, float]] = [
            (step, (rank,), f, s) for rank, times in sorted(self._of_rank.items()) for step, f, s in times
        ]
        entries += self._of_rings
        if len(entries) > _MOST:  # evenly over ranks and steps
            entries = [entries[i] for i in np.linspace(0, len(entries) - 1, _MOST).astype(int).tolist()]
        steps = np.array([entry[0] for entry in entries], np.int64)
        age = steps.max(initial=0) - steps
        return _Times(
            features=np.array([entry[2] for entry in entries]).reshape(len(entries), self._num_features + 1),
            seconds=np.array([entry[3] for entry in entries]),
            weight=0.5 ** (age / HALF_LIFE),
            ranks=np.array([rank for entry in entries for rank in entry[1]], np.int64),
            held=np.array([len(entry[1]) for entry in entries], np.int64),
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


def _slowness(ratio: Floats, times: _Times, of: NDArray[np.integer], num_ranks: int) -> Floats:
    """The median of reported / predicted time of each rank, relative to the median rank.

    It is taken from the work that a rank did alone. A rank that did too little alone has the lower quartile of its rings:
    it is not slower than those in which no other rank was slow.
    """
    alone = times.held == 1
    is_alone = np.repeat(alone, times.held)
    found = _quantiles(ratio[alone], of[is_alone], num_ranks, 0.5)
    together = _quantiles(np.repeat(ratio, times.held)[~is_alone], of[~is_alone], num_ranks, 0.25)
    found = np.where(np.isfinite(found), found, together)
    known = found[np.isfinite(found)]
    usual = float(np.median(known)) if len(known) else 1.0
    return np.clip(np.nan_to_num(found / usual, nan=1.0), 1e-3, 1e3)


def _quantiles(values: Floats, of: NDArray[np.integer], num_ranks: int, share: float) -> Floats:
    """A quantile of the values of each rank; NaN where there are too few."""
    held = np.bincount(of, minlength=num_ranks)
    if not len(values):
        return np.full(num_ranks, np.nan)
    ordered = values[np.lexsort((values, of))]
    place = np.cumsum(held) - held + np.maximum(held - 1, 0) * share
    low, high = (np.minimum(at.astype(np.int64), len(values) - 1) for at in (np.floor(place), np.ceil(place)))
    return np.where(held >= _FEWEST_OF_RANK, (ordered[low] + ordered[high]) / 2, np.nan)
