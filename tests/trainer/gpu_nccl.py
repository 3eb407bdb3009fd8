"""Rings over NCCL on one GPU: `python -m tests.trainer.gpu_nccl`.

NCCL takes one process per GPU, so each message goes from this rank to itself: what a rank receives is what it sent. The same
ring with plain copies must have the same bits. It runs the code of `GroupMessages` for NCCL, its communicator's stream and
the order of streams around it, but no network.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor

from overlord.trainer.ring import GroupMessages, Messages, Ring, RingFacts, ring_attention
from tests.trainer.rings import micro_of


@dataclass(frozen=True)
class Echo:
    """Messages that come back to the rank that sent them, as copies."""

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> EchoPending:
        assert all(len(tensor) == num_tokens for tensor in tensors)
        return EchoPending([tensor.clone() for tensor in tensors])

    def check(self, ring: Ring, facts: RingFacts) -> None:
        """There is nobody to agree with."""


@dataclass(frozen=True)
class EchoPending:
    received: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.received


def results(ring: Ring, tensors: list[Tensor], layers: int) -> list[Tensor]:
    """The output of several layers of attention, one after the other, and the gradients of the first one's input."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
    out = q
    for _ in range(layers):
        out = ring_attention(out, k, v, ring, deterministic=True)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(each.grad for each in (q, k, v) if each.grad is not None)]


def differences(cases: int, seed: int = 0) -> dict[str, Any]:
    """In how many random rings NCCL's results differ from those with plain copies."""
    draw = random.Random(seed)
    device = torch.device("cuda", 0)
    different = 0
    for case in range(cases):
        num_ranks = draw.randint(2, 8)
        part = draw.randrange(num_ranks)
        whole = 2 * num_ranks * draw.choice((64, 500, 2000))  # pieces of one length: what comes back has the right shape
        make = torch.Generator(device).manual_seed(1000 * seed + case)
        shapes = [(whole // num_ranks, heads, 128) for heads in (8, 2, 2)]
        tensors = [torch.randn(shape, generator=make, device=device, dtype=torch.bfloat16) for shape in shapes]
        found = []
        for messages in (Echo(), GroupMessages()):
            found.append(results(_to_itself(num_ranks, part, whole, messages), tensors, layers=3))
        different += not all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {"cases": cases, "different": different, "nccl": torch.cuda.nccl.version()}


def _to_itself(num_ranks: int, part: int, whole: int, messages: Messages) -> Ring:
    """A ring of which this process is one rank, and all others are the same process."""
    ring = Ring.of(micro_of([whole], num_ranks, part))
    return Ring((0,) * num_ranks, ring.index, ring.pieces, ring.number, messages)


def run(cases: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29533"))
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, timeout=timedelta(seconds=60), device_id=device)
    try:
        return differences(cases)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(16), indent=1) + "\n")
