"""`exchange`: send encoded images from the ranks that encode them to those that train on them, in one all-to-all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping


def exchange(encoded: torch.Tensor, micro: Mapping[str, Any], group: Any = None) -> torch.Tensor:
    """Exchange encoder outputs between ranks: the output for the images that this rank encoded in, the output for the images
    that its microbatch trains on out. Differentiable; gradients are sent back the same way.

    `encoded` has the rows that the encoder returned for `micro["encode_images"]`, one image after the other. The result has
    the rows of the microbatch's images, in their order. It is a collective: every encoder place must call it for each
    microbatch, in the same order, even with no rows. `group` has the encoder places as its ranks, in their order; default:
    the whole world. The job's strategy must be `strategies.multimodal(exchange=...)`.
    """
    if "send_rows" not in micro:
        raise SpecError("this microbatch has no exchange: use strategies.multimodal(exchange='cp') or 'world'")
    rows = int(_numbers(micro["encode_tokens"]).sum())
    if encoded.shape[0] != rows:
        raise SpecError(
            f"the images that this rank encodes have {rows} tokens by the strategy's PatchGrid, but the encoder returned "
            f"{encoded.shape[0]} rows"
        )
    send = _numbers(micro["send_counts"]).tolist()
    receive = _numbers(micro["receive_counts"]).tolist()
    num_places = dist.get_world_size(group)
    if len(send) != num_places:
        raise SpecError(f"the step has {len(send)} encoder places, but the process group has {num_places} ranks")
    picked = encoded.index_select(0, _numbers(micro["send_rows"]).to(encoded.device))
    came: torch.Tensor = _AllToAll.apply(picked, send, receive, group)
    return came.index_select(0, _numbers(micro["receive_rows"]).to(encoded.device))


def _numbers(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    came = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), receive, send, group=group)
    return came
