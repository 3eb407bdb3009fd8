"""Microbatches that are collated together have the fields that each has alone."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.arrange.plan import MicroPlan
from overlord.batches.buffers import Arenas
from overlord.batches.collate import can_join, collate, collate_joined, may_join
from overlord.batches.payload import Payload
from overlord.declare.batch import Batch
from overlord.stream.facts import Samples
from tests.batches.microbatches import Microbatch, microbatch, microbatches


@st.composite
def full_microbatches(draw, row_tokens: int) -> Microbatch:
    """Documents that fill every row, in the order of the plan: what packing of long streams of text makes."""
    lengths, rows = [], []
    for row in range(draw(st.integers(1, 3))):
        cuts = draw(st.lists(st.integers(1, row_tokens - 1), unique=True, max_size=4))
        bounds = [0, *sorted(cuts), row_tokens]
        lengths += np.diff(bounds).tolist()
        rows += [row] * (len(bounds) - 1)
    made = microbatch(lengths, rows=rows, num_rows=rows[-1] + 1, row_tokens=row_tokens)
    goes_on = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    following = np.where(goes_on, np.arange(len(lengths)) + 90_000, -100)
    return made._replace(payload=replace(made.payload, following=following))


def together(made: list[Microbatch]) -> Payload:
    """The payload of all samples, as rows of several microbatches are fetched at once."""
    payloads = [each.payload for each in made]
    places, begin = [], 0
    for payload in payloads:
        places.append(np.arange(begin, begin + len(payload.tokens)))
        begin += len(payload.tokens)
    return Payload.merge(payloads, places)


def assert_joined_like_each_alone(made: list[Microbatch]) -> None:
    batch = made[0].batch
    joined = list(collate_joined([each.micro for each in made], together(made), batch, Arenas(2)))
    assert len(joined) == len(made)
    for found, each in zip(joined, made, strict=True):
        alone = collate(each.micro, each.payload, batch)
        assert list(found) == list(alone)
        for name, expected in alone.items():
            if isinstance(expected, np.ndarray):
                assert found[name].dtype == expected.dtype, name
                np.testing.assert_array_equal(found[name], expected, err_msg=name)
            else:
                assert found[name] == expected, name
                assert type(found[name]) is type(expected), name


@given(st.integers(2, 40).flatmap(lambda n: st.lists(full_microbatches(n), min_size=1, max_size=4)))
def test_full_rows_are_collated_together_as_each_alone(made):
    assert all(can_join(each.micro) for each in made)
    assert_joined_like_each_alone(made)


@given(st.lists(microbatches(), min_size=1, max_size=3))
def test_any_microbatches_are_collated_together_as_each_alone(made):
    batch = replace(made[0].batch, document_multiple=1)
    made = [each._replace(batch=batch) for each in made if can_join(each.micro)]
    if made:
        assert_joined_like_each_alone(made)


def test_what_needs_more_than_its_own_text_is_not_joined():
    packed = Batch(samples=1, sequence_length=8)
    assert may_join(packed)
    assert not may_join(replace(packed, layout="padded"))
    assert not may_join(replace(packed, columns=("caption",)))
    assert not may_join(replace(packed, image_token=3))
    assert not may_join(replace(packed, document_multiple=4))
    plan = microbatch([4, 4], rows=[0, 0], row_tokens=8).micro
    assert can_join(plan)
    assert not can_join(replace(plan, row_tokens=0))


def test_a_payload_of_other_lengths_than_planned_is_an_error_here_too():
    plan = MicroPlan(Samples.of_lengths(np.array([4, 4])), np.zeros(2, np.int64), 1, 8)
    payload = Payload(tokens=[np.arange(4), np.arange(5)], following=np.full(2, -100))
    with np.testing.assert_raises_regex(Exception, "was planned with 4 tokens and came with 5"):
        list(collate_joined([plan], payload, Batch(samples=1, sequence_length=8)))
