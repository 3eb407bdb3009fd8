"""What steps cost, fitted to the times that trainers report: robust, non-negative least squares, and how slow each rank is.

A rank's time for a piece of work (a microbatch, or its part of a step) is taken to be

    slowness of the rank x (sum over modules of coefficients . features + per microbatch + per piece)

with no coefficient below 0. The last two stand for what does not depend on documents: launches, the optimiser's step. They
are fitted so that the others come out right, and then left aside. Times that do not fit the others (a garbage collection, a
checkpoint, a wrong unit) lose their say: Huber's weights first, whose minimum is the only one, then Tukey's, which give what
is far off none at all. Older times count less. Where times say nothing about a coefficient (all ranks had the same work), a
weak pull towards what was known before settles it.
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

HALF_LIFE = 32  # steps after which a time counts half
_KEPT = (16, 128)  # the fewest and the most times of each rank
_KEPT_OF_ALL = 32_768
_MOST = 8192  # times that one fit looks at
_FEWEST_OF_RANK = 5  # times before a rank is called slow
_ROUNDS = 4  # of coefficients, then slowness, then coefficients again
_HUBER, _TUKEY = 1.345, 4.685  # in robust standard deviations: 95 % as good as least squares where nothing is wrong
_LEAST_NOISE = 0.01  # of a time: no model is better than that
_PULL = 0.3  # how far off the known coefficients may be, as a share of all cost, before times have to say so


@dataclass(frozen=True, slots=True)
class Fitted:
    """What times say."""

    coefficients: Floats
    """One per column of features."""
    slowness: Mapping[int, float]
    """Of each rank that was heard of often enough: 1.0 for the one in the middle."""
    error: float
    """The median of |predicted - reported| / reported."""
    num_times: int


@dataclass(frozen=True, slots=True)
class _Times:
    """Columns of all measurements that are kept."""

    features: Floats
    seconds: Floats
    rank: Ints
    weight: Floats


class CostFit:
    """Remembers times and fits them. Deterministic: the same times in the same order give the same coefficients."""

    def __init__(self, num_features: int, num_ranks: int = 1) -> None:
        self._num_features = num_features
        self._kept = min(max(_KEPT_OF_ALL // num_ranks, _KEPT[0]), _KEPT[1])
        self._slowness: dict[int, float] = {}
        self._of_rank: dict[int, deque[tuple[int, Floats, float]]] = {}

    def add(self, step: int, rank: int, features: Floats, seconds: float) -> None:
        """Remember how long a rank took for a piece of work: `features` are the sums over its documents, and then how many
        microbatches it was."""
        self._of_rank.setdefault(rank, deque(maxlen=self._kept)).append((step, features, seconds))

    @property
    def num_times(self) -> int:
        return sum(len(times) for times in self._of_rank.values())

    def solve(self, known: Floats, slowness: Mapping[int, float] | None = None) -> Fitted | None:
        """Coefficients and slowness from the kept measurements; None while they say too little.

        `known` are the coefficients that were used so far, in any unit, and `slowness` what was known of ranks. Where steps
        were arranged by it, all ranks took the same time, which says nothing any more: so both are where to begin.
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
        pull = _pull(known, size, used)
        ranks, of = np.unique(times.rank, return_inverse=True)
        begin = {**(slowness or {}), **self._slowness}
        slow = np.array([begin.get(rank, 1.0) for rank in ranks.tolist()])
        found = pull
        for _ in range(_ROUNDS):
            found = _robust(scaled, times.seconds / unit / slow[of], times.weight, pull)
            slow = _slowness(times.seconds / unit / np.maximum(scaled @ found, 1e-12), of, len(ranks))
        coefficients = np.zeros(len(size))
        coefficients[used] = found / size[used] * unit
        predicted = scaled @ found * slow[of] * unit
        error = float(np.median(np.abs(predicted - times.seconds) / times.seconds))
        self._slowness = dict(zip(ranks.tolist(), slow.tolist(), strict=True))
        return Fitted(coefficients[: self._num_features], dict(self._slowness), error, len(times.seconds))

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
    """Coefficients for features and times of one machine, and the time that a piece takes whatever is in it. For times that
    were measured one after the other, as `overlord calibrate` does."""
    size = np.append(features.mean(axis=0), 1.0)
    used = size > 0
    # Divided by the time: what counts is how many per cent a prediction is off, for short work as for long.
    scaled = np.column_stack([features, np.ones(len(seconds))])[:, used] / size[used]
    known = np.ones(features.shape[1]) / size[:-1].clip(1e-300) if known is None else known
    pull = _pull(known, size, used) * float(np.median(seconds))
    found = _robust(scaled / seconds[:, None], np.ones(len(seconds)), np.ones(len(seconds)), pull, strength=1e-6)
    coefficients = np.zeros(len(size))
    coefficients[used] = found / size[used]
    return coefficients[:-1], float(coefficients[-1])


def _pull(known: Floats, size: Floats, used: NDArray[np.bool_]) -> Floats:
    """Known coefficients as shares of the cost of a mean piece of work; what lies beside documents as nothing."""
    padded = np.zeros(len(size))
    padded[: len(known)] = known
    shares = (padded * size)[used]
    total = shares.sum()
    return shares / total if total > 0 else np.full(len(shares), 1 / len(shares))


def _robust(scaled: Floats, times: Floats, weight: Floats, pull: Floats, strength: float | None = None) -> Floats:
    """Non-negative coefficients for columns of mean 1 and times of median 1."""
    found = pull
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
        # As strong as one time that is off by _PULL is weak: it decides only where times do not.
        held = (noise / _PULL) ** 2 if strength is None else strength
        target = (scaled * root).T @ (times[:, None] * root)[:, 0] + held * pull
        found = _non_negative(gram + held * np.eye(len(pull)), target)
    return found


def _non_negative(gram: Floats, target: Floats) -> Floats:
    """The non-negative minimum of a quadratic form: what would be negative is held at 0, until nothing would be better."""
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
    """How much longer than predicted each rank takes, by the middle one of its times; 1 in the middle of all ranks."""
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
