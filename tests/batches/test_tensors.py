"""Tensors over the memory of a batch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from overlord.batches.collate import collate
from overlord.batches.tensors import Destination, copy_arrays, to_torch
from overlord.errors import SpecError
from tests.batches.microbatches import microbatch


def test_tensors_share_the_memory_of_the_arrays():
    batch = collate(*microbatch([3, 5], document_multiple=4))
    tensors = to_torch(batch)
    assert tensors.keys() == batch.keys()
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            assert tensors[name].data_ptr() == value.ctypes.data, name
            np.testing.assert_array_equal(tensors[name].numpy(), value)
        else:
            assert tensors[name] == value, name
    assert tensors["tokens"].dtype == torch.int32
    assert tensors["labels"].dtype == torch.int64
    assert tensors["loss_mask"].dtype == torch.bool


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_])
def test_read_only_arrays_are_shared_without_a_warning(dtype):
    array = np.frombuffer(np.ones(6, dtype).tobytes(), dtype).reshape(2, 3)
    assert not array.flags.writeable
    tensor = to_torch({"tokens": array})["tokens"]
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()


def test_a_tensor_keeps_its_memory_alive():
    array = np.arange(1_000_000, dtype=np.int64)
    array.flags.writeable = False
    tensor = to_torch({"tokens": array})["tokens"]
    del array
    np.zeros(1_000_000, np.int64)  # would land on the freed memory
    assert tensor[123_456].item() == 123_456


def test_empty_arrays_lists_of_images_and_columns_pass():
    images = [np.zeros((2, 3, 3), np.uint8), np.zeros((1, 1, 3), np.uint8)]
    column = pa.array(["a"])
    empty = np.empty((0, 0, 0, 3), np.uint8)
    tensors = to_torch({"images": images, "none": empty, "url": column, "num_rows": 2})
    assert [tuple(image.shape) for image in tensors["images"]] == [(2, 3, 3), (1, 1, 3)]
    assert tuple(tensors["none"].shape) == (0, 0, 0, 3)
    assert tensors["url"] is column
    assert tensors["num_rows"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pinning_without_a_gpu_is_refused():
    with pytest.raises(SpecError, match="pin_memory=True needs a CUDA device"):
        to_torch({"tokens": np.zeros(3, np.int32)}, pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_tensors_are_page_locked_copies():
    batch = collate(*microbatch([3, 5]))
    tensors = to_torch(batch, pin_memory=True)
    assert tensors["tokens"].is_pinned()
    assert tensors["tokens"].to("cuda", non_blocking=True).tolist() == batch["tokens"].tolist()


def test_small_arrays_are_copied_to_a_device_together_and_large_ones_alone():
    large = np.arange(1 << 18, dtype=np.int64).reshape(2, -1)  # 2 MiB
    large.flags.writeable = False
    column = pa.array(["a"])
    fields = {
        "tokens": np.arange(5, dtype=np.int32),
        "loss_mask": np.array([True, False, True]),
        "large": large,
        "images": [np.full((2, 3, 3), 7, np.uint8), np.zeros((0, 4, 3), np.uint8)],
        "none": np.empty((0, 3), np.float32),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        "url": column,
        "num_rows": 2,
    }
    moved, copies = copy_arrays((fields, {"tokens": np.arange(3, dtype=np.int32)}), torch.device("cpu"))
    assert [dict(one).keys() for one in moved] == [fields.keys(), {"tokens"}]
    assert len(copies) == 2, "one for all small arrays, one for the large one"
    assert moved[0]["url"] is column
    assert moved[0]["num_rows"] == 2
    for name in ("tokens", "loss_mask", "large", "none", "strided"):
        np.testing.assert_array_equal(moved[0][name].numpy(), fields[name])
        assert moved[0][name].numpy().dtype == fields[name].dtype
    assert [image.tolist() for image in moved[0]["images"]] == [image.tolist() for image in fields["images"]]
    assert moved[1]["tokens"].tolist() == [0, 1, 2]
    pointers = [moved[0]["tokens"].data_ptr(), moved[0]["loss_mask"].data_ptr(), moved[1]["tokens"].data_ptr()]
    assert len({(pointer - copies[0].data_ptr()) % 256 for pointer in pointers}) == 1
    assert copy_arrays(({"num_rows": 2},), torch.device("cpu")) == (({"num_rows": 2},), [])


def test_what_only_the_host_reads_stays_there_in_memory_of_its_own():
    host = {name: np.array([3, 5]) for name in ("hdp_ranks", "piece_offsets", "whole_lengths", "offload_ratios")}
    fields = host | {"tokens": np.arange(8), "document_lengths": np.array([3, 5]), "hdp_index": 1}
    (moved,), _ = copy_arrays((fields,), torch.device("meta"))
    assert {name for name, value in moved.items() if isinstance(value, torch.Tensor) and value.is_meta} == {
        "tokens",
        "document_lengths",
    }
    for name, array in host.items():
        array[:] = 0  # the batch is used again
        assert moved[name].tolist() == [3, 5]


def test_a_batch_is_placed_as_it_was_asked_for():
    batch = collate(*microbatch([3, 5]))
    assert Destination().open().place((batch,)).use() == (batch,)
    for destination in (Destination(torch=True), Destination(torch=True, device="cpu")):
        (tensors,) = destination.open().place((batch,)).use()
        assert not destination.copies
        assert tensors["tokens"].data_ptr() == batch["tokens"].ctypes.data
    (tensors,) = Destination(torch=True, device="meta").open().place((batch,)).use()
    assert {t.device.type for t in tensors.values() if isinstance(t, torch.Tensor)} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_to_a_gpu_have_the_same_numbers_and_are_waited_for_by_the_current_stream():
    batch = collate(*microbatch([3, 5])) | {"large": np.arange(1 << 20, dtype=np.int64)}
    placer = Destination(torch=True, device="cuda").open()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096
        (tensors,) = placer.place((batch,)).use()
        total = tensors["large"].sum()
        del tensors  # the memory goes to the next copy, which must not begin before the sum is there
        assert total.item() == (1 << 20) * ((1 << 20) - 1) // 2
    (tensors,) = placer.place((batch,)).use()
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(tensors[name].cpu().numpy(), value)


def test_collation_needs_no_torch_and_its_absence_names_the_extra():
    script = """
import sys
sys.modules["torch"] = None  # what an absent package looks like to import
import overlord.batches.collate, overlord.batches.slices
from overlord.batches.tensors import Destination, copy_arrays, to_torch
to_torch({})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "SpecError" in done.stderr
    assert "pip install 'overlord-dataloader[torch]'" in done.stderr
