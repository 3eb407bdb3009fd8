"""The loss of a step as one sum over its tokens, wherever they are: right for any arrangement of the step.

Every microbatch adds the losses of its tokens, divided by the loss tokens of the whole step. Gradients are then summed over
all ranks that hold different tokens, never averaged, and once a step, since ranks may run different numbers of microbatches.
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
    """A microbatch's part of the step's loss: the cross-entropy of its tokens, summed and divided by `step.loss_tokens`.

    `logits` are [tokens, vocabulary]; labels of -100 count nothing. `loss_weights`, where the batch has them, are what each
    token counts; `step.loss_tokens` is then their sum over the step. The loss of the step is the sum over all microbatches
    of all dp x cp ranks.
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
    return summed / (loss_tokens or 1)  # a step may be without loss


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum gradients over the ranks of a group, in place; a rank that ran no microbatch counts as zeros.

    The group must have the dp x cp ranks of one pipeline stage and tensor-parallel index; None is all ranks.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
