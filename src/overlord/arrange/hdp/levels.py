"""PP-balance: assign microbatches to pipelines so that the slowest pipeline finishes as early as possible.

A pipeline of `pp` stages takes about the sum of its microbatches plus pp - 1 times the costliest, which fills and drains it.
So costly microbatches belong together: a pipeline that has one pays the filling once and may as well have several, while a
pipeline without one finishes sooner and can run more of the cheap ones. Each pipeline gets microbatches of one cost level.

Rings are stacked for that, sorted by how many ranks they take. The rings of a stack run one after the other on the same
first ranks, as long as the stack finishes by the goal; then the next stack begins on the ranks that follow. A ring never
takes more ranks than the one below it. So a rank runs the rings of its stack from the lowest up without a gap, and each ring
has the same index on all of its ranks.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.stream.facts import Floats, Ints

_HALVINGS = 10
_LOOSER = 1.08
"""The second goal to try, over the lower bound, when the lower bound itself cannot be reached."""


class PipelinePlacement(NamedTuple):
    """The ranks of rings and of single-rank microbatches."""

    first_rank: list[int]
    """The first rank of each ring; the others follow it."""
    rank: list[int]
    """The rank of each single-rank microbatch."""
    slowest: float
    """The time of the slowest pipeline."""


def place_on_pipelines(shares: Floats, num_parts: Ints, costs: Floats, num_ranks: int, pp: int) -> PipelinePlacement:
    """Place rings, each on `num_parts` ranks at a cost of `shares` per rank, and microbatches of one rank that cost `costs`.

    Rings are sorted by falling `num_parts`, microbatches by falling cost.
    """
    rings = list(zip(shares.tolist(), num_parts.tolist(), strict=True))
    falling = np.sort(np.concatenate([np.repeat(shares, num_parts), costs]))[::-1].tolist()
    least = max(_lower_bound(falling, num_ranks, pp), _lower_bound_of_rings(rings, num_ranks, pp))
    best = _place_by_goal(rings, costs.tolist(), num_ranks, pp, least)
    if best.slowest > least * _LOOSER:
        best = min(
            best, _place_by_goal(rings, costs.tolist(), num_ranks, pp, least * _LOOSER), key=lambda each: each.slowest
        )
    return best


def _place_by_goal(
    rings: Sequence[tuple[float, int]], costs: list[float], num_ranks: int, pp: int, goal: float
) -> PipelinePlacement:
    first_rank, total, costliest = _stack_rings(rings, num_ranks, pp, goal)
    used = sorted((total[rank] + (pp - 1) * costliest[rank], rank) for rank in range(num_ranks) if total[rank])
    fresh = [rank for rank in reversed(range(num_ranks)) if not total[rank]]
    rank_of: list[int] = []
    # A loop over microbatches, because each choice depends on those before: the fullest pipeline that still finishes by the
    # goal, else one that has nothing yet, else the emptiest.
    for cost in costs:
        at = bisect_right(used, (goal - cost, num_ranks)) - 1
        if at < 0 and fresh:
            taken, rank = 0.0, fresh.pop()
        else:
            taken, rank = used.pop(max(at, 0))
        rank_of.append(rank)
        insort(used, (taken + cost + (pp - 1) * max(0.0, cost - costliest[rank]), rank))
        costliest[rank] = max(costliest[rank], cost)
    return PipelinePlacement(first_rank, rank_of, used[-1][0] if used else 0.0)


def _stack_rings(
    rings: Sequence[tuple[float, int]], num_ranks: int, pp: int, goal: float
) -> tuple[list[int], list[float], list[float]]:
    """The first rank of each ring, and the total and the largest cost of each rank. Rings that no longer fit go on the first
    stack."""
    first_rank: list[int] = []
    total, costliest = [0.0] * num_ranks, [0.0] * num_ranks
    begin = end = 0
    height = top = 0.0
    for share, num in rings:
        if height + share + (pp - 1) * max(top, share) > goal * (1 + 1e-9) or end == 0:
            if end + num <= num_ranks:
                begin, end = end, end + num
            else:
                begin = 0
            height = total[begin]
            top = costliest[begin]
        height += share
        top = max(top, share)
        first_rank.append(begin)
        for rank in range(begin, begin + num):
            total[rank] += share
            costliest[rank] = max(costliest[rank], share)
    return first_rank, total, costliest


def _lower_bound_of_rings(rings: Sequence[tuple[float, int]], num_ranks: int, pp: int) -> float:
    """The earliest goal for which there are ranks enough for all stacks."""
    if not rings:
        return 0.0

    def fits(goal: float) -> bool:
        width, height, top = 0, goal, 0.0
        for share, num in rings:
            top = max(top, share)
            if height + share + (pp - 1) * top > goal:
                width, height, top = width + num, 0.0, share
            height += share
        return width <= num_ranks

    low = pp * max(share for share, _ in rings)
    return _least_that_fits(fits, low, pp * sum(share for share, _ in rings))


def _lower_bound(falling: list[float], num_ranks: int, pp: int) -> float:
    """The earliest goal that pipelines can meet when each takes as many of these costs, in order, as fit."""
    if not falling:
        return 0.0
    sums = [0.0, *accumulate(falling)]

    def fits(goal: float) -> bool:
        at = 0
        for _ in range(num_ranks):
            at = bisect_right(sums, sums[at] + goal - (pp - 1) * falling[at]) - 1
            if at == len(falling):
                return True
        return False

    return _least_that_fits(fits, pp * falling[0], sums[-1] / num_ranks + pp * falling[0])


def _least_that_fits(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest goal that fits, by bisection between a lower bound and a goal that fits."""
    if low <= 0 or fits(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5  # by ratio: the bounds may be far apart
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
