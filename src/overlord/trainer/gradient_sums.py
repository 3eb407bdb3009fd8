"""Sums of gradients over ranks in buckets, started while the last backward pass of a step still runs.

Ranks run different numbers of microbatches, so gradients are summed once per step. A bucket whose gradients are final is
summed while the backward pass computes the others; all ranks start their buckets in the same order.

**No deadlock.** A rank whose last microbatch is in a ring starts its sums after that microbatch. So a rank that has begun to
sum is in no ring any more: nobody waits for a message of it, and those that still send each other messages have begun no
sum. Messages and sums can therefore share one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from overlord.trainer.ring.pieces import Ring


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients lie one after the other in `flat`."""

    parameters: list[Tensor]
    views: list[Tensor]
    flat: Tensor
    num_waiting: int = 0
    work: Any = None


@dataclass(slots=True)
class GradientSums:
    """Sums the gradients of parameters over the ranks of a group, overlapped with the last backward pass of a step.

        sums = GradientSums(model.parameters())
        for step in client:
            for micro in step:
                ...
                sums.backward(loss, is_last=micro is step[-1], ring=ring)
            sums.finish()
            optimizer.step()

    Every rank must call `finish` once per step, also one without microbatches. The group must have the dp x cp ranks of one
    pipeline stage and one tensor-parallel index; None is all ranks. Gradients are views of the buckets afterwards.
    """

    parameters: Iterable[Tensor]
    group: dist.ProcessGroup | None = None
    bucket_bytes: int = 64 << 20
    _buckets: list[_Bucket] = field(default_factory=list)
    _num_started: int = 0
    _is_last: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise SpecError(f"bucket_bytes is the size of a bucket, at least 1, got {self.bucket_bytes}")
        # The last layers have their gradients first.
        trained = [parameter for parameter in self.parameters if parameter.requires_grad][::-1]
        self.parameters = trained
        self._buckets = _buckets_of(trained, self.bucket_bytes)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._note(bucket))

    def backward(self, loss: Tensor, *, is_last: bool, ring: Ring | None = None) -> None:
        """Run the backward pass of a microbatch; during the last one of the step, start to sum."""
        self._is_last = is_last and (ring is None or ring.size == 1)
        for bucket in self._buckets:
            bucket.num_waiting = len(bucket.parameters)
        try:
            loss.backward()
        finally:
            self._is_last = False

    def finish(self) -> None:
        """Sum what is not summed yet, and wait for all sums."""
        while self._num_started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work = None
        self._num_started = 0

    def _note(self, bucket: _Bucket) -> None:
        bucket.num_waiting -= 1
        while self._is_last and self._num_started < len(self._buckets) and not self._buckets[self._num_started].num_waiting:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._num_started]
        with torch.no_grad():
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad is not view:
                    view.copy_(parameter.grad)
                parameter.grad = view
        bucket.work = dist.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        self._num_started += 1


def _buckets_of(parameters: list[Tensor], bucket_bytes: int) -> list[_Bucket]:
    groups: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        same = groups and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or size + parameter.nbytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    found = []
    for group in groups:
        flat = torch.zeros(sum(each.numel() for each in group), dtype=group[0].dtype, device=group[0].device)
        parts = flat.split([each.numel() for each in group])
        found.append(_Bucket(group, [part.view(each.shape) for part, each in zip(parts, group, strict=True)], flat))
    return found
