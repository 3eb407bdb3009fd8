"""Rings on fused kernels; needs a GPU. Without one, the same comparison runs on the reference kernel."""

import json
import subprocess
import sys

import pytest
import torch

from tests.trainer.gpu_rings import errors_on


def _check(device: str, cases: int, longest: int) -> None:
    found = errors_on(device, cases, longest)
    for name, error in found["relative_error"]["ring"].items():
        assert error < 1e-2, f"{name} is off by {error}"
        assert error < 2 * found["relative_error"]["one rank"][name] + 1e-4
    assert found["deterministic_repeats"]
    assert found["through_autograd"] < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rings_on_a_gpu_are_as_exact_as_one_rank():
    _check("cuda", 24, 3000)


def test_rings_whose_passes_are_called_as_functions_are_as_exact_as_one_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks are threads already
    try:
        _check("cpu", 3, 300)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_ring_over_nccl_has_the_bits_of_one_with_plain_copies():
    found = subprocess.run(
        [sys.executable, "-m", "tests.trainer.gpu_nccl"], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(found.stdout)["different"] == 0
