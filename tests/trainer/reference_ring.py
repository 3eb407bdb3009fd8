"""Exact causal attention over documents that are cut over ranks, in plain operations: the oracle of `ring_attention`.

The N ranks of a microbatch (`hdp_ranks`) pass keys and values around the ring. After N rounds each has seen all of them, and
has merged the partial results of its own queries by their log-sum-exp, as flash attention does over blocks. The backward
pass goes around once more, and the gradients of keys and values travel along until they are back at their rank. It shares
the pieces and the messages of a ring with `ring_attention`, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlord.trainer.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Iterator

_QUERIES = 1024
"""The number of queries whose scores are computed at once."""


def reference_ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, *, scale: float | None = None) -> Tensor:
    """Causal attention of this rank's queries to all keys of their documents, on whatever rank these are.

    `q` is [tokens, heads, dim]; `k` and `v` are [tokens, kv heads, dim], where kv heads divides heads. All are in the order
    of the microbatch's tokens. `scale` defaults to dim ** -0.5. Every rank of the ring must call it, with the same number of
    heads. The result has the shape and dtype of `q`. Differentiable.
    """
    return _ReferenceRing.apply(q, k, v, ring, q.shape[-1] ** -0.5 if scale is None else scale)


class _ReferenceRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q: Tensor
        k: Tensor
        v: Tensor
        ring: Ring
        q, k, v, ring, scale = args
        grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        out = torch.zeros_like(grouped, dtype=_exact(q))
        lse = torch.full(grouped.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
        held = [k.contiguous(), v.contiguous()]
        for turn in range(ring.size):
            part = (ring.index - turn) % ring.size
            for block in _blocks(ring, part):
                _merge(grouped, held, _Partial(out, lse), block, scale)
            if turn + 1 < ring.size:
                held = _pass_on(ring, held, (part - 1) % ring.size)
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype).view_as(q)

    @staticmethod
    @once_differentiable  # its type stub lacks the name of ctx
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        grouped = q.view(out.shape)
        dout = grads[0].reshape(out.shape).to(out.dtype)
        delta = (dout * out).sum(-1)
        dq = torch.zeros_like(out)
        queries = _Queries(grouped, dout, delta, lse, dq)
        held = [k.contiguous(), v.contiguous()]
        gradients = [torch.zeros_like(k, dtype=out.dtype), torch.zeros_like(v, dtype=out.dtype)]
        for turn in range(ring.size):
            part = (ring.index - turn) % ring.size
            for block in _blocks(ring, part):
                _differentiate(queries, held, gradients, block, ctx.scale)
            if ring.size > 1:
                # The gradients go one round further than the keys, back to the rank that they belong to.
                last = turn + 1 == ring.size
                passed = _pass_on(ring, gradients if last else held + gradients, (part - 1) % ring.size)
                held, gradients = ([], passed) if last else (passed[:2], passed[2:])
        return dq.view_as(q).to(q.dtype), gradients[0].to(k.dtype), gradients[1].to(v.dtype), None, None


def _pass_on(ring: Ring, tensors: list[Tensor], part: int) -> list[Tensor]:
    """Send tensors to the next rank, and receive from the previous rank those of the rank with index `part`."""
    return ring.messages.exchange(ring, tensors, ring.num_tokens(part)).wait()


class _Partial(NamedTuple):
    """The attention output and log-sum-exp of this rank's queries, over the keys seen so far. Updated in place."""

    out: Tensor
    lse: Tensor


class _Queries(NamedTuple):
    """What the backward pass knows about this rank's queries; `dq` is their gradient, updated in place."""

    q: Tensor
    dout: Tensor
    delta: Tensor
    lse: Tensor
    dq: Tensor


@dataclass(frozen=True, slots=True)
class _ScoreBlock:
    """Queries [begin, end) of this rank that see keys [first, stop) of another. With `seen`, in a triangle: query `begin`
    sees the first `seen` keys, each later query one key more. Otherwise all see all."""

    begin: int
    end: int
    first: int
    stop: int
    seen: int | None

    def mask(self, device: torch.device) -> Tensor | None:
        """True where a query does not see a key; None if all queries see all keys."""
        if self.seen is None:
            return None
        shape = (self.end - self.begin, self.stop - self.first)
        return torch.ones(shape, dtype=torch.bool, device=device).triu(self.seen)


def _blocks(ring: Ring, part: int) -> Iterator[_ScoreBlock]:
    """The blocks of scores between this rank's queries and the keys of `part`. Chunks are the same or disjoint."""
    for own in ring.pieces[ring.index]:
        for other in ring.pieces[part]:
            if own.document != other.document or other.offset > own.offset:
                continue
            for begin in range(own.begin, own.end, _QUERIES):
                end = min(begin + _QUERIES, own.end)
                if other.offset < own.offset:
                    yield _ScoreBlock(begin, end, other.begin, other.end, None)
                else:
                    yield _ScoreBlock(begin, end, other.begin, other.begin + end - own.begin, begin - own.begin + 1)


def _exact(tensor: Tensor) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, block: _ScoreBlock, scale: float, dtype: torch.dtype) -> Tensor:
    """The scores of a block, [kv heads, heads per kv head, queries, keys]."""
    queries, keys = q[block.begin : block.end].to(dtype), k[block.first : block.stop].to(dtype)
    scores = torch.einsum("qghd,kgd->ghqk", queries, keys) * scale
    mask = block.mask(q.device)
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


def _merge(q: Tensor, held: list[Tensor], partial: _Partial, block: _ScoreBlock, scale: float) -> None:
    """Merge the attention of a block's queries to its keys into the partial result. `held` are keys and values."""
    out, lse = partial
    scores = _scores(q, held[0], block, scale, out.dtype)
    found_lse = scores.logsumexp(-1)
    values = held[1][block.first : block.stop].to(out.dtype)
    found = torch.einsum("ghqk,kgd->qghd", (scores - found_lse[..., None]).exp_(), values)
    found_lse = found_lse.permute(2, 0, 1)
    before = lse[block.begin : block.end]
    both = torch.logaddexp(before, found_lse)
    rows = out[block.begin : block.end]
    rows.mul_((before - both).exp_()[..., None]).add_(found * (found_lse - both).exp_()[..., None])
    before.copy_(both)


def _differentiate(queries: _Queries, held: list[Tensor], gradients: list[Tensor], block: _ScoreBlock, scale: float) -> None:
    """Add the gradients of a block to those of its queries, keys and values. `held` are keys and values."""
    q, dout, delta, lse, dq = queries
    rows, columns = slice(block.begin, block.end), slice(block.first, block.stop)
    weights = _scores(q, held[0], block, scale, dq.dtype).sub_(lse[rows].permute(1, 2, 0)[..., None]).exp_()
    gradients[1][columns] += torch.einsum("ghqk,qghd->kgd", weights, dout[rows])
    seen = torch.einsum("qghd,kgd->ghqk", dout[rows], held[1][columns].to(dq.dtype))
    dscores = weights * (seen - delta[rows].permute(1, 2, 0)[..., None]) * scale
    dq[rows] += torch.einsum("ghqk,kgd->qghd", dscores, held[0][columns].to(dq.dtype))
    gradients[0][columns] += torch.einsum("ghqk,qghd->kgd", dscores, q[rows].to(dq.dtype))
