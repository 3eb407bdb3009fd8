"""Simulated runs: steps are drawn and arranged from facts alone, by the code of real runs, and their times are predicted.

*Before* and *after* have the same samples. Before is a static mesh with rows dealt round-robin: cp is as wide as the longest
document needs, and every row, short documents included, is cut over all cp ranks of its group. After is the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.strategies import Strategy, hdp, plain
from overlord.arrange.vision.images import sizes_of
from overlord.declare.mesh import Mesh
from overlord.declare.mixture import Mixture
from overlord.errors import SpecError
from overlord.simulate.plan_time import PlanTime, plan_time
from overlord.stream.drawing import ComputedFacts, Extent
from overlord.stream.membership import DrawnStep, StepDrawer
from overlord.stream.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlord.arrange.hdp.offload import Offload
    from overlord.arrange.plan import Plan
    from overlord.declare.batch import Batch
    from overlord.simulate.step_time import TimeModel
    from overlord.stream.facts import ChunkFacts, Samples

_ROWS_OF_CHUNK = 4096
_CHUNKS = 1 << 30  # an epoch that no simulation reaches the end of


class FactsGenerator(Protocol):
    """Makes up the facts of chunks, each from a seed. `LengthTable` and `LlavaLike` are examples."""

    def facts(self, num_documents: int, context: int, seed: tuple[int, ...]) -> ChunkFacts: ...


def drawer_of(documents: FactsGenerator, batch: Batch, num_sources: int, seed: int) -> StepDrawer:
    """A drawer of steps from `num_sources` endless sources with equal weights."""
    names = tuple(f"source-{number:04}" for number in range(num_sources))

    def describe(source: int, chunk: int) -> ChunkFacts:
        return documents.facts(_ROWS_OF_CHUNK, batch.sequence_length, (seed, source, chunk))

    mixture = Mixture({name: 1.0 for name in names})
    return StepDrawer(Progress.start(names), batch, mixture, [Extent(_CHUNKS, None)] * num_sources, ComputedFacts(describe))


def static_mesh(num_ranks: int, *, context: int, capacity: int, tp: int = 1, pp: int = 1, cp: int | None = None) -> Mesh:
    """The mesh of `num_ranks` ranks with the smallest cp that holds a document of `context` tokens, `capacity` per rank."""
    if num_ranks < 1 or num_ranks % (tp * pp):
        raise SpecError(f"tp={tp} x pp={pp} must divide the {num_ranks} ranks; change one of them")
    pool = num_ranks // (tp * pp)
    if cp is None:
        needed = -(-context // capacity)
        cp = next((size for size in range(needed, pool + 1) if pool % size == 0), None)
        if cp is None:
            raise SpecError(
                f"a document of {context:,} tokens needs {needed:,} ranks of {capacity:,}, but tp={tp} x pp={pp} leaves "
                f"only {pool:,} of {num_ranks:,}; give more ranks or capacity, or a shorter context"
            )
    if pool % cp:
        raise SpecError(f"cp={cp} x tp={tp} x pp={pp} must divide the {num_ranks} ranks; change one of them")
    return Mesh(dp=pool // cp, cp=cp, tp=tp, pp=pp)


def quickest(candidates: Sequence[Strategy], mesh: Mesh, model: TimeModel) -> Strategy:
    """Make a strategy that tries several others and returns the plan with the shortest predicted step."""

    def strategy(graph: DGraph) -> Plan:
        return min((candidate(graph) for candidate in candidates), key=lambda plan: plan_time(plan, mesh, model).step_s)

    return candidates[0] if len(candidates) == 1 else strategy


def hdp_strategy(mesh: Mesh, model: TimeModel, capacity: int, offload: Offload | None = None) -> Strategy:
    """Make a strategy for hybrid data parallelism with the costs of a time model.

    If the attention of a full rank takes at least twice as long as the communication of a ring, planning ignores
    communication. Otherwise a step is planned both without and with it, and the faster plan is returned.
    """
    hidden = hdp(model.cost, capacity=capacity, offload=offload)
    if 2 * model.sent_token_s <= model.cost.per_length_squared * capacity / model.tp:
        return hidden
    cost = model.in_pool(capacity, offload)
    sent = hdp(cost, capacity=capacity, offload=offload, communication=model.sent_token_s)
    return quickest([hidden, sent], mesh, model)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The predicted times of one step: dealt round-robin, and by the strategy."""

    number: int
    num_samples: int
    num_tokens: int
    longest: int
    image_bytes: int
    """The size of all images, decoded."""
    before: PlanTime
    after: PlanTime
    plan_s: float
    """The time that the strategy itself took, on this machine."""

    @property
    def ratio(self) -> float:
        return self.before.step_s / self.after.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to simulate: a batch, a mesh, a strategy and a time model."""

    batch: Batch
    mesh: Mesh
    strategy: Strategy
    model: TimeModel

    def steps(
        self, drawn: Iterator[DrawnStep | None], num_steps: int, clock: Callable[[], float]
    ) -> Iterator[SimulatedStep]:
        """Simulate up to `num_steps` steps; fewer if the run ends before."""
        for _ in range(num_steps):
            step = next(drawn, None)
            if step is None:
                return
            yield self.step(step, clock)

    def step(self, drawn: DrawnStep, clock: Callable[[], float]) -> SimulatedStep:
        graph = DGraph(drawn.samples, self.batch.at(drawn.number), ClientPlaceTree(self.mesh), drawn.rows, drawn.in_rows)
        began = clock()
        plan = self.strategy(graph)
        plan_s = clock() - began
        lengths = drawn.samples.tokens
        return SimulatedStep(
            number=drawn.number,
            num_samples=len(lengths),
            num_tokens=int(lengths.sum()),
            longest=int(lengths.max(initial=0)),
            image_bytes=_image_bytes(drawn.samples),
            before=plan_time(plain()(graph), self.mesh, self.model),
            after=plan_time(plan, self.mesh, self.model),
            plan_s=plan_s,
        )


def _image_bytes(samples: Samples) -> int:
    sizes = sizes_of(samples).compact()
    return 3 * int((sizes.height * sizes.width).sum())


@dataclass(frozen=True, slots=True)
class Summary:
    """The averages of several simulated steps."""

    steps: tuple[SimulatedStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise SpecError("there is no step to sum up: the sources hold too little for one")

    @property
    def ratio(self) -> float:
        """The time of all steps dealt round-robin over their time by the strategy."""
        return sum(step.before.step_s for step in self.steps) / sum(step.after.step_s for step in self.steps)

    def mean(self, value: Callable[[SimulatedStep], float]) -> float:
        return float(np.mean([value(step) for step in self.steps]))
