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
from overlord.batches.buffers import Arenas
from overlord.messages import Delivery
from overlord.service import flight_steps, steps, wire
from overlord.service.flight_steps import MESSAGE_BYTES, pack_step, regions_of
from overlord.service.steps import unpack_step

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
    contents, batches = pack_step(delivery)
    sink = io.BytesIO()
    sink.write(b"x" * shift)
    with pa.ipc.new_stream(sink, flight_steps.SCHEMA) as writer:
        for batch in batches:
            batch.validate(full=True)
            writer.write_batch(batch)
    with pa.ipc.open_stream(pa.py_buffer(sink.getvalue()).slice(shift)) as reader:
        received = list(reader)
    answer = wire.unpack_answer(wire.pack(contents))
    assert isinstance(answer, wire.Contents)
    return unpack_step(answer, regions_of(received), Arenas(2))


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
    sizes = [batch.get_total_buffer_size() for batch in pack_step(delivery)[1]]
    assert len(sizes) > 2
    assert max(sizes) <= MESSAGE_BYTES + steps.SMALL_BYTES
    assert all_same(delivery, sent(delivery, shift))


def test_large_arrays_are_neither_copied_when_sent_nor_when_received_where_they_lie_well():
    array = np.arange(100_000, dtype=np.int64)
    contents, batches = pack_step(Delivery(0, 1, ({"tokens": array},)))
    (batch,) = batches
    assert any(buffer is not None and buffer.address == array.ctypes.data for buffer in batch.column(0).buffers())
    received = unpack_step(contents, regions_of([batch]), Arenas(1)).microbatches[0]["tokens"]
    assert np.shares_memory(received, array)


def test_arrays_in_any_order_of_memory_are_sent():
    array = np.arange(60_000).reshape(200, 300)
    delivery = Delivery(0, 1, ({"turned": array.T, "backwards": array[::-1], "every_other": array[:, ::2]},))
    assert all_same(delivery, sent(delivery))


@pytest.mark.parametrize("value", [np.array([object()]), {1, 2}, object()])
def test_what_would_need_pickle_is_refused_with_the_name_of_the_field(value):
    with pytest.raises(ol.OverlordError, match=r"field 'odd' .* cannot be sent to another process"):
        pack_step(Delivery(0, 1, ({"odd": value},)))


def arrow_stream(table: pa.Table, rows: int | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


TEXT = pa.table({"text": ["one", "two", "three"]})


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("stream", "is_view", "message"),
    [
        (arrow_stream(TEXT, rows=2), False, "is one array that came in 2 pieces"),
        (arrow_stream(TEXT)[:-9], False, "an Arrow stream that cannot be read"),
        (arrow_stream(TEXT) + bytes(8), False, r"an Arrow stream that ends after \d+ of \d+ bytes"),
        (arrow_stream(TEXT.slice(0, 0)) + arrow_stream(TEXT), False, r"an Arrow stream that ends after \d+ of \d+ bytes"),
        (arrow_stream(TEXT).replace(b"one", b"\xff\xff\xff"), False, "an Arrow stream that cannot be read: .*UTF8"),
        (arrow_stream(TEXT).replace(b"text", b"\x80ext"), False, "an Arrow stream that cannot be read: 'utf-8' codec"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + bytes(range(56)), False, "an Arrow stream that cannot be read"),
        (arrow_stream(pa.table({"text": [1], "more": [2]})), False, "came as 2 columns instead of one"),
        (arrow_stream(pa.table({"text": [1, 2]})), True, "is a column of views that came as int64"),
    ],
)
def test_a_column_that_is_not_what_was_sent_is_refused(stream, is_view, message):
    regions = flight_steps._MessageRegions()
    column = wire.Column("text", regions.add("text", np.frombuffer(stream, np.uint8)), is_view, False)
    with pytest.raises(steps.DamagedStepError, match=f"field 'text' .*{message}"):
        unpack_step(wire.Contents(0, 1, [[column]]), regions_of(list(regions.batches())), Arenas(1))


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("field", "message"),
    [
        (wire.Array("odd", "<i8", (1,), 0, 8, 2), "takes bytes 8 to 16 of regions that have 128"),
        (wire.Array("odd", "<i8", (15,), 0, 0, 2), "takes bytes 0 to 120 of regions that have 128"),
        (wire.Array("odd", "<i8", (16,), 1, 0, 2), "lies in 2 regions from number 1 on, and 2 came"),
        (wire.Array("odd", "<i8", (0, 1 << 52, 1 << 52), 0, 0), "has shape"),
        *((wire.Array("odd", dtype, (1,), 0, 0), "which is no type of numbers") for dtype in ("|O", "<i3", "<M8[s]", "x")),
        (wire.Shapes("odd", {"tokens": []}, []), "has 0 shapes for 'tokens', which is one array"),
        (wire.Shapes("odd", {"tokens": [((1,), "int32"), ((2,), "int32")]}, []), "has 2 shapes for 'tokens'"),
    ],
)
def test_a_field_that_does_not_fit_to_what_came_is_refused(field, message):
    region = np.arange(64, dtype=np.uint8)
    with pytest.raises(steps.DamagedStepError, match=f"field 'odd' .*{message}"):
        unpack_step(wire.Contents(0, 1, [[field]]), regions_of([flight_steps.batch_of([region, region])]), Arenas(1))


@pytest.mark.strangers
@pytest.mark.parametrize("columns", [{}, {"region": pa.array([b"x"])}, {"other": pa.array([b"x"], pa.binary_view())}])
def test_a_message_of_other_columns_is_refused(columns):
    with pytest.raises(steps.DamagedStepError, match="instead of one of regions"):
        unpack_step(wire.Contents(0, 1, []), regions_of([pa.RecordBatch.from_pydict(columns)]), Arenas(1))
