"""A node with roles on it is lost: how long trainers wait for the next step.

    python -m bench.node_loss [--json] [--kills N] [--plain-health-checks]

A Ray cluster of four nodes on this machine: one for the trainers, three for loaders, planner and constructors. Every process
of the node that has most roles is killed at once, the raylet included. Ranks read all the time. Recovery is the longest wait
of any rank for a step from the loss until steps come as before. The cluster's health checks are set as docs/operations.md
says, or left as Ray has them.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass

from bench.measure import Spread
from bench.telling import parser_of
from tests.faults.nodes import QUICK_HEALTH_CHECKS, Nodes

BAR_S = 5.0
_STEPS = 40
_QUIET_S = 8.0  # what a node starts on the side would share the cores of this machine with the next recovery


@dataclass(frozen=True, slots=True)
class Loss:
    roles: list[str]
    """That were on the node."""
    recovery_s: float


def measured(kills: int, health_checks: dict[str, int]) -> list[Loss]:
    nodes = Nodes(3, health_checks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _losses(nodes, kills, folder)
    finally:
        nodes.close()


def _losses(nodes: Nodes, kills: int, folder: str) -> list[Loss]:
    import overlord as ol
    from tests.faults.on_ray import ON_OTHERS, health_reports
    from tests.small_sources import Numbered, job_of

    sources = {f"s{i}": Numbered(rows=2000, unit_rows=20, first=1 + 3000 * i) for i in range(4)}
    job = job_of(sources, ol.Batch(tokens=2048, sequence_length=256), mesh=ol.Mesh(dp=2))
    engine = ol.Ray("auto", loader_hosts=2, loaders=ON_OTHERS, planner=ON_OTHERS, constructors=ON_OTHERS)
    found: list[Loss] = []
    with ol.start(job, engine=engine, log=folder) as loader:
        clients = [loader.client(rank, timeout_s=120) for rank in range(2)]
        _longest_wait(clients, _STEPS)
        while len(found) < kills:
            where = health_reports(engine)
            node = max(nodes.others, key=lambda one: sum(pulse.node == one.node_id for pulse in where.values()))
            held = sorted(name for name, pulse in where.items() if pulse.node == node.node_id)
            nodes.lose(node)
            recovery = _longest_wait(clients, _STEPS)
            found.append(Loss(held, recovery))
            nodes.add()
            _longest_wait(clients, _STEPS)
            time.sleep(_QUIET_S)
    return found


def _longest_wait(clients: Sequence, num_steps: int) -> float:
    longest = 0.0
    for _ in range(num_steps):
        for client in clients:
            began = time.perf_counter()
            next(client)
            longest = max(longest, time.perf_counter() - began)
    return longest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--plain-health-checks", action="store_true", help="as Ray has them")
    given = parser.parse_args(arguments)
    with redirect_stdout(io.StringIO()):  # Ray tells of every node that died
        losses = measured(given.kills, {} if given.plain_health_checks else QUICK_HEALTH_CHECKS)
    if given.json:
        print(json.dumps([asdict(loss) for loss in losses], indent=1))
        return 0
    for loss in losses:
        print(f"{', '.join(loss.roles):<60} recovery {loss.recovery_s:.2f} s")
    spread = Spread.of([loss.recovery_s for loss in losses])
    print(f"recovery {spread} s over {len(losses)} nodes lost; the bar is {BAR_S:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
