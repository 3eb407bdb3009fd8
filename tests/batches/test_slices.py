"""Slices, stages and broadcasts: what ranks see must add up to the microbatch, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.batches.collate import collate
from overlord.batches.slices import (
    cp_slice,
    cp_slices,
    fields_for,
    join_cp,
    receive_only,
)
from overlord.declare.mesh import StageFields
from overlord.errors import SpecError
from tests.batches.microbatches import Microbatch, microbatch, microbatches

either_layout = st.sampled_from(["packed", "padded"]).flatmap(microbatches)
cp_sizes = st.integers(1, 8)


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, np.ndarray):
            assert value.dtype == right[name].dtype, name
            np.testing.assert_array_equal(value, right[name], err_msg=name)
        else:
            assert value == right[name], name


@given(either_layout, cp_sizes)
def test_joined_slices_give_the_whole(made: Microbatch, cp: int):
    batch = collate(*made)
    assert_same(join_cp(cp_slices(batch, cp)), batch)


@given(either_layout, cp_sizes)
def test_a_rank_gets_the_same_slice_alone_as_with_the_others(made: Microbatch, cp: int):
    batch = collate(*made)
    for index, fields in enumerate(cp_slices(batch, cp)):
        assert_same(cp_slice(batch, cp, index), fields)
        assert all(value.flags.c_contiguous for value in fields.values() if isinstance(value, np.ndarray))


@given(microbatches(), cp_sizes)
def test_each_segment_is_dealt_in_zig_zag(made: Microbatch, cp: int):
    batch = collate(*made)
    bounds = batch.get("cu_seqlens_padded", batch["cu_seqlens"]).tolist()
    for index, fields in enumerate(cp_slices(batch, cp)):
        expected = []
        for begin, end in pairwise(bounds):
            q, longer = divmod(end - begin, 2 * cp)
            ends = np.cumsum([begin] + [q] * (2 * cp - longer) + [q + 1] * longer)
            for chunk in (index, 2 * cp - 1 - index):
                expected += batch["tokens"][ends[chunk] : ends[chunk + 1]].tolist()
        assert fields["tokens"].tolist() == expected


@given(microbatches(), cp_sizes)
def test_ranks_differ_by_at_most_one_place_a_segment(made: Microbatch, cp: int):
    batch = collate(*made)
    sizes = [fields["num_tokens"] for fields in cp_slices(batch, cp)]
    assert sum(sizes) == batch["num_tokens"]
    assert max(sizes) - min(sizes) <= len(batch["cu_seqlens"]) - 1
    if made.batch.document_multiple % (2 * cp) == 0:
        assert len(set(sizes)) == 1


@given(either_layout, cp_sizes)
def test_loss_tokens_of_all_ranks_are_those_of_the_whole(made: Microbatch, cp: int):
    batch = collate(*made)
    slices = cp_slices(batch, cp)
    assert sum(fields["loss_mask"].sum() for fields in slices) == batch["loss_mask"].sum()
    for fields in slices:
        np.testing.assert_array_equal(fields["loss_mask"], fields["labels"] != -100)


@given(either_layout, st.integers(1, 4), st.integers(1, 4))
def test_stages_and_slices_can_be_taken_in_either_order(made: Microbatch, cp: int, num_stages: int):
    batch = collate(*made)
    for stage in range(num_stages):
        staged = cp_slices(fields_for(batch, stage, num_stages), cp)
        for fields, other in zip(staged, cp_slices(batch, cp), strict=True):
            assert_same(fields, fields_for(other, stage, num_stages))


def test_attention_facts_stay_those_of_the_whole_microbatch():
    batch = collate(*microbatch([8, 16], document_multiple=8))
    fields = cp_slice(batch, 4, 1)
    assert fields["cu_seqlens"].tolist() == [0, 8, 24]
    assert fields["max_seqlen"] == 16
    assert fields["num_tokens"] == len(fields["tokens"]) == 6
    assert fields["tokens"].tolist() == [1001, 1006, 1010, 1011, 1020, 1021]
    assert fields["position_ids"].tolist() == [1, 6, 2, 3, 12, 13]


def multimodal() -> dict:
    made = microbatch([3, 5])
    payload = replace(
        made.payload,
        images=[[np.zeros((4, 4, 3), np.uint8)], [np.ones((4, 4, 3), np.uint8)]],
        columns={"url": pa.array(["a", "b"])},
    )
    return collate(made.micro, payload, made.batch) | {"loss_tokens": 1234}


def test_every_context_parallel_rank_gets_all_images_and_columns():
    batch = multimodal()
    for fields in cp_slices(batch, 2):
        np.testing.assert_array_equal(fields["images"], batch["images"])
        assert fields["image_document"].tolist() == [0, 1]
        assert fields["url"].to_pylist() == ["a", "b"]


def test_pipeline_stages_get_only_what_they_need():
    batch = multimodal()
    facts = {
        "cu_seqlens",
        "max_seqlen",
        "num_documents",
        "num_rows",
        "num_tokens",
        "document_starts",
        "document_lengths",
        "document_sources",
        "document_chunks",
        "document_rows",
        "loss_tokens",
    }
    assert fields_for(batch, 0, 1).keys() == batch.keys()
    facts |= {"position_ids"}
    first = {"tokens", "images", "image_document", "url"}
    assert fields_for(batch, 0, 3).keys() == facts | first
    assert fields_for(batch, 1, 3).keys() == facts
    assert fields_for(batch, 2, 3).keys() == facts | {"labels", "loss_mask", "url"}


def test_the_last_stage_embeds_tokens_for_multi_token_prediction():
    batch, stages = multimodal(), StageFields({"tokens": (0, -1), "labels": "all", "url": (1,)})
    have = [fields_for(batch, rank, 3, stages).keys() for rank in range(3)]
    assert ["tokens" in names for names in have] == [True, False, True]
    assert ["labels" in names for names in have] == [True, True, True]
    assert ["url" in names for names in have] == [False, True, False]
    assert ["loss_mask" in names for names in have] == [False, False, True]


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["loop", "v"]),
    st.dictionaries(
        st.sampled_from(["tokens", "labels", "cu_seqlens", "position_ids"]), st.sets(st.integers(-2, 1), max_size=3)
    ),
)
def test_a_rank_with_several_chunks_gets_the_fields_of_all_its_stages(pp, chunks, placement, named):
    num_stages = pp * chunks
    fields = {name: tuple(s for s in stages if -num_stages <= s < num_stages) for name, stages in named.items()}
    stages = StageFields(fields, chunks=chunks, placement=placement)
    stages.check_pipeline(pp)
    held = [stages.stages_of(rank, pp) for rank in range(pp)]
    assert sorted(stage for of_rank in held for stage in of_rank) == list(range(num_stages))
    alone = StageFields(fields)  # one rank for each stage
    for rank in range(pp):
        for name in ("tokens", "labels", "position_ids", "cu_seqlens"):
            of_stages = any(alone.goes_to(name, stage, num_stages) for stage in held[rank])
            assert stages.goes_to(name, rank, pp) == of_stages


def test_a_pipeline_shaped_like_a_v_has_its_first_and_last_stage_on_the_first_rank():
    stages = StageFields(chunks=2, placement="v")
    assert [stages.stages_of(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    have = [fields_for(multimodal(), rank, 4, stages).keys() for rank in range(4)]
    assert ["tokens" in names and "labels" in names for names in have] == [True, False, False, False]
    assert StageFields(chunks=3).stages_of(1, 2) == (1, 3, 5)


def test_all_fields_go_everywhere_when_nothing_is_to_be_cut():
    batch = multimodal()
    assert all(fields_for(batch, rank, 4, StageFields("all")).keys() == batch.keys() for rank in range(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageFields({"tokens": 0}), r"'all' or a tuple such as \(0, -1\), got 0"),  # pyright: ignore[reportArgumentType]
        (lambda: StageFields({"tokens": ("first",)}), "whole numbers, 0 for the first"),  # pyright: ignore[reportArgumentType]
        (lambda: StageFields("some"), "or 'all', got 'some'"),  # pyright: ignore[reportArgumentType]
        (lambda: StageFields(chunks=0), "chunks of StageFields must be at least 1"),
        (lambda: StageFields(placement="w"), "'loop' or 'v', not 'w'"),  # pyright: ignore[reportArgumentType]
        (lambda: StageFields({"tokens": (0, 4)}).check_pipeline(4), "have stages 0 to 3; -1 is always the last"),
    ],
)
def test_stages_that_make_no_sense_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_a_rank_that_only_receives_can_allocate_what_will_be_broadcast():
    batch = multimodal()
    fields = receive_only(batch)
    assert fields["broadcast"] == {
        "tokens": ((8,), "int32"),
        "labels": ((8,), "int64"),
        "position_ids": ((8,), "int32"),
        "loss_mask": ((8,), "bool"),
        "images": ((2, 4, 4, 3), "uint8"),
    }
    assert fields["cu_seqlens"].tolist() == [0, 3, 8]
    assert fields["url"].to_pylist() == ["a", "b"]
    assert not fields.keys() & fields["broadcast"].keys()
    allocated = {name: np.empty(shape, dtype) for name, (shape, dtype) in fields["broadcast"].items()}
    assert {name: value.nbytes for name, value in allocated.items()} == {
        name: batch[name].nbytes for name in fields["broadcast"]
    }


def test_a_receiver_learns_the_size_of_each_image_when_they_differ():
    batch = multimodal() | {"images": [np.zeros((4, 6, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)]}
    assert receive_only(batch)["broadcast"]["images"] == [((4, 6, 3), "uint8"), ((2, 2, 3), "uint8")]


def test_ranks_and_stages_that_do_not_exist_are_refused():
    batch = collate(*microbatch([3]))
    with pytest.raises(SpecError, match="cp=2 has ranks 0 to 1, not 2"):
        cp_slice(batch, 2, 2)
    with pytest.raises(SpecError, match="at least 1 context-parallel rank, got 0"):
        cp_slices(batch, 0)
    with pytest.raises(SpecError, match="3 ranks has ranks 0 to 2, not 3"):
        fields_for(batch, 3, 3)
