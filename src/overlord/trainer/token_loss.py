"""The loss of a step as one sum over its tokens, which is right for every strategy.

Every microbatch adds the losses of its tokens, divided by the loss tokens of the whole step. Gradients are then summed, not
averaged, over all ranks that hold different tokens. That happens once per step, because ranks may run different numbers of
microbatches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable


def token_loss(logits: Tensor, labels: Tensor, loss_tokens: float, loss_weights: Tensor | None = None) -> Tensor:
    """The loss of a microbatch: the cross-entropy of its tokens, summed and divided by the step's `loss_tokens`.

    `logits` are [tokens, vocabulary]; tokens with the label -100 are ignored. Pass `step.loss_tokens`, and the microbatch's
    `loss_weights` if it has them. The loss of the step is the sum over all microbatches of all dp x cp ranks; call
    `sum_gradients` after the last one.
    """
    if loss_tokens < 0:
        raise SpecError(
            f"loss_tokens is the number of loss tokens of the step, or the sum of their weights; got {loss_tokens}"
        )
    if loss_weights is None:
        summed = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    else:
        each = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        summed = (each * loss_weights).sum()
    return summed / (loss_tokens or 1)  # a step may have no loss tokens


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
