"""A small simulator of 1F1B and interleaved 1F1B pipeline schedules, for scoring plans.

Every data-parallel group is one pipeline. A microbatch of cost c (forward and backward through all layers) takes c / stages
on each stage. A stage runs its forward and backward passes in the fixed order of the schedule and waits for the inputs from
its neighbours. Nothing else is modelled but `hop`, the time to send activations or gradients on. The step is done when the
last pipeline is, because gradients are then summed over all groups.

With `virtual` > 1 each stage holds that many separate blocks of layers, and microbatches go round the pipeline as many times
(Megatron's interleaved schedule). That schedule takes microbatches in batches of `stages`, so a pipeline whose number of
microbatches is not a multiple of it also runs empty ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.stream.facts import Floats, Ints


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The trainer's pipeline schedule: 1F1B, interleaved where `virtual` > 1. Strategies order microbatches for it."""

    stages: int
    """Pipeline stages, one rank each."""
    virtual: int = 1
    """Blocks of layers on each stage (Megatron's virtual pipeline size)."""
    backward: float = 2.0
    """The time of a backward pass over that of a forward pass."""
    hop: float = 0.0
    """The time to send activations or gradients to the next stage, in the unit of costs."""

    def __post_init__(self) -> None:
        if self.stages < 1 or self.virtual < 1:
            raise SpecError(f"a pipeline has at least 1 stage and 1 block a stage, got {self.stages} and {self.virtual}")
        if self.stages == 1 and self.virtual > 1:
            raise SpecError(f"virtual={self.virtual} needs a pipeline of several stages, this has 1")
        for name in ("backward", "hop"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(f"a pipeline's {name} must be a number >= 0, got {value!r}")

    @property
    def count_multiple(self) -> int:
        """The schedule needs a multiple of this many microbatches."""
        return self.stages if self.virtual > 1 else 1


@dataclass(frozen=True, slots=True)
class Timing:
    """The simulated times of a step, in the unit of the costs."""

    group_times: Floats
    """When each group finishes its last backward pass."""
    work: float
    """The time that all ranks together are busy."""
    stages: int

    @property
    def step_time(self) -> float:
        """The time of the step: that of its slowest group."""
        return float(self.group_times.max(initial=0.0))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is spent waiting for pipeline neighbours or other groups."""
        total = self.step_time * len(self.group_times) * self.stages
        return 1.0 - self.work / total if total > 0 else 0.0


def simulate(costs: Floats, counts: Ints, pipeline: Pipeline, rings: Ints | None = None) -> Timing:
    """Simulate a step. `costs` has one entry per microbatch, group by group in the order in which they run; group g has
    `counts[g]` of them. `plan.micro_costs(costs)` and `plan.counts` have this form.

    `rings` has the ring of each microbatch, -1 for none, as `Rings.of_micro` does. A stage begins a pass of a ring when the
    stages of all its pipelines are ready for it, and takes as long as on the slowest.
    """
    if int(counts.sum()) != len(costs):
        raise SpecError(f"the groups have {int(counts.sum())} microbatches together, but there are costs of {len(costs)}")
    if rings is not None and (rings >= 0).any():
        forward = costs / (pipeline.stages * pipeline.virtual * (1 + pipeline.backward))
        times = play(forward, forward * pipeline.backward, counts, pipeline, rings)
        return Timing(times, float(costs.sum()), pipeline.stages)
    first = np.cumsum(counts) - counts
    times = np.zeros(len(counts))
    # Groups with the same number of microbatches run the same schedule, side by side.
    for count in np.unique(counts).tolist():
        where = np.flatnonzero(counts == count)
        times[where] = times_of(costs[first[where][:, None] + np.arange(count)], pipeline)
    return Timing(times, float(costs.sum()), pipeline.stages)


def times_of(costs: Floats, pipeline: Pipeline) -> Floats:
    """The time of each of several pipelines with the same number of microbatches; `costs` is [pipeline, microbatch]."""
    num_pipelines, count = costs.shape
    if count == 0:
        return np.zeros(len(costs))
    if pipeline.stages == 1:
        return costs.sum(axis=1)
    if missing := -count % pipeline.count_multiple:
        costs = np.concatenate([costs, np.zeros((num_pipelines, missing))], axis=1)
        count += missing
    blocks = pipeline.stages * pipeline.virtual
    forward = costs.T / (blocks * (1 + pipeline.backward))  # [microbatch, pipeline]
    backward = forward * pipeline.backward
    ends = np.empty((2, blocks, count, num_pipelines))
    free = np.zeros((pipeline.stages, num_pipelines))
    # A loop over passes, because each waits for others. Each iteration handles all pipelines.
    for stage, is_backward, block, micro in _schedule(pipeline.stages, pipeline.virtual, count):
        begin, end = free[stage], ends[is_backward, block, micro]
        if not is_backward and block > 0:
            np.maximum(begin, ends[0, block - 1, micro] + pipeline.hop, out=begin)
        elif is_backward and block < blocks - 1:
            np.maximum(begin, ends[1, block + 1, micro] + pipeline.hop, out=begin)
        elif is_backward:
            np.maximum(begin, ends[0, block, micro], out=begin)
        np.add(begin, (backward if is_backward else forward)[micro], out=end)
        begin[:] = end
    return free.max(axis=0)


def play(forward: Floats, backward: Floats, counts: Ints, pipeline: Pipeline, rings: Ints) -> Floats:
    """The time of each pipeline, where pipelines wait for each other in rings. `forward` and `backward` are the times of the
    passes of each microbatch on one block of layers, group by group.

    A ring has one index on all of its pipelines, so a pass of all pipelines at once can follow the schedule of the longest:
    the others skip what they do not have.
    """
    most = -(-int(counts.max(initial=0)) // pipeline.count_multiple) * pipeline.count_multiple
    group = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(forward)) - np.repeat(np.cumsum(counts) - counts, counts)
    passes, ring = np.zeros((2, most, len(counts))), np.full((most, len(counts)), -1)
    passes[0, index, group], passes[1, index, group], ring[index, group] = forward, backward, rings
    together = [_Together.of(of, passes[:, micro]) if (of >= 0).any() else None for micro, of in enumerate(ring)]
    blocks = pipeline.stages * pipeline.virtual
    padded = -(-counts // pipeline.count_multiple) * pipeline.count_multiple
    ends = np.zeros((2, blocks, most, len(counts)))
    free = np.zeros((pipeline.stages, len(counts)))
    for stage, is_backward, block, micro in _schedule(pipeline.stages, pipeline.virtual, most):
        begin = free[stage].copy()
        if not is_backward and block > 0:
            begin = np.maximum(begin, ends[0, block - 1, micro] + pipeline.hop)
        elif is_backward:
            before = ends[1, block + 1, micro] + pipeline.hop if block < blocks - 1 else ends[0, block, micro]
            begin = np.maximum(begin, before)
        rings_here = together[micro]
        end = begin + passes[is_backward, micro] if rings_here is None else rings_here.ends(begin, is_backward)
        ends[is_backward, block, micro] = end
        free[stage] = np.where(micro < padded, end, free[stage])
    return free.max(axis=0)


class _Together(NamedTuple):
    """The pipelines at one index of their microbatches, those of a ring side by side."""

    order: Ints
    starts: Ints
    """The first of each ring; a pipeline without one is alone."""
    sizes: Ints
    longest: Floats
    """[pass, ring]: the time on the slowest pipeline."""

    @staticmethod
    def of(rings: Ints, passes: Floats) -> _Together:
        alone = int(rings.max()) + 1 + np.arange(len(rings))
        number = np.where(rings >= 0, rings, alone)
        order = np.argsort(number, kind="stable")
        _, starts, sizes = np.unique(number[order], return_index=True, return_counts=True)
        return _Together(order, starts, sizes, np.maximum.reduceat(passes[:, order], starts, axis=1))

    def ends(self, begin: Floats, is_backward: int) -> Floats:
        """When a pass ends that begins on all pipelines of a ring as soon as the last of them is ready."""
        found = np.empty_like(begin)
        found[self.order] = np.repeat(
            np.maximum.reduceat(begin[self.order], self.starts) + self.longest[is_backward], self.sizes
        )
        return found


class Pass(NamedTuple):
    stage: int
    is_backward: int
    block: int
    """Blocks of layers are numbered in the order of the model: block b lies on stage b mod stages."""
    micro: int


@lru_cache(maxsize=64)
def _schedule(stages: int, virtual: int, count: int) -> tuple[Pass, ...]:
    """The passes of all stages, in an order in which each comes after the passes that it waits for."""
    waiting = [list(reversed(passes_of_stage(stage, stages, virtual, count))) for stage in range(stages)]
    last = stages * virtual - 1
    done: set[tuple[int, int, int]] = set()
    found: list[Pass] = []
    while any(waiting):
        before = len(found)
        for passes in waiting:
            while passes and _is_free(passes[-1], last, done):
                at = passes.pop()
                done.add(at[1:])
                found.append(at)
        assert len(found) > before, "a schedule never waits in a circle"
    return tuple(found)


def _is_free(at: Pass, last: int, done: set[tuple[int, int, int]]) -> bool:
    if not at.is_backward:
        return at.block == 0 or (0, at.block - 1, at.micro) in done
    return ((0, at.block, at.micro) if at.block == last else (1, at.block + 1, at.micro)) in done


def passes_of_stage(stage: int, stages: int, virtual: int, count: int) -> list[Pass]:
    """The passes of one stage, in order: forward passes until the pipeline is full, then forward and backward alternately,
    then the remaining backward passes."""
    rounds = _rounds(stages, virtual, count)
    forwards = [Pass(stage, 0, turn * stages + stage, micro) for turn, micro in rounds]
    backwards = [Pass(stage, 1, (virtual - 1 - turn) * stages + stage, micro) for turn, micro in rounds]
    ahead = stages - stage - 1 if virtual == 1 else (stages - stage - 1) * 2 + (virtual - 1) * stages
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [each for pair in pairs for each in pair]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]


def _rounds(stages: int, virtual: int, count: int) -> Sequence[tuple[int, int]]:
    """(block of the stage, microbatch), in the order of the forward passes."""
    if virtual == 1:
        return [(0, micro) for micro in range(count)]
    return [
        (turn, micro)
        for begin in range(0, count, stages)
        for turn in range(virtual)
        for micro in range(begin, begin + stages)
    ]
