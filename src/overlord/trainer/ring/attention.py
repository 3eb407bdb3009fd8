"""`ring_attention`: exact causal attention over documents that are cut over ranks, on fused kernels.

The N ranks of a microbatch pass keys and values around the ring. In each of N turns a rank attends to the keys that it
holds, while it sends them on and receives the next; its outputs are merged by their log-sum-exp. The backward pass goes
around once more. The gradients of keys and values follow one turn behind: what other ranks have added arrives during a turn,
this rank adds its own at the end of it and sends them on, so that they are back at their rank after the last turn.

A microbatch of whole documents is a ring of one rank: a single call of the kernel, without messages.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlord.errors import SpecError
from overlord.trainer.ring.kernels import AttentionMask, Bounds, Kernel, OutputGradient, choose_kernel
from overlord.trainer.ring.merging import merge
from overlord.trainer.ring.schedule import NO_WINDOW, KernelCall, TokenSpan, calls_of
from overlord.trainer.ring.turn_streams import TurnStreams

if TYPE_CHECKING:
    from overlord.trainer.ring.messages import PendingMessages
    from overlord.trainer.ring.pieces import Ring


def ring_attention(  # noqa: PLR0913 - options of a call, by name
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    *,
    scale: float | None = None,
    window: int | None = None,
    deterministic: bool = False,
    kernel: Kernel | None = None,
    overlap_turns: bool = True,
) -> Tensor:
    """Causal attention of this rank's queries to all keys of their documents, on whatever rank these are.

    `q` is [tokens, heads, dim]; `k` and `v` are [tokens, kv heads, dim], where kv heads divides heads. All are in the order
    of the microbatch's tokens. Every rank of the ring must call it, with the same heads and options. The result has the
    shape and dtype of `q`. Differentiable.

    - `scale` of the scores defaults to dim ** -0.5.
    - `window`: a query sees itself and at most so many tokens before it. Default: all of them.
    - `deterministic`: gradients are the same bits each time, at some cost.
    - `kernel`: one of `overlord.trainer.ring`. Default: the fastest that is there. bfloat16 and float16 on a GPU take flash
      attention, everything else a reference in plain operations.
    - `overlap_turns`: on a GPU the kernels of consecutive turns run on two streams. That is quicker where messages are, as
      over NVLink; across a network gradients come too late for it, and False is quicker (docs/results.md has both).
    """
    tokens = ring.num_tokens(ring.index)
    if q.shape[0] != tokens or k.shape[0] != tokens or v.shape != k.shape or q.shape[1] % k.shape[1]:
        raise SpecError(
            f"ring attention takes q [{tokens}, heads, dim] and k, v [{tokens}, kv heads, dim], kv heads dividing heads, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[2] != k.shape[2] or q.dtype != k.dtype or q.dtype != v.dtype:
        raise SpecError(
            f"q, k and v need one head dimension and one dtype, got {q.shape[2]} {q.dtype}, {k.shape[2]} {k.dtype} and "
            f"{v.shape[2]} {v.dtype}"
        )
    if window is not None and window < 0:
        raise SpecError(f"window is the number of earlier tokens that a query sees, at least 0, got {window}")
    chosen = choose_kernel(q.device, q.dtype, q.shape[2]) if kernel is None else kernel
    refusal = chosen.refusal(q.dtype, q.shape[2])
    if refusal is not None:
        raise SpecError(f"{refusal}; leave kernel out, or pass kernel=ReferenceKernel()")
    options = RingOptions(
        chosen,
        q.shape[2] ** -0.5 if scale is None else scale,
        NO_WINDOW if window is None else window,
        deterministic,
        overlap_turns,
    )
    return _RingAttention.apply(q, k, v, ring, options)


class RingOptions(NamedTuple):
    """How attention is computed, the same on all ranks of a ring."""

    kernel: Kernel
    scale: float
    window: int
    deterministic: bool
    overlap_turns: bool = True

    def mask(self, call: KernelCall) -> AttentionMask:
        return AttentionMask(call.causal, call.window, self.scale, self.deterministic)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, v, ring, options = args
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        _check_together(ring, q, k, 0)
        out, lse = attend_around(q, [k, v], ring, options)
        ctx.ring, ctx.options = ring, options
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable  # its type stub lacks the name of ctx
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        _check_together(ctx.ring, q, k, 1)
        grad = OutputGradient(q, grads[0].contiguous(), out, lse)
        return (*differentiate_around(grad, [k, v], ctx.ring, ctx.options), None, None)


def _check_together(ring: Ring, q: Tensor, k: Tensor, direction: int) -> None:
    if ring.size > 1:
        ring.messages.check(ring, (ring.number, direction, q.shape[1], k.shape[1], q.shape[2], q.element_size()))


def attend_around(q: Tensor, held: list[Tensor], ring: Ring, options: RingOptions) -> tuple[Tensor, Tensor]:
    """The output over all keys of the ring, in the dtype of `q`, and its log-sum-exp. `held` are this rank's keys and
    values."""
    out, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]))  # of a rank without tokens
    turns = _turns(ring, options.window, q.device)
    streams = TurnStreams(q.device, ring.size if options.overlap_turns else 1)
    pending = None
    for turn, (part, calls) in enumerate(turns):
        with streams.arrival(turn):
            arrived = held if pending is None else pending.wait()
        with streams.keys(turn):
            held = arrived
            pending = _pass_on(held, ring, part, turn)
        found: list[tuple[Tensor, Tensor]] = []
        with streams.kernels(turn):
            for each in calls:
                keys, values = (each.keys.take(tensor) for tensor in held)
                found.append(
                    options.kernel.forward(each.queries.take(q), keys, values, each.bounds, options.mask(each.call))
                )
        with streams.sums(turn):
            for number, (each, (own, own_lse)) in enumerate(zip(calls, found, strict=True)):
                if turn == 0 and number == 0:  # it has all queries
                    out, lse = _for_sums(own) if ring.size > 1 or options.window != NO_WINDOW else own, own_lse
                    continue
                sums, sums_lse = each.queries.take(out), each.queries.take(lse, 1)
                merge(sums, sums_lse, own, own_lse)
                each.queries.put_back(out, sums)
                each.queries.put_back(lse, sums_lse, 1)
    streams.join()
    return streams.take_out([out], q.dtype)[0], lse


def differentiate_around(grad: OutputGradient, held: list[Tensor], ring: Ring, options: RingOptions) -> list[Tensor]:
    """The gradients of this rank's queries, keys and values, in the dtype of these. `held` are this rank's keys and
    values."""
    dq = grad.q.new_empty(grad.q.shape)
    sums: list[Tensor] = [torch.zeros_like(tensor) for tensor in held]  # of a rank without tokens
    turns = _turns(ring, options.window, grad.q.device)
    streams = TurnStreams(grad.q.device, ring.size if options.overlap_turns else 1)
    pending = arriving = None
    for turn, (part, calls) in enumerate(turns):
        with streams.arrival(turn):
            arrived = held if pending is None else pending.wait()
        with streams.keys(turn):
            held = arrived
            pending = _pass_on(held, ring, part, turn)
        found: list[list[Tensor]] = []
        with streams.kernels(turn):
            for each in calls:
                keys, values = (each.keys.take(tensor) for tensor in held)
                q, dout, out = (each.queries.take(tensor) for tensor in grad[:3])
                own = OutputGradient(q, dout, out, each.queries.take(grad.lse, 1).contiguous())
                found.append(options.kernel.backward(own, keys, values, each.bounds, options.mask(each.call)))
        with streams.sums(turn):
            sums = sums if arriving is None else arriving.wait()
            for number, (each, (added, *gradients)) in enumerate(zip(calls, found, strict=True)):
                if turn == 0 and number == 0:  # it has all queries and keys of this rank
                    alone = ring.size == 1 and options.window == NO_WINDOW
                    dq, *sums = (added, *gradients) if alone else map(_for_sums, (added, *gradients))
                    continue
                for total, gradient in zip(sums, gradients, strict=True):
                    each.keys.add(total, gradient)
            if ring.size > 1:
                # What is sent on now arrives during the next turn of the next rank, or at last at its own rank.
                arriving = ring.messages.exchange(ring, sums, ring.num_tokens((part - 1) % ring.size))
            for number, (each, (added, *_)) in enumerate(zip(calls, found, strict=True)):
                if turn > 0 or number > 0:
                    each.queries.add(dq, added)
            if arriving is not None and turn + 1 == ring.size:
                sums = arriving.wait()
    streams.join()
    return streams.take_out([dq, *sums], grad.q.dtype)


def _turns(ring: Ring, window: int, device: torch.device) -> list[tuple[int, list[_DeviceCall]]]:
    """The rank whose keys are there in each turn, and the calls on them."""
    parts = [(ring.index - turn) % ring.size for turn in range(ring.size)]
    return [(part, _device_calls(ring, part, window, device)) for part in parts]


def _pass_on(held: list[Tensor], ring: Ring, part: int, turn: int) -> PendingMessages | None:
    """Send the keys and values of a turn on and receive those of the next; None in the last turn."""
    if turn + 1 == ring.size:
        return None
    return ring.messages.exchange(ring, held, ring.num_tokens((part - 1) % ring.size))


def _for_sums(tensor: Tensor) -> Tensor:
    """A tensor in the precision in which sums are kept; on a GPU in memory of the current stream (see `turn_streams`)."""
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32, copy=tensor.is_cuda)


class _Selection(NamedTuple):
    """Some tokens of a rank: a slice where they follow each other, otherwise their places."""

    begin: int
    end: int
    places: Tensor | None

    @staticmethod
    def of(spans: tuple[TokenSpan, ...], device: torch.device) -> _Selection:
        if all(left.end == right.begin for left, right in pairwise(spans)):
            return _Selection(spans[0].begin, spans[-1].end, None)
        places = torch.cat([torch.arange(span.begin, span.end) for span in spans])
        return _Selection(spans[0].begin, spans[-1].end, places.to(device, non_blocking=True))

    def take(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The tokens, packed: a view where they follow each other, otherwise a copy."""
        if self.places is None:
            return tensor.narrow(dim, self.begin, self.end - self.begin)
        return tensor.index_select(dim, self.places)

    def put_back(self, tensor: Tensor, taken: Tensor, dim: int = 0) -> None:
        """Write what `take` returned to where it was; a view is there already."""
        if self.places is not None:
            tensor.index_copy_(dim, self.places, taken)

    def add(self, tensor: Tensor, packed: Tensor) -> None:
        """Add packed tokens to where they belong."""
        taken = self.take(tensor)
        taken.add_(packed)
        self.put_back(tensor, taken)


class _DeviceCall(NamedTuple):
    """A call with what the device needs for it."""

    call: KernelCall
    bounds: Bounds
    queries: _Selection
    keys: _Selection


def _device_calls(ring: Ring, part: int, window: int, device: torch.device) -> list[_DeviceCall]:
    key = part, window, device
    found = ring.cache.get(key)
    if found is None:
        found = ring.cache[key] = [
            _DeviceCall(call, Bounds.of(call, device), _Selection.of(call.queries, device), _Selection.of(call.keys, device))
            for call in calls_of(ring, part, window)
        ]
    return found
