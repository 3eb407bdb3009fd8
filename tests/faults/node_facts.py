"""A run on three nodes, one of which is lost: where its roles were before and after, and whether ranks got what they should.

A program of its own, since a process can be connected to one cluster only. Says what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import overlord as ol
from tests.faults.comparison import undisturbed
from tests.faults.nodes import Nodes
from tests.faults.on_ray import health_reports
from tests.faults.trainer import digest
from tests.faults.trainers import wait_until
from tests.small_sources import Numbered, job_of

STEPS = 30
ZONE = {"zone": "b"}


def facts(folder: Path) -> dict:
    sources = {"a": Numbered(rows=300, first=1), "b": Numbered(rows=200, first=400)}
    job = job_of(sources, mesh=ol.Mesh(dp=2), num_workers=1)
    nodes = Nodes(1)
    nodes.add(**ZONE)
    doomed, zoned = nodes.others
    names = {nodes.first_id: "first", doomed.node_id: "doomed", zoned.node_id: "zoned"}
    engine = ol.Ray(
        "auto",
        loader_hosts=2,
        loaders=ol.scaling.ActorOptions(labels=ZONE),
        near=[doomed.node_id, zoned.node_id],
    )

    def where() -> dict[str, str]:
        return {name: names[report.node] for name, report in health_reports(engine).items()}

    try:
        with ol.start(job, engine=engine, log=str(folder / "log")) as loader:
            clients = [loader.client(rank, timeout_s=90) for rank in range(2)]
            got = [[digest(next(client)) for client in clients] for _ in range(STEPS // 2)]
            before = where()
            nodes.lose(doomed)
            began = time.monotonic()
            got += [[digest(next(client)) for client in clients] for _ in range(STEPS // 2)]
            recovery_s = time.monotonic() - began
            wait_until(lambda: len(where()) == len(before), 60)
            return {
                "before": before,
                "after": where(),
                "is_same": got == undisturbed(job, STEPS),
                "recovery_s": recovery_s,
            }
    finally:
        nodes.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, redirect_stdout(sys.stderr):
        found = facts(Path(made))
    print(json.dumps(found))
