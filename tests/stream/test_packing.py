"""Packing loses no token, doubles none, and keeps to its capacities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.arrange.microbatches import even_cost
from overlord.stream.packing import best_fit, concat_and_split, padded_lengths

lengths_of = st.lists(st.integers(0, 100), max_size=60).map(lambda values: np.array(values, np.int64))


@given(lengths_of, st.integers(1, 8), st.integers(20, 200), st.integers(0, 10))
def test_best_fit_leaves_out_only_what_fits_in_no_row(lengths, num_rows, capacity, num_first):
    rows = best_fit(lengths, num_rows, capacity, num_first)
    placed = rows >= 0
    held = np.bincount(rows[placed], lengths[placed], num_rows)
    assert len(held) == num_rows
    assert held.max(initial=0) <= capacity
    assert (lengths[~placed] > capacity - held.min()).all()
    assert np.array_equal(rows, best_fit(lengths, num_rows, capacity, num_first))


@given(st.lists(st.integers(0, 30), max_size=120).map(np.array), st.integers(1, 8), st.integers(5, 60), st.integers(0, 10))
def test_best_fit_takes_each_document_to_the_fullest_row_with_room(lengths, num_rows, capacity, num_first):
    """One document at a time, as the definition says: rows are part of the stream."""
    lengths = lengths.astype(np.int64)
    order = sorted(range(len(lengths)), key=lambda i: (i >= num_first, -lengths[i], i))
    room: dict[int, int] = {}
    expected = [-1] * len(lengths)
    for i in order:
        fitting = [row for row in room if room[row] >= lengths[i]]
        if not fitting and len(room) < num_rows and lengths[i] <= capacity:
            room[len(room)] = capacity
            fitting = [len(room) - 1]
        if fitting:
            expected[i] = min(fitting, key=lambda row: (room[row], row))
            room[expected[i]] -= int(lengths[i])
    assert best_fit(lengths, num_rows, capacity, num_first).tolist() == expected


def test_best_fit_fills_rows_that_a_perfect_packing_fills():
    assert best_fit(np.array([3, 5, 2, 6, 4, 4]), 3, 8).tolist() == [1, 1, 0, 0, 2, 2]


def test_best_fit_places_the_first_documents_before_longer_ones():
    assert best_fit(np.array([3, 9]), 1, 10).tolist() == [-1, 0]
    assert best_fit(np.array([3, 9]), 1, 10, num_first=1).tolist() == [0, -1]


@given(lengths_of, st.integers(1, 12), st.integers(1, 150))
def test_concat_and_split_gives_every_token_once_and_in_order(lengths, num_rows, capacity):
    pieces = concat_and_split(lengths, num_rows, capacity)
    stream = [(i, t) for i, length in enumerate(lengths.tolist()) for t in range(length)]
    columns = (pieces.sample, pieces.start, pieces.stop)
    given_out = [(i, t) for i, start, stop in zip(*map(np.ndarray.tolist, columns), strict=True) for t in range(start, stop)]
    assert given_out == stream[: num_rows * capacity]
    sizes = pieces.stop - pieces.start
    assert (sizes > 0).all()
    held = np.bincount(pieces.row, sizes, num_rows)
    assert len(held) == num_rows
    assert (held[: len(given_out) // capacity] == capacity).all()
    assert held.max(initial=0) <= capacity


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=80).map(np.array),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_even_cost_keeps_to_its_cap_and_leaves_no_microbatch_empty(lengths, num_groups, count, grow, data):
    costs = lengths + 0.05 * lengths.astype(float) ** 2
    group = np.array(data.draw(st.lists(st.integers(0, num_groups - 1), min_size=len(lengths), max_size=len(lengths))))
    counts = np.full(num_groups, count)
    found = even_cost(costs, lengths, group, counts, 120, grow=grow)
    if found is None:
        assert not grow
        return
    assert (found.counts >= counts).all() if grow else np.array_equal(found.counts, counts)
    first = np.cumsum(found.counts) - found.counts
    assert (found.micro < found.counts[found.group]).all()
    slot = first[found.group] + found.micro
    assert np.bincount(slot, lengths).max() <= 120
    if not grow and len(lengths) >= num_groups * count:
        assert len(np.unique(slot)) == num_groups * count


def test_even_cost_moves_a_document_that_has_no_room_in_its_group():
    lengths = np.array([60, 60, 60, 10])
    found = even_cost(lengths.astype(float), lengths, np.array([0, 0, 0, 1]), np.array([2, 1]), 100)
    assert found is not None
    assert sorted(found.group.tolist()) == [0, 0, 1, 1]


def test_even_cost_says_so_when_there_is_no_room_anywhere():
    lengths = np.array([60, 60, 60])
    assert even_cost(lengths.astype(float), lengths, np.zeros(3, np.int64), np.array([2]), 100) is None


def test_even_cost_numbers_the_costliest_microbatch_of_a_group_first():
    lengths = np.array([10, 90, 50])
    found = even_cost(lengths.astype(float), lengths, np.zeros(3, np.int64), np.array([2]), 100)
    assert found is not None
    assert found.micro.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("multiple", "expected"), [(1, [0, 1, 8, 9]), (8, [0, 8, 8, 16])])
def test_a_document_takes_up_a_multiple(multiple, expected):
    assert padded_lengths(np.array([0, 1, 8, 9]), multiple).tolist() == expected
