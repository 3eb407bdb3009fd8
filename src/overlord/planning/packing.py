"""Putting documents into rows (best fit without cutting, concatenate-and-split) and into microbatches of even cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from overlord.planning.balancing import LeastCostBins
from overlord.planning.facts import Floats, Ints


def padded(tokens: Ints, multiple: int) -> Ints:
    """The tokens that documents take up when each is padded to a multiple."""
    return tokens if multiple == 1 else -(-tokens // multiple) * multiple


def best_fit(lengths: Ints, num_rows: int, capacity: int, num_first: int = 0) -> Ints:
    """The row of each document, longest first into the fullest row that still has room; -1 where none has.

    The first `num_first` documents are placed before all others: what one step could not hold, the next one
    does.
    """
    order = np.argsort(-lengths, kind="stable")
    if num_first:
        order = order[np.argsort(order >= num_first, kind="stable")]
    rows = [-1] * len(lengths)
    shortest = int(lengths.min(initial=capacity))
    # Rows in use, sorted by room: each is room * 2^shift + row, so that one integer orders them. A row with
    # less room than the shortest document leaves the list.
    shift = max(1, num_rows).bit_length()
    mask = (1 << shift) - 1
    open_rows: list[int] = []
    num_used = 0
    # A loop over documents, because each choice depends on the one before: about half a microsecond each.
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(open_rows, length << shift)
        if at < len(open_rows):
            key = open_rows.pop(at)
        elif num_used < num_rows and length <= capacity:
            key = (capacity << shift) | num_used
            num_used += 1
        else:
            continue
        rows[i] = key & mask
        key -= length << shift
        if key >> shift >= shortest:
            insort(open_rows, key)
    return np.array(rows, np.int64)


def in_drawn_order(rows: Ints) -> Ints:
    """Rows numbered by their first sample, so that dealing them in turn is blind to how long their documents are."""
    used, first = np.unique(rows, return_index=True)
    if len(used) and used[0] < 0:
        used, first = used[1:], first[1:]
    if len(used) == 0:
        return rows
    number = np.empty(int(used[-1]) + 1, np.int64)
    number[used[np.argsort(first, kind="stable")]] = np.arange(len(used))
    return np.where(rows < 0, -1, number[rows])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Documents cut at row ends: piece p is the tokens [start, stop) of document `sample[p]` and lies in
    `row[p]`."""

    sample: Ints
    start: Ints
    stop: Ints
    row: Ints


def concat_and_split(lengths: Ints, num_rows: int, capacity: int, ends: Ints | None = None) -> Pieces:
    """The documents one after the other, cut at every multiple of `capacity`; what is past the last row is
    left out. `ends` are the sums of the lengths, where they are known."""
    ends = lengths.cumsum() if ends is None else ends
    total = min(int(ends[-1]) if len(ends) else 0, num_rows * capacity)
    cuts = np.concatenate([ends, np.arange(capacity, total + capacity, capacity)])
    np.minimum(cuts, total, out=cuts)
    cuts.sort()
    begins = np.empty_like(cuts)
    begins[:1], begins[1:] = 0, cuts[:-1]
    apart = begins < cuts
    begins, cuts = begins[apart], cuts[apart]
    # The document that a piece lies in is the first to end after it begins; empty documents have no piece.
    sample = ends.searchsorted(begins, side="right")
    origin = ends[sample] - lengths[sample]
    return Pieces(sample, begins - origin, cuts - origin, begins // capacity)


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
