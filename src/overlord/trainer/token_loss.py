"""The loss of a step as one sum over its tokens, which is right for every strategy.

Every microbatch adds the losses of its tokens, divided by the loss tokens of the whole step. Gradients are then summed, not
averaged, over all ranks that hold different tokens. That happens once per step, because ranks may run different numbers of
microbatches.

`chunked_token_loss` computes the logits, too, for some tokens at a time: 256k tokens with a vocabulary of 128k would have
134 GB of logits in single precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable


_IGNORED = -100


def token_loss(logits: Tensor, labels: Tensor, loss_tokens: float, loss_weights: Tensor | None = None) -> Tensor:
    """The loss of a microbatch: the cross-entropy of its tokens, summed and divided by the step's `loss_tokens`.

    `logits` are [tokens, vocabulary]; tokens with the label -100 are ignored. Pass `step.loss_tokens`, and the microbatch's
    `loss_weights` if it has them. The loss of the step is the sum over all microbatches of all dp x cp ranks; call
    `sum_gradients` after the last one.
    """
    _check_loss_tokens(loss_tokens)
    if loss_weights is None:
        summed = functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
    else:
        each = functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="none")
        summed = (each * loss_weights).sum()
    return summed / (loss_tokens or 1)  # a step may have no loss tokens


def _check_loss_tokens(loss_tokens: float) -> None:
    if loss_tokens < 0:
        raise SpecError(
            f"loss_tokens is the number of loss tokens of the step, or the sum of their weights; got {loss_tokens}"
        )


def chunked_token_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    loss_tokens: float,
    loss_weights: Tensor | None = None,
    *,
    chunk_bytes: int = 512 << 20,
) -> Tensor:
    """`token_loss(hidden @ head.T, ...)`, with the logits of only some tokens at a time.

    `hidden` are [tokens, width], in the model's precision; `head` is the weight of the output layer, [vocabulary, width].
    Logits are computed for as many tokens as `chunk_bytes` hold in single precision. Gradients are computed along with the
    loss, so that no logits are kept for the backward pass. They are divided by `loss_tokens`, and multiplied by the scale
    of a `GradScaler`, in single precision: float16 neither loses them nor overflows.
    """
    _check_loss_tokens(loss_tokens)
    if hidden.shape[-1] != head.shape[-1] or len(labels) != len(hidden):
        raise SpecError(
            "the loss takes hidden [tokens, width], head [vocabulary, width] and labels [tokens], got "
            f"{tuple(hidden.shape)}, {tuple(head.shape)} and {tuple(labels.shape)}"
        )
    chunk = max(1, chunk_bytes // (4 * len(head)))
    return _ChunkedLoss.apply(hidden, head, labels.long(), loss_weights, 1 / (loss_tokens or 1), chunk)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        hidden, head, labels, weights, ctx.scale, chunk = args
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=exact, device=hidden.device)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dhead = torch.zeros_like(head, dtype=exact) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = (hidden[part] @ head.T).to(exact)
            counted = (labels[part] != _IGNORED).to(exact)
            if weights is not None:
                counted = counted * weights[part]
            target = labels[part].clamp(min=0)[:, None]
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(1, target))[:, 0] * counted).sum()
            if dhidden is None and dhead is None:
                continue
            dlogits = logits.sub_(lse).exp_().scatter_add_(1, target, torch.full_like(lse, -1.0)).mul_(counted[:, None])
            if dhead is not None:
                dhead += _summed_over_tokens(dlogits, hidden[part])
            if dhidden is not None:
                dhidden[part] = dlogits.to(hidden.dtype) @ head
        ctx.save_for_backward(dhidden, dhead)
        ctx.dtypes = hidden.dtype, head.dtype
        return total * ctx.scale

    @staticmethod
    @once_differentiable  # its type stub lacks the name of ctx
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Gradients are kept as those of the plain sum: divided by the tokens of a step they would vanish in float16.
        factor = (grads[0] * ctx.scale).reshape(1, 1)  # with dimensions, so that the product has its precision
        scaled = [
            None if each is None else torch.mul(each, factor, out=torch.empty_like(each, dtype=dtype))
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _summed_over_tokens(dlogits: Tensor, hidden: Tensor) -> Tensor:
    """The gradient of the head. In float16 it is a product in single precision: sums over many tokens would overflow."""
    kind = hidden.device.type
    computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if computed != torch.float16 or hidden.dtype == torch.float64:
        return dlogits.to(hidden.dtype).T @ hidden
    with torch.autocast(kind, enabled=False):
        return dlogits.T @ hidden.float()


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum gradients over the ranks of a group, in place. Call it once per step, on every rank, instead of DDP's averaging.

    A rank that ran no microbatch contributes zeros. The group must have the dp x cp ranks of one pipeline stage and one
    tensor-parallel index; None is all ranks.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
