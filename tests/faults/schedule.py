"""Which faults happen, drawn from a seed: the same seed gives the same faults in the same order with the same numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TOGETHER = 0.2  # how many faults do not wait for the end of the one before
_LONGEST_PAUSE_S = 0.4


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is about to go wrong. What `which` and `amount` mean is the kind's own affair."""

    kind: str
    after_s: float
    """How long the run goes on before it happens."""
    which: float
    """Which of several victims, as a share of them."""
    amount: float
    """How long, how much or where, from 0 to 1."""
    is_alone: bool
    """Whether the run has come back to itself before the next one."""

    def pick(self, victims: Sequence) -> int:
        return int(self.which * len(victims))


def drawn_faults(seed: int, weights: Mapping[str, int], num_faults: int) -> list[Fault]:
    """Every kind comes at least as often as its share, and at least once if there are enough faults."""
    rng = random.Random(seed)
    total = sum(weights.values())
    kinds = [kind for kind, weight in weights.items() for _ in range(max(num_faults * weight // total, 1))]
    while len(kinds) < num_faults:
        kinds += rng.choices(list(weights), list(weights.values()))
    rng.shuffle(kinds)
    return [
        Fault(kind, rng.uniform(0, _LONGEST_PAUSE_S), rng.random(), rng.random(), rng.random() >= _TOGETHER)
        for kind in kinds[:num_faults]
    ]
