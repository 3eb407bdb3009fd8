"""Long documents with few tokens beside them, short ones with many: every group costs the same and all finish
together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.arrange.balancing import Balancer, greedy
from overlord.arrange.pipelines.ordering import level, order, timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.arrange.graph import CostFunction, DGraph
    from overlord.arrange.pipelines.simulator import Pipeline
    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Axis


def long_short(
    cost: CostFunction,
    *,
    max_tokens: int | None = None,
    equal_counts: bool = True,
    method: Balancer = greedy,
    pipeline: Pipeline | None = None,
    broadcast: tuple[Axis, ...] = (),
) -> Callable[[DGraph], Plan]:
    """Balance `cost` over dp groups and then over microbatches of variable length, none over `max_tokens`.

    `max_tokens` is what fits in memory, one and a half times the batch's mean microbatch unless given; the
    more, the better the balance. `equal_counts` keeps the number of microbatches the same on all ranks, as
    FSDP needs; without it (DDP, ZeRO-1) a rank runs as many as its samples need. Padded batches have rows of
    one length: there, whole rows are dealt by cost. `pipeline` puts microbatches in the order in which it
    waits least and, without `equal_counts`, gives groups microbatches of one length level each where that is
    quicker. `broadcast` names the axes along which the trainer broadcasts.
    """

    def strategy(graph: DGraph) -> Plan:
        graph = graph.cost(cost)
        if graph.batch.layout == "padded":
            graph = graph.pack()
        graph = graph.distribute("dp")
        balanced = graph.balance(method, max_tokens=max_tokens, equal_counts=equal_counts)
        if pipeline is not None:
            may_differ = not equal_counts and graph.rows is None
            levelled = [level(graph, pipeline, max_tokens=max_tokens)] if may_differ else []
            found = [order(candidate, pipeline) for candidate in (balanced, *levelled)]
            times = [timing(candidate, pipeline).step_time for candidate in found]
            balanced = found[times.index(min(times))]
        return (balanced.broadcast_at(*broadcast) if broadcast else balanced).plan()

    return strategy
