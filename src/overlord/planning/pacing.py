"""Sharing items over bins that are not equally fast: a slow one gets less, so that all end together."""

from __future__ import annotations

import numpy as np

from overlord.planning.balancing import Balancer, LeastCostBins
from overlord.planning.facts import Floats, Ints

_GRAIN = 0.02  # bins whose slowness differs by less are taken for alike: fewer kinds to choose from


def paced(method: Balancer, slowness: Floats | None) -> Balancer:
    """The same balancer where all bins are alike; else costliest item first, each to the bin that is done soonest."""
    if slowness is None:
        return method
    kinds, kind = np.unique(np.round(np.log(slowness) / _GRAIN), return_inverse=True)
    factors = np.exp(kinds * _GRAIN).tolist()

    def by_pace(costs: Floats, num_bins: int, sizes: Ints, capacity: int | None = None) -> Ints:
        if num_bins != len(kind):
            return method(costs, num_bins, sizes, capacity)
        return _to_soonest(costs, factors, kind, sizes, int(sizes.sum()) if capacity is None else capacity)

    return by_pace


def _to_soonest(costs: Floats, factors: list[float], kind: Ints, sizes: Ints, capacity: int) -> Ints:
    # Bins in the order of their kind, so that those of one kind lie together.
    by_kind = np.argsort(kind, kind="stable")
    held = np.bincount(kind, minlength=len(factors)).tolist()
    room = [capacity] * len(kind)
    first = (np.cumsum(held) - held).tolist()
    alike = [LeastCostBins(room, begin, count) for begin, count in zip(first, held, strict=True)]
    order = np.argsort(-costs, kind="stable")
    found = np.empty(len(costs), np.int64)
    chosen = []
    # A loop over items, because each choice depends on those before.
    for cost, size in zip(costs[order].tolist(), sizes[order].tolist(), strict=True):
        soonest, at = np.inf, -1
        for k, bins in enumerate(alike):
            total = bins.least(size)
            if total is not None and (done := (total + cost) * factors[k]) < soonest:
                soonest, at = done, k
        if at >= 0:
            chosen.append(alike[at].place(cost, size))
        else:  # nobody has room: of the fastest the roomiest takes it, and the caller arranges the surplus
            chosen.append(alike[0].overfill(cost, size))
    found[order] = by_kind[chosen]
    return found


def times(costs: Floats, slowness: Floats | None) -> Floats:
    """How long bins take that have these costs."""
    return costs if slowness is None else costs * slowness
