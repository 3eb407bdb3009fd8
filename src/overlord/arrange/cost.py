"""The cost of training on a document: linear in its tokens (matrix products), quadratic in its length (attention).

`TransformerCost` is a formula with three coefficients, `MeasuredCost` a table of times measured at a few lengths. The table
is closer where kernels are not equally fast at all lengths: on an H200, attention takes half as long again per pair of
tokens in documents of 4,096 tokens as in long ones, and the formula is off by up to a tenth there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from overlord.declare.source import CHOSEN_TOKENS
from overlord.errors import SpecError
from overlord.stream.facts import Floats, Ints, Samples

ATTENTION_SLOWDOWN = 1.7
"""Time per floating point operation of causal flash attention, forward and backward, over that of dense matrix products:
measured for bf16 varlen attention on an H200, at 512 to 131,072 tokens per document."""

CostFunction = Callable[[Samples], Floats | Mapping[str, Floats]]
"""A function from `Samples` to the cost of each sample, or to a dict of such arrays, one for each module of the model."""


def costs_of(function: CostFunction, samples: Samples) -> Floats:
    """The cost of each sample, summed over modules. Raises SpecError unless they are finite numbers >= 0, one per sample."""
    if CHOSEN_TOKENS in samples.sizes and samples.sizes[CHOSEN_TOKENS].any():
        # Attention does not cross the two sides of a pair, so they cost as two documents do.
        sides, owner = samples.in_sides()
        return np.bincount(owner, costs_of(function, sides), len(samples)).astype(np.float64)
    try:
        found = function(samples)
    except KeyError as error:
        if not error.args or error.args[0] in samples.sizes:
            raise
        known = ", ".join(samples.sizes) or "none"
        raise SpecError(
            f"the cost function found no size {error.args[0]!r}: samples have {known}. A column of the data becomes one "
            "with size_columns=(...) of its source"
        ) from error
    costs = sum(found.values(), np.zeros(len(samples))) if isinstance(found, Mapping) else np.asarray(found, np.float64)
    if costs.shape != (len(samples),):
        raise SpecError(f"a cost function returns one number per sample: {len(samples)}, got shape {costs.shape}")
    if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise SpecError("a cost function returns finite numbers >= 0; it returned others")
    return costs


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """The cost of a document of s tokens in a transformer: per_token * s + per_length_squared * s² + constant.

    It is a cost function: `cost(samples)` returns one number per sample. Any unit of time or work will do, because only
    ratios decide where samples go. Coefficients fitted to measured times are best (`overlord calibrate` and `load_cost`);
    `TransformerCost.of` estimates them from the shape of a model.
    """

    per_token: float
    per_length_squared: float
    constant: float = 0.0
    """Added once per document."""

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
        """Estimate the cost of a decoder with gated feed-forward layers, in GFLOP of dense matrix products.

        `heads` defaults to hidden / 128, `kv_heads` to `heads`, `ffn` to 8/3 hidden. For a mixture of experts,
        `active_experts` is the number of feed-forward layers of width `ffn` that run per token. `attention_slowdown` is
        the time of a floating point operation in attention over that in a matrix product.
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
        # A weight costs 2 operations forward and 4 backward. Causal attention over s tokens: 2 products of s²/2 x hidden
        # forward, and 2.5 times that backward, because flash attention recomputes the scores.
        per_token = 6 * weights
        per_length_squared = layers * 2 * hidden * 3.5 * attention_slowdown
        return cls(per_token / 1e9, per_length_squared / 1e9)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(per_token, per_length_squared, constant)."""
        return self.per_token, self.per_length_squared, self.constant

    def with_coefficients(self, coefficients: tuple[float, ...]) -> TransformerCost:
        """The cost with these coefficients, in the order of `coefficients`. Where all are 0, documents are nearly free."""
        return TransformerCost(*coefficients) if any(coefficients) else TransformerCost(1e-300, 0.0)

    def features(self, samples: Samples) -> Floats:
        """The factor of each coefficient: a row per sample, a column per coefficient."""
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
    """The cost of a document by its length, from a table: one document of `lengths[i]` tokens costs `costs[i]`.

    It is a cost function: `cost(samples)` returns one number per sample. Between two lengths the cost per token is
    interpolated linearly. Beyond the last it grows as between the last two, so the cost is quadratic there.

    The cost of a document is linear in the costs of the table, so a `LearnedCost` can refit the table.
    """

    lengths: tuple[int, ...]
    costs: tuple[float, ...]

    @classmethod
    def like(cls, cost: CostFunction, lengths: Sequence[int]) -> MeasuredCost:
        """The table that another cost function has at these lengths: a starting point for `LearnedCost`."""
        found = costs_of(cost, Samples.of_lengths(np.array(lengths, np.int64)))
        return cls(tuple(lengths), tuple(found.tolist()))

    def __post_init__(self) -> None:
        if len(self.lengths) < 2 or len(self.lengths) != len(self.costs):
            raise SpecError(f"a cost is given for each of at least 2 lengths, got {len(self.lengths)} and {len(self.costs)}")
        if self.lengths[0] < 1 or any(a >= b for a, b in pairwise(self.lengths)):
            raise SpecError(f"lengths are positive and rise, got {self.lengths}")
        if not all(math.isfinite(cost) and cost > 0 for cost in self.costs):
            raise SpecError(f"costs are numbers above 0, got {self.costs}")

    def of(self, lengths: Ints) -> Floats:
        """The cost of one document of each of these lengths."""
        known = np.array(self.lengths, np.float64)
        per_token = np.array(self.costs) / known
        slope = max(0.0, float((per_token[-1] - per_token[-2]) / (known[-1] - known[-2])))
        beyond = np.maximum(0.0, lengths - known[-1])
        return lengths * (np.interp(lengths, known, per_token) + slope * beyond)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The cost at each length."""
        return self.costs

    def with_coefficients(self, coefficients: tuple[float, ...]) -> MeasuredCost:
        """The table with these costs. A cost of 0 or less, which a fit returns where nothing was measured, becomes a small
        one."""
        least = 1e-3 * max(cost / length for cost, length in zip(coefficients, self.lengths, strict=True))
        kept = (max(cost, least * length) for cost, length in zip(coefficients, self.lengths, strict=True))
        return MeasuredCost(self.lengths, tuple(kept))

    def features(self, samples: Samples) -> Floats:
        """The factor of each coefficient: a row per sample, a column per coefficient."""
        tokens, known = samples.tokens.astype(np.float64), np.array(self.lengths, np.float64)
        right = np.clip(np.searchsorted(known, tokens), 1, len(known) - 1)
        share = np.maximum(0.0, (tokens - known[right - 1]) / (known[right] - known[right - 1]))  # above 1 beyond the last
        rows = np.arange(len(tokens))
        found = np.zeros((len(tokens), len(known)))
        found[rows, right] = share * tokens / known[right]
        found[rows, right - 1] += (1 - share) * tokens / known[right - 1]
        return found

    def __call__(self, samples: Samples) -> Floats:
        return self.of(samples.tokens)
