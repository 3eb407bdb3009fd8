"""`receive`: the trainer's half of `broadcast_at`. One rank of a group fetched the arrays of a step; the others get them
from it over torch.distributed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from overlord.errors import SpecError
from overlord.messages import HOST_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlord.messages import Step


def receive(step: Step, group: Any = None, *, device: torch.device | str | None = None) -> Step:
    """Return the step with all its arrays, as tensors on `device`, on the ranks that fetched them and on those that did not.

    It is a collective: every rank of `group` calls it once for each step, in the order of steps. `group` has the ranks that
    share a fetching rank, which is its first: with `broadcast=("tp",)` the tensor-parallel group of a DeviceMesh;
    `ClientPlaceTree.broadcast_groups` lists them for any axes. Default: the whole world.

    Arrays are broadcast in the order of `micro["broadcast"]`. Along cp each rank then takes its slice of them; along pp all
    stages get the fields of all. `device` is the current CUDA device for a group of NCCL, and the CPU for any other.
    """
    device = _device_for(group) if device is None else torch.device(device)
    _check_together(step, group, device)
    micros = [_with_room(micro, device) for micro in step]
    first = 0 if group is None else dist.get_global_rank(group, 0)
    pending = [
        dist.broadcast(_as_numbers(tensor), first, group=group, async_op=True)
        for micro in micros
        for tensor in _large(micro)
        if tensor.numel()
    ]
    for work in pending:
        cast("dist.Work", work).wait()
    return replace(step, microbatches=tuple(cast("Any", _own_slice(micro)) for micro in micros))


def _device_for(group: Any) -> torch.device:
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _check_together(step: Step, group: Any, device: torch.device) -> None:
    """Raise SpecError on every rank if one of them has another step or is in the wrong group, so that none waits for it.

    Ranks at different steps must not mix: their arrays may well have equal shapes.
    """
    rank = dist.get_rank(group)
    lacks = any("broadcast" in micro for micro in step)
    is_out_of_place = lacks if rank == 0 else len(step) > 0 and not lacks
    own = [step.number, -step.number, len(step), -len(step), int(is_out_of_place)]
    sent = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    last, first, most, least, is_wrong = sent.tolist()
    if is_wrong:
        raise SpecError(
            "the first rank of a group sends the arrays that it fetched, and all others have only their shapes; rank "
            f"{rank} of this group has {'shapes' if lacks else 'arrays'}: declare the broadcast with broadcast=(...) of the "
            "strategy, and pass the group of the ranks along these axes, see ClientPlaceTree.broadcast_groups"
        )
    if last != -first or most != -least:
        raise SpecError(
            f"this rank is at step {own[0]} with {own[2]} microbatches, but its group is at steps {-first} to {last} "
            f"with {-least} to {most}: every rank of the group calls receive once for each step"
        )


def _with_room(micro: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The microbatch as tensors on the device, with empty ones for the arrays to come."""
    to_come: Mapping[str, Any] = micro.get("broadcast", {})
    empty = {name: _empty(shape, device) for name, shape in to_come.items()}
    host = torch.device("cpu")
    here = {
        name: _on_device(value, host if name in HOST_FIELDS else device)
        for name, value in micro.items()
        if name != "broadcast"
    }
    return here | empty


def _empty(shape: Any, device: torch.device) -> Any:
    if isinstance(shape, list):
        return [_empty(each, device) for each in shape]
    sizes, dtype = shape
    return torch.empty(tuple(sizes), dtype=getattr(torch, dtype), device=device)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on_device(each, device) for each in value]
    if isinstance(value, np.ndarray):
        from overlord.batches.tensors import to_torch

        value = to_torch({"": value})[""]
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _large(micro: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    from overlord.batches.slices import large_fields

    for name in large_fields(micro):
        value = micro[name]
        yield from value if isinstance(value, list) else [value]


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Not every backend sends booleans."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _own_slice(micro: dict[str, Any]) -> dict[str, Any]:
    """The slice of this context-parallel rank, where the whole microbatch was broadcast along cp."""
    if "cp_size" not in micro:
        return micro
    from overlord.batches.slices import PER_PLACE, cp_places

    cp, index = micro.pop("cp_size"), micro.pop("cp_index")
    bounds = {name: value.cpu().numpy() for name, value in micro.items() if name in ("cu_seqlens", "cu_seqlens_padded")}
    places = cp_places(micro | bounds, cp, index)
    num_tokens = len(places) if bounds else len(places) * micro["num_rows"]
    for name in PER_PLACE:
        if name in micro:
            at = torch.from_numpy(places).to(micro[name].device)
            micro[name] = micro[name].index_select(-1, at)
    return micro | {"num_tokens": num_tokens}
