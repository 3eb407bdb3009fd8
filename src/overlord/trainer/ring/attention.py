"""`ring_attention`: exact causal attention over documents that are cut over ranks, on fused kernels.

The N ranks of a microbatch pass keys and values around the ring. In each of N turns a rank attends to the keys of one rank,
while it receives those of a later turn; its outputs are merged by their log-sum-exp. The backward pass goes around once
more. The gradients of keys and values follow one turn behind: what other ranks have added arrives during a turn,
this rank adds its own at the end of it and sends them on, so that they are back at their rank after the last turn.

A microbatch of whole documents is a ring of one rank: a single call of the kernel, without messages.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlord.errors import SpecError
from overlord.trainer.ring.kernels import AttentionMask, Bounds, Kernel, OutputGradient, choose_kernel
from overlord.trainer.ring.merging import merge
from overlord.trainer.ring.messages import RingFacts
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
    - `kernel`: one of `overlord.trainer.ring`. By default bfloat16 and float16 on a GPU take torch's flash attention, and
      everything else a reference in plain operations; `FlashAttn.installed()` is the package flash_attn.
    - `overlap_turns`: on a GPU the kernels of consecutive turns run on two streams; False runs them one after the other
      (docs/results.md has both).

    Beside its own, a rank holds the keys and values of at most three others on a GPU, and of two elsewhere.
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
        kernel_streams=2 if overlap_turns else 1,
        keys_ahead=2 if q.is_cuda else 1,
    )
    return _RingAttention.apply(q, k, v, ring, options)


class RingOptions(NamedTuple):
    """How attention is computed, the same on all ranks of a ring."""

    kernel: Kernel
    scale: float
    window: int
    deterministic: bool
    kernel_streams: int = 2
    """Streams of a GPU on which the kernels of turns run; 0 puts everything on the caller's stream."""
    keys_ahead: int = 1
    """Keys are sent so many turns before they are needed. With 1 they follow the gradients of the turn before in the queue
    of the communicator, and come late where these do. With 2 a rank without a GPU waits for its first message."""

    def mask(self, call: KernelCall) -> AttentionMask:
        return AttentionMask(call.causal, call.window, self.scale, self.deterministic)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, v, ring, options = args
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        _check_together(ring, q, k, options, is_backward=False)
        out, lse = attend_around(q, [k, v], ring, options)
        ctx.ring, ctx.options = ring, options
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable  # its type stub lacks the name of ctx
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        _check_together(ctx.ring, q, k, ctx.options, is_backward=True)
        grad = OutputGradient(q, grads[0].contiguous(), out, lse)
        return (*differentiate_around(grad, [k, v], ctx.ring, ctx.options), None, None)


def _check_together(ring: Ring, q: Tensor, k: Tensor, options: RingOptions, *, is_backward: bool) -> None:
    if ring.size > 1:
        facts = RingFacts.of(ring, q, k, scale=options.scale, window=options.window, is_backward=is_backward)
        ring.messages.check(ring, facts)


def attend_around(q: Tensor, held: list[Tensor], ring: Ring, options: RingOptions) -> tuple[Tensor, Tensor]:
    """The output over all keys of the ring, in the dtype of `q`, and its log-sum-exp. `held` are this rank's keys and
    values."""
    out, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]))  # of a rank without tokens
    turns = _turns(ring, options.window, q.device)
    streams = TurnStreams(q.device, ring.size, options.kernel_streams)
    passed = _PassedKeys(held, ring, options.keys_ahead, streams)
    found: list[tuple[Tensor, Tensor]] = []
    for turn, calls in enumerate(turns):
        passed.advance(turn)
        with streams.kernels(turn):
            _before, found = found, [_attend(each, q, passed.held, options) for each in calls]
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
    streams = TurnStreams(grad.q.device, ring.size, options.kernel_streams)
    passed = _PassedKeys(held, ring, options.keys_ahead, streams)
    arriving: PendingMessages | None = None
    found: list[list[Tensor]] = []
    for turn, calls in enumerate(turns):
        passed.advance(turn)
        with streams.kernels(turn):
            _before, found = found, [_differentiate(each, grad, passed.held, options) for each in calls]
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
                arriving = ring.messages.exchange(ring, sums, ring.num_tokens(ring.part(turn + 1)))
            for number, (each, (added, *_)) in enumerate(zip(calls, found, strict=True)):
                if turn > 0 or number > 0:
                    each.queries.add(dq, added)
            if arriving is not None and turn + 1 == ring.size:
                sums = arriving.wait()
    streams.join()
    return streams.take_out([dq, *sums], grad.q.dtype)


def _turns(ring: Ring, window: int, device: torch.device) -> list[list[_DeviceCall]]:
    """The calls of every turn. Their places and bounds are copied to the GPU on the caller's stream: so they are made before
    other streams begin, and kept until these have ended."""
    return [_device_calls(ring, ring.part(turn), window, device) for turn in range(ring.size)]


def _attend(each: _DeviceCall, q: Tensor, held: list[Tensor], options: RingOptions) -> tuple[Tensor, Tensor]:
    keys, values = (each.keys.take(tensor) for tensor in held)
    return options.kernel.forward(each.queries.take(q), keys, values, each.bounds, options.mask(each.call))


def _differentiate(each: _DeviceCall, grad: OutputGradient, held: list[Tensor], options: RingOptions) -> list[Tensor]:
    keys, values = (each.keys.take(tensor) for tensor in held)
    q, dout, out = (each.queries.take(tensor) for tensor in grad[:3])
    own = OutputGradient(q, dout, out, each.queries.take(grad.lse, 1).contiguous())
    return options.kernel.backward(own, keys, values, each.bounds, options.mask(each.call))


class _PassedKeys:
    """The keys and values that go around the ring, each sent on when it has come.

    At most `ahead` + 1 sets of other ranks are held: that of this turn, and of `ahead` turns after it.
    """

    def __init__(self, own: list[Tensor], ring: Ring, ahead: int, streams: TurnStreams) -> None:
        self._ring, self._ahead, self._streams = ring, ahead, streams
        self._sets = deque([own])  # of this turn, and of later ones that have come
        self._pending: PendingMessages | None = None
        self._asked = 0
        """The last turn whose keys have come or are under way."""

    @property
    def held(self) -> list[Tensor]:
        """The keys and values of this turn."""
        return self._sets[0]

    def advance(self, turn: int) -> None:
        """Wait for the keys of a turn, forget those of the turn before, and exchange those of later turns."""
        with self._streams.arrival(turn):
            if len(self._sets) == 1 and turn > 0:
                self._arrive()
        with self._streams.keys(turn):
            if turn > 0:
                self._sets.popleft()
            while self._asked < min(turn + self._ahead, self._ring.size - 1):
                self._arrive()
                self._asked += 1
                num_tokens = self._ring.num_tokens(self._ring.part(self._asked))
                self._pending = self._ring.messages.exchange(self._ring, self._sets[-1], num_tokens)

    def _arrive(self) -> None:
        if self._pending is not None:
            self._sets.append(self._pending.wait())
            self._pending = None


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
