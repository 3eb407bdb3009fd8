"""Where samples go, as a graph holds it between its primitives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from overlord.arrange.balancing import LeastCostBins, greedy, summed
from overlord.errors import SpecError
from overlord.stream.packing import best_fit

if TYPE_CHECKING:
    from overlord.declare.batch import Batch
    from overlord.stream.facts import (
        Floats,
        Ints,
    )


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Each document's group and its microbatch within that group; `counts[g]` microbatches in group g."""

    group: Ints
    micro: Ints
    counts: Ints


def even_cost(
    costs: Floats, lengths: Ints, group: Ints, counts: Ints, max_tokens: int, grow: bool = False
) -> Microbatches | None:
    """Fill each group's `counts[g]` microbatches, none over `max_tokens`, evening their costs.

    Costliest document first, each into its group's microbatch of least cost that has room. A document that
    finds none opens another microbatch with `grow`; otherwise it goes to the group of least cost that has
    room. None when there is no room anywhere. No microbatch stays empty while there are documents enough.
    """
    group = _enough_for_each(lengths, group, counts)
    if not grow and (counts == 1).all() and np.bincount(group, lengths, len(counts)).max() <= max_tokens:
        return Microbatches(group, np.zeros(len(group), np.int64), counts)
    order = np.argsort(-costs, kind="stable")
    fill = _Fill(np.bincount(group, costs, len(counts)).tolist(), counts.tolist(), max_tokens)
    groups = fill.groups
    slots: list[int] = []
    # A loop over documents, because each choice depends on those before: about a microsecond each.
    items = zip(costs[order].tolist(), lengths[order].tolist(), group[order].tolist(), strict=True)
    for cost, length, g in items:
        slot = groups[g].place(cost, length)
        if slot < 0:
            slot = fill.opened(g, cost, length) if grow else fill.moved(g, cost, length)
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

    def opened(self, g: int, cost: float, length: int) -> int:
        """A new slot of the group."""
        self.groups[g].add(len(self.room))
        self.group_of.append(g)
        self.room.append(self.max_tokens)
        return self.groups[g].place(cost, length)

    def moved(self, g: int, cost: float, length: int) -> int:
        """To the group of least cost that has room. Scans all slots: rare unless max_tokens is so tight that
        there is no use in going on."""
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
        """Slots numbered within their groups, costliest first: microbatch i of one group meets its like in
        others."""
        slot_costs = np.bincount(slot_of, costs, len(self.group_of))
        group_of = np.array(self.group_of, np.int64)
        by_group = np.lexsort((-slot_costs, group_of))
        counts = np.bincount(group_of, minlength=len(self.groups))
        micro_of = np.empty(len(group_of), np.int64)
        micro_of[by_group] = np.arange(len(group_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Microbatches(group_of[slot_of], micro_of[slot_of], counts)


_MOST_SCANNED = 4_000_000  # slots: some tenths of a second


def _enough_for_each(lengths: Ints, group: Ints, counts: Ints) -> Ints:
    """Groups with fewer documents than microbatches get the shortest ones that other groups can spare."""
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
    """Rows of fixed length: the row of each sample."""

    row: Ints
    num_rows: int
    row_tokens: int


class Arrangement(NamedTuple):
    """Where each sample goes: its group, its microbatch in the group, its row in the microbatch."""

    group: Ints
    micro: Ints
    row: Ints
    counts: Ints
    rows_per_microbatch: int
    row_tokens: int


def numbered(group: Ints, costs: Floats, num_groups: int) -> Ints:
    """Each item's number within its group, costliest first."""
    order = np.lexsort((-costs, group))
    held = np.bincount(group, minlength=num_groups)
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(np.cumsum(held) - held, held)
    return number


def variable(found: Microbatches) -> Arrangement:
    return Arrangement(found.group, found.micro, np.zeros(len(found.group), np.int64), found.counts, 1, 0)


def dealt_bins(bins: Ints, costs: Floats, num_groups: int, count: int) -> Microbatches:
    """Microbatches that are filled already (the bin of each item, with what it costs), `count` to each group by cost."""
    bins = np.unique(bins, return_inverse=True)[1]
    bin_costs = summed(bins, costs, count * num_groups)
    group = greedy(bin_costs, num_groups, np.ones(len(bin_costs), np.int64), count)
    micro = numbered(group, bin_costs, num_groups)
    return Microbatches(group[bins], micro[bins], np.full(num_groups, count))


# A group may hold nearly what its microbatches can: whole documents never fill them to the last token.
_FILL = 0.97


def num_microbatches(batch: Batch, lengths: Ints, num_groups: int) -> int:
    """Microbatches of each group, when all have the same number and samples are handed out one by one."""
    tokens = batch.tokens if batch.tokens is not None else int(lengths.sum())
    wanted = -(-tokens // (num_groups * _mean_tokens(batch)))
    most = -(-len(lengths) // num_groups)  # more would leave some empty
    return max(1, min(wanted, most))


def checked_max_tokens(batch: Batch, lengths: Ints, max_tokens: int | None) -> int:
    """What a microbatch may hold: as given, if that can work, or half as much again as the mean one."""
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
    """What a group may hold, when all have the same number of microbatches."""
    return int(num_microbatches(batch, lengths, num_groups) * max_tokens * _FILL)


def as_many_as_needed(
    batch: Batch, lengths: Ints, costs: Floats, group: Ints, num_groups: int, max_tokens: int
) -> tuple[Microbatches, str]:
    """Each group's samples in as many microbatches as it needs, and how they were found."""
    held = np.bincount(group, lengths, num_groups)
    counts = np.maximum(1, np.rint(held / _mean_tokens(batch)).astype(np.int64))
    counts = np.minimum(counts, np.maximum(1, np.bincount(group, minlength=num_groups)))
    grown = even_cost(costs, lengths, group, counts, max_tokens, grow=True)
    return cast("Microbatches", grown), "even cost"  # no sample is over max_tokens, so growing ends well


def as_many_in_each(
    batch: Batch, lengths: Ints, costs: Floats, group: Ints, num_groups: int, max_tokens: int, known_rows: Ints | None
) -> tuple[Microbatches, str]:
    """The same number of microbatches in every group, and how they were found: samples stay in their group if they fit;
    otherwise they are packed anew, or as in rows that are known to fit."""
    count = num_microbatches(batch, lengths, num_groups)
    while True:
        found = even_cost(costs, lengths, group, np.full(num_groups, count), max_tokens)
        if found is not None:
            return found, "even cost"
        bins = best_fit(lengths, count * num_groups, max_tokens)
        if (bins >= 0).all():
            return dealt_bins(bins, costs, num_groups, count), "best fit"
        if known_rows is not None:
            return dealt_bins(known_rows // batch.rows_per_microbatch, costs, num_groups, count), "as drawn"
        count += 1  # no packing into fewer is known


def _mean_tokens(batch: Batch) -> int:
    return batch.micro_tokens or batch.sequence_length
