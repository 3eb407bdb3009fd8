"""What a document costs by its length alone, from times that were measured at a few lengths.

A GPU's attention kernel is not equally quick at all lengths: on an H200 it takes half as long again per pair of tokens in
documents of 4,096 tokens as in long ones. A formula with three coefficients is a tenth off at its worst there; a table of
a dozen lengths is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from overlord.errors import SpecError
from overlord.planning.facts import Floats, Ints, Samples


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
