"""A payload on its way to another process: the same rows, in few buffers, and nothing of the chunks they are of."""

import pickle

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from overlord.batches.payload import FlatArrays, Payload

DTYPES = st.sampled_from([np.int32, np.uint16, np.int64, np.uint64])
ARRAYS = st.builds(lambda n, dtype: np.arange(n).astype(dtype), st.integers(0, 9), DTYPES)


def sent(payload: Payload) -> tuple[Payload, list[int]]:
    """The payload as it arrives, and the sizes of the buffers beside its pickle."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    return pickle.loads(pickled, buffers=raw), [len(pickled), *(len(buffer) for buffer in raw)]


@given(st.lists(st.none() | ARRAYS, max_size=12))
def test_arrays_of_any_lengths_and_dtypes_come_back_from_flat_ones(arrays):
    views = FlatArrays.of(arrays).views()
    assert [None if a is None else (a.dtype, a.tolist()) for a in views] == [
        None if a is None else (a.dtype, a.tolist()) for a in arrays
    ]


def test_a_payload_arrives_with_only_its_own_rows_in_few_buffers():
    chunk = np.arange(1_000_000, dtype=np.int32)
    titles = pa.array([f"title {i}" for i in range(100_000)])
    payload = Payload(
        tokens=[chunk[i * 1000 : i * 1000 + 50] for i in range(200)],
        following=np.arange(200),
        loss_masks=[None if i % 2 else np.ones(51, np.int8) for i in range(200)],
        columns={"title": titles.slice(500, 200), "raw": pa.array([b"x" * 20] * 200, pa.binary_view())},
        ignored=frozenset({3}),
    )
    arrived, sizes = sent(payload)
    assert [tokens.tolist() for tokens in arrived.tokens] == [tokens.tolist() for tokens in payload.tokens]
    assert arrived.following.tolist() == list(range(200))
    assert arrived.loss_masks is not None
    assert [mask is None for mask in arrived.loss_masks] == [bool(i % 2) for i in range(200)]
    assert arrived.columns["title"].to_pylist() == titles.slice(500, 200).to_pylist()
    assert arrived.columns["raw"].to_pylist() == [b"x" * 20] * 200
    assert arrived.ignored == {3}
    assert len(sizes) <= 10
    assert sum(sizes) < 2 * (200 * 50 * 4 + 200 * 51) + 20_000


def test_pictures_arrive_with_their_shapes_without_a_copy():
    pictures = [[np.full((4, 6, 3), 7, np.uint8)], [], [np.full((2, 2, 3), 1, np.uint8), np.full((4, 6, 3), 9, np.uint8)]]
    tokens = [np.zeros(0, np.int32)] * 3
    arrived, _ = sent(Payload(tokens, np.full(3, -1), images=pictures))
    assert arrived.images is not None
    assert [[picture.tolist() for picture in row] for row in arrived.images] == [
        [picture.tolist() for picture in row] for row in pictures
    ]
    assert all(not picture.flags.owndata for row in arrived.images for picture in row)


def test_an_empty_payload_travels_too():
    arrived, _ = sent(Payload([], np.zeros(0, np.int64)))
    assert arrived.tokens == []
    assert arrived.images is None


def test_a_payload_is_cut_into_the_payloads_it_was_asked_for_as():
    payload = Payload(
        tokens=[np.array([i]) for i in range(5)],
        following=np.arange(5),
        loss_masks=[None, None, np.ones(2, np.int8), None, None],
        images=[[], [], [], [np.zeros((1, 1, 3), np.uint8)], []],
        columns={"title": pa.array(list("abcde"))},
        ignored=frozenset({1, 3}),
    )
    first, empty, rest = payload.split([2, 0, 3])
    assert [tokens.tolist() for tokens in first.tokens] == [[0], [1]]
    assert (first.ignored, empty.ignored, rest.ignored) == ({1}, set(), {1})
    assert len(empty.tokens) == 0
    assert (first.images, first.loss_masks) == (None, None)
    assert rest.columns["title"].to_pylist() == list("cde")
    assert rest.loss_masks is not None
    assert rest.loss_masks[0] is not None
    assert rest.images is not None
    assert [len(images) for images in rest.images] == [0, 1, 0]
    assert rest.following.tolist() == [2, 3, 4]
