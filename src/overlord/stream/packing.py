"""Packing documents into rows: best fit without cutting, or concatenate and split."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from overlord.stream.facts import (
    LOSS_EXTRA,
    Ints,
    Samples,
)


def padded_lengths(tokens: Ints, multiple: int) -> Ints:
    """The lengths of documents when each is padded to a multiple."""
    return tokens if multiple == 1 else -(-tokens // multiple) * multiple


def best_fit(lengths: Ints, num_rows: int, capacity: int, num_first: int = 0) -> Ints:
    """The row of each document by best fit: longest first, each into the fullest row that has room; -1 where none has.

    The first `num_first` documents are placed before all others. They are those that the step before had no room for.
    """
    order = np.argsort(-lengths, kind="stable")
    if num_first:
        order = order[np.argsort(order >= num_first, kind="stable")]
    falling = lengths[order]
    first_of_length = np.flatnonzero(np.diff(falling, prepend=-1))
    counts = np.diff(first_of_length, append=len(falling))
    shortest = int(lengths.min(initial=capacity))
    # Rows in use, sorted by room, each as the integer room * 2^shift + row. A row with less room than the shortest document
    # leaves the list.
    shift = max(1, num_rows).bit_length()
    mask = (1 << shift) - 1
    open_rows: list[int] = []
    num_used = 0
    chosen: list[int] = []
    num_taken: list[int] = []
    # A loop over rows, because each choice depends on the one before. A row that takes a document is then the fullest that
    # has room for another one of the same length, so it takes as many of them as fit.
    for length, num_left in zip(falling[first_of_length].tolist(), counts.tolist(), strict=True):
        while num_left:
            at = bisect_left(open_rows, length << shift)
            if at < len(open_rows):
                key = open_rows.pop(at)
            elif num_used < num_rows and length <= capacity:
                key = (capacity << shift) | num_used
                num_used += 1
            else:
                chosen.append(-1)
                num_taken.append(num_left)
                break
            num = min((key >> shift) // length, num_left) if length else num_left
            chosen.append(key & mask)
            num_taken.append(num)
            num_left -= num
            key -= num * length << shift
            if key >> shift >= shortest:
                insort(open_rows, key)
    rows = np.empty(len(lengths), np.int64)
    rows[order] = np.repeat(np.array(chosen, np.int64), num_taken)
    return rows


def in_drawn_order(rows: Ints) -> Ints:
    """Renumber rows by their first sample, so that dealing them round-robin does not depend on the lengths of documents."""
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
    """Pieces of documents: piece p is the tokens [start, stop) of document `sample[p]`, in row `row[p]`."""

    sample: Ints
    start: Ints
    stop: Ints
    row: Ints


def concat_and_split(lengths: Ints, num_rows: int, capacity: int, ends: Ints | None = None) -> Pieces:
    """Concatenate documents and cut them at every multiple of `capacity`. Tokens past the last row are left out.

    `ends` are the cumulative sums of the lengths, if the caller has them.
    """
    ends = lengths.cumsum() if ends is None else ends
    total = min(int(ends[-1]) if len(ends) else 0, num_rows * capacity)
    cuts = np.concatenate([ends, np.arange(capacity, total + capacity, capacity)])
    np.minimum(cuts, total, out=cuts)
    cuts.sort(kind="stable")  # merges the two rising runs
    begins = np.empty_like(cuts)
    begins[:1], begins[1:] = 0, cuts[:-1]
    apart = begins < cuts
    begins, cuts = begins[apart], cuts[apart]
    # The document that a piece lies in is the first to end after it begins; empty documents have no piece.
    sample = ends.searchsorted(begins, side="right")
    origin = ends[sample] - lengths[sample]
    return Pieces(sample, begins - origin, cuts - origin, begins // capacity)


class SamplesInRows(NamedTuple):
    """Samples, some of them cut at the ends of rows of `sequence_length`, and the row of each."""

    samples: Samples
    row: Ints


def cut_samples(samples: Samples, pieces: Pieces) -> Samples:
    """Cut samples into pieces.

    Every token of a cut document but its last predicts the next one, so loss tokens are counted from the front and the last
    piece has the rest. LOSS_EXTRA is counted in the first piece, because only its sum over a step is ever used.
    """
    made = samples.take(pieces.sample)  # a copy, so its columns are changed in place
    loss = np.minimum(pieces.stop, made.loss_tokens) - np.minimum(pieces.start, made.loss_tokens)
    np.add(made.start, pieces.stop, out=made.stop)
    np.add(made.start, pieces.start, out=made.start)
    np.subtract(pieces.stop, pieces.start, out=made.tokens)
    made.loss_tokens[:] = loss
    if LOSS_EXTRA not in made.sizes:
        return made
    return made.with_loss(loss, np.where(pieces.start == 0, made.sizes[LOSS_EXTRA], 0))
