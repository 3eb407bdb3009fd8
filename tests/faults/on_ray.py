"""A run on a Ray cluster of several nodes, and what can be done to its roles, their workers, its nodes and its log."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

import overlord as ol
from overlord.runtime.ray.role_actor import HEALTH_CHECKS, HealthReport
from tests.faults.disturbance import (
    PATIENCE_S,
    Cause,
    NotRecoveredError,
    children,
    one_of,
    send,
    signals,
    storage_causes,
    torn,
    trainer_causes,
)
from tests.faults.jobs import WORLD_SIZE, disturbed_job
from tests.faults.nodes import OTHERS, Nodes, process_of
from tests.faults.schedule import Fault
from tests.faults.store import Store
from tests.faults.trainers import Trainers, wait_until

HUNG_AFTER_S = 2.0
SPREAD = ol.scaling.ActorOptions(placement="spread", max_concurrency=64)
ON_OTHERS = replace(SPREAD, labels=OTHERS)
LOADER_HOSTS = 2
NUM_OTHER_NODES = 2
SHADOWS = ol.scaling.Budget(cpus=8, memory_bytes=8 << 30)
WEIGHTS: Mapping[str, int] = {
    **{f"{role} {how}": 4 for role in ("loader", "planner", "constructor") for how in ("killed", "stopped", "paused")},
    **{f"shadow {how}": 2 for how in ("killed", "stopped", "paused")},
    **{f"worker {how}": 3 for how in ("killed", "stopped", "paused")},
    "trainer killed": 4,
    "trainer paused": 3,
    "trainers restarted from their state": 2,
    "node lost": 3,
    "node hung": 2,
    "storage errors": 2,
    "storage drops answers": 2,
    "storage cuts answers": 2,
    "storage stalls": 2,
    "storage shut": 2,
    "log torn": 3,
}


class OnRay:
    """See the module's docstring. The planner writes a log to a folder."""

    name = "ray"

    def __init__(
        self,
        folder: Path,
        store: Store,
        pace_s: float,
        *,
        nodes: Nodes | None = None,
        shadows: ol.scaling.Budget | None = None,
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self._nodes = nodes
        anywhere = SPREAD if nodes is None else ON_OTHERS
        self._log = folder / "log"
        self._engine = ol.Ray(
            "auto",
            loader_hosts=LOADER_HOSTS,
            loaders=anywhere,
            planner=anywhere,
            constructors=anywhere,
            hung_after_s=hung_after_s,
            patience_s=PATIENCE_S,
        )
        log = ol.Log(str(self._log), snapshot_every=40, sync_s=0.2)
        self._loader = ol.start(disturbed_job(store.url), engine=self._engine, log=log, shadows=shadows)
        self.trainers = Trainers(self._loader.serve(), WORLD_SIZE, folder, pace_s)
        self.causes = self._causes(store)

    def close(self) -> None:
        self.trainers.close()
        self._loader.close()

    def _causes(self, store: Store) -> dict[str, Cause]:
        causes: dict[str, Cause] = {}
        for victim, those in (
            ("loader", lambda: self._hosts(are_shadows=False)),
            ("shadow", lambda: self._hosts(are_shadows=True)),
            ("planner", lambda: self._roles("planner")),
            ("constructor", lambda: self._roles("constructor/")),
            ("worker", self._workers),
        ):
            for how, cause in signals(those, lambda: self.trainers).items():
                causes[f"{victim} {how}"] = cause
        causes |= trainer_causes(lambda: self.trainers)
        causes |= storage_causes(store, lambda: self.trainers)
        causes |= {"node lost": self._node_lost, "node hung": self._node_hung, "log torn": self._log_torn}
        return causes

    def _roles(self, prefix: str) -> list[tuple[str, int]]:
        return [(name, report.process) for name, report in health_reports(self._engine).items() if name.startswith(prefix)]

    def _hosts(self, are_shadows: bool) -> list[tuple[str, int]]:
        shadows = set(self._loader._roles.fleet.table.shadows.values())
        return [(name, process) for name, process in self._roles("loaders/") if (name in shadows) == are_shadows]

    def _workers(self) -> list[tuple[str, int]]:
        return [(f"a worker of {name}", child) for name, host in self._roles("loaders/") for child in children(host)]

    def _log_torn(self, fault: Fault) -> str:
        """The planner dies in the middle of a write."""
        _, planner = one_of(lambda: self._roles("planner"), fault)
        send(planner, signal.SIGSTOP)
        detail = torn(self._log, fault)
        send(planner, signal.SIGKILL)
        return detail

    def _node_lost(self, fault: Fault) -> str:
        nodes, node, roles = self._doomed(fault)
        nodes.lose(node)
        nodes.add()
        return roles

    def _node_hung(self, fault: Fault) -> str:
        """A node that does not answer for longer than the cluster waits; some come back after that."""
        nodes, node, roles = self._doomed(fault)
        raylet = psutil.Process(process_of(node))
        family = [raylet, *raylet.children(recursive=True)]
        for process in family:
            send(process.pid, signal.SIGSTOP)
        if not wait_until(lambda: not _is_alive(node.node_id), PATIENCE_S):
            raise NotRecoveredError("a node that hangs was not given up")
        if fault.amount < 0.5:
            for process in family:
                send(process.pid, signal.SIGCONT)
            self.trainers.wait(1.0)
        nodes.lose(node)
        nodes.add()
        return roles + (", came back after it was given up" if fault.amount < 0.5 else "")

    def _doomed(self, fault: Fault) -> tuple[Nodes, Any, str]:
        """A node that has roles, if there is one, and which."""
        assert self._nodes is not None
        where = health_reports(self._engine)
        held = {n.node_id: [name for name, p in where.items() if p.node == n.node_id] for n in self._nodes.others}
        with_roles = [n for n in self._nodes.others if held[n.node_id]] or self._nodes.others
        node = with_roles[fault.pick(with_roles)]
        return self._nodes, node, f"a node with {', '.join(sorted(held[node.node_id])) or 'nothing'}"


def health_reports(engine: ol.Ray) -> dict[str, HealthReport]:
    """Where each role runs; without those that are being made anew."""
    actors = {name: actor for name, (_, actor) in engine._running_roles().items()}
    asked = {name: actor.check_health.options(concurrency_group=HEALTH_CHECKS).remote() for name, actor in actors.items()}
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0.5)
    found: dict[str, HealthReport] = {}
    for name, ref in asked.items():
        with suppress(RayError):
            if ref in ready:
                report: Any = ray.get(ref)
                found[name] = report
    return found


def _is_alive(node_id: str) -> bool:
    return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)
