"""Layouts of frameworks: names, dtypes and shapes, and that a loss over them is the loss over the microbatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import overlord as ol
from tests.small_sources import Numbered, job_of

SOURCES = {"a": Numbered(rows=40, first=1, longest=40)}
PACKED = ol.Batch(tokens=128, sequence_length=32)
PADDED = ol.Batch(samples=6, sequence_length=32, layout="padded")
MULTIPLE = ol.Batch(tokens=128, sequence_length=32, document_multiple=4)
VOCABULARY = 64


def micros(batch: ol.Batch, **options: Any) -> list[Any]:
    with ol.start(job_of(SOURCES, batch)) as loader:
        client = loader.client(0, timeout_s=30, **options)
        return [micro for _ in range(3) for micro in next(client)]


def shapes(fields: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in fields.items()
        if hasattr(value, "dtype")
    }


@pytest.mark.parametrize("options", [{}, {"torch": True}], ids=["numpy", "torch"])
def test_the_dtypes_and_shapes_are_those_of_the_frameworks(options):
    for micro in micros(PACKED, **options):
        n, segments = micro["num_tokens"], len(micro["cu_seqlens"])
        row = ("int64", (1, n))
        assert shapes(ol.formats.huggingface(micro)) == {
            "input_ids": row,
            "position_ids": row,
            "labels": row,
            "shift_labels": row,
        }
        flash = ol.formats.huggingface(micro, flash=True)
        assert shapes(flash)["cu_seq_lens_q"] == shapes(flash)["cu_seq_lens_k"] == ("int32", (segments,))
        assert flash["max_length_q"] == flash["max_length_k"] == micro["max_seqlen"]
        assert type(flash["max_length_q"]) is int
        batch = ol.formats.megatron(micro)
        assert batch.pop("attention_mask") is None
        assert shapes(batch) == {
            "tokens": row,
            "position_ids": row,
            "labels": row,
            "loss_mask": ("float32", (1, n)),
            "cu_seqlens": ("int32", (1, segments)),
            "max_seqlen": ("int32", (1,)),
        }
        assert int(batch["max_seqlen"][0]) == micro["max_seqlen"]
        inputs, labels = ol.formats.torchtitan(micro)
        assert shapes(inputs) == {"input": row, "positions": row}
        assert shapes({"": labels}) == {"": row}
        for name, value in (*batch.items(), *inputs.items()):
            assert isinstance(value, torch.Tensor if options else np.ndarray), name


@pytest.mark.parametrize("options", [{}, {"torch": True}], ids=["numpy", "torch"])
def test_padded_microbatches_are_as_wide_as_their_longest_document(options):
    for micro in micros(PADDED, **options):
        found = ol.formats.huggingface(micro)
        rows, width = found["input_ids"].shape
        assert width == int(max(micro["document_lengths"]))
        assert shapes(found)["attention_mask"] == ("int64", (rows, width))
        assert int(found["attention_mask"].sum()) == int(micro["document_lengths"].sum())
        assert "cu_seqlens" not in ol.formats.megatron(micro)
        assert ol.formats.torchtitan(micro)[1].shape == (rows, width)


def test_with_padded_documents_both_bounds_are_there():
    for micro in micros(MULTIPLE):
        batch = ol.formats.megatron(micro)
        assert batch["cu_seqlens_padded"].tolist() == [micro["cu_seqlens_padded"].tolist()]
        assert batch["cu_seqlens"].tolist() == [micro["cu_seqlens"].tolist()]
        assert ol.formats.huggingface(micro, flash=True)["cu_seq_lens_q"][-1] == micro["num_tokens"]


def test_the_loss_of_each_framework_is_the_loss_of_the_microbatch():
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for micro in micros(PACKED, torch=True):
        small = {**micro, "tokens": micro["tokens"] % VOCABULARY, "labels": micro["labels"].clone()}
        has_loss = small["labels"] != -100
        small["labels"][has_loss] %= VOCABULARY
        expected = functional.cross_entropy(table[small["tokens"].long()], small["labels"], reduction="sum")
        hf = ol.formats.huggingface(small)  # as transformers' ForCausalLMLoss: shift_labels are taken as they are
        logits = table[hf["input_ids"]].view(-1, VOCABULARY)
        assert torch.equal(functional.cross_entropy(logits, hf["shift_labels"].view(-1), reduction="sum"), expected)
        assert int(hf["labels"].ne(-100).sum()) == int(has_loss.sum())  # what its Trainer divides by
        batch = ol.formats.megatron(small)  # the loss of every label, then masked
        losses = functional.cross_entropy(
            table[batch["tokens"]].view(-1, VOCABULARY), batch["labels"].view(-1), reduction="none"
        )
        assert torch.isclose((losses * batch["loss_mask"].view(-1)).sum(), expected)
        inputs, labels = ol.formats.torchtitan(small)
        logits = table[inputs["input"]].flatten(0, 1)
        assert torch.equal(
            functional.cross_entropy(logits, labels.flatten(0, 1), reduction="sum", ignore_index=-100), expected
        )


def test_weights_of_labels_are_the_mask_of_megatron():
    micro = micros(PACKED)[0]
    weights = micro["loss_mask"] * np.float32(0.5)
    assert ol.formats.megatron({**micro, "loss_weights": weights})["loss_mask"].tolist() == [weights.tolist()]


def test_fields_of_other_stages_are_left_out_and_others_kept_by_name():
    micro = micros(PACKED)[0]
    first = {name: value for name, value in micro.items() if name not in ("labels", "loss_mask")}
    assert "labels" not in ol.formats.huggingface(first)
    assert "loss_mask" not in ol.formats.megatron(first)
    assert ol.formats.torchtitan(first)[1] is None
    kept = ol.formats.megatron(micro, keep=("document_sources",))
    assert kept["document_sources"] is micro["document_sources"]
    with pytest.raises(ol.errors.SpecError, match="keep names 'images', and the microbatch has cu_seqlens, document_"):
        ol.formats.huggingface(micro, keep=("images",))
    with pytest.raises(ol.errors.SpecError, match=r"made of one microbatch, got Step: iterate over the step"):
        ol.formats.huggingface(ol.Step(0, 1, (micro,)))  # pyright: ignore[reportArgumentType]
