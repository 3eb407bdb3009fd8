"""Outlier delay: which long documents wait, and which of the waiting ones come in this step. Pure functions of the waiting
documents and the number of the step.

Waiting documents are kept among the samples carried to the next step, marked with the step since which they wait, so they
are in every state. They never fill more than a few steps. Beyond that no document is delayed, so a mixture of nothing but
long documents runs as if there were no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.stream.facts import Floats, Ints, Samples
from overlord.stream.packing import padded_lengths

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from overlord.declare.batch import Batch
    from overlord.declare.policies import OutlierDelay

WAITING = "waiting_since"
"""A column of `sizes` in carried samples: 1 + the step that a waiting sample was drawn for; 0 for samples that do not
wait."""
WAITED = "waited_steps"
"""A column of `sizes` in drawn samples of a job that delays outliers: how many steps later the sample came."""

STEPS_WAITING = 4
"""The waiting documents together fill at most this many steps. With fewer, queues of several lengths would never fill."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Samples divided into those that come in this step, if they fit, and those that wait."""

    coming: Samples
    waiting: Samples


def released(carried: Samples, policy: OutlierDelay, step: int) -> Waiting:
    """Divide the carried samples. Those that did not fit before come first; then those that have waited long enough, and
    those of full queues."""
    since = _column(carried, WAITING)
    comes = (since == 0) | (step + 1 - since >= policy.most_steps)
    level = np.searchsorted(policy.lengths, carried.tokens, side="right")
    for number in range(1, len(policy.lengths) + 1):
        queue = np.flatnonzero((level == number) & (since > 0))
        if len(queue) >= policy.together:
            comes[queue[: policy.together]] = True  # carried samples are in the order they were drawn
    first = np.argsort(np.where(since == 0, 0, 1), kind="stable")
    coming = carried.take(first[comes[first]])
    waited = np.where(_column(coming, WAITING) > 0, step + 1 - _column(coming, WAITING), _column(coming, WAITED))
    return Waiting(_with(coming, WAITED, waited, drop=WAITING), carried.take(np.flatnonzero(~comes)))


def set_aside(drawn: Samples, policy: OutlierDelay, step: int, waiting: Samples, batch: Batch) -> Waiting:
    """Divide the samples drawn for a step: long documents wait, unless too many wait already."""
    is_long = drawn.tokens >= policy.lengths[0]
    room = STEPS_WAITING - float(_shares(waiting, batch).sum())
    waits = is_long & (np.cumsum(np.where(is_long, _shares(drawn, batch), 0.0)) <= room)
    coming = drawn.take(np.flatnonzero(~waits))
    aside = drawn.take(np.flatnonzero(waits))
    aside = _with(aside, WAITING, np.full(len(aside), step + 1))
    both = aside if len(waiting) == 0 else Samples.concatenate([waiting, aside])
    return Waiting(_with(coming, WAITED, np.zeros(len(coming), np.int64)), both)


def not_placed(samples: Samples) -> Samples:
    """Mark samples that found no room in their step as one step later. They are carried, but no longer wait."""
    return _with(samples, WAITED, _column(samples, WAITED) + 1)


def all_now(waiting: Samples, step: int) -> Samples:
    """Release all waiting samples, at the end of the data."""
    return _with(waiting, WAITED, step + 1 - _column(waiting, WAITING), drop=WAITING)


@dataclass(frozen=True, slots=True)
class Delay:
    """How much an outlier policy delayed documents."""

    documents: int = 0
    """The number of delayed documents."""
    document_steps: int = 0
    """The steps that they waited, summed over documents."""
    token_steps: int = 0
    """The steps that they waited, summed over tokens."""
    tokens: int = 0
    """The tokens of all documents, delayed or not."""

    @staticmethod
    def of(counts: Mapping[str, Mapping[str, int]]) -> Delay | None:
        """Make it from the counts of `count_delays`, by source; None if the job delays nothing."""
        if not any("tokens" in of_source for of_source in counts.values()):
            return None
        names = ("delayed", "delayed_steps", "delayed_token_steps", "tokens")
        return Delay(*(sum(of_source.get(name, 0) for of_source in counts.values()) for name in names))

    @property
    def mean_steps(self) -> float:
        """The mean number of steps that a delayed document waited."""
        return self.document_steps / self.documents if self.documents else 0.0

    @property
    def mean_steps_per_token(self) -> float:
        """The mean number of steps that a token waited, over all tokens."""
        return self.token_steps / self.tokens if self.tokens else 0.0


def count_delays(samples: Samples, counts: Mapping[str, Counter[str]]) -> None:
    """Add the delays of a step's samples to the counts of each source."""
    if WAITED not in samples.sizes:
        return
    for number in np.unique(samples.source).tolist():
        of_source = samples.source == number
        waited, tokens = samples.sizes[WAITED][of_source], samples.tokens[of_source]
        counts[samples.source_names[number]].update(
            delayed=int(np.count_nonzero(waited)),
            delayed_steps=int(waited.sum()),
            delayed_token_steps=int((waited * tokens).sum()),
            tokens=int(tokens.sum()),
        )


def _shares(samples: Samples, batch: Batch) -> Floats:
    """The share of a step that each sample takes. A row holds a single document if it is longer than half a row."""
    if batch.samples is not None:
        return np.full(len(samples), 1 / batch.samples)
    in_row = batch.sequence_length // np.maximum(padded_lengths(samples.tokens, batch.document_multiple), 1)
    return 1 / (np.maximum(in_row, 1) * (batch.num_rows or 1))


def _column(samples: Samples, name: str) -> Ints:
    return samples.sizes.get(name, np.zeros(len(samples), np.int64))


def _with(samples: Samples, name: str, values: Ints, drop: str | None = None) -> Samples:
    return replace(samples, sizes={**{key: each for key, each in samples.sizes.items() if key != drop}, name: values})
