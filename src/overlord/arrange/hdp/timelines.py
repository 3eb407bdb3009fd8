"""DP-balance: place documents, some of which take several ranks at once, so that all ranks finish together.

Documents are placed one by one on a timeline per rank: first those that must be cut, then the others by falling cost. A
document on n ranks takes the n that are free earliest, and begins when the last of them is free. Until then the others wait,
and documents that are placed later may run in that gap. A document that would finish after the mean rank takes more ranks:
the fewest on which it would not. So `max / mean` counts waiting too. It is near 1 unless there are few ranks and fewer
documents.

Ranks may differ in speed. A document then goes to the rank that finishes it first. A ring runs at the pace of its slowest
rank, so it takes the fastest ranks that are free early enough, and slower ones only where it would finish too late.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.balancing import speed_kinds

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

    @property
    def slowest(self) -> float:
        """When the last rank is free."""
        return max(self.free)[0]

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


class _UnevenTimelines(_Timelines):
    """Timelines of ranks of different speed. Gaps are counted in cost, everything else in time."""

    def __init__(self, slowness: Floats, goal: float, widen: bool, communication: float) -> None:
        super().__init__(len(slowness), goal, widen, communication)
        self.factors, kind = speed_kinds(slowness)
        self.kind: list[int] = kind.tolist()
        self.heaps: list[list[tuple[float, int]]] = [[] for _ in self.factors]
        for rank, of in enumerate(self.kind):
            self.heaps[of].append((0.0, rank))

    def place(self, num: int, cost: float, length: int) -> tuple[int, int] | None:
        if num == 1:
            found = self._in_gap(cost)
            if found is not None:
                return found
            kind, end = self._soonest(cost)
            if not self.widen or cost < self.worth or end <= self.goal + self.slack:
                return self._add(kind, end)
        taken, end = self._take_earliest(num, cost, length)
        if len(taken) == 1:
            rank = taken[0][1]
            heappush(self.heaps[self.kind[rank]], (end, rank))
            return rank, self.num_rings[rank]
        self._join(taken, end)
        return None

    def place_small(self, cost: float) -> tuple[int, int]:
        if self.gaps and self.gaps[-1][0] >= cost:
            return self._fill(len(self.gaps) - 1, cost)
        return self._add(*self._soonest(cost))

    @property
    def slowest(self) -> float:
        return max(max(heap)[0] for heap in self.heaps if heap)

    def _soonest(self, cost: float) -> tuple[int, float]:
        """The speed of the rank that would finish a document first, and when."""
        ends = [heap[0][0] + cost * factor for heap, factor in zip(self.heaps, self.factors, strict=True)]
        kind = min(range(len(ends)), key=ends.__getitem__)
        return kind, ends[kind]

    def _add(self, kind: int, end: float) -> tuple[int, int]:
        rank = self.heaps[kind][0][1]
        heapreplace(self.heaps[kind], (end, rank))
        return rank, self.num_rings[rank]

    def _take_earliest(self, num: int, cost: float, length: int) -> tuple[list[tuple[float, int]], float]:
        best: tuple[float, list[tuple[float, int]]] | None = None
        pool: list[tuple[float, int]] = []
        for heap, factor in zip(self.heaps, self.factors, strict=True):  # the fastest first
            pool = sorted(pool + heap)
            if len(pool) < num:
                continue
            found = self._earliest_of(pool, num, cost, length, factor)
            if best is None or found[0] < best[0] * 0.999:
                best = found
            if best[0] <= self.goal + self.slack:
                break  # with a slower rank the others would wait inside the ring
        assert best is not None  # no document takes more ranks than there are
        end, taken = best
        gone = {rank for _, rank in taken}
        for kind in {self.kind[rank] for rank in gone}:
            self.heaps[kind] = [entry for entry in self.heaps[kind] if entry[1] not in gone]
            heapify(self.heaps[kind])
        return taken, end

    def _earliest_of(
        self, pool: list[tuple[float, int]], num: int, cost: float, length: int, factor: float
    ) -> tuple[float, list[tuple[float, int]]]:
        """When a document finishes on the earliest of some ranks, which are sorted, and those ranks: at least `num`."""
        best, end = num, pool[num - 1][0] + self._share(num, cost, length) * factor
        if self.widen and end > self.goal + self.slack:
            room = max(self.goal - pool[0][0], self.slack)
            most = min(len(pool), length, max(num, int(2 * cost * factor / room) + 1))
            for more in range(num + 1, most + 1):
                if end <= self.goal + self.slack:
                    break
                other = pool[more - 1][0] + self._share(more, cost, length) * factor
                if other < end * 0.999:
                    best, end = more, other
        return end, pool[:best]

    def _join(self, taken: list[tuple[float, int]], end: float) -> None:
        begin = taken[-1][0]
        for free_at, rank in taken:
            kind = self.kind[rank]
            heappush(self.heaps[kind], (end, rank))
            if begin - free_at > self.slack:
                insort(self.gaps, ((begin - free_at) / self.factors[kind], rank, self.num_rings[rank]))
            self.num_rings[rank] += 1
        self.members += sorted(rank for _, rank in taken)
        self.sizes.append(len(taken))


class _AlignedTimelines(_UnevenTimelines):
    """Timelines on which rings take 2, 4, 8, ... ranks, from a multiple of their number on."""

    def _take_earliest(self, num: int, cost: float, length: int) -> tuple[list[tuple[float, int]], float]:
        free = dict(sorted((rank, at) for heap in self.heaps for at, rank in heap))
        at, slow = np.array(list(free.values())), np.array([self.factors[kind] for kind in self.kind])
        best: tuple[float, int, int] | None = None  # when it ends, and the first of how many ranks
        while num <= len(at):
            ends = at.reshape(-1, num).max(1) + self._share(num, cost, length) * slow.reshape(-1, num).max(1)
            first = int(ends.argmin())
            if best is None or ends[first] < best[0] * 0.999:
                best = float(ends[first]), first * num, num
            if not self.widen or best[0] <= self.goal + self.slack or num * 2 > length:
                break
            num *= 2
        assert best is not None  # no document takes more ranks than there are
        end, first, num = best
        for kind in {self.kind[rank] for rank in range(first, first + num)}:
            self.heaps[kind] = [entry for entry in self.heaps[kind] if not first <= entry[1] < first + num]
            heapify(self.heaps[kind])
        return sorted((free[rank], rank) for rank in range(first, first + num)), end


def place_on_timelines(
    costs: Floats,
    lengths: Ints,
    num_parts: Ints,
    num_ranks: int,
    *,
    widen: bool = True,
    communication: float = 0.0,
    slowness: Floats | None = None,
    aligned: bool = False,
) -> DocumentPlacement:
    """Place documents that take at least `num_parts` ranks each. With `widen`, a document that would finish late takes more.
    `slowness` is the time that each rank takes for one unit of cost; None where all are equally fast. `aligned`: `num_parts`
    are powers of two, and so are the ranks that a ring begins at multiples of."""
    shares = costs / num_parts + communication * lengths * (num_parts - 1) / num_parts
    speed = num_ranks if slowness is None else float((1 / slowness).sum())
    goal = float((shares * num_parts).sum()) / speed
    order = np.lexsort((-shares, num_parts == 1))
    if aligned:
        lines = _AlignedTimelines(np.ones(num_ranks) if slowness is None else slowness, goal, widen, communication)
    elif slowness is None:
        lines = _Timelines(num_ranks, goal, widen, communication)
    else:
        lines = _UnevenTimelines(slowness, goal, widen, communication)
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
        slowest=lines.slowest,
    )
