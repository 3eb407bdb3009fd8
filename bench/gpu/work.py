"""What one virtual rank computes in one microbatch, as lengths alone, and what that is predicted to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from overlord.arrange.cost import MeasuredCost
from overlord.arrange.hdp.rings import chunks_of
from overlord.arrange.plan import Plan
from overlord.stream.facts import Floats, Ints

PADDING_SEGMENT = 512  # as collation cuts the padding of a row


@dataclass(frozen=True, slots=True)
class Work:
    """Pieces of documents: `queries[i]` tokens, the last of which sees `keys[i]` tokens of its document, itself included. A
    whole document has as many of both."""

    queries: Ints
    keys: Ints

    @staticmethod
    def of_documents(lengths: Ints) -> Work:
        return Work(lengths, lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.queries.sum())

    @property
    def is_whole(self) -> bool:
        return bool((self.queries == self.keys).all())

    @property
    def area(self) -> float:
        """Twice the pairs of tokens that attend to each other: s² for a whole document of s tokens."""
        return float((self.queries * (2 * self.keys - self.queries)).sum())


LENGTHS = tuple(1 << n for n in range(7, 18))  # 128 to 131,072
_LONG = 1 << 15


@dataclass(frozen=True, slots=True)
class Fit:
    """Milliseconds: of a whole document by its length, as measured; of a chunk of a shared one, by its tokens and by the
    pairs of tokens that attend to each other, at the rates of the longest documents."""

    document_cost: MeasuredCost
    per_token: float
    per_area: float

    @staticmethod
    def of(lengths: Sequence[int], times_ms: Sequence[float]) -> Fit:
        """From the times of one document of each length."""
        long = [(n, t) for n, t in zip(lengths, times_ms, strict=True) if n >= min(_LONG, lengths[-2])]
        (n, t), (m, u) = long[0], long[-1]
        per_area = max(0.0, (u / m - t / n) / (m - n))
        return Fit(MeasuredCost(tuple(lengths), tuple(times_ms)), u / m - per_area * m, per_area)

    def predicted(self, work: Work) -> float:
        whole = work.queries == work.keys
        chunks = Work(work.queries[~whole], work.keys[~whole])
        shared = self.per_token * chunks.num_tokens + self.per_area * chunks.area
        return float(self.document_cost.of(work.queries[whole]).sum()) + shared


Ranks = list[list[Work]]
"""The microbatches of each rank."""


def of_plan(plan: Plan, cp: int = 1) -> Ranks:
    """The work of every data-parallel group; with context parallelism, of its first rank: the others have as much."""
    ranks: Ranks = []
    micro = 0
    for count in plan.counts.tolist():
        ranks.append([_of_microbatch(plan, micro + i, cp) for i in range(count)])
        micro += count
    return ranks


def _of_microbatch(plan: Plan, micro: int, cp: int) -> Work:
    places = slice(int(plan.offsets[micro]), int(plan.offsets[micro + 1]))
    lengths = plan.samples.tokens[plan.order[places]]
    if plan.row_tokens:
        used = np.bincount(plan.row[places], lengths, plan.rows_per_microbatch).astype(np.int64)
        lengths = np.concatenate([lengths, *(_padding(plan.row_tokens - held) for held in used.tolist())])
    if cp == 1:
        return Work.of_documents(lengths)
    pieces = [chunk for length in lengths.tolist() for chunk in chunks_of(length, cp, 0)]
    return Work(np.array([c.end - c.begin for c in pieces]), np.array([c.end for c in pieces]))


def _padding(tokens: int) -> Ints:
    full, rest = divmod(tokens, PADDING_SEGMENT)
    return np.array([PADDING_SEGMENT] * full + [rest] * (rest > 0), np.int64)


def of_hdp_plan(plan: Plan) -> Ranks:
    """The work of every rank of the pool: whole documents, and its two chunks of those that it shares. Documents begin at
    their first token here, so what a chunk's last token sees is where the chunk ends."""
    ranks: Ranks = []
    micro = 0
    for count in plan.counts.tolist():
        places = [plan.order[plan.offsets[m] : plan.offsets[m + 1]] for m in range(micro, micro + count)]
        ranks.append([Work(plan.samples.tokens[at], plan.samples.stop[at]) for at in places])
        micro += count
    return ranks


def predicted_times(ranks: Iterable[Sequence[Work]], fit: Fit) -> Floats:
    return np.array([sum(fit.predicted(work) for work in works) for works in ranks])
