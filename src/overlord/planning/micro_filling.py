"""How many microbatches groups have, how much each may hold, and what goes into which."""

from __future__ import annotations

from typing import cast

import numpy as np

from overlord.errors import SpecError
from overlord.planning.arrangement import dealt_bins
from overlord.planning.facts import Floats, Ints
from overlord.planning.packing import Microbatches, best_fit, even_cost
from overlord.spec import Batch

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
    return cast(Microbatches, grown), "even cost"  # no sample is over max_tokens, so growing ends well


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
