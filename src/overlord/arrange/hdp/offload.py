"""How much of its activations a long document can move to host memory while it computes, and how few ranks hold it then.

The model of ByteScale (arXiv 2502.21231, section on selective offloading): per layer, a document of s tokens takes time
T(s) and leaves Act(s) bytes of activations. Of all layers but two (the one being computed and the one being moved) a part r
is moved out, as long as the bus keeps pace: r Act(s) <= T(s) x bandwidth. A rank that holds C tokens without moving
anything has room for l Act(C) bytes over its l layers, so the document needs

    D(s) = ceil((2 Act(s) + (1 - r) (l - 2) Act(s)) / (l Act(C)))

ranks. r is the smallest that brings D to its least: moving more would save no rank, and a document whose D falls by nothing
has r = 0. (The paper bounds r from below by l Act(C) / ((l - 2) Act(s)), what must be moved to be sure to save one rank;
computing D exactly makes that bound needless.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.arrange.cost import TransformerCost
    from overlord.stream.facts import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What moving activations to the host costs and saves. Time in seconds, memory in bytes."""

    layers: int
    """Layers on one rank."""
    time: TransformerCost
    """Seconds that one layer computes for a document, forward."""
    bytes_per_token: float
    """Activations that one layer keeps for each token."""
    bytes_per_s: float
    """Of the slower direction between device and host."""
    bytes_constant: float = 0.0
    """Activations that one layer keeps for each document, whatever its length."""

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise SpecError(f"two layers always stay on the device, so offloading needs at least 2, got {self.layers}")
        for name in ("bytes_per_token", "bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"Offload.{name} must be a number above 0, got {value!r}")
        if not (math.isfinite(self.bytes_constant) and self.bytes_constant >= 0):
            raise SpecError(f"Offload.bytes_constant must be a number >= 0, got {self.bytes_constant!r}")

    def activations(self, lengths: Ints | Floats) -> Floats:
        """Bytes that one layer keeps for documents of these lengths."""
        return self.bytes_constant + self.bytes_per_token * np.asarray(lengths, np.float64)

    def most_ratio(self, lengths: Ints) -> Floats:
        """The largest part of the activations that the bus can move while a layer computes."""
        s = np.asarray(lengths, np.float64)
        time = self.time.constant + s * (self.time.per_token + self.time.per_length_squared * s)
        return np.minimum(1.0, time * self.bytes_per_s / self.activations(s))

    def fewest_ranks(self, lengths: Ints, capacity: int) -> Ints:
        """The fewest ranks that hold each document."""
        return self._ranks(lengths, capacity, self.most_ratio(lengths))

    def ratios(self, lengths: Ints, capacity: int, num_ranks: Ints) -> Floats:
        """The least part r that each document must move out to fit on so many ranks."""
        inner = self.layers - 2
        if inner == 0:
            return np.zeros(len(lengths))
        needed = 1 - (num_ranks * self._room(capacity) / self.activations(lengths) - 2) / inner
        return np.clip(np.where(num_ranks < self._ranks(lengths, capacity, 0.0), needed, 0.0), 0.0, 1.0)

    def _room(self, capacity: int) -> float:
        return self.layers * float(self.activations(np.array(capacity)))

    def _ranks(self, lengths: Ints, capacity: int, ratio: Floats | float) -> Ints:
        # A hair less than exact: a document that fits to the last byte must not take another rank by rounding.
        kept = (2 + (1 - ratio) * (self.layers - 2)) * self.activations(lengths)
        return np.maximum(1, np.ceil(kept / self._room(capacity) - 1e-9)).astype(np.int64)
