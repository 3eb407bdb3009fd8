"""What a document costs to train on: linear in its tokens (matrix products), quadratic in its length (attention).

`MeasuredCost` goes by length alone, from times that were measured at a few lengths. A GPU's attention kernel is not
equally quick at all lengths: on an H200 it takes half as long again per pair of tokens in documents of 4,096 tokens as in
long ones. A formula with three coefficients is a tenth off at its worst there; a table of a dozen lengths is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from overlord.errors import SpecError
from overlord.stream.facts import Floats, Ints, Samples

# Forward and backward of causal flash attention against dense matrix products, in time per floating point
# operation: 1.7 is what bf16 varlen attention takes on an H200, at 512 to 131,072 tokens a document.
ATTENTION_SLOWDOWN = 1.7


CostFunction = Callable[[Samples], Floats | Mapping[str, Floats]]
"""From facts to the cost of each sample, or of each sample in each module of the model."""


def costs_of(function: CostFunction, samples: Samples) -> Floats:
    """What each sample costs, over all modules."""
    found = function(samples)
    costs = sum(found.values(), np.zeros(len(samples))) if isinstance(found, Mapping) else np.asarray(found, np.float64)
    if costs.shape != (len(samples),):
        raise SpecError(f"a cost function gives one number per sample: {len(samples)}, got shape {costs.shape}")
    if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise SpecError("a cost function gives finite numbers >= 0; it gave others")
    return costs


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """per_token * s + per_length_squared * s² + constant, for each document of s tokens. Any unit of time or
    work.

    Only ratios decide an arrangement. Coefficients fitted to measured times are best; `of` derives them from
    a shape.
    """

    per_token: float
    per_length_squared: float
    constant: float = 0.0
    """Added once a document."""

    def __post_init__(self) -> None:
        for name in ("per_token", "per_length_squared", "constant"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(f"the cost coefficient {name} must be a number >= 0, got {value!r}")
        if self.per_token == self.per_length_squared == self.constant == 0:
            raise SpecError("a TransformerCost with all coefficients 0 makes every document free; give one above 0")

    @classmethod
    def of(
        cls,
        *,
        hidden: int,
        layers: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        ffn: int | None = None,
        vocab: int = 0,
        active_experts: int = 1,
        attention_slowdown: float = ATTENTION_SLOWDOWN,
    ) -> TransformerCost:
        """The cost of a decoder with gated feed-forward layers, in GFLOP of dense matrix products.

        `heads` is hidden / 128 and `kv_heads` is heads unless given; `ffn` is 8/3 hidden unless given. For a
        mixture of experts, `active_experts` feed-forward layers of width `ffn` run per token.
        `attention_slowdown` is how much longer a floating point operation takes in attention than in a matrix
        product.
        """
        heads = max(1, hidden // 128) if heads is None else heads
        kv_heads = heads if kv_heads is None else kv_heads
        ffn = round(hidden * 8 / 3) if ffn is None else ffn
        _check_shape(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            active_experts=active_experts,
        )
        if vocab < 0:
            raise SpecError(f"vocab must be at least 0, got {vocab}")
        if heads % kv_heads:
            raise SpecError(f"kv_heads must divide heads: {kv_heads} does not divide {heads}")
        attention_weights = 2 * hidden * hidden * (1 + kv_heads / heads)  # query and output, key and value
        weights = layers * (attention_weights + 3 * hidden * ffn * active_experts) + hidden * vocab
        # A weight costs 2 operations forward and 4 backward. Causal attention over s tokens: 2 products of
        # s²/2 x hidden forward, and backward 2.5 times that, because flash attention computes the scores
        # again.
        per_token = 6 * weights
        per_length_squared = layers * 2 * hidden * 3.5 * attention_slowdown
        return cls(per_token / 1e9, per_length_squared / 1e9)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return self.per_token, self.per_length_squared, self.constant

    def with_coefficients(self, coefficients: tuple[float, ...]) -> TransformerCost:
        return TransformerCost(*coefficients)

    def features(self, samples: Samples) -> Floats:
        """What each coefficient is multiplied by: a row per sample."""
        tokens = samples.tokens.astype(np.float64)
        return np.column_stack([tokens, tokens * tokens, np.ones(len(tokens))])

    def __call__(self, samples: Samples) -> Floats:
        tokens = samples.tokens.astype(np.float64)
        return self.constant + tokens * (self.per_token + self.per_length_squared * tokens)


def _check_shape(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise SpecError(f"the model shape needs {name} >= 1, got {size}")


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """The cost of one document of each of `lengths` tokens. In between, the cost per token lies on a straight line; beyond
    the last length it goes on as between the last two, so the cost is quadratic there."""

    lengths: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) < 2 or len(self.lengths) != len(self.costs):
            raise SpecError(f"a cost is given for each of at least 2 lengths, got {len(self.lengths)} and {len(self.costs)}")
        if self.lengths[0] < 1 or any(a >= b for a, b in pairwise(self.lengths)):
            raise SpecError(f"lengths are positive and rise, got {self.lengths}")
        if not all(math.isfinite(cost) and cost > 0 for cost in self.costs):
            raise SpecError(f"costs are numbers above 0, got {self.costs}")

    def of(self, lengths: Ints) -> Floats:
        """The cost of a document of each of these lengths."""
        known = np.array(self.lengths, np.float64)
        per_token = np.array(self.costs) / known
        slope = max(0.0, float((per_token[-1] - per_token[-2]) / (known[-1] - known[-2])))
        beyond = np.maximum(0.0, lengths - known[-1])
        return lengths * (np.interp(lengths, known, per_token) + slope * beyond)

    def __call__(self, samples: Samples) -> Floats:
        return self.of(samples.tokens)
