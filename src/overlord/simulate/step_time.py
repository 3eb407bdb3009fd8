"""How long a rank works on its part of a step: a model of time, for predictions. What it counts, and what not:

- matrix products and attention of forward and backward, from cost coefficients in seconds; tp and pp divide them evenly;
- ring attention: every rank of a ring gets the keys and values of all tokens in it, once forward and, with their
  gradients, twice backward. A ring that lies in one node runs at the node's speed, any other at the network's.
  Sending hides behind attention as far as it can: attention takes as long as the longer of the two;
- the gradients' way once a step, which nothing hides;
- not counted: kernels that slow down on small slices, padding of documents to multiples of 2 x cp, unequal speed of ranks.
  All three weigh on wide rings, so what is left out favours the static mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.cost import ATTENTION_SLOWDOWN, TransformerCost
from overlord.arrange.hdp.offload import Offload
from overlord.arrange.vision.images import PatchGrid, VisionTransformerCost, images_of
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from overlord.stream.facts import Floats, Ints, Samples

_BYTES = 2  # bf16
_PASSES = 3  # keys and values forward; keys, values and their gradients backward

# Forward and backward of two Llama-8B-like blocks (hidden 4096, 32 heads, 8 key-value heads, feed-forward 14336) over
# packed documents on one H200 (torch 2.11, bf16, varlen flash attention): 32,768 and 131,072 tokens as documents of 512 to
# 131,072. Least squares of relative errors, within 3.5 % of each of the nine times. These are the seconds of one block.
H200_BLOCK = TransformerCost(per_token=2.23204e-06, per_length_squared=8.7424e-11)
_H200_BLOCK_WEIGHTS = 2 * 4096 * 4096 * (1 + 8 / 32) + 3 * 4096 * 14336
_H200_BLOCK_HIDDEN = 4096
H200_FLOPS = 6 * _H200_BLOCK_WEIGHTS / H200_BLOCK.per_token
"""Operations a second in matrix products, as those times give it: 586e12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with gated feed-forward layers; Llama 3's 8B unless told otherwise."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128_256

    def __post_init__(self) -> None:
        self.flops()  # refuses what is no shape

    @property
    def block_weights(self) -> float:
        return 2 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads) + 3 * self.hidden * self.ffn

    @property
    def weights(self) -> float:
        return self.layers * self.block_weights + 2 * self.hidden * self.vocab

    @property
    def kv_bytes(self) -> float:
        """Of the keys and values of one token in one layer."""
        return 2 * _BYTES * self.hidden * self.kv_heads / self.heads

    @property
    def activation_bytes(self) -> float:
        """What one layer keeps of one token for its backward pass, attention computed again: the inputs of its products."""
        return _BYTES * (6 * self.hidden + 2 * self.hidden * self.kv_heads / self.heads + 3 * self.ffn)

    def flops(self, attention_slowdown: float = ATTENTION_SLOWDOWN) -> TransformerCost:
        """In GFLOP of matrix products."""
        shape = {"hidden": self.hidden, "layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads}
        return TransformerCost.of(**shape, ffn=self.ffn, attention_slowdown=attention_slowdown)

    def at(self, flops_per_s: float) -> TransformerCost:
        """In seconds, at this many operations a second in matrix products."""
        cost, gflops_per_s = self.flops(), flops_per_s / 1e9
        return TransformerCost(cost.per_token / gflops_per_s, cost.per_length_squared / gflops_per_s)

    def on_h200(self) -> TransformerCost:
        """In seconds, as measured on an H200: its block's time by weights and by width of attention."""
        return TransformerCost(
            H200_BLOCK.per_token * self.layers * self.block_weights / _H200_BLOCK_WEIGHTS,
            H200_BLOCK.per_length_squared * self.layers * self.hidden / _H200_BLOCK_HIDDEN,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What joins ranks. The figures are the most that the hardware gives: slower links weigh on wide rings only."""

    ranks_per_node: int = 8
    node_bytes_per_s: float = 450e9
    """NVLink 4, one way."""
    network_bytes_per_s: float = 50e9
    """400 Gb/s a rank."""
    hop_s: float = 10e-6
    """From one rank to the next, however little is sent."""

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "node_bytes_per_s", "network_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} must be above 0, got {getattr(self, name)}")
        if not (math.isfinite(self.hop_s) and self.hop_s >= 0):
            raise SpecError(f"hop_s must be a number of seconds >= 0, got {self.hop_s}")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes the images of samples. Ranks that differ in tp encode the same ones; those of a ring share them."""

    cost: VisionTransformerCost
    """Seconds of one image on one rank, forward and backward."""
    grid: PatchGrid

    @staticmethod
    def at(flops_per_s: float, *, hidden: int = 1280, layers: int = 32, grid: PatchGrid | None = None) -> Encoder:
        """An encoder of this shape (the 0.6 billion weights of ViT-H unless told otherwise)."""
        found, gflops_per_s = VisionTransformerCost.of(hidden=hidden, layers=layers), flops_per_s / 1e9
        seconds = VisionTransformerCost(found.per_patch / gflops_per_s, found.per_patches_squared / gflops_per_s)
        return Encoder(seconds, PatchGrid(patch=14, merge=2) if grid is None else grid)

    def samples_s(self, samples: Samples) -> Floats:
        """What the images of each sample take."""
        images = images_of(samples, self.grid)
        return np.bincount(images.sample, self.cost(images), len(samples)).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Seconds for the parts of a step, on ranks that share a model by tp and pp. With pp, all stages taken together."""

    cost: TransformerCost
    """Seconds of one document on one rank that holds the whole model."""
    shape: ModelShape
    links: Links
    tp: int = 1
    pp: int = 1
    encoder: Encoder | None = None

    def matmul_s(self, tokens: Floats | Ints, ranks: Floats | Ints | int = 1) -> Floats:
        """What is linear in tokens, on each of the ranks that share them."""
        return np.asarray(self.cost.per_token * tokens / (ranks * self.tp), np.float64)

    def attention_s(self, squares: Floats, documents: Floats | Ints | int = 1, ranks: Floats | Ints | int = 1) -> Floats:
        """Attention within documents whose squared lengths add up to `squares`, on each of the ranks that share them."""
        return (self.cost.per_length_squared * squares + self.cost.constant * documents) / (ranks * self.tp)

    def ring_s(
        self, tokens: Floats | Ints, ranks: Floats | Ints | int, in_node: NDArray[np.bool_] | bool | None = None
    ) -> Floats:
        """Passing the keys and values of `tokens` round a ring of ranks; `in_node` says whether it lies in one node, which
        it does, unless told, where a node has room for it."""
        hops = 2 * self.shape.layers * (np.asarray(ranks, np.float64) - 1)
        return np.maximum(np.asarray(tokens) * self.ring_token_s(ranks, in_node), hops * self.links.hop_s)

    def cut_over(self, ranks: int) -> Callable[[Samples], Floats]:
        """What a document takes when it is cut over so many ranks, as a cost function for strategies."""
        ring_token_s = self.ring_token_s(ranks)

        def cost(samples: Samples) -> Floats:
            tokens = samples.tokens.astype(np.float64)
            return self.matmul_s(tokens, ranks) + np.maximum(
                self.attention_s(tokens * tokens, 1, ranks), tokens * ring_token_s
            )

        return cost

    @property
    def sent_token_s(self) -> float:
        """What receiving the keys and values of one token takes a rank of a ring: `communication` of hybrid data
        parallelism. Which ranks will be free together is not known when it plans, so a ring may cross nodes."""
        return float(self.ring_token_s(np.inf, in_node=False))

    def in_pool(self, capacity: int, offload: Offload | None = None) -> Callable[[Samples], Floats]:
        """What a document takes the ranks that hold it, `capacity` tokens each, beside the sending, as a cost function for
        hybrid data parallelism with `communication=sent_token_s`. Attention that hides behind the sending costs nothing."""

        def cost(samples: Samples) -> Floats:
            tokens = samples.tokens.astype(np.float64)
            if offload is None:
                ranks = np.maximum(1.0, np.ceil(tokens / capacity))
            else:
                ranks = offload.fewest_ranks(samples.tokens, capacity).astype(np.float64)
            sent_s = tokens * self.sent_token_s * (ranks - 1)
            return self.matmul_s(tokens) + np.maximum(self.attention_s(tokens * tokens) - sent_s, 0.0)

        return cost

    def offload(self, bytes_per_s: float) -> Offload:
        """Moving activations to the host at this speed. A third of matrix products and 1 / 3.5 of attention is forward."""
        layers = self.shape.layers
        per_token, squared = self.cost.per_token / (3 * layers), self.cost.per_length_squared / (3.5 * layers)
        return Offload(
            layers=max(2, layers // self.pp),
            time=TransformerCost(per_token / self.tp, squared / self.tp),
            bytes_per_token=self.shape.activation_bytes / self.tp,
            bytes_per_s=bytes_per_s,
        )

    def ring_token_s(self, ranks: Floats | Ints | float, in_node: NDArray[np.bool_] | bool | None = None) -> Floats:
        """Passing the keys and values of one token of many round a ring of ranks."""
        ranks = np.asarray(ranks, np.float64)
        if in_node is None:
            in_node = ranks * self.tp <= self.links.ranks_per_node
        speed = np.where(in_node, self.links.node_bytes_per_s, self.links.network_bytes_per_s)
        num_bytes = _PASSES * self.shape.kv_bytes * self.shape.layers * (1 - 1 / ranks) / self.tp
        return num_bytes / speed

    def sync_s(self, replicas: int) -> float:
        """Gradients out and weights back over the ranks that hold the same part of the model, as ZeRO-1 does."""
        if replicas == 1:
            return 0.0
        num_bytes = 2 * _BYTES * self.shape.weights / (self.tp * self.pp)
        in_node = replicas * self.tp * self.pp <= self.links.ranks_per_node
        return num_bytes / (self.links.node_bytes_per_s if in_node else self.links.network_bytes_per_s)
