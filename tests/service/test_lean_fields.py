"""Arrays that do not travel: what the client computes is what was left out, byte for byte."""

from __future__ import annotations

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
from overlord.service.lean_fields import find_derivable
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


@given(EITHER_LAYOUT.flatmap(with_more))
def test_what_comes_out_is_what_went_in(made):
    (micro, payload, batch), weighted = made
    fields = collate(micro, payload, batch, None, weighted)
    found, listed = sent(fields)
    assert_same(found, fields)
    assert derived_of(listed) >= {"labels", "loss_mask", "position_ids"} & fields.keys()
    assert ("attention_mask" in derived_of(listed)) == ("attention_mask" in fields)


@given(EITHER_LAYOUT.flatmap(with_more), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_slices_stages_and_ranks_that_only_receive_come_out_as_they_went_in(made, cp, pp, is_receiver):
    (micro, payload, batch), weighted = made
    for part in cp_slices(collate(micro, payload, batch, None, weighted), cp):
        for stage in range(pp):
            fields = fields_for(part, stage, pp)
            if is_receiver:
                fields = receive_only(fields)
            assert_same(sent(fields)[0], fields)


@given(microbatches(), st.sampled_from(["labels", "loss_mask", "position_ids"]), st.integers(0))
def test_an_array_that_somebody_changed_is_sent(made, name, at):
    fields = collate(*made)
    if not fields["num_tokens"]:
        return
    changed = fields[name].copy()
    changed[at % len(changed)] ^= True if name == "loss_mask" else 64
    fields[name] = changed
    assert_same(sent(fields)[0], fields)


def test_a_token_takes_four_bytes_on_the_wire():
    lengths = [700, 1348, 2048, 4096] * 8
    rows = np.repeat(np.arange(8), 4)
    fields = collate(*microbatch(lengths, rows=rows, num_rows=8, row_tokens=8192))
    _, batches = pack_step(Delivery(0, 1, (fields,)), Arenas(4))
    assert sum(batch.get_total_buffer_size() for batch in batches) < 4.1 * 8 * 8192
    _, batches = pack_step(Delivery(0, 1, (fields,)))
    assert sum(batch.get_total_buffer_size() for batch in batches) > 17 * 8 * 8192


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("document_starts", np.array([0, 1 << 30], np.int32)),
        ("document_starts", np.array([-5, 4], np.int32)),
        ("document_lengths", np.array([4, 1 << 30], np.int32)),
        ("document_lengths", np.array([4], np.int32)),
        ("cu_seqlens", np.array([0, 1 << 30, 10], np.int32)),
        ("cu_seqlens", np.array([], np.int32)),
        ("cu_seqlens", np.array([[0, 10]], np.int32)),
        ("cu_seqlens", np.array([0.0, 10.0])),
        ("tokens", np.zeros(9, np.int32)),
        ("tokens", np.zeros(10, np.int64)),
        ("tokens", 5),
    ],
)
def test_fields_that_contradict_one_another_are_refused(name, value):
    fields = collate(*microbatch([4, 6]))
    regions = flight_steps._MessageRegions()
    derived = find_derivable(fields, Arenas(1), 0)
    listed = pack_fields(regions, fields | {name: value}, derived)
    with pytest.raises(DamagedStepError, match="fields labels, loss_mask, position_ids do not follow from those that came"):
        unpack_step(wire.Contents(0, 1, [listed]), regions_of(list(regions.batches())), Arenas(1))


@pytest.mark.strangers
@pytest.mark.parametrize(
    "extra",
    [
        {"labels": np.zeros(3, np.int64), "loss_mask": None},
        {"labels": None, "loss_mask": None},
        {"labels": np.zeros(2, np.int64)},
        {"labels": np.zeros(2, np.int64), "loss_mask": np.zeros(2, np.int64)},
        {"loss_mask": None},
        {"attention_mask": None},
        {"image_row": None},
        {"num_rows": None},
    ],
)
def test_a_derived_field_without_what_it_needs_is_refused(extra):
    fields = collate(*microbatch([4, 6]))
    regions = flight_steps._MessageRegions()
    listed = pack_fields(regions, fields | dict.fromkeys(extra), extra)
    with pytest.raises(DamagedStepError, match="do not follow from those that came"):
        unpack_step(wire.Contents(0, 1, [listed]), regions_of(list(regions.batches())), Arenas(1))
