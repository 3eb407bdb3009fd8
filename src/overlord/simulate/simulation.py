"""What if: steps are drawn and arranged from facts alone, by the code that real runs use, and their times predicted.

Before and after are the same samples. Before is the static mesh with rows dealt blindly: cp is as wide as the longest
document needs, and every row is cut over all cp ranks of its group, short documents as well. After is the strategy.
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
_CHUNKS = 1 << 30  # an epoch that no simulation sees the end of


class Facts(Protocol):
    """Something that makes up chunks of documents, each from its seed."""

    def facts(self, num_documents: int, context: int, seed: tuple[int, ...]) -> ChunkFacts: ...


def drawer_of(documents: Facts, batch: Batch, num_sources: int, seed: int) -> StepDrawer:
    """Draws steps from so many endless sources with equal weights."""
    names = tuple(f"source-{number:04}" for number in range(num_sources))

    def describe(source: int, chunk: int) -> ChunkFacts:
        return documents.facts(_ROWS_OF_CHUNK, batch.sequence_length, (seed, source, chunk))

    mixture = Mixture({name: 1.0 for name in names})
    return StepDrawer(Progress.start(names), batch, mixture, [Extent(_CHUNKS, None)] * num_sources, ComputedFacts(describe))


def static_mesh(num_ranks: int, *, context: int, capacity: int, tp: int = 1, pp: int = 1, cp: int | None = None) -> Mesh:
    """The mesh of so many ranks whose cp is the narrowest that holds a document of `context` tokens at `capacity` a rank."""
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
    """Arranges a step by each of several strategies and takes the plan that is predicted to be done first."""

    def strategy(graph: DGraph) -> Plan:
        return min((candidate(graph) for candidate in candidates), key=lambda plan: plan_time(plan, mesh, model).step_s)

    return candidates[0] if len(candidates) == 1 else strategy


def pooled(mesh: Mesh, model: TimeModel, capacity: int, offload: Offload | None = None) -> Strategy:
    """Hybrid data parallelism by this model of time. Where the attention of a full rank hides what a ring sends twice over,
    sending is left out of planning; otherwise a step is planned without and with it, and the quicker plan taken."""
    hidden = hdp(model.cost, capacity=capacity, offload=offload)
    if 2 * model.sent_token_s <= model.cost.per_length_squared * capacity / model.tp:
        return hidden
    cost = model.in_pool(capacity, offload)
    sent = hdp(cost, capacity=capacity, offload=offload, communication=model.sent_token_s)
    return quickest([hidden, sent], mesh, model)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step, dealt blindly and by the strategy."""

    number: int
    num_samples: int
    num_tokens: int
    longest: int
    image_bytes: int
    """Of all images, decoded."""
    before: PlanTime
    after: PlanTime
    plan_s: float
    """What the strategy itself took, on this machine."""

    @property
    def ratio(self) -> float:
        return self.before.step_s / self.after.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A mesh, a batch, a strategy and a model of time, ready to be run over drawn steps."""

    batch: Batch
    mesh: Mesh
    strategy: Strategy
    model: TimeModel

    def steps(
        self, drawn: Iterator[DrawnStep | None], num_steps: int, clock: Callable[[], float]
    ) -> Iterator[SimulatedStep]:
        """Up to `num_steps` steps; fewer where the run ends before."""
        for _ in range(num_steps):
            step = next(drawn, None)
            if step is None:
                return
            yield self.step(step, clock)

    def step(self, drawn: DrawnStep, clock: Callable[[], float]) -> SimulatedStep:
        graph = DGraph(drawn.samples, self.batch, ClientPlaceTree(self.mesh), drawn.rows, drawn.in_rows)
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
    """Several simulated steps, averaged over their time."""

    steps: tuple[SimulatedStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise SpecError("there is no step to sum up: the sources hold too little for one")

    @property
    def ratio(self) -> float:
        """How many times faster all the steps together are than dealt blindly."""
        return sum(step.before.step_s for step in self.steps) / sum(step.after.step_s for step in self.steps)

    def mean(self, value: Callable[[SimulatedStep], float]) -> float:
        return float(np.mean([value(step) for step in self.steps]))
