"""Strategies: functions from a `DGraph` to a `Plan`. Pass one as `Job(strategy=...)`, or write your own the same way.

Each function here takes options and returns a strategy: `plain` deals rows round-robin, `long_short` balances cost over
data-parallel groups, `hdp` cuts long documents over as many ranks as they need, `multimodal` balances an image encoder and
its backbone at once.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Literal, ParamSpec, Protocol

import numpy as np

from overlord.arrange.balancing import Balancer, greedy
from overlord.arrange.cost import CostFunction, costs_of
from overlord.arrange.graph import DGraph, deal_rows
from overlord.arrange.hdp.splitting import split
from overlord.arrange.learned_cost import ENCODER, LearnedCost
from overlord.arrange.pipelines.ordering import level, order, timing
from overlord.arrange.vision.encoding import encode
from overlord.arrange.vision.hybrid import hybrid
from overlord.arrange.vision.images import (
    EncodedSamples,
    ImageCost,
    Images,
    PatchGrid,
    fuse,
    images_of,
    learned_with_encoder,
    with_image_tokens,
)
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.arrange.hdp.offload import Offload
    from overlord.arrange.hdp.spread import Mode
    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Axis
    from overlord.stream.facts import Floats, Samples

_PARTS = (1.0, 0.5, 0.25)
"""Parts of the largest microbatch to try as the most that pipelines fill one with: the smaller, the sooner they are full."""

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


_Options = ParamSpec("_Options")


def _records_options(make: Callable[_Options, Strategy]) -> Callable[_Options, Strategy]:
    """Notes on each strategy that a function returns how it was made, so that a job can be printed as a file."""

    @functools.wraps(make)
    def make_and_note(*args: _Options.args, **kwargs: _Options.kwargs) -> Strategy:
        strategy = make(*args, **kwargs)
        if strategy is not deal_rows:  # shared by all, and has no options
            given = inspect.signature(make).bind(*args, **kwargs).arguments
            strategy.declared_as = make_and_note, dict(given)  # type: ignore[attr-defined] - a function has attributes
        return strategy

    return make_and_note


@_records_options
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


@_records_options
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
            levelled = [level(graph, pipeline, max_tokens=max_tokens, part=part) for part in _PARTS] if may_differ else []
            found = [order(candidate, pipeline) for candidate in (balanced, *levelled)]
            times = [timing(candidate, pipeline).step_time for candidate in found]
            balanced = found[times.index(min(times))]
        return (balanced.broadcast_at(*broadcast) if broadcast else balanced).plan()

    return strategy


@_records_options
def hdp(  # noqa: PLR0913 - a declaration: all options but the cost are keyword-only
    cost: CostFunction,
    *,
    capacity: int,
    mode: Mode | None = None,
    offload: Offload | None = None,
    communication: float = 0.0,
    widen: bool = True,
    pipeline: Pipeline | None = None,
    equal_counts: bool = False,
    aligned: bool = False,
    broadcast: tuple[Axis, ...] = (),
) -> Strategy:
    """Make a strategy for hybrid data parallelism: dp x cp ranks are one pool, and a document takes as many as it needs.

    Every document takes the fewest ranks that hold it, `capacity` tokens each; short documents stay whole. Ranks run
    different numbers of microbatches. So the trainer must sum gradients once, at the end of the step (ZeRO-1, or DDP without
    its own averaging); FSDP, which gathers weights in every microbatch, needs `equal_counts`. Trainers attend over the
    `hdp_ranks` of each microbatch, as `overlord.trainer.ring_attention` does. The options:

    - `mode`: "dp" balances the work of ranks, "pp" the time of pipelines. Default: "pp" if the mesh has pipeline stages.
    - `offload`: moves activations of long documents to host memory, so that they need fewer ranks.
    - `communication`: the cost, in the unit of `cost`, of receiving the keys and values of one token.
    - `widen`: lets a document take more ranks than its memory needs where the others would have to wait for it.
    - `pipeline`: the trainer's pipeline, where its schedule is interleaved. Default: 1F1B over the stages of the mesh.
    - `equal_counts`: all ranks run the same number of microbatches, and a document on several of them at the same index, as
      FSDP needs. Those added are empty: a rank runs them only to take part in gathering weights.
    - `aligned`: a document takes 1, 2, 4, 8, ... ranks, which begin at a multiple of their number, as the groups of
      Megatron's dynamic context parallelism do.
    - `broadcast`: the axes (tp, pp) along which the trainer broadcasts.
    """

    def strategy(graph: DGraph) -> Plan:
        graph = graph.cost(cost).distribute("cp")
        stages = graph.place.mesh.pp
        if pipeline is not None and pipeline.stages != stages:
            raise SpecError(f"the pipeline has {pipeline.stages} stages, but the mesh has pp={stages}; give both the same")
        virtual = 1 if pipeline is None else pipeline.virtual
        graph = split(
            graph,
            capacity,
            mode=mode,
            offload=offload,
            communication=communication,
            widen=widen,
            virtual=virtual,
            equal_counts=equal_counts,
            aligned=aligned,
        )
        return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()

    return strategy


@_records_options
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

    With a `LearnedCost` as `backbone` both costs are learned: `encoder` is then a `VisionTransformerCost`.
    """

    if exchange is not None and not equal_counts:
        raise SpecError(
            "ranks exchange images microbatch by microbatch, so each needs as many: exchange takes equal_counts=True"
        )

    def fixed_backbone(samples: Samples) -> Floats:
        return costs_of(backbone, samples if places_in_text else with_image_tokens(samples, images_of(samples, grid)))

    declared = learned_with_encoder(backbone, encoder, grid, places_in_text) if isinstance(backbone, LearnedCost) else None

    def strategy(graph: DGraph) -> Plan:
        images = images_of(graph.samples, grid)
        if not places_in_text:
            graph = fuse(graph, images)
        of_images, of_samples = encoder, fixed_backbone
        if declared is not None:
            of_images, of_samples = _as_learned(declared, graph)
        if exchange is not None:
            graph, method = graph.cost(of_samples), greedy
        else:
            graph, method = _weigh_both(graph, images, of_images, of_samples)
        if declared is not None:
            graph = graph.declare_cost(declared)
        if graph.batch.layout == "padded":
            graph = graph.pack()
        graph = graph.distribute("dp").balance(method, max_tokens=max_tokens, equal_counts=equal_counts)
        if pipeline is not None:
            graph = order(graph, pipeline)
        if exchange is not None:
            graph = encode(graph, images, of_images, exchange)
        return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()

    return strategy


def _weigh_both(
    graph: DGraph, images: Images, of_images: ImageCost, of_samples: Callable[[Samples], Floats]
) -> tuple[DGraph, Balancer]:
    """The graph with what its samples cost in the encoder and in the backbone, and the balancer that evens out both."""
    per_sample = np.bincount(images.sample, of_images(images), len(graph.samples)).astype(np.float64)
    modules = {"encoder": per_sample, "backbone": of_samples(graph.samples)}
    return graph.cost(lambda _: modules), hybrid(list(modules.values()))


def _as_learned(declared: LearnedCost, graph: DGraph) -> tuple[ImageCost, Callable[[Samples], Floats]]:
    """The costs of images and, in the backbone, of samples that are in force for a graph."""
    modules = dict(declared.as_learned(graph.in_force).modules)
    encoder = modules.pop(ENCODER)
    assert isinstance(encoder, EncodedSamples)
    return encoder.of_images, lambda samples: costs_of(lambda s: {name: cost(s) for name, cost in modules.items()}, samples)
