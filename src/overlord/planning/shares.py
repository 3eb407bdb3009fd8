"""How a step was drawn, in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.planning.facts import Floats, Samples


@dataclass(frozen=True, slots=True)
class Shares:
    """Asked and drawn share of each source, both in the mixture's unit; text only when read."""

    asked: Floats
    samples: Samples
    unit: str

    def __str__(self) -> str:
        sizes = self.samples.tokens if self.unit == "tokens" else None
        drawn = np.bincount(self.samples.source, sizes, len(self.asked))
        drawn = drawn / max(1, drawn.sum())
        largest = np.argsort(-self.asked, kind="stable").tolist()
        names = self.samples.source_names
        shown = [f"{names[i]} {self.asked[i]:.3f}/{drawn[i]:.3f}" for i in largest[:12]]
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        return ", ".join(shown) + more
