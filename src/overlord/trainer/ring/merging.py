"""Merge attention outputs over different keys by their log-sum-exp.

With outputs o and p over disjoint keys and log-sum-exps a and b, the output over both is o + sigmoid(b - a) (p - o), and its
log-sum-exp is log(exp a + exp b). The sum is kept in single precision. On a GPU one Triton kernel reads and writes it once
for each merge; separate operations would read it several times.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def merge(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge an output [tokens, heads, dim] into `out`, and its log-sum-exp [heads, tokens] into `lse`, in place.

    `lse` is finite; `found_lse` may be minus infinity for a query that sees no key.
    """
    fused = _fused_merge() if out.is_cuda and out.dtype == torch.float32 else None
    if fused is not None:
        fused(out, lse, found, found_lse)
        return
    weight = torch.sigmoid(found_lse - lse).T[..., None]
    out.lerp_(found.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, found_lse))


@cache
def _fused_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    try:
        from overlord.trainer.ring.merging_triton import merge_on_gpu
    except ImportError:
        return None
    return merge_on_gpu
