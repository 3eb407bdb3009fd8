"""Balancing several costs at once: the samples of a VLM by their cost in the encoder and by their cost in the backbone.

Moving a sample moves both of its costs. So, by falling cost, each sample goes to the bin where the larger of the two sums,
as a share of its mean, stays smallest. That compares all bins for every sample. With many bins, samples are first dealt
evenly to pools of bins, which bounds the work per sample; all pools are filled side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.arrange.balancing import Balancer
    from overlord.stream.facts import Floats, Ints

_BINS_OF_POOL = 128  # the fewest: smaller pools come out uneven


def hybrid(modules: Sequence[Floats]) -> Balancer:
    """Make a `Balancer` that balances the cost in every module; each of `modules` has one cost per item. Items that cost
    nothing in one module fill the gaps of the others."""
    costs = np.stack([np.asarray(module, np.float64) for module in modules])
    return HybridBalancer(costs / np.maximum(costs.sum(axis=1, keepdims=True), 1e-300))


@dataclass(frozen=True, slots=True)
class HybridBalancer:
    """What `hybrid` returns: a `Balancer` of items that cost a share of each module, [module, item]."""

    shares: Floats
    slowness: Floats | None = None
    """The time that each bin takes for one unit of cost; None where all are equally fast."""

    @property
    def __name__(self) -> str:  # for `explain`
        return "hybrid_balance" if self.slowness is None else "hybrid_balance_by_time"

    def with_slowness(self, slowness: Floats) -> HybridBalancer:
        """The balancer for bins of different speed."""
        return replace(self, slowness=slowness)

    def __call__(self, total: Floats, num_bins: int, sizes: Ints, capacity: int | None = None) -> Ints:
        if total.shape != self.shares.shape[1:]:
            raise SpecError(
                f"hybrid was made for {self.shares.shape[1]} items and is called with {len(total)}: it balances samples, "
                "not packed rows"
            )
        slowness = np.ones(num_bins) if self.slowness is None or len(self.slowness) != num_bins else self.slowness
        return _assign(self.shares * num_bins, slowness, sizes, capacity)


def _assign(costs: Floats, slowness: Floats, sizes: Ints, capacity: int | None) -> Ints:
    """The bin of each item. `costs` are [module, item], in shares of the mean bin."""
    num_bins = len(slowness)
    num_items = costs.shape[1]
    num_pools = max(d for d in range(1, num_bins + 1) if num_bins % d == 0 and (d == 1 or num_bins // d >= _BINS_OF_POOL))
    pools = _deal_to_pools(costs, num_pools)  # [turn, pool], num_items where a pool has no more
    costs = np.concatenate([costs, np.zeros((len(costs), 1))], axis=1)
    sizes = np.append(sizes, 0)
    loads = np.zeros((len(costs), num_pools, num_bins // num_pools))
    slow = slowness.reshape(loads.shape[1:])
    room = None if capacity is None else np.full(loads.shape[1:], capacity)
    bins = np.zeros(num_items + 1, np.int64)
    each, first = np.arange(num_pools), np.arange(num_pools) * loads.shape[2]
    # A loop over items, because each choice depends on those before. Each iteration places one item of every pool.
    for items in pools:
        added = costs[:, items]
        score = (loads + added[:, :, None]).max(axis=0) * slow
        if room is None:
            best = np.asarray(score.argmin(axis=1), np.int64)
        else:
            best = np.asarray(np.where(room >= sizes[items][:, None], score, np.inf).argmin(axis=1), np.int64)
            full = room[each, best] < sizes[items]
            if full.any():  # the roomiest bin of the pool takes it, and the caller moves the surplus
                best = np.where(full, room.argmax(axis=1), best)
            room[each, best] -= sizes[items]
        loads[:, each, best] += added
        bins[items] = first + best
    return bins[:num_items]


def _deal_to_pools(costs: Floats, num_pools: int) -> Ints:
    """Deal items to pools back and forth, by falling cost among those that cost most in the same module. Returns [turn,
    pool]."""
    num_items = costs.shape[1]
    order = np.lexsort((-costs.max(axis=0), costs.argmax(axis=0)))
    num_turns = -(-num_items // num_pools)
    padded = np.full(num_turns * num_pools, num_items)
    padded[:num_items] = order
    pools = padded.reshape(num_turns, num_pools)
    pools[1::2] = pools[1::2, ::-1].copy()
    largest = np.append(costs.max(axis=0), -1.0)
    return np.take_along_axis(pools, np.argsort(-largest[pools], axis=0, kind="stable"), axis=0)
