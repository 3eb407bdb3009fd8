"""Filling microbatches: which sample goes to which microbatch of which group, and the values in which a graph keeps that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from overlord.arrange.balancing import LeastCostBins, bin_sums, greedy
from overlord.errors import SpecError
from overlord.stream.packing import best_fit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from overlord.declare.batch import Batch
    from overlord.stream.facts import (
        Floats,
        Ints,
    )


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Each sample's group and its microbatch within that group; `counts[g]` microbatches in group g."""

    group: Ints
    micro: Ints
    counts: Ints

    def to_arrangement(self) -> Arrangement:
        """Microbatches of variable length: one row each, as long as its samples together."""
        return Arrangement(self.group, self.micro, np.zeros(len(self.group), np.int64), self.counts, 1, 0)


def even_cost(
    costs: Floats, lengths: Ints, group: Ints, counts: Ints, max_tokens: int, *, grow: bool = False
) -> Microbatches | None:
    """Fill the `counts[g]` microbatches of each group g with even costs, none over `max_tokens`.

    Samples are placed by falling cost, each in the cheapest microbatch of its group that has room. Where none has room, the
    sample opens another microbatch with `grow`; without it, it moves to the cheapest group that has room. Returns None if
    no group has. No microbatch stays empty while there are enough samples.
    """
    group = _enough_for_each(lengths, group, counts)
    if not grow and (counts == 1).all() and np.bincount(group, lengths, len(counts)).max() <= max_tokens:
        return Microbatches(group, np.zeros(len(group), np.int64), counts)
    order = np.argsort(-costs, kind="stable")
    fill = _Fill(np.bincount(group, costs, len(counts)).tolist(), counts.tolist(), max_tokens)
    groups = fill.groups
    slots: list[int] = []
    # A loop over samples, because each choice depends on those before: about a microsecond each.
    items: Iterable[tuple[float, int, int]] = zip(
        costs[order].tolist(), lengths[order].tolist(), group[order].tolist(), strict=True
    )
    for cost, length, g in items:
        slot = groups[g].place(cost, length)
        if slot < 0:
            slot = fill.place_in_new_slot(g, cost, length) if grow else fill.place_in_other_group(g, cost, length)
            if slot < 0:
                return None
        slots.append(slot)
    slot_of = np.empty(len(group), np.int64)
    slot_of[order] = slots
    return fill.microbatches(slot_of, costs)


class _Fill:
    """Microbatches being filled. A slot is a microbatch, numbered over all groups."""

    __slots__ = ("group_costs", "group_of", "groups", "max_tokens", "room", "scanned")

    def __init__(self, group_costs: list[float], counts: list[int], max_tokens: int) -> None:
        self.group_costs = group_costs
        self.max_tokens = max_tokens
        self.room = [max_tokens] * sum(counts)
        self.groups: list[LeastCostBins] = []
        self.group_of: list[int] = []
        for g, count in enumerate(counts):
            self.groups.append(LeastCostBins(self.room, len(self.group_of), count))
            self.group_of.extend([g] * count)
        self.scanned = 0

    def place_in_new_slot(self, g: int, cost: float, length: int) -> int:
        """Open another slot of group g for a sample. Returns the slot."""
        self.groups[g].add(len(self.room))
        self.group_of.append(g)
        self.room.append(self.max_tokens)
        return self.groups[g].place(cost, length)

    def place_in_other_group(self, g: int, cost: float, length: int) -> int:
        """Move a sample of group g to the cheapest group that has room. Returns the slot, or -1 if no group has.

        Scans all slots, which is rare unless `max_tokens` is so tight that the caller should give up anyway.
        """
        self.scanned += len(self.room)
        if self.scanned > _MOST_SCANNED:
            return -1
        group_of, group_costs = self.group_of, self.group_costs
        roomy = {group_of[slot] for slot, room in enumerate(self.room) if room >= length}
        if not roomy:
            return -1
        to = min(roomy, key=lambda other: (group_costs[other], other))
        group_costs[g] -= cost
        group_costs[to] += cost
        return self.groups[to].place(cost, length)

    def microbatches(self, slot_of: Ints, costs: Floats) -> Microbatches:
        """The result, with slots numbered within their groups by falling cost, so that microbatches that run at the same
        time in different groups cost about the same."""
        slot_costs = np.bincount(slot_of, costs, len(self.group_of))
        group_of = np.array(self.group_of, np.int64)
        by_group = np.lexsort((-slot_costs, group_of))
        counts = np.bincount(group_of, minlength=len(self.groups))
        micro_of = np.empty(len(group_of), np.int64)
        micro_of[by_group] = np.arange(len(group_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Microbatches(group_of[slot_of], micro_of[slot_of], counts)


_MOST_SCANNED = 4_000_000  # slots: some tenths of a second


def _enough_for_each(lengths: Ints, group: Ints, counts: Ints) -> Ints:
    """Move samples to groups that have fewer samples than microbatches: the shortest that other groups can spare."""
    held = np.bincount(group, minlength=len(counts))
    missing = np.maximum(counts - held, 0)
    if not missing.any():
        return group
    order = np.lexsort((lengths, group))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(held) - held, held)
    spare = order[rank < np.repeat(np.maximum(held - counts, 0), held)]
    spare = spare[np.argsort(lengths[spare], kind="stable")]
    needy = np.repeat(np.arange(len(counts)), missing)[: len(spare)]
    group = group.copy()
    group[spare[: len(needy)]] = needy
    return group


class PackedRows(NamedTuple):
    """Samples in rows of fixed length; `row[i]` is the row of sample i."""

    row: Ints
    num_rows: int
    row_tokens: int


class Arrangement(NamedTuple):
    """The place of each sample: its group, its microbatch within the group, its row within the microbatch."""

    group: Ints
    micro: Ints
    row: Ints
    counts: Ints
    """The number of microbatches of each group."""
    rows_per_microbatch: int
    row_tokens: int
    """The tokens that every row is padded to; 0 where a row is as long as its samples."""


@dataclass(frozen=True, slots=True)
class GroupedSamples:
    """Samples that are assigned to groups but not yet to microbatches: one entry of each column per sample."""

    lengths: Ints
    costs: Floats
    group: Ints
    num_groups: int


def number_in_group(group: Ints, costs: Floats, num_groups: int) -> Ints:
    """The number of each item within its group, by falling cost."""
    order = np.lexsort((-costs, group))
    held = np.bincount(group, minlength=num_groups)
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(np.cumsum(held) - held, held)
    return number


def deal_bins(bins: Ints, costs: Floats, num_groups: int, count: int) -> Microbatches:
    """Assign microbatches that are filled already (`bins[i]` is that of sample i) to groups by cost, `count` to each."""
    bins = np.unique(bins, return_inverse=True)[1]
    bin_costs = bin_sums(bins, costs, count * num_groups)
    group = greedy(bin_costs, num_groups, np.ones(len(bin_costs), np.int64), count)
    micro = number_in_group(group, bin_costs, num_groups)
    return Microbatches(group[bins], micro[bins], np.full(num_groups, count))


# The share of its microbatches' capacity that a group may hold: whole samples never fill them to the last token.
_FILL = 0.97


def num_microbatches(batch: Batch, lengths: Ints, num_groups: int) -> int:
    """The number of microbatches per group, when all groups have the same number and samples are assigned one by one."""
    tokens = batch.tokens if batch.tokens is not None else int(lengths.sum())
    wanted = -(-tokens // (num_groups * _mean_tokens(batch)))
    most = -(-len(lengths) // num_groups)  # more would leave some empty
    return max(1, min(wanted, most))


def microbatch_limit(batch: Batch, lengths: Ints, max_tokens: int | None) -> int:
    """The most tokens of a microbatch: `max_tokens`, or one and a half times the mean microbatch. Raises SpecError if the
    samples cannot fit."""
    micro_tokens, longest = _mean_tokens(batch), int(lengths.max(initial=0))
    if max_tokens is None:
        return max(micro_tokens * 3 // 2, longest)
    if max_tokens < max(micro_tokens, longest):
        raise SpecError(
            f"max_tokens must hold the mean microbatch ({micro_tokens} tokens) and the longest sample "
            f"({longest}), got {max_tokens}; raise it, or lower micro_tokens or sequence_length of the batch"
        )
    return max_tokens


def group_tokens(batch: Batch, lengths: Ints, num_groups: int, max_tokens: int) -> int:
    """The most tokens of a group, when all groups have the same number of microbatches."""
    return int(num_microbatches(batch, lengths, num_groups) * max_tokens * _FILL)


def fill_as_needed(batch: Batch, samples: GroupedSamples, max_tokens: int, group_size: int = 1) -> Microbatches:
    """Fill as many microbatches in each group as its samples need, and in neighbours of `group_size` the same number."""
    if group_size > 1:
        return _fill_neighbours(batch, samples, max_tokens, group_size)
    held = np.bincount(samples.group, samples.lengths, samples.num_groups)
    counts = np.maximum(1, np.rint(held / _mean_tokens(batch)).astype(np.int64))
    counts = np.minimum(counts, np.maximum(1, np.bincount(samples.group, minlength=samples.num_groups)))
    filled = even_cost(samples.costs, samples.lengths, samples.group, counts, max_tokens, grow=True)
    return cast("Microbatches", filled)  # never None: no sample is over max_tokens, so a new microbatch always has room


def _fill_neighbours(batch: Batch, samples: GroupedSamples, max_tokens: int, group_size: int) -> Microbatches:
    num_groups = samples.num_groups // group_size
    micro, group = np.empty(len(samples.group), np.int64), samples.group.copy()
    counts = np.empty(samples.num_groups, np.int64)
    for g in range(num_groups):
        first = g * group_size
        at = np.flatnonzero(samples.group // group_size == g)
        lengths, costs, local = samples.lengths[at], samples.costs[at], samples.group[at] - first
        count = round(int(lengths.sum()) / (group_size * _mean_tokens(batch)))
        count = max(1, min(count, len(at) // group_size))
        while (found := even_cost(costs, lengths, local, np.full(group_size, count), max_tokens)) is None:
            count += 1  # ends: with a microbatch for every sample, each has room
        group[at], micro[at] = first + found.group, found.micro
        counts[first : first + group_size] = found.counts
    return Microbatches(group, micro, counts)


def fill_equal_counts(
    batch: Batch, samples: GroupedSamples, max_tokens: int, known_rows: Ints | None
) -> tuple[Microbatches, str]:
    """Fill the same number of microbatches in every group. Returns them and the name of the method that worked.

    Samples stay in their group if they fit there. Otherwise they are packed anew, or kept in `known_rows`, rows that are
    known to fit.
    """
    lengths, costs, num_groups = samples.lengths, samples.costs, samples.num_groups
    count = num_microbatches(batch, lengths, num_groups)
    while True:
        found = even_cost(costs, lengths, samples.group, np.full(num_groups, count), max_tokens)
        if found is not None:
            return found, "even cost"
        bins = best_fit(lengths, count * num_groups, max_tokens)
        if (bins >= 0).all():
            return deal_bins(bins, costs, num_groups, count), "best fit"
        if known_rows is not None:
            return deal_bins(known_rows // batch.rows_per_microbatch, costs, num_groups, count), "as drawn"
        count += 1  # no packing into fewer is known


def _mean_tokens(batch: Batch) -> int:
    return batch.micro_tokens or batch.sequence_length
