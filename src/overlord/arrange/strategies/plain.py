"""Deal blindly, as most loaders do: the baseline, and all that short, packed text needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.arrange.graph import CostFunction, DGraph
    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Axis


def plain(*, cost: CostFunction | None = None, broadcast: tuple[Axis, ...] = ()) -> Callable[[DGraph], Plan]:
    """Rows of sequence_length in turn over the dp groups; samples in turn where a packed step is counted in
    samples.

    `cost` changes nothing but lets `explain` show how uneven the groups are. `broadcast` names the axes along
    which the trainer broadcasts.
    """

    def strategy(graph: DGraph) -> Plan:
        if cost is not None:
            graph = graph.cost(cost)
        if graph.batch.tokens is not None or graph.batch.layout == "padded":
            graph = graph.pack()
        graph = graph.distribute("dp").deal()
        return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()

    return strategy
