"""The package `flash_attn` is called as its releases want it: functions with the parameters of each compute what the
reference does, registered with torch as the package registers its own. The package, which needs a GPU, is not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from overlord.errors import SpecError
from overlord.trainer import ring_attention
from overlord.trainer.ring import FlashAttn, Kernel, ReferenceKernel, TorchFlash
from overlord.trainer.ring.kernels import AttentionMask, Bounds, OutputGradient, choose_kernel, fused_kernels
from tests.trainer.rings import random_numbers, run_in_threads

_LEFT_OUT = -1


def _mask(scale: float, causal: bool, left: int, right: int, deterministic: bool = False) -> AttentionMask:
    assert right == (0 if causal else _LEFT_OUT)
    return AttentionMask(causal, left, scale, deterministic)


def _forward_2_7_0(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (dropout_p, softcap, return_softmax) == (0.0, 0.0, False)
    assert {alibi_slopes, block_table, leftpad_k, seqused_k} == {None}
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    mask = _mask(softmax_scale, causal, window_size_left, window_size_right)
    out, lse = ReferenceKernel().forward(q, k, v, bounds, mask)
    return out.to(q.dtype), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _forward_2_7_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert not zero_tensors
    mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    more = (alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k)
    return _forward_2_7_0(q, k, v, *ends, dropout_p, *mask, *more)


def _backward_2_7_0(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    assert (dropout_p, softcap, alibi_slopes, rng_state) == (0.0, 0.0, None, None)
    assert deterministic
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    mask = _mask(softmax_scale, causal, window_size_left, window_size_right, deterministic)
    found = ReferenceKernel().backward(OutputGradient(q, dout, out, softmax_lse), k, v, bounds, mask)
    for written, gradient in zip((dq, dk, dv), found, strict=True):
        assert written is not None
        written.copy_(gradient)
    return torch.zeros(q.shape[1], len(q) + 128 * (len(cu_seqlens_q) - 1))


def _backward_2_7_4(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    assert not zero_tensors
    mask = (softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state)
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward_2_7_0(dout, q, k, v, out, softmax_lse, dq, dk, dv, *ends, dropout_p, *mask)


_SIGNATURES = {
    "2.7.0.post2": (_forward_2_7_0, _backward_2_7_0),
    "2.7.4.post1": (_forward_2_7_4, _backward_2_7_4),
    "2.8.3": (_forward_2_7_4, _backward_2_7_4),
}


def _registered(version: str) -> SimpleNamespace:
    """The functions as operators of torch, which check the type of every argument."""
    forward, backward = _SIGNATURES[version]
    name = "flash_attn_stand_in_" + version.replace(".", "_")
    library = torch.library.custom_op
    return SimpleNamespace(
        _flash_attn_varlen_forward=library(f"{name}::forward", forward, mutates_args=()),
        _flash_attn_varlen_backward=library(f"{name}::backward", backward, mutates_args=("dq", "dk", "dv")),
    )


_INTERFACES = {version: _registered(version) for version in _SIGNATURES}


@pytest.mark.parametrize("version", _SIGNATURES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_ring_on_flash_attn_has_the_numbers_of_the_reference_with_the_signature_of_each_release(version, window):
    wholes, num_ranks = [60, 21], 3
    tensors: list[Tensor] = [random_numbers((81, heads, 8), i).bfloat16() for i, heads in enumerate((4, 2, 2))]
    dout = random_numbers((81, 4, 8), 9).bfloat16()
    kernels: list[Kernel] = [FlashAttn(_INTERFACES[version]), ReferenceKernel()]
    found, expected = (
        run_in_threads(
            partial(ring_attention, window=window, kernel=each, deterministic=True), wholes, num_ranks, tensors, dout
        )
        for each in kernels
    )
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == torch.bfloat16
            assert (a.double() - b.double()).norm() < 6e-3 * b.double().norm()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of that name, whose version may be set."""
    package = ModuleType("flash_attn")
    package.flash_attn_interface = _INTERFACES["2.8.3"]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    fused_kernels.cache_clear()
    yield package
    fused_kernels.cache_clear()


def _set_version(package: ModuleType, version: str) -> None:
    package.__version__ = version  # pyright: ignore[reportAttributeAccessIssue]
    fused_kernels.cache_clear()


def _chosen() -> Kernel:
    return choose_kernel(torch.device("cuda"), torch.bfloat16, 128)


@pytest.mark.parametrize("version", [*_SIGNATURES, "2.7.0", "2.10.1", "3.0.0b1"])
def test_flash_attn_is_chosen_by_hand_or_where_torch_has_no_kernel(installed, version, monkeypatch):
    _set_version(installed, version)
    assert FlashAttn.installed() == FlashAttn(installed.flash_attn_interface)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(_chosen(), FlashAttn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    fused_kernels.cache_clear()
    assert _chosen() == TorchFlash()


@pytest.mark.parametrize("version", ["2.6.3", "2.5.9.post1", "1.0.9"])
def test_a_release_of_flash_attn_that_is_too_old_is_refused_and_named(installed, version, caplog):
    _set_version(installed, version)
    assert not isinstance(_chosen(), FlashAttn)
    assert torch.cuda.is_available() or f"needs flash_attn 2.7 or later, found {version}" in caplog.text
    with pytest.raises(SpecError, match=f"2.7 or later, found {version}"):
        FlashAttn.installed()


def test_flash_attn_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(SpecError, match="flash_attn is not installed; leave kernel out"):
        FlashAttn.installed()
