"""`Offload`: how much of its activations a long document can move to host memory, and how few ranks it then needs.

The model is ByteScale's (arXiv 2502.21231, selective offloading). Per layer, a document of s tokens takes time T(s) and
leaves Act(s) bytes of activations. Of all layers but two (the one being computed and the one being moved) a share r is moved
out, as long as the bus keeps up: r Act(s) <= T(s) x bandwidth. A rank that holds C tokens without offloading has room for
l Act(C) bytes over its l layers, so the document needs

    D(s) = ceil((2 Act(s) + (1 - r) (l - 2) Act(s)) / (l Act(C)))

ranks, and as many as it takes for the moved activations to fit into the hosts' memory. r is the smallest value for which D
is least: moving more would save no rank, and a document that saves none has r = 0. (The paper bounds r from below by l
Act(C) / ((l - 2) Act(s)), which is sure to save one rank. Computing D exactly makes that bound unnecessary.)

Fewer ranks send less, but each of them computes more. That pays only while messages take longer than the attention which
hides them: on n ranks, a rank computes 1 / n of the attention A(s) and receives (n - 1) / n of the keys and values, M(s). So
with `sent_token_s` a document keeps n = 1 + A(s) / M(s) ranks, where both take equally long, or as many as it has without
offloading if these are fewer.
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
    """A model of activation offloading to host memory, for `strategies.hdp` and `hdp.split`.

    It tells how much of a long document's activations can be moved out while the model computes, and so how few ranks hold
    the document. Times are in seconds, memory in bytes.
    """

    layers: int
    """Layers on one rank."""
    time: TransformerCost
    """The forward time of one layer, in seconds."""
    bytes_per_token: float
    """Activation bytes that one layer keeps per token."""
    bytes_per_s: float
    """Bandwidth between device and host, in the slower direction."""
    bytes_constant: float = 0.0
    """Activation bytes that one layer keeps per document, whatever its length."""
    host_bytes: float = math.inf
    """Host memory of one rank that activations may be moved to."""
    sent_token_s: float = math.inf
    """Seconds in which a rank receives the keys and values of one token for one layer. A document gives up ranks only as far
    as attention would not hide its messages. Infinite: it takes as few ranks as hold it, however long they then compute."""

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise SpecError(f"two layers always stay on the device, so offloading needs at least 2, got {self.layers}")
        for name in ("bytes_per_token", "bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"Offload.{name} must be a number above 0, got {value!r}")
        for name in ("host_bytes", "sent_token_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"Offload.{name} must be above 0, got {getattr(self, name)!r}")
        if not (math.isfinite(self.bytes_constant) and self.bytes_constant >= 0):
            raise SpecError(f"Offload.bytes_constant must be a number >= 0, got {self.bytes_constant!r}")

    def activations(self, lengths: Ints | Floats) -> Floats:
        """The activation bytes that one layer keeps for a document of each of these lengths."""
        return self.bytes_constant + self.bytes_per_token * np.asarray(lengths, np.float64)

    def most_ratio(self, lengths: Ints) -> Floats:
        """The largest share of the activations that the bus can move while a layer computes."""
        s = np.asarray(lengths, np.float64)
        time = self.time.constant + s * (self.time.per_token + self.time.per_length_squared * s)
        return np.minimum(1.0, time * self.bytes_per_s / self.activations(s))

    def fewest_ranks(self, lengths: Ints, capacity: int) -> Ints:
        """The fewest ranks that hold a document of each of these lengths, `capacity` tokens per rank without offloading."""
        # What does not stay on the devices must fit on the hosts of the same ranks.
        in_all = self.layers * self.activations(lengths) / (self._room(capacity) + self.host_bytes)
        fewest = np.maximum(1, np.ceil(in_all - 1e-9)).astype(np.int64)
        fewest = np.maximum(fewest, self._ranks(lengths, capacity, self.most_ratio(lengths)))
        return np.maximum(fewest, np.minimum(self._ranks(lengths, capacity, 0.0), self._hidden_ranks(lengths)))

    def _hidden_ranks(self, lengths: Ints) -> Ints:
        """The most ranks on which the attention of a document hides its messages."""
        hidden = self.time.per_length_squared * np.asarray(lengths, np.float64) / self.sent_token_s
        return 1 + np.minimum(hidden, 1 << 40).astype(np.int64)

    def ratios(self, lengths: Ints, capacity: int, num_ranks: Ints) -> Floats:
        """The smallest share of its activations that each document must move out to fit on `num_ranks` ranks."""
        inner = self.layers - 2
        if inner == 0:
            return np.zeros(len(lengths))
        needed = 1 - (num_ranks * self._room(capacity) / self.activations(lengths) - 2) / inner
        return np.clip(np.where(num_ranks < self._ranks(lengths, capacity, 0.0), needed, 0.0), 0.0, 1.0)

    def _room(self, capacity: int) -> float:
        return self.layers * float(self.activations(np.array(capacity)))

    def _ranks(self, lengths: Ints, capacity: int, ratio: Floats | float) -> Ints:
        # Rounded down by a hair: a document that fits to the last byte must not take another rank by a rounding error.
        kept = (2 + (1 - ratio) * (self.layers - 2)) * self.activations(lengths)
        return np.maximum(1, np.ceil(kept / self._room(capacity) - 1e-9)).astype(np.int64)
