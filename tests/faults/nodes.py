"""A Ray cluster of several nodes on this machine, of which any but the first can be lost the way machines are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from overlord.runtime.ray.cluster import SYSTEM_CONFIG

QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
OTHERS = {"node": "other"}
"""The label of all nodes but the first."""
_NUM_CPUS = 2
_STORE_BYTES = 100 << 20


class Nodes:
    """The first node is this process's own; `others` are the rest."""

    def __init__(
        self,
        num_others: int,
        health_checks: Mapping[str, int] = QUICK_HEALTH_CHECKS,
        *,
        first_cpus: int = _NUM_CPUS,
        store_bytes: int = _STORE_BYTES,
    ) -> None:
        self._store_bytes = store_bytes
        config = {**SYSTEM_CONFIG, **health_checks}
        settings = {"num_cpus": first_cpus, "object_store_memory": store_bytes, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={**settings, "_system_config": config})
        self.others: list[Any] = []
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        for _ in range(num_others):
            self.add()

    @property
    def first_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def add(self, num_cpus: int = _NUM_CPUS, /, **labels: str) -> Any:
        """A node with these labels, beside the one that all others have."""
        node = self._cluster.add_node(num_cpus=num_cpus, object_store_memory=self._store_bytes, labels={**OTHERS, **labels})
        self.others.append(node)
        return node

    def lose(self, node: Any) -> None:
        """Every process of the node is gone at once."""
        self.others.remove(node)
        raylet = psutil.Process(process_of(node))
        for process in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def process_of(node: Any) -> int:
    """The process that is the node, as the cluster sees it."""
    return node.all_processes["raylet"][0].process.pid
