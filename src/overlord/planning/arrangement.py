"""Where samples go, as a graph holds it between its primitives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from overlord.planning.balancing import greedy, summed
from overlord.planning.facts import LOSS_EXTRA, Floats, Ints, Samples
from overlord.planning.packing import Microbatches, Pieces


class Rows(NamedTuple):
    """Rows of fixed length: the row of each sample."""

    row: Ints
    num_rows: int
    row_tokens: int


class SamplesInRows(NamedTuple):
    """Samples, some of them cut at the ends of rows of sequence_length, and the row of each."""

    samples: Samples
    row: Ints


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


def cut_samples(samples: Samples, pieces: Pieces) -> Samples:
    """Samples for the pieces. Every token of a cut document but its last predicts the next one, so loss
    tokens are counted from the front and the last piece has the rest. What loss weights add is counted in the first piece:
    only the sum over a step is ever used."""
    taken = samples.take(pieces.sample)
    loss = np.minimum(pieces.stop, taken.loss_tokens) - np.minimum(pieces.start, taken.loss_tokens)
    made = taken.with_columns(
        start=taken.start + pieces.start,
        stop=taken.start + pieces.stop,
        tokens=pieces.stop - pieces.start,
        loss_tokens=loss,
    )
    if LOSS_EXTRA not in taken.sizes:
        return made
    return made.with_loss(loss, np.where(pieces.start == 0, taken.sizes[LOSS_EXTRA], 0))
