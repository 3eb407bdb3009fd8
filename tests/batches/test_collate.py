"""Packed and padded batches against a slow, obvious reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given

from overlord.batches.collate import collate
from overlord.batches.text_fields import PADDING_SEGMENT
from overlord.errors import DataError, SpecError
from tests.batches.microbatches import Microbatch, microbatch, microbatches


def reference(made: Microbatch, row_width: int) -> dict[str, list[list[int]]]:
    """Row by row, document by document, token by token; `row_width` 0 means as long as the documents."""
    micro, payload, batch = made
    fields = {name: [] for name in ("tokens", "labels", "position_ids")}
    num_rows = micro.num_rows if row_width else 1
    for r in range(num_rows):
        row = {name: [] for name in fields}
        for i in range(len(micro.samples)):
            if row_width and micro.row[i] != r:
                continue
            document = payload.tokens[i].tolist()
            for t, token in enumerate(document):
                label = document[t + 1] if t + 1 < len(document) else int(payload.following[i])
                mask = payload.loss_masks[i] if payload.loss_masks is not None else None
                if label < 0 or i in payload.ignored or (mask is not None and mask[t + 1] == 0):
                    label = -100
                row["tokens"].append(token)
                row["labels"].append(label)
                row["position_ids"].append(t)
            pads = -len(document) % batch.document_multiple if batch.layout == "packed" else 0
            row["tokens"] += [batch.pad_token] * pads
            row["labels"] += [-100] * pads
            row["position_ids"] += range(len(document), len(document) + pads)
        missing = max(row_width - len(row["tokens"]), 0)
        row["tokens"] += [batch.pad_token] * missing
        row["labels"] += [-100] * missing
        if batch.layout == "padded":
            row["position_ids"] = list(range(row_width))
        else:
            piece = -(-PADDING_SEGMENT // batch.document_multiple) * batch.document_multiple
            row["position_ids"] += [k % piece for k in range(missing)]
        for name in fields:
            fields[name].append(row[name])
    return fields


@given(microbatches())
def test_a_packed_batch_equals_the_obvious_reference(made: Microbatch):
    batch = collate(*made)
    for name, rows in reference(made, made.micro.row_tokens).items():
        assert batch[name].tolist() == [value for row in rows for value in row], name


@given(microbatches("padded"))
def test_a_padded_batch_equals_the_obvious_reference(made: Microbatch):
    batch = collate(*made)
    width = batch["tokens"].shape[1]
    for name, rows in reference(made, width).items():
        if width:
            assert batch[name].tolist() == rows, name
    lengths = np.zeros(made.micro.num_rows, int)
    lengths[made.micro.row] = made.micro.samples.tokens
    assert batch["attention_mask"].sum(axis=1).tolist() == lengths.tolist()
    assert [int(row.argmin()) for row in batch["attention_mask"] if not row.all()] == [int(n) for n in lengths if n < width]


@given(microbatches())
def test_packing_keeps_every_token_once_and_in_order(made: Microbatch):
    batch = collate(*made)
    for start, length, document in zip(
        batch["document_starts"], batch["document_lengths"], made.payload.tokens, strict=True
    ):
        assert batch["tokens"][start : start + length].tolist() == document.tolist()
    padding = batch["num_tokens"] - batch["document_lengths"].sum()
    assert (batch["tokens"] == made.batch.pad_token).sum() == padding


@given(microbatches())
def test_segments_are_the_documents_and_short_runs_of_padding(made: Microbatch):
    batch = collate(*made)
    bounds = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
    lengths = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == len(batch["tokens"]) == batch["num_tokens"]
    assert (lengths > 0).all()
    assert batch["max_seqlen"] == max(lengths, default=0)
    with_text = batch["document_lengths"] > 0
    assert set(batch["document_starts"][with_text]) <= set(bounds[:-1])
    is_document = np.isin(bounds[:-1], batch["document_starts"][with_text])
    assert (lengths[~is_document] <= PADDING_SEGMENT).all()
    assert not (lengths % made.batch.document_multiple).any()
    if made.micro.row_tokens:  # no segment reaches over the end of a row
        assert set(range(0, batch["num_tokens"] + 1, made.micro.row_tokens)) <= set(bounds.tolist())


@given(microbatches())
def test_loss_tokens_counted_by_labels_are_those_the_plan_counted(made: Microbatch):
    payload = replace(made.payload, loss_masks=None)
    batch = collate(made.micro, payload, made.batch)
    lengths = made.micro.samples.tokens
    goes_on = (payload.following >= 0) & (lengths > 0)
    assert batch["loss_mask"].sum() == made.micro.samples.loss_tokens.sum() + goes_on.sum()


@given(microbatches().filter(lambda made: made.batch.document_multiple > 1))
def test_real_lengths_are_those_of_documents_and_zero_for_padding(made: Microbatch):
    batch = collate(*made)
    documents = zip(batch["document_starts"].tolist(), batch["document_lengths"].tolist(), strict=True)
    length_at = {start: length for start, length in documents if length}
    begins = batch["cu_seqlens_padded"][:-1].tolist()
    assert np.diff(batch["cu_seqlens"]).tolist() == [length_at.get(begin, 0) for begin in begins]


def test_real_and_padded_lengths_follow_transformer_engine():
    batch = collate(*microbatch([1, 2, 1, 2], document_multiple=2, row_tokens=12))
    assert batch["tokens"].tolist() == [1000, 7, 1001, 1002, 1003, 7, 1004, 1005, 7, 7, 7, 7]
    assert batch["cu_seqlens"].tolist() == [0, 1, 3, 4, 6, 6]
    assert batch["cu_seqlens_padded"].tolist() == [0, 2, 4, 6, 8, 12]


def test_dtypes_are_what_torch_and_attention_kernels_take():
    batch = collate(*microbatch([5, 3], document_multiple=4))
    dtypes = {name: value.dtype.name for name, value in batch.items() if isinstance(value, np.ndarray)}
    assert dtypes == {
        "tokens": "int32",
        "labels": "int64",
        "loss_mask": "bool",
        "position_ids": "int32",
        "cu_seqlens": "int32",
        "cu_seqlens_padded": "int32",
        "document_starts": "int32",
        "document_lengths": "int32",
        "document_sources": "int32",
        "document_chunks": "int64",
        "document_rows": "int32",
    }
    logits = torch.zeros(8, 2000)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["labels"][:8]), reduction="sum")
    assert loss.item() == pytest.approx(batch["loss_mask"][:8].sum() * np.log(2000), rel=1e-5)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_tokens_of_any_integer_type_come_out_as_int32(dtype):
    made = microbatch([3, 4])
    payload = replace(made.payload, tokens=[document.astype(dtype) for document in made.payload.tokens])
    batch = collate(made.micro, payload, made.batch)
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].tolist() == list(range(1000, 1007))


def test_an_empty_row_is_cut_so_that_attention_over_it_stays_cheap():
    batch = collate(*microbatch([100], num_rows=2, row_tokens=8192))
    assert batch["max_seqlen"] == PADDING_SEGMENT
    assert batch["tokens"].reshape(2, -1).shape == (2, 8192)
    assert not batch["loss_mask"][8192:].any()


def test_no_loss_is_taken_on_samples_whose_decode_failed():
    made = microbatch([3, 4, 2])
    batch = collate(made.micro, replace(made.payload, ignored=frozenset({1})), made.batch)
    assert batch["labels"].tolist() == [1001, 1002, -100, -100, -100, -100, -100, 1008, -100]


def test_a_microbatch_without_samples_is_all_padding():
    batch = collate(*microbatch([], num_rows=2, row_tokens=4))
    assert batch["tokens"].tolist() == [7] * 8
    assert batch["num_documents"] == 0
    assert collate(*microbatch([]))["cu_seqlens"].tolist() == [0]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_samples_without_text_carry_images_and_columns_only(layout):
    made = microbatch([0, 0, 0], rows=[0, 1, 2], num_rows=3, layout=layout)
    images = [[np.full((4, 6, 3), i, np.uint8)] * i for i in range(3)]
    payload = replace(made.payload, images=images, columns={"caption": pa.array(["a", "b", "c"])})
    batch = collate(made.micro, payload, made.batch)
    assert batch["num_tokens"] == 0
    assert batch["images"].shape == (3, 4, 6, 3)
    assert batch["images"][:, 0, 0, 0].tolist() == [1, 2, 2]
    assert batch["image_document"].tolist() == [1, 2, 2]
    assert batch["caption"].to_pylist() == ["a", "b", "c"]


def test_images_of_different_sizes_come_as_a_list():
    made = microbatch([2, 2])
    images = [[np.zeros((4, 6, 3), np.uint8)], [np.zeros((5, 6, 3), np.uint8)]]
    batch = collate(made.micro, replace(made.payload, images=images), made.batch)
    assert [image.shape for image in batch["images"]] == [(4, 6, 3), (5, 6, 3)]


def test_documents_without_images_among_images_leave_an_empty_stack():
    made = microbatch([2, 2])
    batch = collate(made.micro, replace(made.payload, images=[[], []]), made.batch)
    assert batch["images"].shape == (0, 0, 0, 3)
    assert batch["image_document"].tolist() == []


def test_a_padded_batch_is_as_wide_as_its_longest_document_or_as_asked():
    rows = {"rows": [0, 1], "num_rows": 3, "layout": "padded"}
    assert collate(*microbatch([3, 5], **rows))["tokens"].shape == (3, 5)
    assert collate(*microbatch([3, 5], **rows, document_multiple=4))["tokens"].shape == (3, 8)
    assert collate(*microbatch([3, 5], **rows, row_tokens=16))["tokens"].shape == (3, 16)


@pytest.mark.strangers
def test_a_rank_without_documents_still_has_padded_rows_of_one_place():
    made = microbatch([], rows=[], num_rows=2, layout="padded", document_multiple=4)
    batch = collate(*made)
    assert batch["tokens"].shape == batch["attention_mask"].shape == (2, 4)
    assert not batch["loss_mask"].any()


@pytest.mark.strangers
@given(microbatches() | microbatches("padded"))
def test_loss_weights_lie_where_the_labels_are_that_they_weigh(made: Microbatch):
    rng = np.random.default_rng(len(made.payload.tokens))
    weights = [(rng.integers(0, 5, len(tokens) + 1) / 4).astype(np.float32) for tokens in made.payload.tokens]
    payload = replace(made.payload, loss_masks=[w if i % 3 else None for i, w in enumerate(weights)])
    batch = collate(made.micro, payload, made.batch, weighted=True)
    flat, labels = batch["loss_weights"].ravel(), batch["labels"].ravel()
    expected = np.zeros(len(flat), np.float32)
    for i, (start, tokens) in enumerate(zip(batch["document_starts"].tolist(), payload.tokens, strict=True)):
        own = weights[i][1:] if i % 3 else np.ones(len(tokens), np.float32)
        expected[start : start + len(tokens)] = np.where(labels[start : start + len(tokens)] != -100, own, 0)
    assert np.array_equal(flat, expected)
    assert np.array_equal(flat > 0, batch["loss_mask"].ravel())
    plain = collate(made.micro, payload, made.batch)
    assert set(batch) - set(plain) == {"loss_weights"}
    assert np.array_equal(plain["labels"], batch["labels"])


def test_a_row_that_came_back_different_is_named():
    made = microbatch([3, 4])
    payload = replace(made.payload, tokens=[made.payload.tokens[0], made.payload.tokens[1][:2]])
    with pytest.raises(DataError, match=r"row 1 of chunk 0 of source 'samples'.*4 tokens and came with 2"):
        collate(made.micro, payload, made.batch)


def test_a_plan_that_overfills_a_row_is_refused():
    with pytest.raises(SpecError, match=r"put 12 tokens, .* in row 0 of a microbatch whose rows hold 8"):
        collate(*microbatch([5, 3], row_tokens=8, document_multiple=4))
    with pytest.raises(SpecError, match="row 2 of a microbatch of 2 rows"):
        collate(*microbatch([5], rows=[2], num_rows=2, row_tokens=8))
    with pytest.raises(SpecError, match="one document a row"):
        collate(*microbatch([5, 3], layout="padded"))


def test_a_loss_mask_of_another_length_is_refused():
    made = microbatch([3])
    with pytest.raises(DataError, match=r"needs 4 entries .* not 3"):
        collate(made.micro, replace(made.payload, loss_masks=[np.ones(3, np.uint8)]), made.batch)


def test_a_column_cannot_take_the_name_of_a_field():
    made = microbatch([3])
    with pytest.raises(SpecError, match=r"\['labels'\].*rename the column"):
        collate(made.micro, replace(made.payload, columns={"labels": pa.array([1])}), made.batch)
