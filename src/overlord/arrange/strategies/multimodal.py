"""Images and text: the encoder's work and the backbone's are evened out at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from overlord.arrange.balancing import greedy
from overlord.arrange.cost import CostFunction, costs_of
from overlord.arrange.pipelines.ordering import order
from overlord.arrange.vision.encoding import encode
from overlord.arrange.vision.hybrid import hybrid
from overlord.arrange.vision.images import (
    ImageCost,
    PatchGrid,
    fuse,
    fused,
    images_of,
)
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.arrange.graph import DGraph
    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Axis
    from overlord.stream.facts import Floats, Samples


def multimodal(
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
) -> Callable[[DGraph], Plan]:
    """Even out what images cost in the encoder and what whole samples cost in the backbone.

    Without `exchange` a rank encodes the images of its own samples. Samples are moved whole then, so that both costs are
    even over dp groups at once. With it, images are encoded anywhere along an axis ("cp": dp x cp ranks, "world": all), and
    trainers send what comes out to the rank that needs it (`overlord.trainer.exchange`): samples are placed by their
    cost in the backbone alone, and images evenly over all ranks for every microbatch. That needs `equal_counts`.

    `places_in_text` says that texts have a place for each token of their images, as `ol.vision.PlaceImages` makes them;
    otherwise the tokens of its images are added to a sample's length. The other options are those of `long_short`.
    """

    if exchange is not None and not equal_counts:
        raise SpecError(
            "ranks exchange images microbatch by microbatch, so each needs as many: exchange takes equal_counts=True"
        )

    def backbone_costs(samples: Samples) -> Floats:
        return costs_of(backbone, samples if places_in_text else fused(samples, images_of(samples, grid)))

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
