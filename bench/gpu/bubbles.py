"""A lower bound of what a pipeline takes with its microbatches in any order, under 1F1B or interleaving.

What a stage runs, and in which order, depends only on the places of microbatches in the order. So does every path through
the schedule that a pipeline waits along, and the time of a path is a sum over places: how much the path takes of the
microbatch at each place. These paths are used, and all of their combinations:

- the first stage runs until it begins microbatch i, then i goes down through all blocks, then the last stage runs on;
- the last stage runs until it ends microbatch j, then j goes back up through all blocks, then the first stage runs on;
- the first stage runs everything.

Take the k costliest microbatches, and say that the first of them is at place i and the last at place j. Before i and after j
are only others, which cost less, so a path down at i or up at j passes little else meanwhile. A path takes at least what it
takes when costs are dealt to places so that large ones are where it takes least of them. Orders with i and j take at least
as long as the longest of the paths, and all orders at least the shortest of that over i and j, for every k.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from overlord.arrange.hdp.reordering import Grid
from overlord.arrange.pipelines.simulator import Pipeline, passes_of_stage
from overlord.stream.facts import Floats

_MOST_COSTLY = 14
"""How many of the costliest microbatches are considered together, at most."""
_ALIKE = 1.001
"""Microbatches whose costs are nearer to each other than this are not told apart."""


def least_time(costs: Floats, pipeline: Pipeline) -> float:
    """What the pipeline takes at least, times its stages; `costs` are those of its microbatches, in the unit of which a
    microbatch of cost c takes c / stages on each stage."""
    # Interleaving needs a multiple of the stages; those added are empty, and may be anywhere here.
    falling = np.sort(np.concatenate([costs, np.zeros(-len(costs) % pipeline.count_multiple)]))[::-1]
    num, paths, found = len(falling), _paths(pipeline, len(falling)), 0.0
    for k in range(1, min(num, _MOST_COSTLY) + 1):
        if k < num and falling[k - 1] < falling[k] * _ALIKE:
            continue  # the next one belongs to them
        least = np.inf
        for i, j in _pairs(num):
            if (k == 1) != (i == j) or j - i + 1 < k:
                continue
            longest = max(_least_of_path(path, i, j, falling, k) for path in paths.of(i, j))
            least = min(least, longest)
            if least <= found:
                break
        found = max(found, least if least < np.inf else 0.0)
    return found


def least_of_pipelines(grid: Grid, pipeline: Pipeline) -> float:
    """What the slowest of several pipelines takes at least, times the stages. A ring takes as long as on the slowest of its
    ranks."""
    times = grid.times.copy()
    for ring in np.unique(grid.rings[grid.rings >= 0]).tolist():
        times[grid.rings == ring] = times[grid.rings == ring].max()
    columns = {tuple(np.sort(times[:count, rank]).tolist()) for rank, count in enumerate(grid.counts.tolist()) if count}
    return max((least_time(np.array(each), pipeline) for each in columns), default=0.0)


def _pairs(num: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(num) for j in range(i, num)]


def _least_of_path(path: Floats, i: int, j: int, falling: Floats, k: int) -> float:
    """The least time of a path over all orders whose k costliest microbatches are at places from i to j, both included."""
    ends = path[[i]] if i == j else path[[i, j]]
    between = np.sort(path[i + 1 : j])
    cut = k - len(ends)  # the others of the k costliest are where the path passes least
    costly = np.sort(np.concatenate([ends, between[:cut]]))
    rest = np.sort(np.concatenate([path[:i], between[cut:], path[j + 1 :]]))
    return float(costly @ falling[:k] + rest @ falling[k:])


class _Paths(NamedTuple):
    """How much of the microbatch at each place a path takes, where the whole of it on one stage is 1."""

    down_and_up: dict[tuple[int, int], Floats]
    """The path down at i and up at j."""
    first_stage: Floats

    def of(self, i: int, j: int) -> list[Floats]:
        last = len(self.first_stage) - 1
        turns = dict.fromkeys([(i, j), (0, last), (0, j), (i, last), (i, i), (j, j)])
        return [self.first_stage, *(self.down_and_up[turn] for turn in turns if turn in self.down_and_up)]


@lru_cache(maxsize=64)
def _paths(pipeline: Pipeline, num: int) -> _Paths:
    stages, virtual = pipeline.stages, pipeline.virtual
    forward = 1 / (1 + pipeline.backward) / virtual
    backward = pipeline.backward * forward
    last_block = stages * virtual - 1
    first, last = (passes_of_stage(stage, stages, virtual, num) for stage in (0, stages - 1))
    until: list[Floats] = []  # what the first and the last stage have run before each of their passes
    for passes in (first, last):
        weights = np.zeros((len(passes) + 1, num))
        for at, each in enumerate(passes):
            weights[at + 1, each.micro] = backward if each.is_backward else forward
        until.append(weights.cumsum(axis=0))
    begins = {each.micro: at for at, each in enumerate(first) if not each.is_backward and each.block == 0}
    ended = {each.micro: at for at, each in enumerate(first) if each.is_backward and each.block == 0}
    arrives = {each.micro: at for at, each in enumerate(last) if not each.is_backward and each.block == last_block}
    leaves = {each.micro: at for at, each in enumerate(last) if each.is_backward and each.block == last_block}
    everything = until[0][-1]
    found: dict[tuple[int, int], Floats] = {}
    for i, j in _pairs(num):
        if arrives[i] > leaves[j]:
            continue
        path = everything - (until[0][ended[j] + 1] - until[0][begins[i]]) + until[1][leaves[j]] - until[1][arrives[i] + 1]
        path[i] += stages * virtual * forward
        path[j] += stages * virtual * backward
        found[i, j] = path
    return _Paths(found, everything)
