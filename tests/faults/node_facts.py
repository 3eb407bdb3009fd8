"""A run on three nodes, one of which is lost: where its roles were before and after, and whether ranks got what they should.
Then a run that fills two nodes, of which one is lost, so that no node has room for its loaders. With `apart`: on which nodes
shadows are.

    python -m tests.faults.node_facts [apart]

A program of its own, since a process can be connected to one cluster only. Says what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
    nodes = Nodes(1)
    nodes.add(**ZONE)
    try:
        return {**_placed(nodes, folder), "full": _full(nodes)}
    finally:
        nodes.close()


def _placed(nodes: Nodes, folder: Path) -> dict:
    sources = {"a": Numbered(rows=300, first=1), "b": Numbered(rows=200, first=400)}
    job = job_of(sources, mesh=ol.Mesh(dp=2), num_workers=1)
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

    with ol.start(job, engine=engine, log=str(folder / "log")) as loader:
        clients = [loader.client(rank, timeout_s=90) for rank in range(2)]
        got = [[digest(next(client)) for client in clients] for _ in range(STEPS // 2)]
        before = where()
        nodes.lose(doomed)
        began = time.monotonic()
        got += [[digest(next(client)) for client in clients] for _ in range(STEPS // 2)]
        recovery_s = time.monotonic() - began
        wait_until(lambda: len(where()) == len(before), 60)
        after = where()
        refused = [_refusal(loader, near) for near in (["nowhere", zoned.node_id], [zoned.node_id])]
        loader.resize(ol.Mesh(dp=1))  # though `near` names the lost node
        clients[0].rejoin()
        return {
            "before": before,
            "after": after,
            "refused": refused,
            "resized": where()["constructor/0"],
            "step": next(clients[0]).number,
            "is_same": got == undisturbed(job, STEPS),
            "recovery_s": recovery_s,
        }


def _refusal(loader: ol.Loader, near: list[str]) -> str:
    """Why the nodes of the groups cannot be these."""
    try:
        loader.resize(ol.Mesh(dp=2), near=near)
    except ol.errors.SpecError as error:
        return str(error)
    return "nothing is wrong"


def _full(nodes: Nodes) -> dict:
    """Loaders that take every CPU of two nodes of two."""
    job = job_of({name: Numbered(rows=300, first=1 + 1000 * at) for at, name in enumerate("abcd")}, num_workers=1)
    engine = ol.Ray("auto", hung_after_s=2.0)

    def processes() -> int:
        return len({report.process for name, report in health_reports(engine).items() if name.startswith("loaders")})

    with ol.start(job, engine=engine) as loader:
        client = loader.client(0, timeout_s=60)
        got = [digest(next(client)) for _ in range(STEPS // 3)]
        before = processes()
        nodes.lose(nodes.others[0])
        while len(got) < 2 * STEPS // 3 or processes() != before // 2:
            got.append(digest(next(client)))
        told = [str(event.text) for event in loader.metrics().events if "no node has room" in event.text]
        nodes.add()
        is_back = wait_until(lambda: processes() == before, 60)
        got += [digest(next(client)) for _ in range(STEPS // 3)]
        expected = undisturbed(job, len(got))
        return {"before": before, "told": told, "is_back": is_back, "is_same": [[each] for each in got] == expected}


def apart() -> dict:
    """The nodes of a loader and its shadow, while another node has room and while none has."""
    nodes = Nodes(1)
    there = nodes.others[0].node_id
    job = job_of({"a": Numbered(rows=300, first=1)}, num_workers=1)

    def places() -> dict[str, str]:
        engine = ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions(num_cpus=1, placement="here"))
        with ol.start(job, engine=engine) as loader:
            loader._roles.fleet.add_shadow("loaders/0")
            reports = health_reports(engine)
            return {name: "there" if reports[name].node == there else "here" for name in ("loaders/0", "loaders/1")}

    try:
        with_room = places()
        remote: Any = ray.remote(num_cpus=2)(_Guest)
        guest = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote()
        ray.get(guest.is_there.remote(), timeout=60)
        return {"with_room": with_room, "without": places()}
    finally:
        nodes.close()


class _Guest:
    """Another program's actor."""

    def is_there(self) -> bool:
        return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, redirect_stdout(sys.stderr):
        found = apart() if sys.argv[1:] == ["apart"] else facts(Path(made))
    print(json.dumps(found))
