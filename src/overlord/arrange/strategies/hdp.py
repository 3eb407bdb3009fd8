"""Hybrid data parallelism: dp x cp ranks as one pool, where a document takes as many ranks as its length needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.arrange.hdp.splitting import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.arrange.graph import CostFunction, DGraph
    from overlord.arrange.hdp.offload import Offload
    from overlord.arrange.hdp.spread import Mode
    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Axis


def hdp(
    cost: CostFunction,
    *,
    capacity: int,
    mode: Mode | None = None,
    offload: Offload | None = None,
    communication: float = 0.0,
    widen: bool = True,
    broadcast: tuple[Axis, ...] = (),
) -> Callable[[DGraph], Plan]:
    """Give every document the fewest ranks that hold it, `capacity` tokens each, and even out what ranks do.

    Short documents stay whole. Ranks run different numbers of microbatches, so the trainer must sum gradients at the end of
    the step (ZeRO-1, DDP without its own averaging) and attend over `hdp_ranks` of each microbatch, as
    `overlord.trainer.ring_attention` does. `mode="dp"` evens the work of ranks, `"pp"` the time of pipelines; it is the one
    that the mesh asks for unless given. `offload` lets long documents take fewer ranks by moving activations to the host.
    `communication` is the cost, in units of `cost`, of receiving the keys and values of one token. `widen` lets a document
    take more ranks than its memory needs where it would keep the others waiting. `broadcast` names the axes along which the
    trainer broadcasts: tp or pp.
    """

    def strategy(graph: DGraph) -> Plan:
        graph = graph.cost(cost).distribute("cp")
        graph = split(graph, capacity, mode=mode, offload=offload, communication=communication, widen=widen)
        return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()

    return strategy
