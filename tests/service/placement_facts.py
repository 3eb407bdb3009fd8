"""Runs whose trainers are on several nodes of a Ray cluster: where their constructors are, and what the trainers got.

    python -m tests.service.placement_facts connected|attached|outside

A program of its own, since a process can be connected to one cluster only. Says what it found as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import overlord as ol
from tests.commands import python
from tests.faults.comparison import undisturbed
from tests.faults.nodes import Nodes
from tests.faults.on_ray import health_reports
from tests.faults.trainer import digest
from tests.small_sources import Numbered, job_of

STEPS = 12
SOURCES = {"a": Numbered(rows=300, first=1), "b": Numbered(rows=200, first=400)}
JOB = job_of(SOURCES, mesh=ol.Mesh(dp=2), num_workers=1)
_WAIT_S = 90


class Trainer:
    """A rank in a process of the cluster."""

    def __init__(self) -> None:
        self.client: Any = None
        self.engine: Any = None

    def connect(self, address: str, rank: int) -> None:
        self.client = ol.connect(address, rank=rank, timeout_s=_WAIT_S)

    def attach(self, rank: int, size: int, port: int) -> dict[str, str]:
        """Join the run as a rank of a torch world; rank 0 returns which actor is on which node."""
        from overlord.trainer import attach

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.client = attach(JOB, engine=ol.Ray("auto", loader_hosts=1), torch=False, timeout_s=_WAIT_S)
        return kept_constructor_nodes() if rank == 0 else {}

    def take(self, num_steps: int) -> list[str]:
        return [digest(next(self.client)) for _ in range(num_steps)]

    def state(self) -> Any:
        return self.client.state_dict()

    def load(self, state: Any) -> None:
        self.client.load_state_dict(state)

    def close(self) -> None:
        self.client.close()


def constructor_nodes(engine: ol.Ray) -> dict[str, str]:
    return {name: report.node for name, report in health_reports(engine).items() if name.startswith("constructor")}


def kept_constructor_nodes() -> dict[str, str]:
    """Of the run that `attach` has put into the cluster."""
    named: Any = list_named_actors(all_namespaces=True)
    found: dict[str, str] = {}
    for entry in named:
        if entry["namespace"].startswith("overlord-run-attach") and entry["name"].startswith("constructor"):
            report: Any = ray.get(ray.get_actor(**entry).check_health.remote())
            found[entry["name"].partition("#")[0]] = report.node
    return found


def start_trainers(nodes: Sequence[str]) -> list[Any]:
    remote: Any = ray.remote(num_cpus=0)(Trainer)
    placed = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [remote.options(scheduling_strategy=strategy).remote() for strategy in placed]


def take_all(trainers: Sequence[Any], num_steps: int) -> list[list[str]]:
    """By step, what each rank got."""
    found = ray.get([trainer.take.remote(num_steps) for trainer in trainers], timeout=_WAIT_S)
    return [list(step) for step in zip(*found, strict=True)]


def connected(nodes: Nodes, names: dict[str, str]) -> dict[str, Any]:
    left, right = (node.node_id for node in nodes.others)
    engine = ol.Ray("auto", loader_hosts=2, loaders=ol.scaling.ActorOptions(placement="spread"))

    def where() -> dict[str, str]:
        return {name: names[node] for name, node in constructor_nodes(engine).items()}

    with ol.start(JOB, engine=engine) as loader:
        before = where()
        address = loader.serve()
        trainers = start_trainers([left, right])
        ray.get([trainer.connect.remote(address, rank) for rank, trainer in enumerate(trainers)], timeout=_WAIT_S)
        found = {"before": before, "connected": where()}
        got = take_all(trainers, 4)
        state = ray.get(trainers[0].state.remote())
        got += take_all(trainers, 4)
        ray.get([trainer.load.remote(state) for trainer in trainers], timeout=_WAIT_S)
        got[4:] = take_all(trainers, STEPS - 4)
        ray.get(trainers[0].close.remote())
        ray.kill(trainers[0])
        # The rank comes back elsewhere, and the other one as a second client that must not move what it reads from.
        (elsewhere,) = start_trainers([nodes.first_id])
        ray.get(elsewhere.connect.remote(address, 0), timeout=_WAIT_S)
        found |= {"came_back": where(), "is_same": got == undisturbed(JOB, STEPS)}
        for trainer in (trainers[1], elsewhere):
            ray.get(trainer.close.remote())
            ray.kill(trainer)
    return found


def attached(nodes: Nodes, names: dict[str, str]) -> dict[str, Any]:
    trainers = start_trainers([node.node_id for node in nodes.others])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    placed = ray.get([trainer.attach.remote(rank, 2, port) for rank, trainer in enumerate(trainers)], timeout=_WAIT_S)[0]
    got = take_all(trainers, STEPS)
    ray.get([trainer.close.remote() for trainer in reversed(trainers)], timeout=_WAIT_S)
    return {
        "attached": {name: names[node] for name, node in placed.items()},
        "is_same_attached": got == undisturbed(JOB, STEPS),
    }


_READ_ALL = """
import json, sys
import overlord as ol
from tests.faults.trainer import digest
clients = [ol.connect(sys.argv[1], rank=rank, timeout_s=90) for rank in range(4)]
print(json.dumps([[digest(next(client)) for client in clients] for _ in range(int(sys.argv[2]))]))
for client in clients:
    client.close()
"""


def outside(nodes: Nodes, _names: dict[str, str]) -> dict[str, Any]:
    """The driver's node has no CPUs, and the trainers' machine is not in the cluster."""
    names = {nodes.first_id: "first", nodes.others[0].node_id: "small", nodes.add(3).node_id: "large"}
    engine = ol.Ray("auto", loader_hosts=2)
    job = replace(JOB, mesh=ol.Mesh(dp=4))

    def where() -> dict[str, tuple[str, int]]:
        reports = health_reports(engine)
        return {name: (names[at.node], at.process) for name, at in reports.items() if name.startswith("constructor")}

    with ol.start(job, engine=engine) as loader:
        before = where()
        got = json.loads(python("-c", _READ_ALL, loader.serve(), str(STEPS)).stdout.splitlines()[-1])
        found = {"before": before, "after": where(), "is_same": got == undisturbed(job, STEPS)}
    engine = ol.Ray("auto", loader_hosts=2)
    with ol.start(job, engine=engine) as loader:
        next(loader.client(3))
        return {**found, "read_here": {name: node for name, (node, _) in where().items() if node == "first"}}


def facts(way: str) -> dict[str, Any]:
    nodes = Nodes(1, first_cpus=0) if way == "outside" else Nodes(2)
    names = {
        nodes.first_id: "first",
        **{node.node_id: side for node, side in zip(nodes.others, ("left", "right"), strict=False)},
    }
    try:
        return {"connected": connected, "attached": attached, "outside": outside}[way](nodes, names)
    finally:
        nodes.close()


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        found = facts(sys.argv[1])
    print(json.dumps(found))
