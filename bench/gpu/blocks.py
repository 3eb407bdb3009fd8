"""Transformer blocks that run pieces of documents, and a clock for their forward and backward pass."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from bench.gpu.work import Work


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    causal: bool
    gated: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LLAMA_8B = Shape(hidden=4096, heads=32, kv_heads=8, ffn=14336, causal=True, gated=True)
VIT_2B = Shape(hidden=2048, heads=16, kv_heads=16, ffn=8192, causal=False, gated=False)
TINY = Shape(hidden=64, heads=4, kv_heads=2, ffn=96, causal=True, gated=True)


class _Varlen(torch.autograd.Function):
    """Flash attention of pieces of unequal length; a piece's last query sees all of its keys."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bounds: _Bounds, causal: bool
    ) -> Tensor:
        found = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False)
        out, lse, seed, unused = found[:4]
        ctx.save_for_backward(q, k, v, out, lse, seed, unused)
        ctx.bounds, ctx.causal = bounds, causal  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, unused = ctx.saved_tensors  # type: ignore[attr-defined]
        bounds, causal = ctx.bounds, ctx.causal  # type: ignore[attr-defined]
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, k, v, out, lse, *bounds, 0.0, causal, seed, unused
        )
        return (*found, None, None)


_Bounds = tuple[Tensor, Tensor, int, int]


def bounds_of(work: Work, device: str) -> _Bounds:
    """The ends of a microbatch's pieces on the device. Made before anything is timed: a copy to the device waits for all
    kernels before it."""
    queries, keys = (
        torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
        for lengths in (work.queries, work.keys)
    )
    return queries, keys, int(work.queries.max()), int(work.keys.max())


def attention(q: Tensor, k: Tensor, v: Tensor, work: Work, bounds: _Bounds, causal: bool) -> Tensor:  # noqa: PLR0917
    if q.is_cuda:
        return _Varlen.apply(q, k, v, bounds, causal)
    return _piece_by_piece(q, k, v, work, causal)


def _piece_by_piece(q: Tensor, k: Tensor, v: Tensor, work: Work, causal: bool) -> Tensor:
    """The same in plain operations: what the kernel is checked against, and what runs without a GPU."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    outs, at_q, at_k = [], 0, 0
    for nq, nk in zip(work.queries.tolist(), work.keys.tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[at_q : at_q + nq], k[at_k : at_k + nk]) / q.shape[2] ** 0.5
        if causal:
            seen = torch.ones(nq, nk, dtype=torch.bool, device=q.device).tril(nk - nq)
            scores = scores.masked_fill(~seen, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[at_k : at_k + nk]))
        at_q, at_k = at_q + nq, at_k + nk
    return torch.cat(outs)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.query, self.key, self.value = (nn.Linear(shape.hidden, n, bias=False) for n in (wide, narrow, narrow))
        self.output = nn.Linear(wide, shape.hidden, bias=False)
        self.up, self.down = nn.Linear(shape.hidden, shape.ffn, bias=False), nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.gated else None
        self.first, self.second = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)

    def forward(
        self, x: Tensor, work: Work, bounds: _Bounds, remote: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`remote` are the keys and values that a ring would have brought, where documents are shared with other ranks; this
        rank's own are computed all the same, and given back so that their gradients are too."""
        hidden = self.first(x)
        q, k, v = (layer(hidden).unflatten(1, (-1, self.shape.head_dim)) for layer in (self.query, self.key, self.value))
        keys, values = (k, v) if remote is None else remote
        x = x + self.output(attention(q, keys, values, work, bounds, self.shape.causal).flatten(1))
        hidden = self.second(x)
        wide = self.up(hidden)
        wide = nn.functional.gelu(wide) if self.gate is None else nn.functional.silu(self.gate(hidden)) * wide
        return x + self.down(wide), () if remote is None else (k, v)


class Bench:
    """Runs microbatches through a stack of blocks and says how long each took."""

    def __init__(self, shape: Shape, device: str, num_blocks: int = 1) -> None:
        self.device = device
        self._kind = torch.bfloat16 if device == "cuda" else torch.float32
        self._shape = shape
        torch.manual_seed(0)
        with torch.device(device):
            self._pool = torch.randn(1, dtype=self._kind)
            self._blocks = nn.ModuleList(Block(shape) for _ in range(num_blocks)).to(self._kind)

    def run(
        self, work: Work, bounds: _Bounds | None = None, backward: bool = True, between: torch.cuda.Event | None = None
    ) -> None:
        """Forward and backward of one microbatch."""
        bounds = bounds_of(work, self.device) if bounds is None else bounds
        x = self._numbers((work.num_tokens, self._shape.hidden))
        heads = (int(work.keys.sum()), self._shape.kv_heads, self._shape.head_dim)
        remote = None if work.is_whole else (self._numbers(heads), self._numbers(heads))
        out, ends = x, []
        for block in self._blocks:
            out, own = block(out, work, bounds, remote)
            ends += own
        ends.append(out)
        if between is not None:
            between.record()
        if backward:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])

    def timed(self, works: list[Work], backward: bool = True) -> list[float]:
        """Milliseconds of each, run one right after the other."""
        if self.device != "cuda":
            found = []
            for work in works:
                begun = time.perf_counter()
                self.run(work, backward=backward)
                found.append((time.perf_counter() - begun) * 1e3)
            return found
        bounds = [bounds_of(work, self.device) for work in works]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        events[0].record()
        for work, known, event in zip(works, bounds, events[1:], strict=True):
            self.run(work, known, backward)
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def settled(self, works: list[Work], runs: int) -> list[tuple[float, float]]:
        """Milliseconds of the forward and of the backward pass of each on a GPU, in the last of several runs in a row.

        The clock of a GPU depends on what it ran just before: after attention, which draws less power, matrix products are
        up to a tenth quicker for some tens of milliseconds. One block of a microbatch is over by then, a whole model is not.
        """
        bounds = [bounds_of(work, self.device) for work in works]
        found = []
        for work, known in zip(works, bounds, strict=True):
            for _ in range(runs - 1):
                self.run(work, known)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            self.run(work, known, between=events[1])
            events[2].record()
            found.append(events)
        torch.cuda.synchronize()
        return [(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in found]

    def _numbers(self, shape: tuple[int, ...]) -> Tensor:
        """Random numbers out of one pool: making them anew would be part of what is timed."""
        size = math.prod(shape)
        if self._pool.numel() < size:
            self._pool = torch.randn(size, device=self.device, dtype=self._kind)
        return self._pool[:size].view(shape).detach().requires_grad_()


def kernel_error(device: str) -> float:
    """How far the kernel's output is from the plain operations', on pieces of documents."""
    work = Work(np.array([64, 200, 1, 130]), np.array([64, 500, 77, 131]))
    make = torch.Generator(device).manual_seed(1)
    sizes = ((work.num_tokens, 8), (int(work.keys.sum()), 2), (int(work.keys.sum()), 2))
    q, k, v = (torch.randn(n, h, 128, generator=make, device=device, dtype=torch.bfloat16) for n, h in sizes)
    exact = _piece_by_piece(q.float(), k.float(), v.float(), work, causal=True)
    return float((attention(q, k, v, work, bounds_of(work, device), causal=True).float() - exact).abs().max())
