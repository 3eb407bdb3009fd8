"""`hdp.split`: assign the samples of a graph to dp x cp ranks as one pool, long documents to several of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.cost import costs_of
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.hdp.spread import (
    Mode,
    RankPool,
    Spread,
    spread,
)
from overlord.arrange.learned_cost import COMMUNICATION, LearnedCost
from overlord.arrange.microbatches import Arrangement
from overlord.arrange.plan import PlanStage
from overlord.declare.source import CHOSEN_TOKENS
from overlord.errors import SpecError
from overlord.stream.packing import Pieces, cut_samples

if TYPE_CHECKING:
    from overlord.arrange.graph import DGraph
    from overlord.arrange.hdp.offload import Offload
    from overlord.stream.facts import Floats


def split(  # noqa: PLR0913 - a declaration: all options but the capacity are keyword-only
    graph: DGraph,
    capacity: int,
    *,
    mode: Mode | None = None,
    offload: Offload | None = None,
    communication: float = 0.0,
    widen: bool = True,
    virtual: int = 1,
    equal_counts: bool = False,
    aligned: bool = False,
) -> DGraph:
    """Assign samples to dp x cp ranks as one pool: short documents whole to one rank, long ones cut over several.

    Call `cost(fn)` and `distribute("cp")` before it. Every document takes the fewest ranks that hold it at `capacity` tokens
    per rank. The options:

    - `mode`: "dp" balances the work of ranks, "pp" the time of pipelines. Default: "pp" if the mesh has pipeline stages.
    - `offload`: moves activations of long documents to host memory, so that they need fewer ranks.
    - `communication`: the cost, in the unit of `cost`, of receiving the keys and values of one token.
    - `widen`: lets a document take more ranks than its memory needs where the others would have to wait for it.
    - `virtual`: the blocks of layers on each pipeline stage, where the schedule is interleaved.
    - `equal_counts`: all ranks run the same number of microbatches, and a document at the same index, as FSDP needs; those
      added are empty.
    - `aligned`: a document takes 1, 2, 4, 8, ... ranks, which begin at a multiple of their number, as the groups of
      Megatron's dynamic context parallelism do.
    """
    graph.check_distributed("split")
    costs = _require_costs(graph)
    communication = _learned_communication(graph, communication)
    pool = _pool(graph, capacity, mode, offload=offload, communication=communication, widen=widen, virtual=virtual)
    pool = replace(pool, equal_counts=equal_counts, aligned=aligned)
    found = spread(graph.samples.tokens, costs, pool)
    zeros = np.zeros(len(found.sample), np.int64)
    rings = Rings(
        of_micro=found.ring_of_micro,
        members=found.members,
        bounds=found.bounds,
        offset=found.start,
        whole=graph.samples.tokens[found.sample],
        offload=found.offload[found.sample],
        cost=found.cost,
        communication=communication,
    )
    pieces = Pieces(found.sample, found.start, found.stop, zeros)
    graph = graph.with_stage(
        _cut_stage(found),
        samples=cut_samples(graph.samples, pieces),
        costs=found.cost,
        parts=(*graph.parts, rings),
        reference_rows=None,
        in_rows=None,
    )
    mean = float(found.cost.sum()) / pool.speed
    text = "{}-balance, up to {} tokens: {} to {} a rank, the slowest ends at {:.3f}x mean"
    values = (pool.mode, pool.capacity, found.counts.min(), found.counts.max(), found.slowest / mean if mean > 0 else 1.0)
    return graph.assign(Arrangement(found.rank, found.micro, zeros, found.counts, 1, 0), "balance", text, *values)


def _learned_communication(graph: DGraph, declared: float) -> float:
    """The cost of receiving a token in the unit of the graph's costs: as learned, or as declared. Where only other
    coefficients were learned, which are in seconds, the declared one is scaled as the cost of the whole step is."""
    cost, learned = graph.declared_cost, graph.in_force
    if not isinstance(cost, LearnedCost) or cost.as_learned(learned) is cost or learned is None:
        return declared
    if COMMUNICATION in learned.modules:
        return learned.modules[COMMUNICATION][0]
    before = float(costs_of(cost, graph.samples).sum())
    return declared * float(_require_costs(graph).sum()) / before if declared and before > 0 else declared


def _pool(
    graph: DGraph,
    capacity: int,
    mode: Mode | None,
    *,
    offload: Offload | None,
    communication: float,
    widen: bool,
    virtual: int,
) -> RankPool:
    mesh = graph.place.mesh
    if mode == "dp" and mesh.pp > 1:
        raise SpecError(
            f"mode='dp' lets ranks run a ring at different indices, where the {mesh.pp} stages of a pipeline would wait for "
            "each other forever; use mode='pp', or leave it out"
        )
    mode = mode or ("pp" if mesh.pp > 1 else "dp")
    slow = graph.slowness_along("cp")
    virtual = 1 if mode == "dp" else virtual
    return RankPool(graph.place.num_groups("cp"), capacity, mode, mesh.pp, offload, communication, widen, slow, virtual)


def _require_costs(graph: DGraph) -> Floats:
    """The costs of the graph's samples. Raises SpecError if the graph cannot be split."""
    batch = graph.batch
    if graph.costs is None:
        raise SpecError("split needs to know what samples cost: call cost(fn) before it")
    if graph.axis != "cp" or graph.group_size != 1:
        raise SpecError(
            f"split shares a step over dp x cp ranks: call distribute('cp') before it, not distribute({graph.axis!r})"
        )
    if batch.layout != "packed" or batch.document_multiple != 1:
        raise SpecError(
            "split cuts documents without padding: it needs layout='packed' and document_multiple=1, not "
            f"layout={batch.layout!r} and document_multiple={batch.document_multiple}"
        )
    if CHOSEN_TOKENS in graph.samples.sizes:
        raise SpecError(
            "hybrid data parallelism cuts documents over ranks, and a preference pair is never cut: use "
            "strategies.long_short for jobs with pairs"
        )
    if batch.image_token is not None or graph.extra is not None:
        raise SpecError(
            "split cannot say which image rows lie in a piece of a document; leave Batch.image_token and fuse(...) out"
        )
    return graph.costs


def _cut_stage(found: Spread) -> PlanStage:
    parts = found.num_parts[found.num_parts > 1]
    if not len(parts):
        return PlanStage("split", "every sample stays whole on one rank")
    text, values = "{} of {} samples over {} to {} ranks each", (len(parts), len(found.num_parts), parts.min(), parts.max())
    moved = found.offload[found.offload > 0]
    if len(moved):
        text += "; {} move up to {:.0%} of their activations to the host"
        values = (*values, len(moved), moved.max())
    return PlanStage("split", text, values)
