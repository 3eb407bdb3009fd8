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
    loss, so that no logits are kept for the backward pass.
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
        hidden, head, labels, weights, scale, chunk = args
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=exact, device=hidden.device)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dhead = torch.zeros_like(head, dtype=exact) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = (hidden[part] @ head.T).to(exact)
            counted = (labels[part] != _IGNORED).to(exact) * scale
            if weights is not None:
                counted = counted * weights[part]
            target = labels[part].clamp(min=0)[:, None]
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(1, target))[:, 0] * counted).sum()
            if dhidden is None and dhead is None:
                continue
            dlogits = logits.sub_(lse).exp_().scatter_add_(1, target, torch.full_like(lse, -1.0)).mul_(counted[:, None])
            dlogits = dlogits.to(hidden.dtype)
            if dhidden is not None:
                dhidden[part] = dlogits @ head
            if dhead is not None:
                dhead += dlogits.T @ hidden[part]
        ctx.save_for_backward(dhidden, None if dhead is None else dhead.to(head.dtype))
        return total

    @staticmethod
    @once_differentiable  # its type stub lacks the name of ctx
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dhidden, dhead = (None if each is None else each * grads[0].to(each.dtype) for each in ctx.saved_tensors)
        return dhidden, dhead, None, None, None, None


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
