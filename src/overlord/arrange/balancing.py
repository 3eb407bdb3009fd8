"""Balancers: assign items of known cost to bins so that the costliest bin is as cheap as possible. All are deterministic.

`greedy` is nearly always the right one: with many items per bin the costliest bin ends within a fraction of a per cent of
the mean, at a twentieth of a microsecond per item with hundreds of bins, and half a microsecond where a capacity binds.
`karmarkar_karp` is better with few items per bin (two to eight, such as whole rows). Its time grows with items x bins: it is
for at most a few thousand items and a few dozen bins. Any function with the signature of `Balancer` will do.

`with_slowness` adapts a balancer to bins of different speed: slow ones get less, so that all finish together. `in_groups`
adapts it to groups of bins, such as the ranks of one node or the shards of one replica.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from overlord.stream.facts import Floats, Ints


class Balancer(Protocol):
    """A function that assigns items to bins so that the costliest bin is as cheap as possible.

    It returns the bin of each item, from 0 to `num_bins` - 1, and must be deterministic. The sizes of the items in a bin
    should add up to at most `capacity`. A balancer that finds no such assignment may exceed it; the caller then moves the
    surplus.
    """

    def __call__(self, costs: Floats, num_bins: int, sizes: Ints, capacity: int | None, /) -> Ints: ...


def bin_sums(bins: Ints, values: Floats | Ints, num_bins: int) -> Floats:
    """The sum of the values of each bin."""
    return np.bincount(bins, values, num_bins).astype(np.float64, copy=False)


def max_over_mean(costs: Floats) -> float:
    """The costliest bin over the mean bin. 1.0 is a perfect balance; it is also returned where all costs are 0."""
    mean = float(costs.mean()) if len(costs) else 0.0
    return float(costs.max()) / mean if mean > 0 else 1.0


def least_possible_cost(costs: Floats, num_bins: int) -> float:
    """A lower bound of the costliest bin, over all assignments of whole items.

    It is the largest of: the mean; the costliest item; and, for every k, the cheapest k + 1 of the k x num_bins + 1
    costliest items, because some bin must hold k + 1 of these.
    """
    if not len(costs):
        return 0.0
    falling = np.sort(costs)[::-1]
    before = np.concatenate([[0.0], np.cumsum(falling)])
    k = np.arange((len(falling) - 1) // num_bins + 1)
    last = k * num_bins + 1  # items up to here, of which the cheapest k + 1 are counted
    crowded = before[last] - before[last - k - 1]
    return float(max(costs.sum() / num_bins, crowded.max()))


class LeastCostBins:
    """Bins that are filled one item at a time, each item into the cheapest bin that has room for it.

    `room` has the capacity left in each bin and may be shared with other objects; this one fills bins `first` to
    `first + num_bins`.
    """

    __slots__ = ("_aside", "_heap", "_room")

    def __init__(self, room: list[int], first: int, num_bins: int) -> None:
        self._room = room
        self._heap = [(0.0, b) for b in range(first, first + num_bins)]
        # A heap of bins that were too full for some item, roomiest first, until an item comes that fits. So no item has to
        # look through all the full bins.
        self._aside: list[tuple[int, float, int]] = []

    def add(self, b: int) -> None:
        heappush(self._heap, (0.0, b))

    def place(self, cost: float, size: int) -> int:
        """Put an item into the cheapest bin with room. Returns the bin, or -1 if none has room."""
        heap, aside, room = self._heap, self._aside, self._room
        while aside and aside[0][0] <= -size:
            _, total, b = heappop(aside)
            heappush(heap, (total, b))
        while heap:
            total, b = heap[0]
            left = room[b] - size
            if left >= 0:
                room[b] = left
                heapreplace(heap, (total + cost, b))
                return b
            heappop(heap)
            heappush(aside, (-room[b], total, b))
        return -1

    def least(self, size: int) -> float | None:
        """The cost of the bin that `place` would choose for an item of this size; None if none has room."""
        heap, aside, room = self._heap, self._aside, self._room
        while aside and aside[0][0] <= -size:
            _, total, b = heappop(aside)
            heappush(heap, (total, b))
        while heap and room[heap[0][1]] < size:
            total, b = heappop(heap)
            heappush(aside, (-room[b], total, b))
        return heap[0][0] if heap else None

    def overfill(self, cost: float, size: int) -> int:
        """Put an item into the roomiest bin although it does not fit. Returns the bin. Call it after `place` returned -1."""
        _, total, b = self._aside[0]
        self._room[b] -= size
        heapreplace(self._aside, (-self._room[b], total + cost, b))
        return b


def greedy(costs: Floats, num_bins: int, sizes: Ints, capacity: int | None = None) -> Ints:
    """A `Balancer`: by falling cost, each item to the cheapest bin that has room."""
    order = np.argsort(-costs, kind="stable")
    bins = np.empty(len(costs), np.int64)
    bins[order] = _to_least_cost(costs[order], num_bins)
    if capacity is not None and bin_sums(bins, sizes, num_bins).max(initial=0) > capacity:
        filled = LeastCostBins([capacity] * num_bins, 0, num_bins)
        items = zip(costs[order].tolist(), sizes[order].tolist(), strict=True)
        # A loop over items, because each choice depends on those before.
        bins[order] = [b if (b := filled.place(cost, size)) >= 0 else filled.overfill(cost, size) for cost, size in items]
    return bins


_FEW_BINS = 32
"""With fewer, items are quicker placed one by one."""


def _to_least_cost(costs: Floats, num_bins: int) -> Ints:
    """Each item, in the order given, to the cheapest bin; of equally cheap ones to the first."""
    totals, bins = np.zeros(num_bins), np.empty(len(costs), np.int64)
    begin = 0
    while begin < len(costs):
        num_placed = _place_round(costs[begin : begin + num_bins], totals, bins[begin:]) if num_bins >= _FEW_BINS else 0
        begin += num_placed
        if num_placed < num_bins // 8 or num_bins < _FEW_BINS:  # not worth the round
            end = begin + 4 * num_bins
            _place_one_by_one(costs[begin:end], totals, bins[begin:end])
            begin = end
    return bins


def _place_round(costs: Floats, totals: Floats, bins: Ints) -> int:
    """Place the next items, at most one in each bin, as long as the cheapest bin is one that has none of them. Returns how
    many were placed: with falling costs nearly always all."""
    order = np.argsort(totals, kind="stable")[: len(costs)]
    before = totals[order]
    after = before + costs
    # A bin that has an item of this round is cheaper than the next bin, or as cheap.
    is_taken_again = before[1:] >= np.minimum.accumulate(after[:-1])
    num_placed = int(is_taken_again.argmax()) + 1 if is_taken_again.any() else len(costs)
    placed = order[:num_placed]
    bins[:num_placed] = placed
    totals[placed] = after[:num_placed]
    return num_placed


def _place_one_by_one(costs: Floats, totals: Floats, bins: Ints) -> None:
    heap = list(zip(totals.tolist(), range(len(totals)), strict=True))
    heapify(heap)
    chosen: list[int] = []
    # A loop over items, because each choice depends on those before.
    for cost in costs.tolist():
        total, b = heap[0]
        chosen.append(b)
        heapreplace(heap, (total + cost, b))
    bins[:] = chosen
    for total, b in heap:
        totals[b] = total


def karmarkar_karp(costs: Floats, num_bins: int, sizes: Ints, capacity: int | None = None) -> Ints:
    """A `Balancer` by the largest differencing method: merge the two partial assignments of largest spread, heavy bins with
    light ones, until one is left. Bins over `capacity` then give their cheapest items to the cheapest bins with room."""
    n = len(costs)
    # A partial assignment is its spread, a number that breaks ties the same way everywhere, its sums in falling order (as
    # many as are not 0), and the items behind each sum.
    heap: list[tuple[float, int, list[float], list[list[int]]]] = [
        (-cost, i, [cost], [[i]]) for i, cost in enumerate(costs.tolist())
    ]
    if num_bins == 1 or n == 0:
        return np.zeros(n, np.int64)
    heapify(heap)
    number = n
    while len(heap) > 1:
        _, _, sums, items = heappop(heap)
        _, _, other_sums, other_items = heappop(heap)
        sums, items = _merge(sums, items, other_sums, other_items, num_bins)
        spread = sums[0] - (sums[-1] if len(sums) == num_bins else 0.0)
        heappush(heap, (-spread, number, sums, items))
        number += 1
    bins = np.empty(n, np.int64)
    for b, members in enumerate(heap[0][3]):
        bins[members] = b
    return bins if capacity is None else _within_capacity(bins, costs, num_bins, sizes, capacity)


def _merge(
    sums: list[float],
    items: list[list[int]],
    other_sums: list[float],
    other_items: list[list[int]],
    num_bins: int,
) -> tuple[list[float], list[list[int]]]:
    free = num_bins - len(sums)
    # The heaviest bins of the other assignment go to empty bins of this one, the rest to its lightest: heavy meets light.
    alone, shared = other_sums[:free], other_sums[free:]
    joined = [*sums, *alone]
    members = [*items, *other_items[:free]]
    for i, (cost, indices) in enumerate(zip(shared, other_items[free:], strict=True)):
        at = len(sums) - 1 - i
        joined[at] += cost
        members[at] = members[at] + indices
    order = sorted(range(len(joined)), key=joined.__getitem__, reverse=True)
    return [joined[i] for i in order], [members[i] for i in order]


def _within_capacity(bins: Ints, costs: Floats, num_bins: int, sizes: Ints, capacity: int) -> Ints:
    held = bin_sums(bins, sizes, num_bins)
    total = bin_sums(bins, costs, num_bins)
    bins = bins.copy()
    for b in np.flatnonzero(held > capacity).tolist():
        members = np.flatnonzero(bins == b)
        for i in members[np.argsort(costs[members], kind="stable")].tolist():
            if held[b] <= capacity:
                break
            fits = np.flatnonzero(held + sizes[i] <= capacity)
            if not len(fits):
                continue
            to = fits[np.argmin(total[fits])]
            bins[i] = to
            held[b] -= sizes[i]
            total[b] -= costs[i]
            held[to] += sizes[i]
            total[to] += costs[i]
    return bins


_GRAIN = 0.02  # bins whose slowness differs by less count as equally fast, so that there are few speeds to choose from


def with_slowness(method: Balancer, slowness: Floats | None) -> Balancer:
    """Adapt a balancer to bins of different speed: by falling cost, each item to the bin that would finish it first.

    `slowness` has the time that each bin takes for one unit of cost; None means that all are equally fast, and returns
    `method` itself. A balancer that has a method `with_slowness` adapts itself.
    """
    if slowness is None:
        return method
    adapt = getattr(method, "with_slowness", None)
    if adapt is not None:
        return adapt(slowness)
    factors, kind = speed_kinds(slowness)

    def balance_by_time(costs: Floats, num_bins: int, sizes: Ints, capacity: int | None = None) -> Ints:
        if num_bins != len(kind):
            return method(costs, num_bins, sizes, capacity)
        return _to_soonest(costs, factors, kind, sizes, int(sizes.sum()) if capacity is None else capacity)

    return balance_by_time


def speed_kinds(slowness: Floats) -> tuple[list[float], Ints]:
    """The few speeds that bins have, as factors of time, the fastest first; and which of them each bin has."""
    kinds, kind = np.unique(np.round(np.log(slowness) / _GRAIN), return_inverse=True)
    return np.exp(kinds * _GRAIN).tolist(), kind


def _to_soonest(costs: Floats, factors: list[float], kind: Ints, sizes: Ints, capacity: int) -> Ints:
    # Bins sorted by speed, so that equally fast ones are neighbours.
    by_kind = np.argsort(kind, kind="stable")
    held = np.bincount(kind, minlength=len(factors)).tolist()
    room = [capacity] * len(kind)
    first = (np.cumsum(held) - held).tolist()
    alike = [LeastCostBins(room, begin, count) for begin, count in zip(first, held, strict=True)]
    order = np.argsort(-costs, kind="stable")
    found = np.empty(len(costs), np.int64)
    chosen: list[int] = []
    # A loop over items, because each choice depends on those before.
    for cost, size in zip(costs[order].tolist(), sizes[order].tolist(), strict=True):
        soonest, at = np.inf, -1
        for k, bins in enumerate(alike):
            total = bins.least(size)
            if total is not None and (done := (total + cost) * factors[k]) < soonest:
                soonest, at = done, k
        if at >= 0:
            chosen.append(alike[at].place(cost, size))
        else:  # no bin has room: the roomiest of the fastest takes it, and the caller moves the surplus
            chosen.append(alike[0].overfill(cost, size))
    found[order] = by_kind[chosen]
    return found


def in_groups(method: Balancer, group_size: int, slowness: Floats | None = None) -> Balancer:
    """Adapt a balancer to bins that form groups of `group_size` neighbours: items go to groups first, and then to the bins
    of their group. `slowness` is that of `with_slowness`, for bins."""
    if group_size == 1:
        return with_slowness(method, slowness)
    of_groups = None if slowness is None else slowness.reshape(-1, group_size).mean(axis=1)
    over_groups = with_slowness(method, of_groups)

    def balance_in_groups(costs: Floats, num_bins: int, sizes: Ints, capacity: int | None = None) -> Ints:
        num_groups = num_bins // group_size
        group = over_groups(costs, num_groups, sizes, None if capacity is None else capacity * group_size)
        bins = np.empty(len(costs), np.int64)
        for g in range(num_groups):
            at, first = np.flatnonzero(group == g), g * group_size
            inside = with_slowness(method, None if slowness is None else slowness[first : first + group_size])
            bins[at] = first + inside(costs[at], group_size, sizes[at], capacity)
        return bins

    return balance_in_groups


def bin_times(costs: Floats, slowness: Floats | None) -> Floats:
    """The time that each bin takes for its cost."""
    return costs if slowness is None else costs * slowness
