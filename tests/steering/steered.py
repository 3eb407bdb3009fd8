"""A job whose weights may change while it runs, and what may happen to it meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import overlord as ol
from tests.small_sources import Numbered, job_of, tokens_of

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
C = Numbered(rows=30, unit_rows=3, first=300, longest=5)
SOURCES = {"a": A, "b": B, "c": C}
NAMES = tuple(SOURCES)
STEPS = 30
FEEDBACK = ol.policies.Feedback(rule=ol.policies.MultiplicativeWeights(rate=1.0, bound=3.0), every=5, lag=4)
EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0}
WEIGHTS_OF_ALL = st.fixed_dictionaries({name: st.floats(0.1, 10) for name in NAMES})


@dataclass(frozen=True)
class History:
    """What happens before the step of each number is taken: weights that are set, and losses reported after it."""

    changes: Mapping[int, tuple[Mapping[str, float] | None, int]] = field(default_factory=dict)
    losses: Mapping[int, Sequence[Mapping[str, float]]] = field(default_factory=dict)


CHANGES = st.dictionaries(st.integers(0, 20), st.tuples(st.none() | WEIGHTS_OF_ALL, st.integers(0, 6)), max_size=3)
LOSSES = st.fixed_dictionaries({name: st.floats(0, 10) for name in NAMES})
HISTORIES = st.builds(
    History, CHANGES, st.dictionaries(st.integers(0, STEPS), st.tuples(LOSSES, LOSSES), min_size=5, max_size=STEPS)
)


def job_with(batch: ol.Batch | None = None, feedback: ol.policies.Feedback | None = FEEDBACK, **fields: Any) -> ol.Job:
    return job_of(SOURCES, batch, mixture=ol.Mixture(EQUAL, unit="tokens", feedback=feedback), **fields)


def lived(loader: ol.Loader, history: History, until: int, made: dict[int, int]) -> list[np.ndarray]:
    """Read up to a step on two ranks while a history happens. `made` has the changes that were made before, with the step
    that each took effect at: they are not made again."""
    clients = [loader.client(rank, timeout_s=60) for rank in range(loader.tree.world_size)]
    found = []
    for number in range(clients[0].step, until):
        if number in history.changes and number not in made:
            weights, later = history.changes[number]
            made[number] = loader.set_weights(weights, from_step=number + 12 + later)
        parts = [tokens_of(next(client)) for client in clients]
        found.append(np.sort(np.concatenate(parts)))
        for client, losses in zip(clients, history.losses.get(number, ()), strict=False):
            client.feedback(losses=losses, tokens=dict.fromkeys(losses, 7 + client.rank))
    return found
