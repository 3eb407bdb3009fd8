"""The order in which the pipelines of a pool run their rings and microbatches, chosen by simulation.

A ring has one index on all of its ranks. A *column* is an index at which every rank has a microbatch: a shelf of rings that
takes all ranks, or one single-rank microbatch of each rank, the j-th by cost. So columns may run in any order, as long as it
is the same on all ranks. Everything else (shelves that leave ranks out, then the other microbatches by falling cost) comes
after them.

Under 1F1B a stage waits wherever a microbatch is much costlier than those around it, and longest while the pipeline fills.
So a pipeline should begin with a few cheap microbatches, climb to the costliest in a few steps, and then run everything else
by falling cost. How many cheap ones, and how many steps, depends on the costs: all small numbers are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.pipelines.simulator import play, times_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.stream.facts import Floats

SIMULATED = 32
"""Ranks that are simulated at most."""
_PLAYED = 8
"""Orders that are simulated with the waits inside rings, of those that are best without them."""
_MOST_PASSES = 6000
"""The most passes of a schedule for which orders are searched: it keeps planning within some tenths of a second."""


class SingleColumn(NamedTuple):
    """A column of single-rank microbatches."""

    number: int
    """Of the microbatch among those of its rank, which are sorted by falling cost; below 0 it counts from the end."""
    before: int
    """How many full shelves run before it."""
    turn: int
    """Its place among all columns."""


class ColumnOrder(NamedTuple):
    """An order of columns."""

    shelves: list[int]
    """The full shelves, in the order in which they run."""
    singles: list[SingleColumn]
    slowest: float
    """The time of the slowest pipeline, by simulation."""


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What one rank runs: the times and numbers of its rings on full shelves, those of its other rings in order, and the
    times of its single-rank microbatches by falling cost."""

    full: list[tuple[float, int]]
    others: list[tuple[float, int]]
    singles: list[float]

    def sequence(self, singles: Sequence[int], order: Sequence[int]) -> list[tuple[float, int]]:
        """Everything in the order in which it runs: columns, which are full shelves and then `singles`, and the rest."""
        columns = [*self.full, *((self.singles[at], -1) for at in singles)]
        taken = {at % len(self.singles) for at in singles}
        rest = ((time, -1) for at, time in enumerate(self.singles) if at not in taken)
        return [*(columns[at] for at in order), *self.others, *rest]


class _Choice(NamedTuple):
    singles: list[int]
    """The single-rank microbatches that are columns, as in `SingleColumn.number`."""
    order: list[int]
    """The columns: full shelves, and after them the microbatches of `singles`."""


def best_columns(ranks: Sequence[RankCosts], pipeline: Pipeline) -> ColumnOrder:
    """The best order found. Without a search, full shelves rise and fall again in cost."""
    num_full = len(ranks[0].full)
    some = _some_of(ranks)
    costs = [max(rank.full[at][0] for rank in some) for at in range(num_full)]
    rising = sorted(range(num_full), key=costs.__getitem__)
    tried = [_Choice([], rising[::2] + rising[1::2][::-1])]
    longest = max(len(rank.full) + len(rank.others) + len(rank.singles) for rank in some)
    if 2 * pipeline.stages * pipeline.virtual * longest <= _MOST_PASSES:
        tried += _promising(some, costs, min(len(rank.singles) for rank in ranks), pipeline)
    times = _played(some, tried, pipeline)
    best = tried[int(times.argmin())]  # of equal times the first
    passed = np.cumsum([column < num_full for column in best.order], dtype=np.int64).tolist()
    return ColumnOrder(
        [column for column in best.order if column < num_full],
        [
            SingleColumn(best.singles[column - num_full], passed[turn], turn)
            for turn, column in enumerate(best.order)
            if column >= num_full
        ],
        float(times.min()),
    )


def slowest_of(ranks: Sequence[RankCosts], pipeline: Pipeline) -> float:
    """The time of the slowest of pipelines without columns, by simulation."""
    return float(_played(_some_of(ranks), [_Choice([], [])], pipeline)[0])


def _some_of(ranks: Sequence[RankCosts]) -> list[RankCosts]:
    if len(ranks) <= SIMULATED:
        return list(ranks)
    return [ranks[at] for at in np.linspace(0, len(ranks) - 1, SIMULATED).astype(int).tolist()]


def _promising(ranks: Sequence[RankCosts], costs: list[float], fewest: int, pipeline: Pipeline) -> list[_Choice]:
    """The orders that are best for one pipeline alone: one with the costs of a mean rank, or with the largest of all."""
    found: list[_Choice] = []
    times: list[Floats] = []
    longest = max(ranks, key=lambda rank: len(rank.others) + len(rank.singles))
    for singles in _choices_of_singles(fewest, pipeline.stages):
        of_singles = [float(np.median([rank.singles[at] for rank in ranks])) for at in singles]
        mean = [float(np.mean([rank.full[at][0] for rank in ranks])) for at in range(len(costs))]
        orders = _orders([*costs, *of_singles], len(costs), pipeline.stages)
        if not orders:
            continue
        rest = [time for time, _ in longest.sequence(singles, [])]
        columns = np.array([[*each, *of_singles] for each in (costs, mean)])[:, np.array(orders)]  # [kind, order, column]
        held = np.concatenate([columns, np.broadcast_to(rest, (*columns.shape[:2], len(rest)))], axis=2)
        found += [_Choice(singles, order) for order in orders]
        times.append(times_of(held.reshape(-1, held.shape[2]), pipeline).reshape(2, -1))
    if not found:
        return []
    best = np.argsort(np.concatenate(times, axis=1), axis=1, kind="stable")[:, :_PLAYED]
    return [found[at] for at in dict.fromkeys(best.ravel().tolist())]


def _choices_of_singles(fewest: int, stages: int) -> list[list[int]]:
    """Which single-rank microbatches to make columns, where every rank has at least `fewest`: none, some of the cheapest to
    fill the pipeline with, or as many as possible, so that shelves that leave ranks out come last."""
    cheap = sorted({1, 2, stages - 1} & set(range(1, fewest + 1)))
    return [[], *([-1 - j for j in range(num)] for num in cheap), *([list(range(fewest))] if fewest else [])]


def _orders(costs: list[float], num_full: int, stages: int) -> list[list[int]]:
    """Orders of columns: some of the cheapest, then some of the costliest by rising cost, then the rest by falling cost.

    The cheapest are taken from all columns, or from those after `num_full`. These cost about the same on all ranks, so that
    nobody comes late to the first ring of all ranks.
    """
    rising = sorted(range(len(costs)), key=costs.__getitem__)
    found: dict[tuple[int, ...], None] = {}
    for cheapest in (rising, [column for column in rising if column >= num_full]):
        for num_cheap in range(min(stages, len(cheapest)) + 1):
            first = cheapest[:num_cheap]
            rest = [column for column in rising if column not in first]
            for costly in range(1, min(stages + 1, len(rest)) + 1):
                top = len(rest) - costly
                found[(*first, *rest[top:], *rest[:top][::-1])] = None
    return [list(order) for order in found]


def _played(ranks: Sequence[RankCosts], choices: Sequence[_Choice], pipeline: Pipeline) -> Floats:
    """The time of the slowest of some ranks in each order, with the waits of ranks for each other. All orders are played at
    once, as if they were rings of different pipelines."""
    sequences = [rank.sequence(choice.singles, choice.order) for choice in choices for rank in ranks]
    counts = np.array([len(each) for each in sequences], np.int64)
    times = np.array([time for each in sequences for time, _ in each])
    rings = np.array([ring for each in sequences for _, ring in each], np.int64)
    if not len(times):
        return np.zeros(len(choices))
    number = np.repeat(np.arange(len(sequences)) // len(ranks), counts) * (int(rings.max()) + 1)
    forward = times / (pipeline.virtual * (1 + pipeline.backward))
    ends = play(forward, forward * pipeline.backward, counts, pipeline, np.where(rings >= 0, rings + number, -1))
    return ends.reshape(len(choices), -1).max(axis=1)
