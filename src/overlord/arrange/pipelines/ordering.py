"""The order in which a pipeline runs its microbatches, and how many microbatches of which length each pipeline gets.

Under 1F1B a stage waits while the first microbatch comes down the pipeline, while the last one goes back up, and wherever
neighbours in the order differ in cost. So cheap microbatches belong at both ends, and costs should rise and fall slowly in
between. `best_orders` tries some orders of that kind on the simulator and keeps the best for each pipeline: within a per
cent of the best of all orders, where all can be tried.

`levels` goes further where pipelines may run different numbers of microbatches: documents of one length share a microbatch,
microbatches of one cost share a pipeline, and pipelines of cheap microbatches get more of them.

Strategies call `order`, `level` and `timing`, which take a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.balancing import bin_sums
from overlord.arrange.microbatches import Arrangement, Microbatches, microbatch_limit
from overlord.arrange.pipelines.simulator import (
    Pipeline,
    Timing,
    simulate,
    times_of,
)
from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.arrange.graph import DGraph
    from overlord.stream.facts import Floats, Ints

_HALVINGS = 20  # bisection steps: to a millionth of the interval in which the shortest time lies


def level(graph: DGraph, pipeline: Pipeline, *, max_tokens: int | None = None, part: float = 1.0) -> DGraph:
    """Assign samples so that each group, a pipeline, runs microbatches of about the same cost: the cheaper, the more of
    them.

    It takes the place of `balance` for trainers that may run different numbers of microbatches (DDP, ZeRO-1). Microbatches
    hold up to `max_tokens` (default: the batch's microbatch, or its longest sample), and are filled with documents up to
    `part` of that: smaller microbatches fill a pipeline sooner. Where there are fewer microbatches than groups, it falls
    back to `balance(equal_counts=False)`.
    """
    graph.check_distributed("level")
    if graph.costs is None or graph.rows is not None:
        raise SpecError("level needs the costs of samples that are not in rows: call cost(fn) before it, and not pack()")
    micro_tokens = graph.batch.micro_tokens or graph.batch.sequence_length
    wanted = max_tokens or max(micro_tokens, int(graph.lengths.max(initial=0)))
    cap = microbatch_limit(graph.batch, graph.lengths, wanted)
    found = levels(graph.costs, graph.lengths, graph.num_groups, max(1, int(cap * part)), pipeline)
    if found is None:
        return graph.balance(max_tokens=cap, equal_counts=False)
    text = "one cost level a group, up to {} tokens, {} to {} a group"
    return graph.assign(found.to_arrangement(), "level", text, cap, found.counts.min(), found.counts.max())


def order(graph: DGraph, pipeline: Pipeline) -> DGraph:
    """Reorder the microbatches of each group so that its pipeline waits least, as the simulator predicts it.

    Call it after `deal`, `balance` or `level`. An order is only replaced by a better one.
    """
    costs, a = _micro_costs(graph, "order")
    number, *times = best_orders(costs, a.counts, pipeline)
    before, after = (Timing(each, float(costs.sum()), pipeline.stages) for each in times)
    micro = number[(np.cumsum(a.counts) - a.counts)[a.group] + a.micro]
    # Interleaving needs a multiple of the stages; the microbatches added are empty.
    counts = -(-a.counts // pipeline.count_multiple) * pipeline.count_multiple
    text = "{} stages: step {:.6g} before, {:.6g} now; waiting {:.1%} before, {:.1%} now"
    values = (pipeline.stages, before.step_time, after.step_time, before.bubble, after.bubble)
    return graph.assign(a._replace(micro=micro, counts=counts), "order", text, *values)


def timing(graph: DGraph, pipeline: Pipeline) -> Timing:
    """The predicted `Timing` of the step as it is assigned now, by a simulation of the pipelines."""
    costs, a = _micro_costs(graph, "timing")
    return simulate(costs, a.counts, pipeline)


def _micro_costs(graph: DGraph, primitive: str) -> tuple[Floats, Arrangement]:
    a = graph.arrangement
    if a is None or graph.costs is None:
        raise SpecError(f"{primitive} goes by the costs of microbatches: call cost(fn), then deal or balance, before it")
    return graph.micro_costs(a), a


class Orders(NamedTuple):
    """The new order of microbatches."""

    number: Ints
    """The new number of each microbatch within its group."""
    before: Floats
    """The time of each group in the old order."""
    after: Floats
    """The time of each group in the new order."""


def best_orders(costs: Floats, counts: Ints, pipeline: Pipeline) -> Orders:
    """The best order found for each group, none slower than the order given. `costs` has the cost of each microbatch, group
    by group."""
    number, before, after = np.empty(len(costs), np.int64), np.zeros(len(counts)), np.zeros(len(counts))
    first = np.cumsum(counts) - counts
    different: list[int] = np.unique(counts[counts > 0]).tolist()
    for count in different:
        groups = np.flatnonzero(counts == count)
        at = first[groups][:, None] + np.arange(count)
        rising = np.argsort(costs[at], axis=1, kind="stable")
        orders = np.stack([np.broadcast_to(np.arange(count), at.shape), *(rising[:, o] for o in _orders(count, pipeline))])
        held = np.take_along_axis(costs[at][None], orders, axis=2)
        times = times_of(held.reshape(-1, count), pipeline).reshape(len(orders), -1)
        chosen = orders[times.argmin(axis=0), np.arange(len(at))]  # of equal times the first: the order given
        number[np.take_along_axis(at, chosen, axis=1)] = np.arange(count)
        before[groups], after[groups] = times[0], times.min(axis=0)
    return Orders(number, before, after)


def _orders(count: int, pipeline: Pipeline) -> list[Ints]:
    """Orders worth trying, as indexes into the microbatches sorted by rising cost."""
    rising = np.arange(count)
    there_and_back = np.concatenate([rising[::2], rising[1::2][::-1]])
    first = {1, min(pipeline.stages - 1, count - 1)} - {0}  # so many cheap ones while the pipeline fills
    climbs = [
        np.concatenate([rising[:few], rising[count - top :], rising[few : count - top][::-1]])
        for few in (0, 1, 2, 4)
        for top in sorted({2, 3, 4, pipeline.stages})
        if few + top <= count
    ]
    return [
        there_and_back,
        there_and_back[::-1],
        rising,
        *(np.concatenate([rising[:few], rising[few:][::-1]]) for few in sorted(first)),
        *climbs,  # some cheap ones, then the costliest by rising cost, then the rest by falling cost
    ]


def levels(costs: Floats, lengths: Ints, num_groups: int, max_tokens: int, pipeline: Pipeline) -> Microbatches | None:
    """Give each pipeline microbatches of one cost level. None if there are fewer microbatches than pipelines.

    Documents are put into microbatches of up to `max_tokens` by falling cost. Runs of these microbatches go to pipelines so
    that all take about the same time, filling and draining included.
    """
    order = np.argsort(-costs, kind="stable")
    micro_of_order = _fill_in_order(lengths[order], max_tokens)
    num_micros = int(micro_of_order[-1]) + 1 if len(order) else 0
    if num_micros < num_groups:
        return None
    micro_costs = bin_sums(micro_of_order, costs[order], num_micros)
    counts = _run_lengths(micro_costs, num_groups, (pipeline.stages - 1) / pipeline.virtual)
    group_of_micro = np.repeat(np.arange(num_groups), counts)
    number = np.arange(num_micros) - np.repeat(np.cumsum(counts) - counts, counts)
    micro = np.empty(len(order), np.int64)
    micro[order] = micro_of_order
    return Microbatches(group_of_micro[micro], number[micro], counts)


def _fill_in_order(lengths: Ints, max_tokens: int) -> Ints:
    """The microbatch of each document, when each microbatch is filled before the next one is opened."""
    ends = np.cumsum(lengths)
    starts: list[int] = []
    begin = 0
    while begin < len(lengths):  # one iteration per microbatch
        starts.append(begin)
        before = int(ends[begin - 1]) if begin else 0
        begin = max(begin + 1, int(ends.searchsorted(before + max_tokens, side="right")))
    return np.repeat(np.arange(len(starts)), np.diff([*starts, len(lengths)]))


def _run_lengths(costs: Floats, num_groups: int, filling: float) -> Ints:
    """The number of consecutive microbatches of each group, at least 1, that minimizes the slowest group. A group takes the
    sum of its costs plus `filling` times the largest."""
    ends = np.cumsum(costs)
    low, high = float(ends[-1]) / num_groups, (float(ends[-1]) + filling * float(costs.max())) * (1 + 1e-9)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _cut(costs, ends, num_groups, filling, middle) is not None else (middle, high)
    found = _cut(costs, ends, num_groups, filling, high)
    assert found is not None  # `high` is known to be enough, or is the cost of everything in one group
    return found


def _cut(costs: Floats, ends: Floats, num_groups: int, filling: float, most: float) -> Ints | None:
    """The counts when every group takes microbatches until it costs `most`; None if some are left over."""
    counts: list[int] = []
    begin = 0
    for left in range(num_groups - 1, -1, -1):
        before = float(ends[begin - 1]) if begin else 0.0
        # The first microbatch of a group is about its costliest, because they come by falling cost.
        end = int(ends.searchsorted(before + most - filling * float(costs[begin]), side="right"))
        end = min(end, len(costs) - left)
        if end <= begin:
            return None
        counts.append(end - begin)
        begin = end
    return np.array(counts) if begin == len(costs) else None
