"""A step on the wire: whatever a rank can be given comes out as it went in, in messages of bounded size."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import overlord as ol
from overlord.data.arenas import Arenas
from overlord.roles.data_constructor import Delivery
from overlord.transport import steps, wire
from overlord.transport.steps import MESSAGE_BYTES, packed_step, unpacked_step

DTYPES = st.sampled_from([np.bool_, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64])
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)))
IMAGES = st.lists(hnp.arrays(np.uint8, st.tuples(st.integers(0, 9), st.integers(1, 9), st.just(3))), max_size=5)
COLUMNS = st.one_of(
    st.lists(st.none() | st.integers(-5, 5)).map(lambda values: pa.array(values, pa.int64())),
    st.lists(st.none() | st.text()).map(lambda values: pa.array(values, pa.string())),
    st.lists(st.lists(st.integers(0, 9))).map(lambda values: pa.array(values, pa.list_(pa.int32()))),
    st.lists(st.binary(max_size=30)).map(lambda values: pa.array(values, pa.binary_view())),
    st.lists(st.text(), min_size=1).map(lambda values: pa.chunked_array([values, values[:1]])),
)
SHAPE = st.tuples(st.lists(st.integers(0, 9)).map(tuple), st.sampled_from(["int32", "bool"]))
FIELDS = st.one_of(
    ARRAYS,
    IMAGES,
    COLUMNS,
    st.integers(-(2**62), 2**62),
    st.none() | st.booleans() | st.text() | st.floats(allow_nan=False),
    st.dictionaries(st.text(max_size=5), SHAPE | st.lists(SHAPE, max_size=3), max_size=3),
)
MICROBATCHES = st.lists(st.dictionaries(st.text(max_size=8), FIELDS, max_size=6), max_size=3)


def sent(delivery: Delivery, shift: int = 0) -> Delivery:
    """Through bytes and back, at any alignment, as gRPC would bring them."""
    contents, batches = packed_step(delivery)
    sink = io.BytesIO()
    sink.write(b"x" * shift)
    with pa.ipc.new_stream(sink, steps.SCHEMA) as writer:
        for batch in batches:
            batch.validate(full=True)
            writer.write_batch(batch)
    with pa.ipc.open_stream(pa.py_buffer(sink.getvalue()).slice(shift)) as reader:
        received = list(reader)
    answer = wire.unpacked_answer(wire.packed(contents))
    assert isinstance(answer, wire.Contents)
    return unpacked_step(answer, received, Arenas(2))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, (pa.Array, pa.ChunkedArray)):
        return left.type == right.type and left.equals(right) and type(left) is type(right)
    if isinstance(left, list) and left and isinstance(left[0], np.ndarray):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def all_same(left: Delivery, right: Delivery) -> bool:
    return (left.step, left.loss_tokens) == (right.step, right.loss_tokens) and all(
        a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
        for a, b in zip(left.microbatches, right.microbatches, strict=True)
    )


@given(MICROBATCHES, st.integers(0, 15))
def test_whatever_a_rank_is_given_comes_out_as_it_went_in(microbatches, shift):
    delivery = Delivery(7, 123, tuple(microbatches))
    assert all_same(delivery, sent(delivery, shift))


@pytest.mark.parametrize("shift", [0, 3])
def test_an_array_longer_than_a_message_is_cut_and_joined(shift):
    rng = np.random.default_rng(0)
    long = rng.integers(0, 1 << 40, (2 * MESSAGE_BYTES + 8_000) // 8)
    delivery = Delivery(0, 1, ({"long": long, "short": np.arange(5), "other": long[:100_000].reshape(100, 1000)},))
    sizes = [batch.nbytes for batch in packed_step(delivery)[1]]
    assert len(sizes) > 2
    assert max(sizes) <= MESSAGE_BYTES + steps._SMALL_BYTES
    assert all_same(delivery, sent(delivery, shift))


def test_large_arrays_are_neither_copied_when_sent_nor_when_received_where_they_lie_well():
    array = np.arange(100_000, dtype=np.int64)
    contents, batches = packed_step(Delivery(0, 1, ({"tokens": array},)))
    (batch,) = batches
    assert any(buffer is not None and buffer.address == array.ctypes.data for buffer in batch.column(0).buffers())
    received = unpacked_step(contents, [batch], Arenas(1)).microbatches[0]["tokens"]
    assert np.shares_memory(received, array)


def test_arrays_in_any_order_of_memory_are_sent():
    array = np.arange(60_000).reshape(200, 300)
    delivery = Delivery(0, 1, ({"turned": array.T, "backwards": array[::-1], "every_other": array[:, ::2]},))
    assert all_same(delivery, sent(delivery))


@pytest.mark.parametrize("value", [np.array([object()]), {1, 2}, object()])
def test_what_would_need_pickle_is_refused_with_the_name_of_the_field(value):
    with pytest.raises(ol.OverlordError, match=r"field 'odd' .* cannot be sent to another process"):
        packed_step(Delivery(0, 1, ({"odd": value},)))


def test_a_message_that_asks_for_pointers_is_refused():
    contents = wire.Contents(0, 1, [[wire.Array("odd", "|O", (1,), 0, 0)]])
    _, batches = packed_step(Delivery(0, 1, ({"number": np.arange(3)},)))
    with pytest.raises(ol.OverlordError, match="is no number; the message is damaged"):
        unpacked_step(contents, list(batches), Arenas(1))
