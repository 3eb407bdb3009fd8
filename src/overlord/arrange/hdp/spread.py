"""Hybrid data parallelism (ByteScale, arXiv 2502.21231): the dp x cp ranks of a mesh as one pool.

A document takes the fewest ranks whose memory holds it; all other documents stay whole on one rank. Ranks run as many
microbatches as their documents need. `spread` decides all of that from lengths and costs alone:

1. *Size.* A document of s tokens takes ceil(s / capacity) ranks, or the number that `Offload` computes. Each of its N ranks
   then does 1 / N of its work, plus the cost of passing keys and values around. With `widen`, a document that would keep
   one rank busy for longer than the mean rank's whole step is cut further, until it does not.
2. *Jobs.* A document on several ranks, or longer than the capacity, is a microbatch of its own: a *ring* when several ranks
   run it. Documents that stay whole share microbatches of up to `capacity` tokens.
3. *Balance.* `mode="dp"` balances the total work of ranks. `mode="pp"` balances total + (pp - 1) x costliest microbatch, the
   time of a pipeline, by giving each rank microbatches of one cost level: the costly ones together on few ranks, which run
   few of them.

**No deadlock.** The ranks of a ring wait for each other inside it, so all ranks must agree on the order of rings. Rings are
numbered, and every rank runs its rings by rising number (microbatches without a ring may lie anywhere in between). Then the
unfinished ring with the lowest number can always run: on each of its ranks every earlier ring has a lower number and is
finished, and microbatches without a ring wait for no other rank. So the rings finish one after the other.

A pipeline interleaves forward and backward passes of several microbatches by their index on the rank: under 1F1B the forward
pass of index i comes before the backward pass of index j on a stage if and only if i <= j + the number of stages after it.
So with `mode="pp"` a ring has **the same index on all of its ranks** (`levels`, `columns`). The schedule of a rank is then a
prefix of one endless schedule that all ranks share, so all agree on the order, however many microbatches each of them has.

FSDP gathers weights in every microbatch, so there a rank in its i-th microbatch waits for all others to reach theirs. With
`equal_counts` all ranks therefore run the same number, and a ring has the same index on all of its ranks here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from overlord.arrange.balancing import bin_sums
from overlord.arrange.hdp.evening import RankEnds, WholeRows, even_ends
from overlord.arrange.hdp.levels import filling_of, place_on_pipelines
from overlord.arrange.hdp.reordering import Grid, reorder
from overlord.arrange.hdp.rings import chunk_begins
from overlord.arrange.hdp.timelines import DocumentPlacement, place_on_timelines
from overlord.arrange.microbatches import even_cost
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.errors import SpecError
from overlord.stream.packing import best_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.arrange.hdp.offload import Offload
    from overlord.stream.facts import Floats, Ints

Mode = Literal["dp", "pp"]
Number = TypeVar("Number", np.int64, np.float64)

_GOOD = {"dp": 1.01, "pp": 1.03}
"""Over the lower bound: a placement that finishes by then is good enough. A worse one is used only if finer cuts do not
help."""
_FINER = (0.5, 0.25, 0.125, 0.35, 0.0625)
"""Shares of the mean: the most that a document may cost each of its ranks, tried in turn when the fewest cuts are not good
enough."""
_WORTH = {"dp": 0.01, "pp": 0.02}
"""A share of the mean: finer cuts, which send more keys and values around, must save more than that."""
_PER_STAGE = (3, 6, 2)
"""Microbatches that a rank should run for each stage of its pipeline, tried in turn: the more, the less it waits for the
pipeline to fill, and the more ranks a long document takes."""
_LEAST_TOKENS = 2048
"""A mean microbatch with fewer is not tried: kernels would be slow."""
_ROOM = 1 << 20
"""What a microbatch holds, in the unit in which whole documents are packed by cost."""
_MOST_WORK = {"dp": 200_000, "pp": 120_000}
"""The most documents and parts to place, over all tries but the last: it keeps planning within some tenths of a second."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """The ranks that documents are spread over, with the options of `hdp.split`."""

    num_ranks: int
    capacity: int
    """Tokens that one rank's memory holds."""
    mode: Mode = "dp"
    pp: int = 1
    offload: Offload | None = None
    communication: float = 0.0
    """The cost, on each rank of a ring, of receiving the keys and values of one token."""
    widen: bool = True
    slowness: Floats | None = None
    """The time that each rank takes for one unit of cost; None where all are equally fast."""
    virtual: int = 1
    """Blocks of layers on each stage of a pipeline; with several, a rank runs a multiple of `pp` microbatches."""
    equal_counts: bool = False
    """All ranks run the same number of microbatches, those added being empty, and the ranks of a ring run it at the same
    index."""
    aligned: bool = False
    """Rings have 2, 4, 8, ... ranks that begin at a multiple of their number: the groups that Megatron's dynamic context
    parallelism has."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise SpecError(f"capacity is the tokens that one rank's memory holds, at least 1, got {self.capacity}")
        if self.mode not in ("dp", "pp"):
            raise SpecError(f"mode is 'dp' (even sums) or 'pp' (even pipelines), not {self.mode!r}")
        if not self.communication >= 0:
            raise SpecError(f"communication is a cost per token, at least 0, got {self.communication}")
        if self.aligned and self.num_ranks & (self.num_ranks - 1):
            raise SpecError(
                f"aligned rings need a power of two of ranks, and dp x cp is {self.num_ranks}: change the mesh, or leave "
                "aligned out"
            )

    def fewest_ranks(self, lengths: Ints) -> Ints:
        """The fewest ranks whose memory holds each document. Raises SpecError if a document needs more than there are."""
        if self.offload is None:
            needed = np.maximum(1, -(-lengths // self.capacity))
        else:
            needed = self.offload.fewest_ranks(lengths, self.capacity)
        needed = self.allowed(needed)
        if needed.max(initial=1) > self.num_ranks:
            i = int(needed.argmax())
            raise SpecError(
                f"a document of {lengths[i]} tokens needs {needed[i]} ranks of {self.capacity} tokens, and dp x cp is "
                f"{self.num_ranks}; raise capacity, offload activations, lower sequence_length, or add ranks"
            )
        return needed

    def allowed(self, num_parts: Ints) -> Ints:
        """The next numbers of ranks that rings may have."""
        return 1 << np.ceil(np.log2(num_parts)).astype(np.int64) if self.aligned else num_parts

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.pp, self.virtual if self.pp > 1 else 1)

    @property
    def speed(self) -> float:
        """How much cost all ranks together work off in a unit of time."""
        return self.num_ranks if self.slowness is None else float((1 / self.slowness).sum())

    def microbatch_shares(self, lengths: Ints) -> list[float]:
        """The shares of a rank's work that a microbatch of a pipeline may cost, to try in turn."""
        tokens = int(lengths.sum()) / self.num_ranks
        counts = [self.pp * each for each in _PER_STAGE]
        return [1 / count for count in counts if count == counts[0] or tokens >= count * _LEAST_TOKENS]

    def ratios(self, lengths: Ints, num_parts: Ints) -> Floats:
        """The share of its activations that each document must move to the host to fit on `num_parts` ranks."""
        if self.offload is None:
            return np.zeros(len(lengths))
        return self.offload.ratios(lengths, self.capacity, num_parts)

    def shares(self, costs: Floats, lengths: Ints, num_parts: Ints) -> Floats:
        """The cost of a document on each of its ranks."""
        return costs / num_parts + self.communication * lengths * (num_parts - 1) / num_parts


@dataclass(frozen=True, slots=True)
class Spread:
    """The place of every piece of every document.

    A piece is the tokens [start, stop) of document `sample`. It is in microbatch `micro` of rank `rank` and costs that rank
    `cost`. Microbatches are numbered rank by rank; `ring_of_micro` has the ring of each, -1 where a rank runs it alone. The
    ranks of ring k are `members[bounds[k]:bounds[k + 1]]`, rising; the i-th of them has part i of the ring's document.
    `num_parts` is the number of ranks of each document, `offload` the share of its activations that it moves to the host.
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
    """When the last rank finishes, with the time spent waiting in rings and filling pipelines."""


class _Indices(NamedTuple):
    """The index of the microbatch on its rank: of every ring on each of its ranks, and of every whole document."""

    ring: Ints
    whole: Ints
    counts: Ints
    """The number of microbatches of each rank."""


def spread(lengths: Ints, costs: Floats, pool: RankPool) -> Spread:
    """Place documents of these lengths and costs on the ranks of a pool: whole, or cut over as many ranks as they need."""
    placed, micro = _best(lengths, costs, pool.fewest_ranks(lengths), pool)
    if micro is None:
        micro = _pack_whole(lengths, costs, placed, pool)
    units = _Units.of(placed, micro)
    if pool.equal_counts and pool.mode == "dp":
        at = _in_columns(placed, units, pool.num_ranks)
    else:
        at = _in_order(placed, units, pool.num_ranks)
    if pool.mode == "pp":
        placed, at = _reordered(placed, at, lengths, costs, pool)
    if pool.equal_counts:
        at = at._replace(counts=np.full(pool.num_ranks, at.counts.max(initial=0)))
    if pool.virtual > 1:  # interleaving takes microbatches in batches of the stages; those added are empty
        at = at._replace(counts=-(-at.counts // pool.pp) * pool.pp)
    return _pieces(lengths, costs, placed, at, pool)


def _best(lengths: Ints, costs: Floats, needed: Ints, pool: RankPool) -> tuple[DocumentPlacement, Ints | None]:
    """The best placement found, cutting documents finer while that may help; and the microbatch of each whole document,
    where the placement decides it."""
    place = _on_pipelines if pool.mode == "pp" else _on_timelines
    best = place(lengths, costs, needed, pool, 1 / (pool.pp * _PER_STAGE[0]))
    mean = float((pool.shares(costs, lengths, needed) * needed).sum()) / pool.speed
    finest = min(pool.microbatch_shares(lengths)) if pool.mode == "pp" else 0.0
    good = mean * _GOOD[pool.mode] * (1 + filling_of(pool.pipeline) * finest)
    most = np.minimum(pool.num_ranks, np.maximum(1, lengths))
    work = len(lengths) + len(best[0].members)
    for part in _FINER if pool.mode == "dp" else pool.microbatch_shares(lengths):
        if not pool.widen or mean == 0 or best[0].slowest <= good or work > _MOST_WORK[pool.mode]:
            break
        finer = np.clip(np.ceil(costs / (part * mean)).astype(np.int64), needed, np.maximum(needed, most))
        finer = np.minimum(pool.allowed(finer), pool.num_ranks)
        found = place(lengths, costs, finer, pool, part)
        work += len(lengths) + len(found[0].members)
        if found[0].slowest < best[0].slowest - _WORTH[pool.mode] * mean:
            best = found
    return best


def _on_timelines(
    lengths: Ints, costs: Floats, num_parts: Ints, pool: RankPool, part: float
) -> tuple[DocumentPlacement, None]:
    """A placement that balances the total work of ranks. It does not decide the microbatches of whole documents."""
    del part
    found = place_on_timelines(
        costs,
        lengths,
        num_parts,
        pool.num_ranks,
        widen=pool.widen,
        communication=pool.communication,
        slowness=pool.slowness,
        aligned=pool.aligned,
    )
    return found, None


def _on_pipelines(
    lengths: Ints, costs: Floats, num_parts: Ints, pool: RankPool, part: float
) -> tuple[DocumentPlacement, Ints]:
    """A placement that balances the time of pipelines: rings, and microbatches filled with whole documents. A microbatch of
    whole documents costs up to `part` of the mean rank's work."""
    cut, whole = np.flatnonzero(num_parts > 1), np.flatnonzero(num_parts == 1)
    shares = pool.shares(costs[cut], lengths[cut], num_parts[cut])
    order = np.lexsort((-shares, -num_parts[cut]))
    cut, shares = cut[order], shares[order]
    # Microbatches are small enough for a pipeline to stay full; a costlier document is a microbatch of its own.
    most = max(1e-300, part * float(costs.sum()) / pool.num_ranks)
    filled = np.maximum(costs[whole] / most, lengths[whole] / pool.capacity) * _ROOM
    row = best_fit(np.clip(np.ceil(filled).astype(np.int64), 1, _ROOM), len(whole), _ROOM)
    rows = _by_falling_cost(row, costs[whole])  # a rank runs them like that, so that it drains quickly
    sizes = num_parts[cut]
    # Rings come by falling size and begin where others end, so powers of two are aligned; sorted by speed they would not be.
    slowness = None if pool.aligned else pool.slowness
    place = partial(place_on_pipelines, shares, sizes, num_ranks=pool.num_ranks, pipeline=pool.pipeline, slowness=slowness)
    found = place(rows.costs)
    if found.ends is not None and len(rows.costs):
        tokens = np.minimum(lengths[whole], pool.capacity)
        slow = np.ones(pool.num_ranks) if slowness is None else slowness
        ranks = np.array(found.rank)
        before = WholeRows(rows.of_document, ranks)
        moved = even_ends(before, costs[whole], tokens, RankEnds(found.ends, slow), pool.capacity)
        if (moved != rows.of_document).any():
            evened = _by_falling_cost(moved, costs[whole])
            again = place(evened.costs, on_shelves=ranks[evened.before].tolist())
            if again.slowest < found.slowest:
                found, rows = again, evened
    cut, sizes = cut[found.order], sizes[found.order]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    members = np.array([rank for ring in found.order for rank in found.ranks[ring]], np.int64)
    row, rank = rows.of_document, np.array(found.rank, np.int64)
    after = np.bincount(members, minlength=pool.num_ranks)[rank]
    number = np.arange(len(rank))
    if found.in_column:
        number += 1 + max(turn for _, turn in found.in_column.values())
        for at, (num_rings, turn) in found.in_column.items():
            after[at], number[at] = num_rings, turn
    return DocumentPlacement(cut, members, bounds, whole, rank[row], after[row], found.slowest), number[row]


def _by_falling_cost(row: Ints, costs: Floats) -> _RowsByCost:
    """Microbatches numbered anew, the costliest first: that of each document, their costs, and their numbers before."""
    row_costs = bin_sums(row, costs, int(row.max(initial=-1)) + 1)
    by_cost = np.argsort(-row_costs, kind="stable")
    turn = np.empty(len(by_cost), np.int64)
    turn[by_cost] = np.arange(len(by_cost))
    return _RowsByCost(turn[row], row_costs[by_cost], by_cost)


class _RowsByCost(NamedTuple):
    """Microbatches of whole documents."""

    of_document: Ints
    costs: Floats
    before: Ints
    """The number that each had before."""


def _pack_whole(lengths: Ints, costs: Floats, placed: DocumentPlacement, pool: RankPool) -> Ints:
    """Pack whole documents into microbatches. Returns the microbatch of each, numbered among those that lie between the same
    two rings of a rank."""
    if not len(placed.whole):
        return placed.whole
    # A document longer than the capacity, which fits only by offloading, fills a microbatch of its own.
    tokens = np.minimum(lengths[placed.whole], pool.capacity)
    _, group = np.unique(_key(placed.rank, placed.after), return_inverse=True)
    counts = np.minimum(-(-np.bincount(group, tokens).astype(np.int64) // pool.capacity), np.bincount(group))
    counts = np.maximum(1, counts)
    found = even_cost(costs[placed.whole], tokens, group, counts, pool.capacity, grow=True)
    if found is None:
        raise AssertionError("a document longer than a microbatch was placed whole")
    return found.micro


def _key(high: Ints, low: Ints) -> Ints:
    """One integer for each pair of integers, with the same sort order."""
    return high * (int(low.max(initial=0)) + 1) + low


class _Units(NamedTuple):
    """The microbatches of whole documents, sorted by rank and then by how many rings of the rank come before them."""

    rank: Ints
    after: Ints
    of_whole: Ints
    """The unit of each whole document."""

    @staticmethod
    def of(placed: DocumentPlacement, micro: Ints) -> _Units:
        keys = _key(_key(placed.rank, placed.after), micro)
        _, first, of_whole = np.unique(keys, return_index=True, return_inverse=True)
        return _Units(placed.rank[first], placed.after[first], of_whole)


def _in_order(placed: DocumentPlacement, units: _Units, num_ranks: int) -> _Indices:
    """The index of every microbatch on its rank: rings by rising number, each after the units that come before it."""
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


def _in_columns(placed: DocumentPlacement, units: _Units, num_ranks: int) -> _Indices:
    """The same with every ring at one index on all of its ranks: the first at which none of them has an earlier ring. Units
    fill the indices between the rings of a rank, and then those after them."""
    ring = np.empty(len(placed.members), np.int64)
    free = np.zeros(num_ranks, np.int64)  # after the last ring of each rank
    for begin, end in zip(placed.bounds[:-1].tolist(), placed.bounds[1:].tolist(), strict=True):
        ranks = placed.members[begin:end]
        ring[begin:end] = index = int(free[ranks].max())
        free[ranks] = index + 1
    # Unit k of a rank has the k-th index without a ring: k and as many more as rings have fewer than k + 1 gaps before them.
    by_rank = np.argsort(placed.members, kind="stable")
    num_rings, num_units = (np.bincount(each, minlength=num_ranks) for each in (placed.members, units.rank))
    turn = np.arange(len(by_rank)) - np.repeat(np.cumsum(num_rings) - num_rings, num_rings)
    gaps_before = ring[by_rank] - turn
    k = np.arange(len(units.rank)) - (np.cumsum(num_units) - num_units)[units.rank]
    most = max(int(gaps_before.max(initial=0)), int(k.max(initial=0))) + 1
    passed = np.searchsorted(placed.members[by_rank] * most + gaps_before, units.rank * most + k, side="right")
    unit = k + passed - (np.cumsum(num_rings) - num_rings)[units.rank]
    counts = free.copy()
    np.maximum.at(counts, units.rank, unit + 1)
    return _Indices(ring, unit[units.of_whole], counts)


def _reordered(
    placed: DocumentPlacement, at: _Indices, lengths: Ints, costs: Floats, pool: RankPool
) -> tuple[DocumentPlacement, _Indices]:
    """The same microbatches on the same ranks, in an order in which pipelines wait less; rings are numbered anew."""
    num, sizes = int(at.counts.max(initial=0)), np.diff(placed.bounds)
    slow = np.ones(pool.num_ranks) if pool.slowness is None else pool.slowness
    times, rings = np.zeros((num, pool.num_ranks)), np.full((num, pool.num_ranks), -1)
    np.add.at(times, (at.whole, placed.rank), costs[placed.whole] * slow[placed.rank])
    ring = np.repeat(np.arange(len(sizes)), sizes)
    shares = pool.shares(costs[placed.rings], lengths[placed.rings], sizes)
    times[at.ring, placed.members] = shares[ring] * slow[placed.members]
    rings[at.ring, placed.members] = ring
    found = reorder(Grid(times, rings, at.counts).of_some_ranks(), pool.pipeline)
    place = np.arange(num)
    place[found.order] = np.arange(len(found.order))
    of_rings = place[at.ring[placed.bounds[:-1]]]
    by_index = np.argsort(of_rings, kind="stable")
    kept = np.concatenate([[0], np.cumsum(sizes[by_index])])
    members = np.arange(len(ring)) - np.repeat(kept[:-1] - placed.bounds[:-1][by_index], sizes[by_index])
    placed = placed._replace(
        rings=placed.rings[by_index], members=placed.members[members], bounds=kept, slowest=found.slowest
    )
    return placed, at._replace(ring=place[at.ring[members]], whole=place[at.whole])


def _pieces(lengths: Ints, costs: Floats, placed: DocumentPlacement, at: _Indices, pool: RankPool) -> Spread:
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

    def concat(of_part: NDArray[Number], of_whole: NDArray[Number]) -> NDArray[Number]:
        each = of_part if of_part.ndim == 2 else np.repeat(of_part, 2)
        return np.concatenate([each.ravel()[kept], of_whole])

    first = np.cumsum(at.counts) - at.counts
    ring_of_micro = np.full(int(at.counts.sum()), -1, np.int64)
    ring_of_micro[first[placed.members] + at.ring] = np.repeat(np.arange(len(sizes)), sizes)
    num_parts = np.ones(len(lengths), np.int64)
    num_parts[placed.rings] = sizes
    return Spread(
        sample=concat(cut, whole),
        start=concat(start, np.zeros(len(whole), np.int64)),
        stop=concat(stop, lengths[whole]),
        rank=concat(placed.members, placed.rank),
        micro=concat(at.ring, at.whole),
        cost=concat(cost, costs[whole]),
        counts=at.counts,
        ring_of_micro=ring_of_micro,
        members=placed.members,
        bounds=placed.bounds,
        num_parts=num_parts,
        offload=pool.ratios(lengths, num_parts),
        slowest=placed.slowest,
    )
