"""DP-balance: place documents, some of which take several ranks at once, so that all ranks finish together.

Documents are placed one by one on a timeline per rank: first those that must be cut, then the others by falling cost. A
document on n ranks takes the n that are free earliest, and begins when the last of them is free. Until then the others wait,
and documents that are placed later may run in that gap. A document that would finish after the mean rank takes more ranks:
the fewest on which it would not. So `max / mean` counts waiting too. It is near 1 unless there are few ranks and fewer
documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from overlord.stream.facts import Floats, Ints

_SLACK = 0.005
"""A share of the mean: a document that is late by less is not cut for it, and smaller gaps stay empty."""
_WORTH_CUTTING = 0.03
"""A share of the mean: a document that costs less stays whole, however late it finishes."""


class DocumentPlacement(NamedTuple):
    """The ranks of every document: of those on several ranks (rings), in the order in which all ranks run them, and of those
    that stay whole."""

    rings: Ints
    """The document of each ring."""
    members: Ints
    """The ranks of all rings, one ring after the other; those of ring k are `members[bounds[k]:bounds[k + 1]]`."""
    bounds: Ints
    whole: Ints
    """The documents that stay whole."""
    rank: Ints
    """The rank of each whole document."""
    after: Ints
    """How many rings of its rank come before each whole document."""
    slowest: float
    """When the last rank finishes."""


class _Timelines:
    """The timeline of each rank. Placing is a loop over documents, because each choice depends on those before: about a
    microsecond for each rank of each document."""

    def __init__(self, num_ranks: int, goal: float, widen: bool, communication: float) -> None:
        self.free = [(0.0, rank) for rank in range(num_ranks)]  # a heap: when each rank is free
        self.gaps: list[tuple[float, int, int]] = []  # sorted: size, rank, how many of its rings come before
        self.num_rings = [0] * num_ranks
        self.goal = goal
        self.slack = goal * _SLACK
        self.worth = goal * _WORTH_CUTTING
        self.widen = widen
        self.communication = communication
        self.members: list[int] = []
        self.sizes: list[int] = []

    def place(self, num: int, cost: float, length: int) -> tuple[int, int] | None:
        """Place a document on at least `num` ranks. Returns its rank and how many rings of the rank come before it; None if
        the document became a ring."""
        if num == 1:
            found = self._in_gap(cost)
            if found is not None:
                return found
            begin, rank = self.free[0]
            if not self.widen or cost < self.worth or begin + cost <= self.goal + self.slack:
                heapreplace(self.free, (begin + cost, rank))
                return rank, self.num_rings[rank]
        taken, end = self._take_earliest(num, cost, length)
        if len(taken) == 1:
            rank = taken[0][1]
            heappush(self.free, (end, rank))
            return rank, self.num_rings[rank]
        self._join(taken, end)
        return None

    def place_small(self, cost: float) -> tuple[int, int]:
        """Place a document that is too small to be worth cutting, or to search for the best gap. Returns as `place` does."""
        if self.gaps and self.gaps[-1][0] >= cost:
            return self._fill(len(self.gaps) - 1, cost)
        begin, rank = self.free[0]
        heapreplace(self.free, (begin + cost, rank))
        return rank, self.num_rings[rank]

    def _share(self, num: int, cost: float, length: int) -> float:
        return cost / num + self.communication * length * (num - 1) / num

    def _take_earliest(self, num: int, cost: float, length: int) -> tuple[list[tuple[float, int]], float]:
        """Take the ranks that are free earliest: `num`, or more where the document would finish too late. Returns them and
        when the document finishes."""
        free = self.free
        room = self.goal - free[0][0]
        taken = [heappop(free) for _ in range(num)]
        best, end = num, taken[-1][0] + self._share(num, cost, length)
        if self.widen and end > self.goal + self.slack:
            # At most twice the ranks that would do if all were free now: beyond that, more ranks would only wait longer.
            most = min(len(taken) + len(free), length, max(num, int(2 * cost / max(room, self.slack)) + 1))
            while len(taken) < most and end > self.goal + self.slack:
                taken.append(heappop(free))
                other = taken[-1][0] + self._share(len(taken), cost, length)
                if other < end * 0.999:
                    best, end = len(taken), other
        for entry in taken[best:]:
            heappush(free, entry)
        return taken[:best], end

    def _join(self, taken: list[tuple[float, int]], end: float) -> None:
        begin = taken[-1][0]
        for free_at, rank in taken:
            heappush(self.free, (end, rank))
            if begin - free_at > self.slack:
                insort(self.gaps, (begin - free_at, rank, self.num_rings[rank]))
            self.num_rings[rank] += 1
        self.members += sorted(rank for _, rank in taken)
        self.sizes.append(len(taken))

    def _in_gap(self, cost: float) -> tuple[int, int] | None:
        at = bisect_left(self.gaps, (cost, -1, -1)) if self.gaps else 0
        return self._fill(at, cost) if at < len(self.gaps) else None

    def _fill(self, at: int, cost: float) -> tuple[int, int]:
        size, rank, after = self.gaps.pop(at)
        if size - cost > self.slack / 10:
            insort(self.gaps, (size - cost, rank, after))
        return rank, after


def place_on_timelines(
    costs: Floats, lengths: Ints, num_parts: Ints, num_ranks: int, *, widen: bool = True, communication: float = 0.0
) -> DocumentPlacement:
    """Place documents that take at least `num_parts` ranks each. With `widen`, a document that would finish late takes
    more."""
    shares = costs / num_parts + communication * lengths * (num_parts - 1) / num_parts
    goal = float((shares * num_parts).sum()) / num_ranks
    order = np.lexsort((-shares, num_parts == 1))
    lines = _Timelines(num_ranks, goal, widen, communication)
    num_large = int(((num_parts > 1) | (shares > lines.slack)).sum())
    large, small = order[:num_large], order[num_large:]
    columns = (num_parts[large].tolist(), costs[large].tolist(), lengths[large].tolist())
    found = [lines.place(*document) for document in zip(*columns, strict=True)]
    is_ring = np.array([at is None for at in found], np.bool_)
    places = [at for at in found if at is not None] + [lines.place_small(cost) for cost in costs[small].tolist()]
    placed = np.array(places, np.int64).reshape(-1, 2)
    return DocumentPlacement(
        rings=large[is_ring],
        members=np.array(lines.members, np.int64),
        bounds=np.concatenate([[0], np.cumsum(lines.sizes, dtype=np.int64)]),
        whole=np.concatenate([large[~is_ring], small]),
        rank=placed[:, 0],
        after=placed[:, 1],
        slowest=max(lines.free)[0],
    )
