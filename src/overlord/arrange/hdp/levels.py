"""PP-balance: assign microbatches to pipelines so that the slowest pipeline finishes as early as possible.

A pipeline of `pp` stages takes about the sum of its microbatches plus pp - 1 times the costliest, which fills and drains it.
There are two ways to keep that small, and the better one is taken:

**Shelves**, for microbatches of about one cost: the sum is then what counts. The rings of a shelf lie side by side on
different ranks, the widest first. Shelves are sorted by how many ranks they take, and all begin at the first rank. So each
rank has the rings of the first so many shelves without a gap, and a ring has one index on all of its ranks. Whole documents
then even out the sums, and `columns` chooses the order in which ranks run what they have.

**Stacks**, for microbatches of very different cost: costly ones belong together. A pipeline that has one pays the filling
once and may as well have several, while a pipeline without one finishes sooner and can run more of the cheap ones. The rings
of a stack run one after the other on the same first ranks, as long as the stack finishes by the goal; then the next stack
begins on the ranks that follow. A ring never takes more ranks than the one below it.

Where ranks differ in speed, the fastest come first and rings run at the pace of their slowest rank.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.balancing import speed_kinds
from overlord.arrange.hdp.columns import RankCosts, best_columns, slowest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.stream.facts import Floats, Ints

_HALVINGS = 10
_LOOSER = 1.08
"""The second goal to try, over the lower bound, when the lower bound itself cannot be reached."""


class PipelinePlacement(NamedTuple):
    """The ranks of rings and of single-rank microbatches."""

    order: list[int]
    """The rings in the order in which ranks run them."""
    ranks: list[list[int]]
    """The ranks of each ring, rising."""
    rank: list[int]
    """The rank of each single-rank microbatch."""
    in_column: dict[int, tuple[int, int]]
    """Single-rank microbatches that do not run after all rings of their rank: how many of these run before each, and its
    place among the others of the rank."""
    slowest: float
    """The time of the slowest pipeline, by simulation."""
    ends: Floats | None = None
    """On shelves: about when each rank ends, its work and filling."""


def place_on_pipelines(
    shares: Floats,
    num_parts: Ints,
    costs: Floats,
    num_ranks: int,
    *,
    pipeline: Pipeline,
    slowness: Floats | None = None,
    on_shelves: list[int] | None = None,
) -> PipelinePlacement:
    """Place rings, each on `num_parts` ranks at a cost of `shares` per rank, and microbatches of one rank that cost `costs`.

    Rings are sorted by falling `num_parts`, microbatches by falling cost. `slowness` is the time of each rank for one unit
    of cost; None where all are equally fast. `on_shelves` is the rank of each microbatch where rings lie on shelves and only
    the order is wanted.
    """
    rings = list(zip(shares.tolist(), num_parts.tolist(), strict=True))
    slow = np.ones(num_ranks) if slowness is None else slowness
    found = [_place_on_shelves(rings, costs.tolist(), slow, pipeline, on_shelves)]
    if slowness is None and on_shelves is None:
        found += _place_on_stacks(rings, costs, num_ranks, pipeline)
    return min(found, key=lambda each: each.slowest)


def _place_on_shelves(
    rings: Sequence[tuple[float, int]], costs: list[float], slow: Floats, pipeline: Pipeline, given: list[int] | None
) -> PipelinePlacement:
    by_speed = np.argsort(slow, kind="stable")
    slow = slow[by_speed]
    used, shelf, first = _fill_shelves(rings, len(slow))
    number = sorted(range(len(used)), key=lambda at: -used[at])
    total, most = np.zeros(len(slow)), np.zeros(len(slow))
    on_shelf = np.zeros((len(used), len(slow)))  # the time of each rank's ring
    ring_of = np.full((len(used), len(slow)), -1)
    for ring, ((share, num), begin, at) in enumerate(zip(rings, first, shelf, strict=True)):
        on_shelf[at, begin : begin + num] = share * slow[begin + num - 1]
        ring_of[at, begin : begin + num] = ring
    if len(used):
        total, most = on_shelf.sum(axis=0), on_shelf.max(axis=0)
    rank_of: list[int] = []
    if given is None:
        rank_of = _even_out(costs, total, most, slow, filling_of(pipeline))
    elif given:
        rank_of = np.argsort(by_speed)[given].tolist()
    held = _RowsOfRanks.of(rank_of, len(slow))
    num_full = sum(width == len(slow) for width in used)
    of_ranks = [
        [(time, ring) for time, ring in zip(times, numbers, strict=True) if ring >= 0]
        for times, numbers in zip(on_shelf[number].T.tolist(), ring_of[number].T.tolist(), strict=True)
    ]
    ranks = [
        RankCosts(each[:num_full], each[num_full:], [costs[row] * float(slow[rank]) for row in held.rows(rank)])
        for rank, each in enumerate(of_ranks)
    ]
    found = best_columns(ranks, pipeline)
    number = [*(number[at] for at in found.shelves), *number[num_full:]]
    turn = np.empty(len(used), np.int64)
    turn[number] = np.arange(len(used))
    columns = [(held.rows(rank), column) for rank in range(len(slow)) for column in found.singles]
    in_column = {rows[column.number]: (column.before, column.turn) for rows, column in columns}
    order: list[int] = np.argsort(turn[shelf], kind="stable").tolist() if rings else []
    members = [sorted(by_speed[begin : begin + num].tolist()) for (_, num), begin in zip(rings, first, strict=True)]
    ends = np.empty(len(slow))
    ends[by_speed] = total + filling_of(pipeline) * most
    return PipelinePlacement(order, members, by_speed[rank_of].tolist() if rank_of else [], in_column, found.slowest, ends)


def filling_of(pipeline: Pipeline) -> float:
    """How many times its costliest microbatch a pipeline takes to fill and drain."""
    return (pipeline.stages - 1) / pipeline.virtual


class _RowsOfRanks(NamedTuple):
    """The single-rank microbatches of each rank, by falling cost."""

    by_rank: Ints
    bounds: Ints

    @staticmethod
    def of(rank_of: list[int], num_ranks: int) -> _RowsOfRanks:
        ranks = np.array(rank_of, np.int64)
        counts = np.bincount(ranks, minlength=num_ranks)
        return _RowsOfRanks(np.argsort(ranks, kind="stable"), np.concatenate([[0], np.cumsum(counts)]))

    def rows(self, rank: int) -> list[int]:
        return self.by_rank[self.bounds[rank] : self.bounds[rank + 1]].tolist()


def _fill_shelves(rings: Sequence[tuple[float, int]], num_ranks: int) -> tuple[list[int], list[int], list[int]]:
    """Put each ring on the first shelf that has ranks enough. Returns the ranks that each shelf uses, and the shelf and the
    first rank of each ring."""
    used: list[int] = []
    shelf: list[int] = []
    first: list[int] = []
    open_from = 0  # shelves before it are full
    for _, num in rings:
        at = next((i for i in range(open_from, len(used)) if used[i] + num <= num_ranks), len(used))
        if at == len(used):
            used.append(0)
        shelf.append(at)
        first.append(used[at])
        used[at] += num
        while open_from < len(used) and used[open_from] == num_ranks:
            open_from += 1
    return used, shelf, first


def _even_out(costs: list[float], total: Floats, most: Floats, slow: Floats, filling: float) -> list[int]:
    """The rank of each microbatch: the one that would finish it first. Adds them to `total` and `most`."""
    factors, kind = speed_kinds(slow)
    heaps = [
        [(float(total[r] + filling * most[r]), r) for r in np.flatnonzero(kind == k).tolist()] for k in range(len(factors))
    ]
    for heap in heaps:
        heapify(heap)
    rank_of: list[int] = []
    # A loop over microbatches, because each choice depends on those before.
    for cost in costs:
        ends = [heap[0][0] + cost * factor for heap, factor in zip(heaps, factors, strict=True)]
        at = min(range(len(ends)), key=ends.__getitem__)
        rank = heaps[at][0][1]
        time = cost * float(slow[rank])
        total[rank] += time
        most[rank] = max(most[rank], time)
        heapreplace(heaps[at], (float(total[rank] + filling * most[rank]), rank))
        rank_of.append(rank)
    return rank_of


def _place_on_stacks(
    rings: Sequence[tuple[float, int]], costs: Floats, num_ranks: int, pipeline: Pipeline
) -> list[PipelinePlacement]:
    pp = 1 + filling_of(pipeline)
    falling = np.sort(np.concatenate([np.repeat([s for s, _ in rings], [n for _, n in rings]), costs]))[::-1].tolist()
    least = max(_lower_bound(falling, num_ranks, pp), _lower_bound_of_rings(rings, num_ranks, pp))
    found = [_place_by_goal(rings, costs.tolist(), num_ranks, pp, least)]
    if found[0].slowest > least * _LOOSER:
        found.append(_place_by_goal(rings, costs.tolist(), num_ranks, pp, least * _LOOSER))
    return [each._replace(slowest=_simulated_time(each, rings, costs.tolist(), num_ranks, pipeline)) for each in found]


def _simulated_time(
    placed: PipelinePlacement, rings: Sequence[tuple[float, int]], costs: list[float], num_ranks: int, pipeline: Pipeline
) -> float:
    """The time of the slowest pipeline, where each runs its rings and then its other microbatches."""
    of_rings: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
    for ring in placed.order:
        for rank in placed.ranks[ring]:
            of_rings[rank].append((rings[ring][0], ring))
    held = _RowsOfRanks.of(placed.rank, num_ranks)
    ranks = [RankCosts([], of_rings[rank], [costs[row] for row in held.rows(rank)]) for rank in range(num_ranks)]
    return slowest_of(ranks, pipeline)


def _place_by_goal(
    rings: Sequence[tuple[float, int]], costs: list[float], num_ranks: int, pp: float, goal: float
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
    ranks = [list(range(first, first + num)) for first, (_, num) in zip(first_rank, rings, strict=True)]
    return PipelinePlacement(list(range(len(rings))), ranks, rank_of, {}, used[-1][0] if used else 0.0)


def _stack_rings(
    rings: Sequence[tuple[float, int]], num_ranks: int, pp: float, goal: float
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


def _lower_bound_of_rings(rings: Sequence[tuple[float, int]], num_ranks: int, pp: float) -> float:
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


def _lower_bound(falling: list[float], num_ranks: int, pp: float) -> float:
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
