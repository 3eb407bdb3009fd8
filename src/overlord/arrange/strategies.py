"""Strategies: functions from a `DGraph` to a `Plan`. Pass one as `Job(strategy=...)`, or write your own the same way.

Each function here takes options and returns a strategy: `plain` deals rows round-robin, `long_short` balances cost over
data-parallel groups, `hdp` cuts long documents over as many ranks as they need, `multimodal` balances an image encoder and
its backbone at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from overlord.arrange.balancing import Balancer, greedy
from overlord.arrange.cost import CostFunction, costs_of
from overlord.arrange.graph import DGraph, deal_rows
from overlord.arrange.hdp.splitting import split
from overlord.arrange.pipelines.ordering import level, order, timing
from overlord.arrange.vision.encoding import encode
from overlord.arrange.vision.hybrid import hybrid
from overlord.arrange.vision.images import ImageCost, PatchGrid, fuse, images_of, with_image_tokens
from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.arrange.hdp.offload import Offload
    from overlord.arrange.hdp.spread import Mode
    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Axis
    from overlord.stream.facts import Floats, Samples

__all__ = ["Strategy", "hdp", "long_short", "multimodal", "plain"]


class Strategy(Protocol):
    """A function from a `DGraph` to a `Plan`: it decides where the samples of a step go, never which samples make the step.

    Pass one as `Job(strategy=...)`: one of `ol.strategies`, or a function of your own:

        def strategy(graph: ol.DGraph) -> ol.Plan:
            return graph.cost(cost).distribute("dp").balance().plan()

    It must be a pure function of the graph, and may not add or drop samples, so that the stream does not depend on the
    strategy. `ol.testing.assert_strategy_conserves` checks that it loses no token and returns the same plan twice.
    """

    def __call__(self, graph: DGraph, /) -> Plan: ...


def plain(*, cost: CostFunction | None = None, broadcast: tuple[Axis, ...] = ()) -> Strategy:
    """Make the strategy of most loaders: rows of `sequence_length`, dealt round-robin to data-parallel groups, blind to
    cost.

    It is the default, and all that short packed text needs. Packed steps that are counted in samples deal samples instead of
    rows. `cost` changes nothing but lets `explain` show how uneven the groups are. `broadcast` names the axes (tp, cp, pp)
    along which the trainer broadcasts.
    """

    def strategy(graph: DGraph) -> Plan:
        if cost is not None:
            graph = graph.cost(cost)
        return deal_rows(graph, broadcast)

    return deal_rows if cost is None and not broadcast else strategy


def long_short(
    cost: CostFunction,
    *,
    max_tokens: int | None = None,
    equal_counts: bool = True,
    group_size: int = 1,
    method: Balancer = greedy,
    pipeline: Pipeline | None = None,
    broadcast: tuple[Axis, ...] = (),
) -> Strategy:
    """Make a strategy that balances `cost` over data-parallel groups, and then over microbatches of variable length.

    Long documents share a microbatch with few other tokens, short ones with many, so that all groups finish together. Padded
    batches have rows of one length; there, whole rows are assigned by cost. The options:

    - `max_tokens`: the most tokens of a microbatch that fit in memory. Default: one and a half times the batch's mean
      microbatch. The more, the better the balance.
    - `equal_counts`: all ranks run the same number of microbatches, as FSDP needs. With False (DDP, ZeRO-1) a rank runs as
      many as its samples need.
    - `group_size`: with `equal_counts=False`, so many neighbouring groups still run the same number: the shards of one
      replica in HSDP, which gather weights together in every microbatch, while replicas meet only at the end of the step.
    - `method`: the `Balancer`.
    - `pipeline`: the trainer's pipeline. Microbatches are put in the order in which it waits least; without `equal_counts`,
      groups also get microbatches of one length level each where that is faster.
    - `broadcast`: the axes (tp, cp, pp) along which the trainer broadcasts.
    """

    def strategy(graph: DGraph) -> Plan:
        graph = graph.cost(cost)
        if graph.batch.layout == "padded":
            graph = graph.pack()
        graph = graph.distribute("dp", group_size)
        balanced = graph.balance(method, max_tokens=max_tokens, equal_counts=equal_counts)
        if pipeline is not None:
            may_differ = not equal_counts and graph.rows is None and group_size == 1
            levelled = [level(graph, pipeline, max_tokens=max_tokens)] if may_differ else []
            found = [order(candidate, pipeline) for candidate in (balanced, *levelled)]
            times = [timing(candidate, pipeline).step_time for candidate in found]
            balanced = found[times.index(min(times))]
        return (balanced.broadcast_at(*broadcast) if broadcast else balanced).plan()

    return strategy


def hdp(
    cost: CostFunction,
    *,
    capacity: int,
    mode: Mode | None = None,
    offload: Offload | None = None,
    communication: float = 0.0,
    widen: bool = True,
    broadcast: tuple[Axis, ...] = (),
) -> Strategy:
    """Make a strategy for hybrid data parallelism: dp x cp ranks are one pool, and a document takes as many as it needs.

    Every document takes the fewest ranks that hold it, `capacity` tokens each; short documents stay whole. Ranks run
    different numbers of microbatches. So the trainer must sum gradients once, at the end of the step (ZeRO-1, or DDP without
    its own averaging), and attend over the `hdp_ranks` of each microbatch, as `overlord.trainer.ring_attention` does. The
    options:

    - `mode`: "dp" balances the work of ranks, "pp" the time of pipelines. Default: "pp" if the mesh has pipeline stages.
    - `offload`: moves activations of long documents to host memory, so that they need fewer ranks.
    - `communication`: the cost, in the unit of `cost`, of receiving the keys and values of one token.
    - `widen`: lets a document take more ranks than its memory needs where the others would have to wait for it.
    - `broadcast`: the axes (tp, pp) along which the trainer broadcasts.
    """

    def strategy(graph: DGraph) -> Plan:
        graph = graph.cost(cost).distribute("cp")
        graph = split(graph, capacity, mode=mode, offload=offload, communication=communication, widen=widen)
        return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()

    return strategy


def multimodal(  # noqa: PLR0913 - a declaration: all options but the two costs are keyword-only
    backbone: CostFunction,
    encoder: ImageCost,
    *,
    grid: PatchGrid,
    exchange: Literal["cp", "world"] | None = None,
    places_in_text: bool = True,
    max_tokens: int | None = None,
    equal_counts: bool = True,
    pipeline: Pipeline | None = None,
    broadcast: tuple[Axis, ...] = (),
) -> Strategy:
    """Make a strategy that balances the cost of images in the encoder and the cost of samples in the backbone at once.

    Without `exchange` a rank encodes the images of its own samples; samples are then assigned so that both costs are even
    over data-parallel groups. With `exchange`, images are encoded anywhere along an axis ("cp": dp x cp ranks, "world": all
    ranks), and trainers send the encoder's output to the rank that needs it (`overlord.trainer.exchange`). Samples are then
    assigned by their cost in the backbone alone, and images evenly over all ranks in every microbatch; this needs
    `equal_counts`.

    `grid` is how the model divides an image. `places_in_text` says that texts have a place for each token of their images,
    as `ol.vision.PlaceImages` makes them; with False the tokens of its images are added to a sample's length. The other
    options are those of `long_short`.
    """

    if exchange is not None and not equal_counts:
        raise SpecError(
            "ranks exchange images microbatch by microbatch, so each needs as many: exchange takes equal_counts=True"
        )

    def backbone_costs(samples: Samples) -> Floats:
        return costs_of(backbone, samples if places_in_text else with_image_tokens(samples, images_of(samples, grid)))

    def strategy(graph: DGraph) -> Plan:
        images = images_of(graph.samples, grid)
        if not places_in_text:
            graph = fuse(graph, images)
        per_sample = np.bincount(images.sample, encoder(images), len(graph.samples)).astype(np.float64)
        if exchange is not None:
            graph, method = graph.cost(backbone_costs), greedy
        else:
            modules = {"encoder": per_sample, "backbone": backbone_costs(graph.samples)}
            graph, method = graph.cost(lambda _: modules), hybrid(list(modules.values()))
        if graph.batch.layout == "padded":
            graph = graph.pack()
        graph = graph.distribute("dp").balance(method, max_tokens=max_tokens, equal_counts=equal_counts)
        if pipeline is not None:
            graph = order(graph, pipeline)
        if exchange is not None:
            graph = encode(graph, images, encoder, exchange)
        return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()

    return strategy
