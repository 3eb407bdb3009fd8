"""Hybrid data parallelism (ByteScale, arXiv 2502.21231): the dp x cp ranks of a mesh as one pool.

A document takes the fewest ranks whose memory holds it, all other documents stay whole on one rank. Ranks run as many
microbatches as their documents need. `spread` decides all of it, from lengths and costs alone:

1. *Size.* A document of s tokens takes ceil(s / capacity) ranks, or what `Offload` says. Each of its N ranks then does
   1 / N of its work, plus what passing keys and values around costs. With `widen`, a document that would take one rank
   longer than the whole step takes the average one is cut further, until it does not.
2. *Jobs.* A document on several ranks, or longer than the capacity, is a microbatch of its own: a *ring* when several ranks
   run it. Documents that stay whole share microbatches of up to `capacity` tokens.
3. *Balance.* `mode="dp"` evens the sum of every rank's work. `mode="pp"` evens sum + (pp - 1) x costliest microbatch, what a
   pipeline takes, by giving each rank microbatches of one cost level: the costly ones together on few ranks, which run few.

**No deadlock.** The ranks of a ring wait for each other inside it, so all ranks must agree which ring comes first. Rings are
numbered, and every rank runs its rings in the order of their numbers (microbatches without a ring may lie anywhere
between). Then the unfinished ring of the lowest number can always run: on each of its ranks every ring before it has a
lower number and is finished, and the rest waits for nobody. So one ring after the other ends.

A pipeline runs forward and backward passes of several microbatches in turn, by their index on the rank: under 1F1B the
forward pass of index i comes before the backward pass of index j on a stage if and only if i <= j + the stages after it. So
for `mode="pp"` a ring has **the same index on all of its ranks**, and they run their rings before all else (`levels`). The
program of a rank is then the beginning of one endless program that is the same for all: what is first for one is first for
all, whatever number of microbatches each has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from overlord.arrange.balancing import summed
from overlord.arrange.hdp.levels import levelled
from overlord.arrange.hdp.rings import chunk_begins
from overlord.arrange.hdp.timelines import Placed, filled
from overlord.arrange.microbatches import even_cost
from overlord.errors import SpecError
from overlord.stream.packing import best_fit

if TYPE_CHECKING:
    from overlord.arrange.hdp.offload import Offload
    from overlord.stream.facts import Floats, Ints

Mode = Literal["dp", "pp"]

_GOOD = {"dp": 1.01, "pp": 1.1}
"""Over the least that can be: an arrangement that ends by then is taken, a worse one only when finer cuts give no better."""
_FINER = {"dp": (0.5, 0.25, 0.125, 0.35, 0.0625), "pp": (0.125, 0.25)}
"""Of the mean: what a document may at most cost each of its ranks, when cutting as little as can be does not end well."""
_WORTH = 0.01
"""Of the mean: finer cuts, which pass more keys and values round, must save more than that."""
_PER_STAGE = 3
"""Microbatches that a rank should run for each stage of its pipeline."""
_MOST_WORK = {"dp": 200_000, "pp": 120_000}
"""Documents and their parts, over all tries but the last: keeps planning within some tenths of a second."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """The ranks that documents are spread over, and what they can do."""

    num_ranks: int
    capacity: int
    """Tokens that one rank's memory holds."""
    mode: Mode = "dp"
    pp: int = 1
    offload: Offload | None = None
    communication: float = 0.0
    """The cost, on each rank of a ring, of receiving the keys and values of one token."""
    widen: bool = True

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise SpecError(f"capacity is the tokens that one rank's memory holds, at least 1, got {self.capacity}")
        if self.mode not in ("dp", "pp"):
            raise SpecError(f"mode is 'dp' (even sums) or 'pp' (even pipelines), not {self.mode!r}")
        if not self.communication >= 0:
            raise SpecError(f"communication is a cost per token, at least 0, got {self.communication}")

    def fewest_ranks(self, lengths: Ints) -> Ints:
        """The ranks that memory asks for."""
        if self.offload is None:
            needed = np.maximum(1, -(-lengths // self.capacity))
        else:
            needed = self.offload.fewest_ranks(lengths, self.capacity)
        if needed.max(initial=1) > self.num_ranks:
            i = int(needed.argmax())
            raise SpecError(
                f"a document of {lengths[i]} tokens needs {needed[i]} ranks of {self.capacity} tokens, and dp x cp is "
                f"{self.num_ranks}; raise capacity, offload activations, lower sequence_length, or add ranks"
            )
        return needed

    def ratios(self, lengths: Ints, num_parts: Ints) -> Floats:
        """The part of its activations that each document moves out, for it to fit on so many ranks."""
        if self.offload is None:
            return np.zeros(len(lengths))
        return self.offload.ratios(lengths, self.capacity, num_parts)

    def shares(self, costs: Floats, lengths: Ints, num_parts: Ints) -> Floats:
        """What a document costs each of its ranks."""
        return costs / num_parts + self.communication * lengths * (num_parts - 1) / num_parts


@dataclass(frozen=True, slots=True)
class Spread:
    """Who runs what. A piece is the tokens [start, stop) of document `sample`, in microbatch `micro` of rank `rank`, and
    costs that rank `cost`.

    Microbatches are numbered rank by rank; `ring_of_micro` is the number of the ring each is part of, -1 where a rank runs
    it alone. The ranks of ring k are `members[bounds[k]:bounds[k + 1]]`, rising; the i-th of them has part i of its
    document. `offload` is the part of its activations that each document moves out, `num_parts` its number of ranks.
    """

    sample: Ints
    start: Ints
    stop: Ints
    rank: Ints
    micro: Ints
    cost: Floats
    counts: Ints
    ring_of_micro: Ints
    members: Ints
    bounds: Ints
    num_parts: Ints
    offload: Floats
    slowest: float
    """When the last rank ends, waiting in rings and filling pipelines included."""


class _Indices(NamedTuple):
    """The microbatch of every ring on each of its ranks, and of every whole document; and how many each rank runs."""

    ring: Ints
    whole: Ints
    counts: Ints


def spread(lengths: Ints, costs: Floats, pool: RankPool) -> Spread:
    """Every document's place; see the module's docstring."""
    placed, micro = _best(lengths, costs, pool.fewest_ranks(lengths), pool)
    if micro is None:
        micro = _packed(lengths, costs, placed, pool)
    units = _Units.of(placed, micro)
    return _pieces(lengths, costs, placed, _in_order(placed, units, pool.num_ranks), pool)


def _best(lengths: Ints, costs: Floats, needed: Ints, pool: RankPool) -> tuple[Placed, Ints | None]:
    """The documents placed, cut finer while that may help; and the microbatch of each whole one, where that is settled."""
    place = _levelled if pool.mode == "pp" else _filled
    best = place(lengths, costs, needed, pool)
    mean = float((pool.shares(costs, lengths, needed) * needed).sum()) / pool.num_ranks
    good = mean * _GOOD[pool.mode] * (1 + (pool.pp - 1) / (pool.pp * _PER_STAGE))
    most = np.minimum(pool.num_ranks, np.maximum(1, lengths))
    work = len(lengths) + len(best[0].members)
    for part in _FINER[pool.mode]:
        if not pool.widen or mean == 0 or best[0].slowest <= good or work > _MOST_WORK[pool.mode]:
            break
        finer = np.clip(np.ceil(costs / (part * mean)).astype(np.int64), needed, most)
        found = place(lengths, costs, finer, pool)
        work += len(lengths) + len(found[0].members)
        if found[0].slowest < best[0].slowest - _WORTH * mean:
            best = found
    return best


def _filled(lengths: Ints, costs: Floats, num_parts: Ints, pool: RankPool) -> tuple[Placed, None]:
    return filled(costs, lengths, num_parts, pool.num_ranks, widen=pool.widen, communication=pool.communication), None


def _levelled(lengths: Ints, costs: Floats, num_parts: Ints, pool: RankPool) -> tuple[Placed, Ints]:
    """Rings and full microbatches of whole documents, as jobs for pipelines. Every rank runs its rings first."""
    cut, whole = np.flatnonzero(num_parts > 1), np.flatnonzero(num_parts == 1)
    shares = pool.shares(costs[cut], lengths[cut], num_parts[cut])
    order = np.lexsort((-shares, -num_parts[cut]))
    cut, shares = cut[order], shares[order]
    # Microbatches so small that a pipeline has enough of them to stay full; a longer document is one of its own.
    most = max(1, min(pool.capacity, int(lengths.sum()) // (pool.num_ranks * pool.pp * _PER_STAGE)))
    row = best_fit(np.minimum(lengths[whole], most), len(whole), most)
    row_costs = summed(row, costs[whole], int(row.max(initial=-1)) + 1)
    by_cost = np.argsort(-row_costs, kind="stable")
    sizes = num_parts[cut]
    found = levelled(shares, sizes, row_costs[by_cost], pool.num_ranks, pool.pp)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    members = np.repeat(np.array(found.first_rank, np.int64) - bounds[:-1], sizes) + np.arange(bounds[-1])
    rank_of_row = np.empty(len(by_cost), np.int64)
    rank_of_row[by_cost] = found.rank
    rank = rank_of_row[row]
    after = np.bincount(members, minlength=pool.num_ranks)[rank]
    return Placed(cut, members, bounds, whole, rank, after, found.slowest), row


def _packed(lengths: Ints, costs: Floats, placed: Placed, pool: RankPool) -> Ints:
    """The microbatch of each whole document, numbered within those that lie between the same rings of a rank."""
    if not len(placed.whole):
        return placed.whole
    # A document longer than the capacity, which fits by offloading, fills a microbatch of its own.
    tokens = np.minimum(lengths[placed.whole], pool.capacity)
    _, group = np.unique(_key(placed.rank, placed.after), return_inverse=True)
    counts = np.minimum(-(-np.bincount(group, tokens).astype(np.int64) // pool.capacity), np.bincount(group))
    counts = np.maximum(1, counts)
    found = even_cost(costs[placed.whole], tokens, group, counts, pool.capacity, grow=True)
    if found is None:
        raise AssertionError("a document longer than a microbatch was placed whole")
    return found.micro


def _key(high: Ints, low: Ints) -> Ints:
    """One number for two, that sorts as they do."""
    return high * (int(low.max(initial=0)) + 1) + low


class _Units(NamedTuple):
    """The microbatches of whole documents, sorted by rank and then by how many rings of the rank come before."""

    rank: Ints
    after: Ints
    of_whole: Ints
    """The unit of each whole document."""

    @staticmethod
    def of(placed: Placed, micro: Ints) -> _Units:
        keys = _key(_key(placed.rank, placed.after), micro)
        _, first, of_whole = np.unique(keys, return_index=True, return_inverse=True)
        return _Units(placed.rank[first], placed.after[first], of_whole)


def _in_order(placed: Placed, units: _Units, num_ranks: int) -> _Indices:
    """Every rank's rings in the order of their numbers, each after the units that come before it."""
    num_units = np.bincount(units.rank, minlength=num_ranks)
    first_unit = np.cumsum(num_units) - num_units
    unit = np.arange(len(units.rank)) - first_unit[units.rank] + units.after
    by_rank = np.argsort(placed.members, kind="stable")
    num_rings = np.bincount(placed.members, minlength=num_ranks)
    turn = np.empty(len(by_rank), np.int64)
    turn[by_rank] = np.arange(len(by_rank)) - np.repeat(np.cumsum(num_rings) - num_rings, num_rings)
    most = max(int(units.after.max(initial=0)), int(turn.max(initial=0))) + 1
    before = np.searchsorted(units.rank * most + units.after, placed.members * most + turn, side="right")
    return _Indices(turn + before - first_unit[placed.members], unit[units.of_whole], num_units + num_rings)


def _pieces(lengths: Ints, costs: Floats, placed: Placed, at: _Indices, pool: RankPool) -> Spread:
    sizes = np.diff(placed.bounds)
    cut, parts = np.repeat(placed.rings, sizes), np.repeat(sizes, sizes)
    part = np.arange(len(cut)) - np.repeat(placed.bounds[:-1], sizes)
    chunks = np.stack([part, 2 * parts - 1 - part], axis=1)
    start = chunk_begins(lengths[cut][:, None], parts[:, None], chunks)
    stop = chunk_begins(lengths[cut][:, None], parts[:, None], chunks + 1)
    shares = pool.shares(costs[cut], lengths[cut], parts)
    pieces = stop - start
    cost = shares[:, None] * pieces / np.maximum(1, pieces.sum(axis=1, keepdims=True))
    kept = np.flatnonzero(pieces.ravel() > 0)
    whole = placed.whole

    def joined(of_part: Ints | Floats, of_whole: Ints | Floats) -> np.ndarray:
        each = of_part if of_part.ndim == 2 else np.repeat(of_part, 2)
        return np.concatenate([each.ravel()[kept], of_whole])

    first = np.cumsum(at.counts) - at.counts
    ring_of_micro = np.full(int(at.counts.sum()), -1, np.int64)
    ring_of_micro[first[placed.members] + at.ring] = np.repeat(np.arange(len(sizes)), sizes)
    num_parts = np.ones(len(lengths), np.int64)
    num_parts[placed.rings] = sizes
    return Spread(
        sample=joined(cut, whole),
        start=joined(start, np.zeros(len(whole), np.int64)),
        stop=joined(stop, lengths[whole]),
        rank=joined(placed.members, placed.rank),
        micro=joined(at.ring, at.whole),
        cost=joined(cost, costs[whole]),
        counts=at.counts,
        ring_of_micro=ring_of_micro,
        members=placed.members,
        bounds=placed.bounds,
        num_parts=num_parts,
        offload=pool.ratios(lengths, num_parts),
        slowest=placed.slowest,
    )
