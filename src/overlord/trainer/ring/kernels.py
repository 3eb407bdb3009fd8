"""Kernels for attention over spans of tokens: one interface, and `choose_kernel`, which takes the fastest that is there.

A kernel returns the log-sum-exp of the scores beside its output, so that outputs over different keys can be merged. Its
backward pass takes the output and log-sum-exp over *all* keys of the queries, whatever keys it is called with: the gradients
of a block of scores then need nothing else.

- `TorchFlash`: the flash attention that CUDA builds of torch have. It is what was measured, and the first choice.
- `FlashAttn`: the package `flash_attn` (2.7 or later), with `kernel=FlashAttn.installed()`, or where torch has no kernel of
  its own. Tests run it against functions with the signatures of its releases; the package itself was never run here.
- `ReferenceKernel`: plain operations on any device and precision, for some queries at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from overlord.errors import SpecError
from overlord.trainer.ring.schedule import NO_WINDOW, KernelCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger(__name__)
_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256
_OLDEST_FLASH_ATTN = (2, 7)
"""Earlier releases take the window as a pair and return the log-sum-exp elsewhere."""


class Bounds(NamedTuple):
    """The spans of a call as the kernels take them: ends of packed queries and keys, from 0, and the longest of each."""

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int

    @staticmethod
    def of(call: KernelCall, device: torch.device) -> Bounds:
        sizes = [[span.end - span.begin for span in spans] for spans in (call.queries, call.keys)]
        ends = [torch.tensor([0, *each]).cumsum(0, dtype=torch.int32).to(device, non_blocking=True) for each in sizes]
        return Bounds(ends[0], ends[1], max(sizes[0], default=0), max(sizes[1], default=0))


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which keys a query sees (see `KernelCall`), and how scores are scaled."""

    causal: bool
    window: int
    scale: float
    deterministic: bool = False
    """Whether gradients must be the same bits each time: slower on fused kernels."""


class Kernel(Protocol):
    """Attention of packed queries [tokens, heads, dim] to packed keys and values [tokens, kv heads, dim]."""

    def refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why the kernel cannot take such tensors; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Return the output, and the log-sum-exp as [heads, tokens]."""
        ...

    def backward(self, grad: OutputGradient, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> list[Tensor]:
        """Return the gradients of queries, keys and values."""
        ...


class OutputGradient(NamedTuple):
    """The queries of a call and the gradient of their output; `out` and `lse` are those over all keys of the queries."""

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, fused: Sequence[Kernel] | None = None) -> Kernel:
    """The fastest kernel for such tensors. `fused` are those that are installed, best first.

    Single and double precision take the reference, and so does everything where there is no fused kernel. A head dimension
    that the fused kernel refuses is an error, because the reference would be a hundred times slower.
    """
    if device.type != "cuda" or dtype not in _HALF:
        return ReferenceKernel()
    fused = fused_kernels() if fused is None else fused
    if not fused:
        _warn_of_reference()
        return ReferenceKernel()
    refusals = [kernel.refusal(dtype, head_dim) for kernel in fused]
    for kernel, refusal in zip(fused, refusals, strict=True):
        if refusal is None:
            return kernel
    raise SpecError(
        f"no fused attention kernel takes these heads: {'; '.join(filter(None, refusals))}; change the model, or "
        "pass kernel=ReferenceKernel() of overlord.trainer.ring, which is slow"
    )


@cache
def fused_kernels() -> tuple[Kernel, ...]:
    """The fused kernels that this process can use, best first."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return (TorchFlash(),)
    try:
        return (FlashAttn.installed(),)
    except SpecError as error:
        if not isinstance(error.__cause__, ImportError):
            _log.warning("flash_attn is not used: %s", error)
    return ()


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


@cache
def _warn_of_reference() -> None:
    _log.warning(
        "there is no fused attention kernel here (they need a GPU of compute capability 8.0 or flash_attn): ring attention "
        "uses its reference, which is exact but slow, and holds at most %d MB of scores at a time",
        ReferenceKernel().most_bytes >> 20,
    )


def _flash_refusal(name: str, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in _HALF:
        return f"{name} takes bfloat16 and float16, not {dtype}"
    if head_dim % 8 or head_dim > _MOST_HEAD_DIM:
        return f"{name} takes a head dimension that is a multiple of 8 up to {_MOST_HEAD_DIM}, not {head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class TorchFlash:
    """Torch's own flash attention: the operators behind `torch.nn.attention.varlen`, which also take an output and a
    log-sum-exp from elsewhere in the backward pass."""

    def refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        return _flash_refusal("torch's flash attention", dtype, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        forward = torch.ops.aten._flash_attention_forward  # noqa: SLF001 - torch has no public operator with a log-sum-exp
        found = forward(q, k, v, *bounds, 0.0, mask.causal, False, **_torch_options(mask))
        return found[0], found[1]

    def backward(self, grad: OutputGradient, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> list[Tensor]:
        q, dout, out, lse = grad
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        backward = torch.ops.aten._flash_attention_backward  # noqa: SLF001
        with _Determinism(mask.deterministic):
            options = _torch_options(mask)
            return list(backward(dout, q, k, v, out, lse, *bounds, 0.0, mask.causal, *unused, **options))


def _torch_options(mask: AttentionMask) -> dict[str, Any]:
    if mask.window == NO_WINDOW:
        return {"scale": mask.scale}
    right = 0 if mask.causal else -1
    return {"scale": mask.scale, "window_size_left": mask.window, "window_size_right": right}


class _Determinism:
    """Asks torch for deterministic kernels, which is a setting of the process, and sets it back."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._before = False, False

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if self._wanted:
            torch.use_deterministic_algorithms(True)  # with warn_only, flash attention stays as it is

    def __exit__(self, *args: object) -> None:
        torch.use_deterministic_algorithms(self._before[0], warn_only=self._before[1])


@dataclass(frozen=True, slots=True)
class FlashAttn:
    """The package `flash_attn`, through the two functions that its own autograd uses: `FlashAttn.installed()`."""

    interface: Any

    @staticmethod
    def installed() -> FlashAttn:
        """The package of this environment. Raises SpecError if there is none, or one whose functions differ."""
        try:
            from flash_attn import __version__, flash_attn_interface  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise SpecError("flash_attn is not installed; leave kernel out to use torch's flash attention") from error
        if _release(__version__) < _OLDEST_FLASH_ATTN:
            raise SpecError(
                f"ring attention needs flash_attn 2.7 or later, found {__version__}; install a later one, or leave kernel "
                "out to use torch's flash attention"
            )
        return FlashAttn(flash_attn_interface)

    def refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        return _flash_refusal("flash_attn", dtype, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        found = self.interface._flash_attn_varlen_forward(q, k, v, **_package_options(bounds, mask))  # noqa: SLF001
        return found[0], found[1]

    def backward(self, grad: OutputGradient, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> list[Tensor]:
        q, dout, out, lse = grad
        found = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)]
        options = _package_options(bounds, mask) | {
            "softcap": 0.0,
            "alibi_slopes": None,
            "deterministic": mask.deterministic,
        }
        self.interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *found, **options)  # noqa: SLF001
        return found


def _package_options(bounds: Bounds, mask: AttentionMask) -> dict[str, Any]:
    return {
        "cu_seqlens_q": bounds.queries,
        "cu_seqlens_k": bounds.keys,
        "max_seqlen_q": bounds.max_queries,
        "max_seqlen_k": bounds.max_keys,
        "dropout_p": 0.0,
        "softmax_scale": mask.scale,
        "causal": mask.causal,
        "window_size_left": mask.window,
        "window_size_right": 0 if mask.causal else -1,
    }


@dataclass(frozen=True, slots=True)
class ReferenceKernel:
    """Plain operations, in single precision or better, for as many queries at a time as fit into `most_bytes`.

    `most_bytes` bounds everything that has a number for each pair of a query and a key: scores, their gradients and masks,
    forward and backward. At least one query is computed at a time. The rest grows with the number of tokens.
    """

    most_bytes: int = 256 << 20

    def refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        del head_dim
        return None if dtype.is_floating_point else f"attention needs floating-point numbers, not {dtype}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        grouped = _grouped(q, k)
        out = torch.zeros_like(grouped)
        lse = torch.full((*grouped.shape[1:3], len(q)), -torch.inf, dtype=out.dtype, device=q.device)
        for block in self._blocks(grouped, bounds):
            rows, columns = block.rows, block.columns
            scores = _scores(grouped[rows], k[columns], block, mask)
            lse[..., rows] = scores.logsumexp(-1)
            weights = scores.sub_(lse[..., rows, None]).exp_()
            out[rows] = torch.einsum("ghqk,kgd->qghd", weights, v[columns].to(out.dtype))
            del scores, weights  # before the next block has its own
        return out.view(q.shape), lse.flatten(0, 1)

    def backward(self, grad: OutputGradient, k: Tensor, v: Tensor, bounds: Bounds, mask: AttentionMask) -> list[Tensor]:
        q = _grouped(grad.q, k)
        dout = grad.dout.reshape(q.shape).to(q.dtype)
        delta = (dout * grad.out.reshape(q.shape)).sum(-1).permute(1, 2, 0)
        lse = grad.lse.view(*q.shape[1:3], len(q))
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=q.dtype), torch.zeros_like(v, dtype=q.dtype)
        for block in self._blocks(q, bounds):
            rows, columns = block.rows, block.columns
            keys, values = k[columns].to(q.dtype), v[columns].to(q.dtype)
            weights = _scores(q[rows], keys, block, mask).sub_(lse[..., rows, None]).exp_()
            dv[columns] += torch.einsum("ghqk,qghd->kgd", weights, dout[rows])
            seen = torch.einsum("qghd,kgd->ghqk", dout[rows], values)
            dscores = seen.sub_(delta[..., rows, None]).mul_(weights).mul_(mask.scale)
            del weights
            dq[rows] = torch.einsum("ghqk,kgd->qghd", dscores, keys)
            dk[columns] += torch.einsum("ghqk,qghd->kgd", dscores, q[rows])
            del seen, dscores  # before the next block has its own
        return [dq.view(grad.q.shape), dk, dv]

    def _blocks(self, q: Tensor, bounds: Bounds) -> Iterator[_ScoreBlock]:
        begins, firsts = bounds.queries.tolist(), bounds.keys.tolist()
        per_pair = _SCORE_TENSORS * q.shape[1] * q.shape[2] * q.element_size() + _MASK_TENSORS
        for begin, end, first, stop in zip(begins, begins[1:], firsts, firsts[1:], strict=False):
            at_once = max(1, self.most_bytes // max(1, per_pair * (stop - first)))
            for row in range(begin, end, at_once):
                yield _ScoreBlock(slice(row, min(row + at_once, end)), slice(first, stop), stop - first - end)


_SCORE_TENSORS = 2
"""Tensors of the size of a block of scores that exist at a time: `logsumexp` makes one beside the scores, and the backward
pass has weights and gradients of scores."""
_MASK_TENSORS = 2
"""Masks of a block that exist at a time, a byte for each pair of a query and a key."""


class _ScoreBlock(NamedTuple):
    """Some queries of a span, and all keys of it."""

    rows: slice
    columns: slice
    shift: int
    """Query `row` is aligned with the key `row + shift` of the span."""

    def hidden(self, mask: AttentionMask, device: torch.device) -> Tensor | None:
        """Where a query does not see a key; None if all queries see all keys."""
        if not mask.causal and mask.window == NO_WINDOW:
            return None
        aligned = torch.arange(self.rows.start + self.shift, self.rows.stop + self.shift, device=device)[:, None]
        column = torch.arange(self.columns.stop - self.columns.start, device=device)[None]
        if mask.window == NO_WINDOW:
            return column > aligned
        hidden = column < aligned - mask.window
        return hidden.logical_or_(column > aligned) if mask.causal else hidden


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Queries as [tokens, kv heads, heads per kv head, dim], in the precision in which sums are computed."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[2]).to(exact)


def _scores(q: Tensor, k: Tensor, block: _ScoreBlock, mask: AttentionMask) -> Tensor:
    """The scores of a block, [kv heads, heads per kv head, queries, keys]."""
    scores = torch.einsum("qghd,kgd->ghqk", q, k.to(q.dtype)).mul_(mask.scale)
    hidden = block.hidden(mask, q.device)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)
