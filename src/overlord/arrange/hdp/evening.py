"""Move whole documents between the microbatches of pipelines until these end together.

Microbatches of about one cost can only be dealt evenly to within one of them, and a step waits for the pipeline that has one
more. Documents are smaller: a few that change places even out what is left, and no microbatch is added or emptied.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.balancing import bin_sums

if TYPE_CHECKING:
    from overlord.stream.facts import Floats, Ints

_EVEN = 1e-3
"""A pipeline that ends this much after the mean, as a share of it, keeps its documents."""


class RankEnds(NamedTuple):
    """When each rank ends, and what it takes for one unit of cost."""

    at: Floats
    slowness: Floats


class WholeRows(NamedTuple):
    """Microbatches of whole documents."""

    of_document: Ints
    """The microbatch of each document."""
    ranks: Ints
    """The rank of each microbatch."""


def even_ends(rows: WholeRows, costs: Floats, lengths: Ints, ends: RankEnds, capacity: int) -> Ints:
    """The new microbatch of each document. Microbatches hold `capacity` tokens at most.

    Ranks that end late give documents to those that end early, the costliest first that makes neither late nor early.
    """
    slow = ends.slowness
    goal = float((ends.at / slow).sum() / (1 / slow).sum())
    late = (ends.at - goal).tolist()
    takers = [(late[rank], rank) for rank in range(len(late)) if late[rank] < 0]
    givers = sorted((rank for rank in range(len(late)) if late[rank] > _EVEN * goal), key=lambda rank: -late[rank])
    if not takers or not givers:
        return rows.of_document
    heapify(takers)
    held = _RowContents(rows, costs, lengths)
    pace: list[float] = slow.tolist()
    for giver in givers:
        documents = held.documents(giver)
        rising: Floats = -costs[documents]
        at = 0
        while late[giver] > _EVEN * goal:
            early, taker = takers[0]
            most = min(late[giver] / pace[giver], -early / pace[taker])
            at = max(at, int(np.searchsorted(rising, np.float64(-most))))
            if at == len(documents):
                break
            cost = -float(rising[at])
            if cost > 0 and held.move(int(documents[at]), taker, capacity):
                late[giver] -= cost * pace[giver]
                late[taker] += cost * pace[taker]
                heapreplace(takers, (late[taker], taker))
            at += 1
    return held.row


class _RowContents:
    """What microbatches hold, while documents move."""

    def __init__(self, rows: WholeRows, costs: Floats, lengths: Ints) -> None:
        row, rank_of_row = rows
        num_rows = len(rank_of_row)
        self.row = row.copy()
        self._costs, self._lengths = costs, lengths
        self._cost: list[float] = bin_sums(row, costs, num_rows).tolist()
        self._tokens: list[int] = np.bincount(row, lengths, num_rows).astype(np.int64).tolist()
        self._count: list[int] = np.bincount(row, minlength=num_rows).tolist()
        rank = rank_of_row[row]
        self._by_cost = np.lexsort((-costs, rank))
        self._bounds = np.searchsorted(rank[self._by_cost], np.arange(int(rank.max(initial=-1)) + 2))
        by_rank = np.argsort(rank_of_row, kind="stable")
        bounds = np.searchsorted(rank_of_row[by_rank], np.arange(int(rank_of_row.max(initial=-1)) + 2))
        self._rows: list[list[int]] = [by_rank[a:b].tolist() for a, b in pairwise(bounds)]

    def documents(self, rank: int) -> Ints:
        """The documents that a rank has, by falling cost."""
        if rank + 1 >= len(self._bounds):
            return self._by_cost[:0]
        return self._by_cost[self._bounds[rank] : self._bounds[rank + 1]]

    def move(self, document: int, rank: int, capacity: int) -> bool:
        """Move a document to the cheapest microbatch of a rank that has room, unless that empties the one that it is in."""
        before, tokens = int(self.row[document]), int(self._lengths[document])
        rows = self._rows[rank] if rank < len(self._rows) else []
        free = [row for row in rows if self._tokens[row] + tokens <= capacity]
        if self._count[before] == 1 or not free:
            return False
        to = min(free, key=lambda row: self._cost[row])
        cost = float(self._costs[document])
        for row, sign in ((before, -1), (to, 1)):
            self._cost[row] += sign * cost
            self._tokens[row] += sign * tokens
            self._count[row] += sign
        self.row[document] = to
        return True
