"""Arrays that do not travel: what the client computes is what was left out, byte for byte."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.batches.buffers import Arenas
from overlord.batches.collate import collate
from overlord.batches.slices import cp_slices, fields_for, receive_only
from overlord.messages import Delivery, Fields
from overlord.service import flight_steps, wire
from overlord.service.flight_steps import pack_step, regions_of
from overlord.service.lean_fields import _TYPES, find_derivable
from overlord.service.steps import DamagedStepError, pack_fields, unpack_step
from tests.batches.microbatches import Microbatch, microbatch, microbatches

EITHER_LAYOUT = st.sampled_from(["packed", "padded"]).flatmap(microbatches)


def sent(fields: Fields, least_bytes: int = 0) -> tuple[Fields, list[wire.Field]]:
    regions = flight_steps._MessageRegions()
    listed = pack_fields(regions, fields, find_derivable(fields, Arenas(4), least_bytes))
    answer = wire.unpack_answer(wire.pack(wire.Contents(3, 1, [listed])))
    assert isinstance(answer, wire.Contents)
    return unpack_step(answer, regions_of(list(regions.batches())), Arenas(4)).microbatches[0], listed


def derived_of(listed: list[wire.Field]) -> set[str]:
    return {field.name for field in listed if isinstance(field, wire.Derived)}


def assert_same(found: Fields, expected: Fields) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        got: Any = found[name]
        if isinstance(value, np.ndarray):
            assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
            assert got.flags.c_contiguous, name
            assert got.flags.aligned, name
            assert not got.flags.writeable, name
        else:
            assert got == value, name


@st.composite
def with_more(draw, made: Microbatch) -> tuple[Microbatch, bool]:
    """Also with ignored samples, loss weights and image tokens, of which some lie on padding."""
    count = len(made.micro.samples)
    ignored = frozenset(draw(st.sets(st.integers(0, count - 1)))) if count and draw(st.booleans()) else frozenset()
    weighted = draw(st.booleans())
    batch = replace(made.batch, image_token=draw(st.sampled_from([None, 7, 1003])))
    return Microbatch(made.micro, replace(made.payload, ignored=ignored), batch), weighted


def bytes_of(fields: Fields) -> int:
    """Of the arrays with an entry for each place, as they are sent."""
    return sum(sent_bytes(field) for field in sent(fields)[1] if field.name in (*_TYPES, "tokens"))


def sent_bytes(field: wire.Field) -> int:
    array = field.exceptions if isinstance(field, wire.Derived) else field
    if array is None:
        return 0
    assert isinstance(array, wire.Array)
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


@given(EITHER_LAYOUT.flatmap(with_more))
def test_what_comes_out_is_what_went_in(made):
    (micro, payload, batch), weighted = made
    fields = collate(micro, payload, batch, None, weighted)
    found, _ = sent(fields)
    assert_same(found, fields)


@given(EITHER_LAYOUT.flatmap(with_more), st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.booleans())
def test_slices_stages_and_ranks_that_only_receive_come_out_as_they_went_in(made, cp, pp, is_receiver):
    (micro, payload, batch), weighted = made
    for part in cp_slices(collate(micro, payload, batch, None, weighted), cp):
        for stage in range(pp):
            fields = fields_for(part, stage, pp)
            if is_receiver:
                fields = receive_only(fields)
            found, listed = sent(fields)
            assert_same(found, fields)
            for field in listed:
                if field.name in _TYPES:
                    assert sent_bytes(field) <= fields[field.name].nbytes + 16


@given(
    st.lists(st.integers(-200, 3000), min_size=1, max_size=40),
    st.lists(st.sampled_from([-100, -1, 0, 5, 1 << 40, -(1 << 40)]), min_size=1, max_size=40),
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 50),
)
def test_arrays_of_any_values_come_out_as_they_went_in(positions, labels, mask, times):
    n = min(map(len, (positions, labels, mask))) * times
    fields: Fields = {
        "labels": np.repeat(labels, times)[:n].astype(np.int64),
        "loss_mask": np.repeat(mask, times)[:n],
        "position_ids": np.repeat(positions, times)[:n].astype(np.int32),
        "image_row": np.cumsum(np.ones(n, np.int32), dtype=np.int32) + positions[0],
        "attention_mask": np.repeat(mask, times)[:n][::-1],
    }
    assert_same(sent(fields)[0], {name: np.ascontiguousarray(array) for name, array in fields.items()})
    tokens = fields["labels"].astype(np.int32)
    assert_same(sent({"tokens": tokens} | fields)[0], {"tokens": tokens} | fields)


@given(microbatches(), st.sampled_from(["labels", "loss_mask", "position_ids"]), st.integers(0))
def test_an_array_that_somebody_changed_is_sent(made, name, at):
    fields = collate(*made)
    if not fields["num_tokens"]:
        return
    changed = fields[name].copy()
    changed[at % len(changed)] ^= True if name == "loss_mask" else 64
    fields[name] = changed
    assert_same(sent(fields)[0], fields)


LENGTHS = [700, 1348, 2048, 4096] * 8
FOUR_ROWS = {"rows": np.repeat(np.arange(8), 4), "num_rows": 8, "row_tokens": 8192}


def wire_bytes(fields: Fields) -> int:
    _, batches = pack_step(Delivery(0, 1, (fields,)), Arenas(4))
    return sum(batch.get_total_buffer_size() for batch in batches)


def test_a_token_takes_four_bytes_on_the_wire():
    fields = collate(*microbatch(LENGTHS, **FOUR_ROWS))
    assert wire_bytes(fields) < 4.1 * 8 * 8192
    _, batches = pack_step(Delivery(0, 1, (fields,)))
    assert sum(batch.get_total_buffer_size() for batch in batches) > 17 * 8 * 8192


@pytest.mark.parametrize("cp", [2, 4])
def test_a_token_of_a_slice_takes_four_bytes_too(cp):
    for part in cp_slices(collate(*microbatch(LENGTHS, **FOUR_ROWS)), cp):
        assert part["num_tokens"] == 8 * 8192 / cp
        assert wire_bytes(part) < 4.2 * part["num_tokens"]


@pytest.mark.parametrize(("stage", "num_bytes"), [(0, 4.1), (1, 0.1), (2, 4.1)])
def test_a_pipeline_stage_gets_no_more_than_four_bytes_a_token(stage, num_bytes):
    fields = fields_for(collate(*microbatch(LENGTHS, **FOUR_ROWS)), stage, 3)
    assert wire_bytes(fields) < num_bytes * 8 * 8192


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_padded_token_takes_four_bytes_and_masks_of_prompts_a_few_bits(cp):
    made = microbatch([900] * 64, rows=range(64), num_rows=64, layout="padded")
    masks = [(np.arange(901) % 300 >= 100).astype(np.uint8) for _ in range(64)]
    for part in cp_slices(collate(made.micro, replace(made.payload, loss_masks=masks), made.batch), cp):
        assert {"labels", "loss_mask", "position_ids", "attention_mask"} <= derived_of(sent(part)[1])
        assert bytes_of(part) < 4.2 * part["num_tokens"]


def test_labels_that_do_not_fit_into_four_bytes_are_sent_in_eight():
    labels = np.full(9000, 1 << 40)
    found, listed = sent({"labels": labels})
    assert_same(found, {"labels": labels})
    assert not derived_of(listed)


CONTRADICTIONS: list[tuple[str, Any, Any]] = [
    ("position_ids", (10,), np.array([[0, 20], [0, 0]], np.int32)),
    ("position_ids", (10,), np.array([[-1, 2], [0, 0]], np.int32)),
    ("position_ids", (10,), np.array([[3, 2], [0, 0]], np.int32)),
    ("position_ids", (10,), np.array([[2, 3], [0, 0]], np.int32)),
    ("position_ids", (10,), np.array([[], []], np.int32)),
    ("position_ids", (10,), np.array([0, 1], np.int32)),
    ("position_ids", (10,), np.array([[0.0], [0.0]])),
    ("position_ids", (10,), None),
    ("position_ids", (1 << 40, 1 << 40), np.array([[0], [0]], np.int32)),
    ("position_ids", (0,), np.array([[0], [0]], np.int32)),
    ("labels", (10,), np.array([[10], [0]], np.int32)),
    ("labels", (10,), np.array([[0], [0]], np.int16)),
    ("labels", (10,), np.zeros((3, 10), np.int32)),
    ("labels", (9,), np.array([[0], [0]], np.int32)),
    ("labels", (10,), np.zeros(9, np.int32)),
    ("labels", (10,), None),
    ("loss_mask", (10,), None),
    ("loss_mask", (10,), np.array([4, 10], np.int32)),
    ("loss_mask", (10,), np.array([4, 4], np.int32)),
    ("loss_mask", (10,), np.zeros(1, np.uint8)),
    ("loss_mask", (10,), np.zeros(10, np.bool_)),
    ("attention_mask", (10,), None),
    ("num_rows", (10,), None),
]


@pytest.mark.strangers
@pytest.mark.parametrize(("name", "shape", "exceptions"), CONTRADICTIONS)
def test_what_contradicts_other_fields_is_refused(name, shape, exceptions):
    regions = flight_steps._MessageRegions()
    extra = None if exceptions is None else regions.add(name, exceptions)
    listed = [regions.add("tokens", np.zeros(10, np.int32)), wire.Derived(name, shape, extra)]
    with pytest.raises(DamagedStepError, match=f"fields {name} do not follow from those that came"):
        unpack_step(wire.Contents(0, 1, [listed]), regions_of(list(regions.batches())), Arenas(1))


@pytest.mark.strangers
@pytest.mark.parametrize("mask", [(9,), (2, 5)])
def test_masks_and_labels_of_different_places_are_refused(mask):
    regions = flight_steps._MessageRegions()
    labels = wire.Derived("labels", (10,), regions.add("labels", np.array([[9], [0]], np.int32)))
    for switches in (None, np.array([4], np.int32)):
        extra = None if switches is None else regions.add("loss_mask", switches)
        listed = [regions.add("tokens", np.zeros(10, np.int32)), labels, wire.Derived("loss_mask", mask, extra)]
        if mask == (2, 5) and switches is not None:
            continue
        with pytest.raises(DamagedStepError, match="do not follow from those that came"):
            unpack_step(wire.Contents(0, 1, [listed]), regions_of(list(regions.batches())), Arenas(1))


@pytest.mark.strangers
def test_labels_without_tokens_are_refused():
    regions = flight_steps._MessageRegions()
    listed: list[wire.Field] = [wire.Derived("labels", (10,), regions.add("labels", np.array([[9], [0]], np.int32)))]
    with pytest.raises(DamagedStepError, match="not one token for each of 10 labels"):
        unpack_step(wire.Contents(0, 1, [listed]), regions_of(list(regions.batches())), Arenas(1))
