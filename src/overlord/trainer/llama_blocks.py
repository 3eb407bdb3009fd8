"""A stack of Llama-like blocks over packed documents, for `overlord calibrate`. Weights are random: only the time matters.

Attention is causal within each document: `torch.nn.attention.varlen` on a GPU if this torch has it, otherwise
`scaled_dot_product_attention` on one document after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The shape of one block."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "ffn"):
            if getattr(self, name) < 1:
                raise SpecError(f"a block needs {name} >= 1, got {getattr(self, name)}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise SpecError(
                f"heads must divide hidden, and kv_heads heads: got hidden {self.hidden}, heads {self.heads}, kv_heads "
                f"{self.kv_heads}"
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


LLAMA_8B = BlockShape(hidden=4096, heads=32, kv_heads=8, ffn=14336)
LLAMA_70B = BlockShape(hidden=8192, heads=64, kv_heads=8, ffn=28672)
TINY = BlockShape(hidden=64, heads=4, kv_heads=2, ffn=128)

Attention = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""A function (query, key, value, lengths) of tensors [tokens, heads, head size] that returns [tokens, heads, head size]."""


def steps_of(shape: BlockShape, layers: int, device: str) -> Callable[[Sequence[int]], None]:
    """Make a function that runs forward and backward over packed documents of given lengths."""
    if layers < 1:
        raise SpecError(f"at least 1 block is measured, got layers={layers}")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    attention = attention_for(device)
    with torch.device(device):
        blocks = nn.ModuleList(_LlamaBlock(shape, attention) for _ in range(layers)).to(dtype)

    def step(lengths: Sequence[int]) -> None:
        hidden = torch.randn(sum(lengths), shape.hidden, device=device, dtype=dtype, requires_grad=True)
        angles = _angles(lengths, shape.head_size, device)
        out = hidden
        for block in blocks:
            out = block(out, lengths, angles)
        out.float().square().mean().backward()
        for parameter in blocks.parameters():
            parameter.grad = None

    return step


def attention_for(device: str) -> Attention:
    """The fastest attention over packed documents that this torch has on the device."""
    varlen = _varlen() if device.startswith("cuda") else None
    return _one_by_one if varlen is None else varlen


def attention_name(device: str) -> str:
    """The name of `attention_for(device)`, for reports."""
    return "one document at a time" if attention_for(device) is _one_by_one else "varlen"


class _LlamaBlock(nn.Module):
    def __init__(self, shape: BlockShape, attention: Attention) -> None:
        super().__init__()
        self._shape = shape
        self._attention = attention
        kv = shape.kv_heads * shape.head_size
        self.queries_keys_values = nn.Linear(shape.hidden, shape.hidden + 2 * kv, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, lengths: Sequence[int], angles: Tensor) -> Tensor:
        shape = self._shape
        normed = rms_norm(hidden, (shape.hidden,))
        heads = self.queries_keys_values(normed).view(len(hidden), -1, shape.head_size)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        attended = self._attention(_rotate(query, angles), _rotate(key, angles), value.contiguous(), lengths)
        hidden = hidden + self.out(attended.reshape(len(hidden), shape.hidden))
        gate, up = self.gate_up(rms_norm(hidden, (shape.hidden,))).chunk(2, dim=-1)
        return hidden + self.down(silu(gate) * up)


def _angles(lengths: Sequence[int], head_size: int, device: str) -> Tensor:
    position = torch.cat([torch.arange(length, device=device) for length in lengths])
    rate = 1e4 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    return position[:, None, None] * rate


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = zip(*(whole.split(list(lengths)) for whole in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for q, k, v in parts
    ]
    return torch.cat(attended)


def _varlen() -> Attention | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    # The options for causal attention and for fewer key heads differ between torch releases.
    options: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    shares_heads = "enable_gqa" in known
    if shares_heads:
        options["enable_gqa"] = True

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        ends = torch.tensor([0, *lengths], device=query.device).cumsum(0, dtype=torch.int32)
        if not shares_heads:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        longest = max(lengths)
        return varlen_attn(query, key, value, ends, ends, longest, longest, **options)  # type: ignore[arg-type]

    return attend
