"""Sums of gradients over ranks in buckets, started while the last backward pass of a step still runs.

Ranks run different numbers of microbatches, so gradients are summed once per step. A bucket whose gradients are final is
summed while the backward pass computes the others; all ranks start their buckets in the same order.

Gradients are accumulated and summed in single precision: in bfloat16, which has 8 bits, 600 gradients of 1 add up to 256.

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
    added: list[bool] = field(default_factory=list)
    """Whether a view has gradients of this step: for parameters of lower precision, whose `grad` is not the view."""

    @property
    def is_own(self) -> bool:
        """True if the views are the `grad` of the parameters; False if these are of lower precision."""
        return self.flat.dtype == self.parameters[0].dtype

    def attach(self) -> None:
        """Let gradients be accumulated in the bucket, where they have its precision."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view

    def add(self, number: int) -> None:
        """Add the `grad` of a parameter to the bucket, and forget it there."""
        parameter, view = self.parameters[number], self.views[number]
        if parameter.grad is not None:
            view.add_(parameter.grad) if self.added[number] else view.copy_(parameter.grad)
        elif not self.added[number]:
            view.zero_()
        self.added[number] = True
        parameter.grad = None

    def hand_over(self) -> None:
        """Let every parameter have its sum."""
        if not self.is_own:
            for number, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
                parameter.grad = view.to(parameter.dtype)
                self.added[number] = False


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
            optimizer.zero_grad()

    Every rank must call `finish` once per step, also one without microbatches. The group must have the dp x cp ranks of one
    pipeline stage and one tensor-parallel index; None is all ranks.

    Gradients are accumulated over microbatches, and summed over ranks, in `dtype` or the precision of the parameter,
    whichever is higher. Where both are the same, `grad` is a view of a bucket. Parameters of lower precision have no `grad`
    during the step; `finish` sets it to the sum, rounded once, and `main_gradient` returns the sum as it is. With
    `dtype=torch.bfloat16` gradients of that precision are accumulated and sent as they are: half the memory and traffic, and
    sums that lose small addends.
    """

    parameters: Iterable[Tensor]
    group: dist.ProcessGroup | None = None
    bucket_bytes: int = 64 << 20
    dtype: torch.dtype = torch.float32
    _buckets: list[_Bucket] = field(default_factory=list)
    _places: dict[Tensor, Tensor] = field(default_factory=dict)
    _num_started: int = 0
    _is_last: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise SpecError(f"bucket_bytes is the size of a bucket, at least 1, got {self.bucket_bytes}")
        if not self.dtype.is_floating_point:
            raise SpecError(f"dtype is the precision in which gradients are summed, a floating-point one, got {self.dtype}")
        # The last layers have their gradients first.
        trained = [parameter for parameter in self.parameters if parameter.requires_grad][::-1]
        self.parameters = trained
        self._buckets = _buckets_of(trained, self.bucket_bytes, self.dtype)
        for bucket in self._buckets:
            for number, parameter in enumerate(bucket.parameters):
                self._places[parameter] = bucket.views[number]
                parameter.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket, number=number: self._note(bucket, number)
                )

    def backward(self, loss: Tensor, *, is_last: bool, ring: Ring | None = None) -> None:
        """Run the backward pass of a microbatch; during the last one of the step, start to sum."""
        self._is_last = is_last and (ring is None or ring.size == 1)
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.num_waiting = len(bucket.parameters)
                if bucket.is_own:
                    bucket.attach()
        try:
            loss.backward()
        finally:
            self._is_last = False

    def finish(self) -> None:
        """Sum what is not summed yet, and wait for all sums."""
        while self._num_started < len(self._buckets):
            self._start_next()
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.work.wait()
                bucket.work = None
                bucket.hand_over()
        self._num_started = 0

    def main_gradient(self, parameter: Tensor) -> Tensor:
        """The sum of a parameter's gradients in the precision in which it was made, for an optimizer with weights of that
        precision. Valid from `finish` until the next backward pass."""
        if parameter not in self._places:
            raise SpecError(f"the parameter {list(parameter.shape)} is not among those that are summed, or is not trained")
        return self._places[parameter]

    def _note(self, bucket: _Bucket, number: int) -> None:
        if not bucket.is_own:
            with torch.no_grad():
                bucket.add(number)
        bucket.num_waiting -= 1
        while self._is_last and self._num_started < len(self._buckets) and not self._buckets[self._num_started].num_waiting:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._num_started]
        with torch.no_grad():
            if bucket.is_own:
                bucket.attach()
            else:
                for number, parameter in enumerate(bucket.parameters):
                    if parameter.grad is not None or not bucket.added[number]:
                        bucket.add(number)
        bucket.work = dist.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        self._num_started += 1


def _buckets_of(parameters: list[Tensor], bucket_bytes: int, dtype: torch.dtype) -> list[_Bucket]:
    groups: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        same = groups and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        num_bytes = parameter.numel() * torch.promote_types(parameter.dtype, dtype).itemsize
        if not same or size + num_bytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += num_bytes
    found = []
    for group in groups:
        exact = torch.promote_types(group[0].dtype, dtype)
        flat = torch.zeros(sum(each.numel() for each in group), dtype=exact, device=group[0].device)
        parts = flat.split([each.numel() for each in group])
        views = [part.view(each.shape) for part, each in zip(parts, group, strict=True)]
        found.append(_Bucket(group, views, flat, added=[False] * len(group)))
    return found
