"""Columns of lists in one piece: the same lists as Arrow's own concatenation, in memory that is used again."""

import gc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.batches.buffers import Arenas
from overlord.chunks.lists import combine_lists

arrow: Any = pa  # its stubs know no lists of lists
NUMBERS = st.lists(st.integers(0, 100), max_size=5)
LISTS = st.lists(NUMBERS, max_size=6)


@given(
    chunks=st.lists(st.tuples(LISTS, st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=4),
    value=st.sampled_from([pa.int32(), pa.int64(), pa.uint16(), pa.float32(), pa.bool_()]),
    large=st.booleans(),
    null=st.sampled_from([None, "list", "value"]),
)
def test_lists_in_one_piece_are_those_of_the_pieces(chunks, value, large, null):
    kind = pa.large_list(value) if large else pa.list_(value)
    arrays = []
    for lists, first, last in chunks:
        rows: list[Any] = [[bool(n) if value == pa.bool_() else n for n in numbers] for numbers in lists]
        if null == "list":
            rows.append(None)
        elif null == "value":
            rows.append([None])
        arrays.append(arrow.array(rows, kind)[first : max(len(rows) - last, first)])
    column = arrow.chunked_array(arrays, kind)
    combined = combine_lists(column, Arenas())
    combined.validate(full=True)
    assert combined.equals(pa.concat_arrays(arrays))


def test_the_memory_of_a_chunk_that_was_dropped_is_used_for_the_next():
    arenas = Arenas(1)
    column = arrow.chunked_array([arrow.array([np.arange(50_000, dtype=np.int32)])] * 2)
    first: Any = combine_lists(column, arenas)
    address = first.values.buffers()[1].address
    other: Any = combine_lists(column, arenas)
    assert other.values.buffers()[1].address != address, "the first is in use"
    del first
    gc.collect()
    third: Any = combine_lists(column, arenas)
    assert third.values.buffers()[1].address == address


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_one_piece_stays_as_it_is(num_chunks):
    column = arrow.chunked_array([pa.array([[1, 2]], pa.list_(pa.int32()))] * num_chunks, pa.list_(pa.int32()))
    assert combine_lists(column, Arenas()).to_pylist() == [[1, 2]] * num_chunks
