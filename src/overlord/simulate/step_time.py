"""`TimeModel`: predicts how long a rank works on its part of a step. It counts

- matrix products and attention of forward and backward, from cost coefficients in seconds; tp and pp divide them evenly;
- ring attention: every rank of a ring gets the keys and values of all tokens in it, once forward and once backward, and
  backward their gradients too, in single precision: four times the bytes of a forward pass in all. A ring that lies in one
  node runs at the node's speed, any other at the network's.
  Sending hides behind attention as far as it can: attention takes as long as the longer of the two;
- the exchange of gradients once per step, which nothing hides.

It does not count kernels that are slower on small slices, the padding of documents to multiples of 2 x cp, and ranks of
unequal speed. All three cost most on wide rings, so leaving them out favours the static mesh.
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

# Forward and backward of two Llama-8B-like blocks (hidden 4096, 32 heads, 8 key-value heads, feed-forward 14336) over
# packed documents on one H200 (torch 2.11, bf16, varlen flash attention): 32,768 and 131,072 tokens as documents of 512 to
# 131,072. Least squares of relative errors, within 3.5 % of each of the nine times. These are the seconds of one block.
H200_BLOCK = TransformerCost(per_token=2.23204e-06, per_length_squared=8.7424e-11)
_H200_BLOCK_WEIGHTS = 2 * 4096 * 4096 * (1 + 8 / 32) + 3 * 4096 * 14336
_H200_BLOCK_HIDDEN = 4096
H200_FLOPS = 6 * _H200_BLOCK_WEIGHTS / H200_BLOCK.per_token
"""Floating point operations per second in matrix products that those times amount to: 586e12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder with gated feed-forward layers. The defaults are Llama 3 8B."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128_256

    def __post_init__(self) -> None:
        self.flops()  # raises SpecError for an invalid shape

    @property
    def block_weights(self) -> float:
        return 2 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads) + 3 * self.hidden * self.ffn

    @property
    def weights(self) -> float:
        return self.layers * self.block_weights + 2 * self.hidden * self.vocab

    @property
    def kv_bytes(self) -> float:
        """The bytes of the keys and values of one token in one layer."""
        return 2 * _BYTES * self.hidden * self.kv_heads / self.heads

    @property
    def activation_bytes(self) -> float:
        """The bytes that one layer keeps per token for its backward pass, with attention recomputed: the inputs of its
        matrix products."""
        return _BYTES * (6 * self.hidden + 2 * self.hidden * self.kv_heads / self.heads + 3 * self.ffn)

    def flops(self, attention_slowdown: float = ATTENTION_SLOWDOWN) -> TransformerCost:
        """The cost of a document in GFLOP of matrix products."""
        shape = {"hidden": self.hidden, "layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads}
        return TransformerCost.of(**shape, ffn=self.ffn, attention_slowdown=attention_slowdown)

    def at(self, flops_per_s: float) -> TransformerCost:
        """The cost of a document in seconds, at this many operations per second in matrix products."""
        cost, gflops_per_s = self.flops(), flops_per_s / 1e9
        return TransformerCost(cost.per_token / gflops_per_s, cost.per_length_squared / gflops_per_s)

    def on_h200(self) -> TransformerCost:
        """The cost of a document in seconds on an H200: the measured block, scaled by weights and by the width of
        attention."""
        return TransformerCost(
            H200_BLOCK.per_token * self.layers * self.block_weights / _H200_BLOCK_WEIGHTS,
            H200_BLOCK.per_length_squared * self.layers * self.hidden / _H200_BLOCK_HIDDEN,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The network between ranks. The defaults are the peak rates of the hardware; slower links affect wide rings only."""

    ranks_per_node: int = 8
    node_bytes_per_s: float = 450e9
    """NVLink 4, per direction."""
    network_bytes_per_s: float = 50e9
    """400 Gb/s per rank."""
    hop_s: float = 10e-6
    """The latency from one rank to the next."""

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "node_bytes_per_s", "network_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} must be above 0, got {getattr(self, name)}")
        if not (math.isfinite(self.hop_s) and self.hop_s >= 0):
            raise SpecError(f"hop_s must be a number of seconds >= 0, got {self.hop_s}")


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """The encoding time of images. Ranks that differ only in tp encode the same images; the ranks of a ring share them."""

    cost: VisionTransformerCost
    """Seconds per image on one rank, forward and backward."""
    grid: PatchGrid

    @staticmethod
    def at(flops_per_s: float, *, hidden: int = 1280, layers: int = 32, grid: PatchGrid | None = None) -> EncoderModel:
        """Estimate it from the shape of an encoder. The default shape is ViT-H, 0.6 billion weights."""
        found, gflops_per_s = VisionTransformerCost.of(hidden=hidden, layers=layers), flops_per_s / 1e9
        seconds = VisionTransformerCost(found.per_patch / gflops_per_s, found.per_patches_squared / gflops_per_s)
        return EncoderModel(seconds, PatchGrid(patch=14, merge=2) if grid is None else grid)

    def samples_s(self, samples: Samples) -> Floats:
        """The encoding time of each sample's images."""
        images = images_of(samples, self.grid)
        return np.bincount(images.sample, self.cost(images), len(samples)).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Predicts the time of the parts of a step, in seconds, on ranks that share a model by tp and pp. With pp, times are
    those of all stages together."""

    cost: TransformerCost
    """Seconds per document on one rank that holds the whole model."""
    shape: ModelShape
    links: Links
    tp: int = 1
    pp: int = 1
    encoder: EncoderModel | None = None
    gradient_bytes: int = 4
    """The bytes of a number in the gradients of keys and values that a ring sends: `overlord.trainer` sums them in single
    precision."""

    def matmul_s(self, tokens: Floats | Ints, ranks: Floats | Ints | int = 1) -> Floats:
        """The time of matrix products, which is linear in tokens, on each of the ranks that share these."""
        return np.asarray(self.cost.per_token * tokens / (ranks * self.tp), np.float64)

    def attention_s(self, squares: Floats, documents: Floats | Ints | int = 1, ranks: Floats | Ints | int = 1) -> Floats:
        """The time of attention within documents whose squared lengths add up to `squares`, on each of the ranks that share
        them."""
        return (self.cost.per_length_squared * squares + self.cost.constant * documents) / (ranks * self.tp)

    def ring_s(
        self, tokens: Floats | Ints, ranks: Floats | Ints | int, in_node: NDArray[np.bool_] | bool | None = None
    ) -> Floats:
        """The time to pass the keys and values of `tokens` around a ring of ranks. `in_node` says whether the ring lies in
        one node; by default it does if it fits."""
        hops = 2 * self.shape.layers * (np.asarray(ranks, np.float64) - 1)
        return np.maximum(np.asarray(tokens) * self.ring_token_s(ranks, in_node), hops * self.links.hop_s)

    def cut_over(self, ranks: int) -> Callable[[Samples], Floats]:
        """A cost function for strategies: the time of a document that is cut over this many ranks."""
        ring_token_s = self.ring_token_s(ranks)

        def cost(samples: Samples) -> Floats:
            tokens = samples.tokens.astype(np.float64)
            return self.matmul_s(tokens, ranks) + np.maximum(
                self.attention_s(tokens * tokens, 1, ranks), tokens * ring_token_s
            )

        return cost

    @property
    def sent_token_s(self) -> float:
        """The time in which a rank of a ring receives the keys and values of one token: the `communication` of
        `strategies.hdp`. Planning does not know which ranks will form a ring, so it assumes that rings cross nodes."""
        return float(self.ring_token_s(np.inf, in_node=False))

    def in_pool(self, capacity: int, offload: Offload | None = None) -> Callable[[Samples], Floats]:
        """A cost function for `strategies.hdp` with `communication=sent_token_s`: the time of a document on the ranks that
        hold it, `capacity` tokens each, without communication. Attention that overlaps with communication costs nothing."""

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
        """The `Offload` of this model at this bandwidth. The forward pass is a third of the time of matrix products, and 1 /
        3.5 of that of attention."""
        layers = self.shape.layers
        per_token, squared = self.cost.per_token / (3 * layers), self.cost.per_length_squared / (3.5 * layers)
        return Offload(
            layers=max(2, layers // self.pp),
            time=TransformerCost(per_token / self.tp, squared / self.tp),
            bytes_per_token=self.shape.activation_bytes / self.tp,
            bytes_per_s=bytes_per_s,
            sent_token_s=self.shape.kv_bytes / self.tp / self.links.network_bytes_per_s,
        )

    def ring_token_s(self, ranks: Floats | Ints | float, in_node: NDArray[np.bool_] | bool | None = None) -> Floats:
        """The time to pass the keys and values of one token, among many, around a ring of ranks."""
        ranks = np.asarray(ranks, np.float64)
        if in_node is None:
            in_node = ranks * self.tp <= self.links.ranks_per_node
        speed = np.where(in_node, self.links.node_bytes_per_s, self.links.network_bytes_per_s)
        passes = 2 + self.gradient_bytes / _BYTES  # keys and values forward and backward, and their gradients backward
        num_bytes = passes * self.shape.kv_bytes * self.shape.layers * (1 - 1 / ranks) / self.tp
        return num_bytes / speed

    def sync_s(self, replicas: int) -> float:
        """The time to reduce gradients and gather weights over the ranks that hold the same part of the model (ZeRO-1)."""
        if replicas == 1:
            return 0.0
        num_bytes = 2 * _BYTES * self.shape.weights / (self.tp * self.pp)
        in_node = replicas * self.tp * self.pp <= self.links.ranks_per_node
        return num_bytes / (self.links.node_bytes_per_s if in_node else self.links.network_bytes_per_s)
