"""One rank of a ring on one GPU: its messages are copies on a stream of their own, of the size that the rank would receive.

A copy reads and writes device memory as a message does, and runs beside the kernels, so overlap is real. What a network adds
is modelled where a bandwidth is given: the stream then waits for as long as the message would take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from bench.gpu.blocks import Shape
from overlord.arrange.hdp.rings import chunks_of
from overlord.trainer import Ring, Rotary, ring_attention
from overlord.trainer.ring import RingFacts


@dataclass
class CopyMessages:
    """Messages of one rank alone: what it receives is random."""

    device: torch.device
    bytes_per_s: float | None = None
    received_bytes: int = 0

    def __post_init__(self) -> None:
        self._pools: dict[torch.dtype, Tensor] = {}
        # Of high priority, as the streams of a communicator should be: otherwise a copy waits for the kernels before it.
        self._stream: Any = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> CopyPending:
        received = [tensor.new_empty((num_tokens, *tensor.shape[1:])) for tensor in tensors]
        self.received_bytes += sum(tensor.nbytes for tensor in received)
        origins = [self._numbers(tensor) for tensor in received]
        if self._stream is None:
            for target, origin in zip(received, origins, strict=True):
                target.copy_(origin)
            return CopyPending(received, None)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for target, origin in zip(received, origins, strict=True):
                target.copy_(origin)
            if self.bytes_per_s is not None:
                seconds = sum(tensor.nbytes for tensor in received) / self.bytes_per_s
                torch.cuda._sleep(int(seconds * _cycles_per_s(self.device)))
            return CopyPending(received, self._stream.record_event())

    def check(self, ring: Ring, facts: RingFacts) -> None:
        """There is nobody to agree with."""

    def _numbers(self, like: Tensor) -> Tensor:
        pool = self._pools.get(like.dtype)
        if pool is None or pool.numel() < like.numel():
            pool = self._pools[like.dtype] = torch.randn(like.numel(), device=like.device, dtype=like.dtype)
        return pool[: like.numel()].view(like.shape)


@dataclass(frozen=True)
class CopyPending:
    received: list[Tensor]
    ready: Any

    def wait(self) -> list[Tensor]:
        if self.ready is not None:
            torch.cuda.current_stream(self.received[0].device).wait_event(self.ready)
        return self.received


@cache
def _cycles_per_s(device: torch.device) -> float:
    cycles = 200_000_000
    torch.cuda._sleep(cycles)
    return cycles / clocked(lambda: torch.cuda._sleep(cycles), device, 3) * 1e3


def ring_of(wholes: Sequence[int], num_ranks: int, part: int, messages: CopyMessages) -> Ring:
    """The ring of documents cut over ranks, on one of them. Documents of fewer than two tokens a rank are left out."""
    pieces = [
        (whole, chunk)
        for whole in wholes
        if num_ranks == 1 or whole >= 2 * num_ranks
        for chunk in chunks_of(whole, num_ranks, part)
    ]
    micro = {
        "hdp_ranks": np.arange(num_ranks),
        "hdp_index": part,
        "whole_lengths": np.array([whole for whole, _ in pieces]),
        "piece_offsets": np.array([chunk.begin for _, chunk in pieces]),
        "document_lengths": np.array([chunk.end - chunk.begin for _, chunk in pieces]),
    }
    return Ring.of(micro).with_messages(messages)


def positions_of(ring: Ring, device: torch.device) -> Tensor:
    own = ring.pieces[ring.index]
    places = [np.arange(piece.offset, piece.offset + piece.end - piece.begin) for piece in own]
    return torch.from_numpy(np.concatenate(places)).to(device)


class RingBlock(nn.Module):
    """A Llama block whose attention goes around a ring."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.qkv = nn.Linear(shape.hidden, shape.hidden + 2 * kv, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.rotary = Rotary(shape.head_dim)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], ring: Ring) -> Tensor:
        shape = self.shape
        heads = self.qkv(rms_norm(x, (shape.hidden,))).view(len(x), -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        attended = ring_attention(self.rotary.rotate(q, angles), self.rotary.rotate(k, angles), v, ring)
        x = x + self.out(attended.reshape(len(x), shape.hidden))
        gate, up = self.gate_up(rms_norm(x, (shape.hidden,))).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


def clocked(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Milliseconds of a call, the median of some."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            run()
            ended.record()
            torch.cuda.synchronize(device)
            times.append(begun.elapsed_time(ended))
        else:
            at = time.perf_counter()
            run()
            times.append((time.perf_counter() - at) * 1e3)
    return float(np.median(times))
