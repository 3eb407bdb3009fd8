"""The Triton kernel of `merging`: one program for each token merges all of its heads. Needs triton, which comes with CUDA
builds of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from torch import Tensor


def merge_on_gpu(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """`merging.merge` for an `out` in single precision."""
    tokens, heads, dim = out.shape
    if not tokens:
        return
    found, found_lse = found.contiguous(), found_lse.contiguous()
    strides = (out.stride(0), out.stride(1), lse.stride(0), lse.stride(1))
    blocks = {"block_heads": triton.next_power_of_2(heads), "block_dim": triton.next_power_of_2(dim)}
    kernel: Any = _merge_token
    kernel[(tokens,)](out, lse, found, found_lse, *strides, tokens, heads, dim, **blocks, num_warps=4)


@triton.jit
def _merge_token(  # noqa: PLR0913, PLR0917 - a kernel's arguments are pointers, strides and sizes
    out,
    lse,
    found,
    found_lse,
    out_token,
    out_head,
    lse_head,
    lse_token,
    tokens,
    heads,
    dim,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads).to(tl.int64)
    place = tl.arange(0, block_dim)
    is_head = head < heads
    inside = is_head[:, None] & (place < dim)[None, :]
    lse_at = lse + head * lse_head + token * lse_token
    before = tl.load(lse_at, mask=is_head, other=0.0)
    new = tl.load(found_lse + head * tokens + token, mask=is_head, other=0.0)
    weight = 1.0 / (1.0 + tl.exp(before - new))
    out_at = out + token * out_token + head[:, None] * out_head + place[None, :]
    sums = tl.load(out_at, mask=inside, other=0.0)
    added = tl.load(found + (token * heads + head[:, None]) * dim + place[None, :], mask=inside, other=0.0)
    # Where a token has fewer elements than a program has threads, several warps load the same ones: all must have done so
    # before one of them stores.
    tl.debug_barrier()
    tl.store(out_at, sums + weight[:, None] * (added.to(tl.float32) - sums), mask=inside)
    most = tl.maximum(before, new)
    tl.store(lse_at, most + tl.log(tl.exp(before - most) + tl.exp(new - most)), mask=is_head)
