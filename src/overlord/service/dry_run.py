"""Reads a job without a trainer, every rank's part of each step, and counts tokens, padding and images."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from overlord.messages import Step
    from overlord.service.loader import Loader
    from overlord.status import Mix


@dataclass(frozen=True, slots=True)
class StepParts:
    """One step on all ranks that are read, with its totals. Tokens that several ranks hold count once."""

    number: int
    parts: Mapping[int, Step]
    """The part of each rank."""
    tokens: int
    places: int
    """Token positions in the batches: tokens and padding."""
    images: int


def read_steps(loader: Loader, ranks: Sequence[int] | None = None, num_steps: int | None = None) -> Iterator[StepParts]:
    """Yield up to `num_steps` steps on these ranks (by default all), until the end of the run."""
    ranks = range(loader.tree.world_size) if ranks is None else ranks
    clients = [loader.client(rank) for rank in ranks]
    places = [loader.tree.coordinates(rank) for rank in reversed(ranks)]
    keys = {
        "dp": [place.dp for place in places],
        "cp": [(place.dp, place.cp) for place in places],
        "world": [place.rank for place in places],
    }
    planned = loader.plan(clients[0].step)
    axis = "dp" if planned is None else planned.plan.axis
    distinct = dict(zip(keys[axis], (place.rank for place in places), strict=True)).values()
    for _ in count() if num_steps is None else range(num_steps):
        parts = {client.rank: step for client in clients if (step := next(client, None)) is not None}
        if not parts:
            return
        counted = [micro for rank in distinct for micro in parts[rank]]
        yield StepParts(
            number=next(iter(parts.values())).number,
            parts=parts,
            tokens=sum(int(micro["document_lengths"].sum()) for micro in counted),
            places=sum(_places(micro) for micro in counted),
            images=sum(len(micro.get("image_document", ())) for micro in counted),
        )


def _places(micro: Mapping[str, Any]) -> int:
    """Positions of the whole microbatch; a context-parallel rank has only a slice of it."""
    if "cu_seqlens" not in micro:
        return micro["num_rows"] * micro["max_seqlen"]
    return int(micro.get("cu_seqlens_padded", micro["cu_seqlens"])[-1])


class Throughput:
    """Totals of the steps that were taken, and the time since this object was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.num_steps = 0
        self.tokens = 0
        self.places = 0
        self.images = 0
        self.first_batch_s: float | None = None
        """From the start until every rank had its part of the first step; None before that."""
        self.seconds = 0.0

    def add(self, taken: StepParts) -> None:
        self.seconds = self._clock() - self._began
        if self.first_batch_s is None:
            self.first_batch_s = self.seconds
        self.num_steps += 1
        self.tokens += taken.tokens
        self.places += taken.places
        self.images += taken.images

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def padding(self) -> float:
        """The share of token positions that are padding."""
        return 1 - self.tokens / self.places if self.places else 0.0


@dataclass(frozen=True, slots=True)
class SourceShare:
    """The declared and the realised share of one source, in the mixture's unit."""

    asked: float
    realised: float
    samples: int
    tokens: int


def shares_of(mix: Mapping[str, Mix], unit: str) -> dict[str, SourceShare]:
    drawn = {name: entry.tokens if unit == "tokens" else entry.samples for name, entry in mix.items()}
    total = sum(drawn.values()) or 1
    return {name: SourceShare(entry.weight, drawn[name] / total, entry.samples, entry.tokens) for name, entry in mix.items()}
