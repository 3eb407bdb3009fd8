"""The last step of PP-balance: change the order in which all pipelines run their microbatches, for as long as that helps.

A ring has one index on all of its ranks. It still has one when all ranks exchange what they run at two indices, or move what
they run at one index to another place. Such changes are drawn, simulated many at once, and the best is kept if it is quicker
than what there was. Changes come from a generator whose numbers never differ, so a plan is the same wherever it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.hdp.columns import SIMULATED
from overlord.arrange.pipelines.simulator import play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.stream.facts import Floats, Ints

_AT_ONCE = 32
"""Orders that are simulated at once."""
_ROUNDS = 24
"""Rounds of changes at most."""
_MOST_PASSES = 8_000
"""The most passes to simulate in all rounds: it keeps planning within some tenths of a second."""
_SEED = 14


class Grid(NamedTuple):
    """What pipelines run: the time and the ring of each microbatch, as [index, rank]. The first `counts[rank]` indices of a
    rank are used."""

    times: Floats
    rings: Ints
    counts: Ints

    @property
    def movable(self) -> int:
        """The indices at which every rank has a microbatch."""
        return int(self.counts.min()) if len(self.counts) else 0

    def of_some_ranks(self) -> Grid:
        """Of at most so many ranks as are simulated. The rank with the fewest microbatches, which says what is movable, is
        one of them."""
        num = len(self.counts)
        if num <= SIMULATED:
            return self
        at = np.unique([*np.linspace(0, num - 1, SIMULATED - 1).astype(np.int64), self.counts.argmin()])
        longest = int(self.counts[at].max())
        return Grid(self.times[:longest, at], self.rings[:longest, at], self.counts[at])


class Reordered(NamedTuple):
    """An order of indices and the time of the slowest pipeline in it."""

    order: Ints
    slowest: float


def reorder(grid: Grid, pipeline: Pipeline) -> Reordered:
    """The order found, as the old index of each new one; the order given if nothing is quicker."""
    num, movable = len(grid.times), grid.movable
    best: Ints = np.arange(num)
    slowest = float(times_in_orders(grid, best[None], pipeline)[0])
    passes = 2 * pipeline.stages * pipeline.virtual * num
    rounds = min(_ROUNDS, _MOST_PASSES // max(1, passes))
    if movable < 2 or pipeline.stages == 1:
        return Reordered(best, slowest)
    numbers = (np.random.PCG64(_SEED).random_raw((rounds, _AT_ONCE, 6)) >> np.uint64(11)).astype(np.int64)
    for of_round in numbers.tolist():
        tried = np.array([_changed(best, movable, drawn) for drawn in of_round])
        times = times_in_orders(grid, tried, pipeline)
        at = int(times.argmin())
        if times[at] < slowest:
            best, slowest = tried[at], float(times[at])
    return Reordered(best, slowest)


def _changed(order: Ints, movable: int, drawn: Sequence[int]) -> Ints:
    """One or two changes of an order: two indices exchanged, or one moved elsewhere."""
    num, is_move, *where = drawn
    found = order
    for change in range(1 + num % 2):
        i, j = where[2 * change] % movable, where[2 * change + 1] % movable
        if (is_move >> change) % 2:
            found = np.insert(np.delete(found, i), j, found[i])
        else:
            found = found.copy()
            found[[i, j]] = found[[j, i]]
    return found


def times_in_orders(grid: Grid, orders: Ints, pipeline: Pipeline) -> Floats:
    """The time of the slowest pipeline in each order of the indices, with the waits of pipelines for each other. All are
    played at once, as if they were rings of different pipelines."""
    num_orders, num_ranks = len(orders), len(grid.counts)
    num = len(grid.times)
    of_ranks: NDArray[np.bool_] = np.arange(num) < grid.counts[:, None]
    used = np.broadcast_to(of_ranks, (num_orders, num_ranks, num))
    times = grid.times[orders].transpose(0, 2, 1)[used]
    rings = grid.rings[orders].transpose(0, 2, 1)
    numbered = np.where(rings >= 0, rings + (np.arange(num_orders) * (int(rings.max(initial=0)) + 1))[:, None, None], -1)
    forward = times / (pipeline.virtual * (1 + pipeline.backward))
    ends = play(forward, forward * pipeline.backward, np.tile(grid.counts, num_orders), pipeline, numbered[used])
    return ends.reshape(num_orders, num_ranks).max(axis=1)
