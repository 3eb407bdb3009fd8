"""How long a step takes on pipelines: a small simulator of 1F1B and of interleaved 1F1B, for scoring plans.

Every data-parallel group is one pipeline. A microbatch of cost c (forward and backward through all layers) takes c / stages
on each stage. A stage runs its forwards and backwards in the fixed order of the schedule and waits for what it needs from
its neighbours; nothing else is modelled but `hop`, the time to hand activations or gradients on. When the last pipeline is
done, the step is: gradients are summed over all groups then.

With `virtual` > 1 each stage holds that many separate blocks of layers, and microbatches go round the pipeline so many
times (Megatron's interleaved schedule). It takes microbatches in batches of `stages`, so a pipeline whose number of
microbatches is no multiple of that runs empty ones beside them.
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
    """The trainer's pipeline: `stages` ranks, `virtual` blocks of layers on each.

    `backward` is the time of a backward pass over that of a forward pass. `hop` is in the unit of costs.
    """

    stages: int
    virtual: int = 1
    backward: float = 2.0
    hop: float = 0.0

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
        """What the number of a pipeline's microbatches should be a multiple of."""
        return self.stages if self.virtual > 1 else 1


@dataclass(frozen=True, slots=True)
class Timing:
    """What the simulator found, in the unit of the costs."""

    group_times: Floats
    """When each group has done its last backward pass."""
    work: float
    """What all ranks are busy for together."""
    stages: int

    @property
    def step_time(self) -> float:
        """All groups wait for the slowest."""
        return float(self.group_times.max(initial=0.0))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is spent waiting, for neighbours in the pipeline or for other groups."""
        total = self.step_time * len(self.group_times) * self.stages
        return 1.0 - self.work / total if total > 0 else 0.0


def simulated(costs: Floats, counts: Ints, pipeline: Pipeline) -> Timing:
    """The timing of a step: `costs` has one entry per microbatch, group by group and in the order they are run, and group g
    has `counts[g]` of them. `plan.micro_costs(costs)` and `plan.counts` are just that."""
    if int(counts.sum()) != len(costs):
        raise SpecError(f"the groups have {int(counts.sum())} microbatches together, but there are costs of {len(costs)}")
    first = np.cumsum(counts) - counts
    times = np.zeros(len(counts))
    # Groups with the same number of microbatches run the same schedule, side by side.
    for count in np.unique(counts).tolist():
        where = np.flatnonzero(counts == count)
        times[where] = times_of(costs[first[where, None] + np.arange(count)], pipeline)
    return Timing(times, float(costs.sum()), pipeline.stages)


def times_of(costs: Floats, pipeline: Pipeline) -> Floats:
    """The time of each of several pipelines that run the same number of microbatches: costs are [pipeline, microbatch]."""
    num_pipelines, count = costs.shape
    if count == 0:
        return np.zeros(num_pipelines)
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
    # A loop over passes, because each waits for others; all pipelines at once.
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


class _Pass(NamedTuple):
    stage: int
    is_backward: int
    block: int
    """Blocks of layers are numbered through the model: block b lies on stage b mod stages."""
    micro: int


@lru_cache(maxsize=64)
def _schedule(stages: int, virtual: int, count: int) -> tuple[_Pass, ...]:
    """The passes of all stages in an order in which each comes after those that it waits for."""
    waiting = [list(reversed(_of_stage(stage, stages, virtual, count))) for stage in range(stages)]
    last = stages * virtual - 1
    done: set[tuple[int, int, int]] = set()
    found: list[_Pass] = []
    while any(waiting):
        before = len(found)
        for passes in waiting:
            while passes and _is_free(passes[-1], last, done):
                at = passes.pop()
                done.add(at[1:])
                found.append(at)
        assert len(found) > before, "a schedule never waits in a circle"
    return tuple(found)


def _is_free(at: _Pass, last: int, done: set[tuple[int, int, int]]) -> bool:
    if not at.is_backward:
        return at.block == 0 or (0, at.block - 1, at.micro) in done
    return ((0, at.block, at.micro) if at.block == last else (1, at.block + 1, at.micro)) in done


def _of_stage(stage: int, stages: int, virtual: int, count: int) -> list[_Pass]:
    """What a stage does, in its order: forwards until the pipeline is full, then forward and backward in turn, then the
    backwards that are left."""
    rounds = _rounds(stages, virtual, count)
    forwards = [_Pass(stage, 0, turn * stages + stage, micro) for turn, micro in rounds]
    backwards = [_Pass(stage, 1, (virtual - 1 - turn) * stages + stage, micro) for turn, micro in rounds]
    ahead = stages - stage - 1 if virtual == 1 else (stages - stage - 1) * 2 + (virtual - 1) * stages
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [each for pair in pairs for each in pair]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]


def _rounds(stages: int, virtual: int, count: int) -> Sequence[tuple[int, int]]:
    """(block of the stage, microbatch) in the order that they are run forward."""
    if virtual == 1:
        return [(0, micro) for micro in range(count)]
    return [
        (turn, micro)
        for begin in range(0, count, stages)
        for turn in range(virtual)
        for micro in range(begin, begin + stages)
    ]
