"""On which node of the cluster a role is placed, and whether any has room for its actor."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray._private.state import actors, available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from overlord.errors import SpecError
from overlord.runtime.whereabouts import match_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.runtime.ray.engine import ActorOptions

_log = logging.getLogger("overlord.runtime.engine")
_CONSTRUCTOR = "constructor"
_FRESH_S = 1.0  # thousands of trainers may connect within that, each of which is looked for


class RolePlacement:
    """Which node each role prefers. Constructors are on the nodes of their trainers, as far as these are known and in the
    cluster; else neighbouring groups share a node, and all nodes with CPUs have about as many.

    `near` and `trainers` are by data-parallel group: nodes that the user has named, and the names by which trainers know
    their own. A node of `near` must exist when it is first needed, unless it is `known` to have existed; one that is lost
    later is replaced by another, with a warning.
    """

    def __init__(self, near: Sequence[str], trainers: Sequence[Sequence[str]], *, known: Sequence[str] = ()) -> None:
        self._near = tuple(near)
        self._known = set(known)
        self._told: set[str] = set()
        self._trainers = tuple(map(tuple, trainers))
        self._num_groups = 1
        self._homes: dict[str, str] = {}  # of roles that were moved
        self._lock = threading.Lock()
        self._nodes: list[dict[str, Any]] = []
        self._known_at = float("-inf")

    def expect_groups(self, num_groups: int) -> None:
        """Spread the constructors of so many groups from now on."""
        self._num_groups = num_groups

    def node_of(self, name: str, options: ActorOptions) -> str | None:
        """The node that a role prefers; None where the choice is Ray's."""
        kind, _, number = name.partition("/")
        if kind == _CONSTRUCTOR:
            group = int(number)
            if self._near:
                if group >= len(self._near):
                    raise SpecError(
                        f"near names the nodes of {len(self._near)} data-parallel groups, but the mesh has more: name a "
                        "node for each group, in a run that is resized with resize(near=...)"
                    )
                named = self._named_node(self._near[group])
                if named is not None:
                    return named
            trainers = self._trainers_of(group)
            home = self._homes.get(name)
            node = self.find(trainers if home is None else (home, *trainers))
            if node is not None:
                return node
            if options.placement == "spread":
                nodes = self._nodes_for(options)
                return nodes[group * len(nodes) // max(self._num_groups, group + 1)]
        return ray.get_runtime_context().get_node_id() if options.placement == "here" else None

    def cpus_of(self, node: str) -> float:
        """The CPUs that a node has in the cluster."""
        return next((each["Resources"].get("CPU", 0) for each in self._alive_nodes() if each["NodeID"] == node), 0)

    def num_beside(self, name: str, options: ActorOptions) -> int:
        """How many groups will have their constructors on the node of a group's, that one among them, as far as is known."""
        group = int(name.partition("/")[2])
        if self._near:
            return self._near.count(self._near[group]) if group < len(self._near) else 1
        trainers = self._trainers_of(group)
        return self._trainers.count(trainers) if trainers else math.ceil(self._num_groups / len(self._nodes_for(options)))

    def _trainers_of(self, group: int) -> tuple[str, ...]:
        return self._trainers[group] if group < len(self._trainers) else ()

    def _nodes_for(self, options: ActorOptions) -> list[str]:
        """The nodes to spread constructors over: this one first, if it has CPUs. Only this one if none has."""
        here = ray.get_runtime_context().get_node_id()
        fitting = [
            node["NodeID"]
            for node in self._alive_nodes()
            if node["Resources"].get("CPU", 0) > 0
            and _has_labels(node.get("Labels", {}), options)
            and all(node["Resources"].get(name, 0) >= amount for name, amount in _wanted(options).items())
        ]
        return sorted(fitting, key=lambda node: (node != here, node)) or [here]

    def place_near(self, near: Sequence[str]) -> None:
        """Place constructors on these nodes from now on. SpecError, before anything changes, if one is not there."""
        for name in near:
            self._named_node(name)
        self._known |= {*self._near}  # these were accepted before: to come back to them is no error
        self._near = tuple(near)

    def find(self, names: Sequence[str]) -> str | None:
        """The node of the cluster that has one of these names."""
        return match_node(self._alive_nodes(), names) if names else None

    def note_home(self, name: str, node: str) -> None:
        """Prefer a node for a role from now on."""
        self._homes[name] = node

    def _named_node(self, name: str) -> str | None:
        nodes = self._alive_nodes()
        for node in nodes:
            if name in (node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]):
                self._known.add(name)
                self._told.discard(name)
                return node["NodeID"]
        there = ", ".join(sorted(node["NodeManagerAddress"] for node in nodes))
        if name not in self._known:
            raise SpecError(f"near names the node {name!r}, but the cluster's nodes are {there}")
        if name not in self._told:
            self._told.add(name)
            _log.warning(
                "the node %r, which near names, is lost: the constructors that were to be there are made on other nodes, of "
                "%s",
                name,
                there,
            )
        return None

    def _alive_nodes(self) -> list[dict[str, Any]]:
        with self._lock:
            if time.monotonic() - self._known_at > _FRESH_S:
                self._nodes = [node for node in ray.nodes() if node["Alive"]]
                self._known_at = time.monotonic()
            return self._nodes


def strategy_for(node: str | None, is_spread: bool) -> Any:
    """The argument of Ray for an actor that prefers a node, or none."""
    if node is not None:
        return NodeAffinitySchedulingStrategy(node, soft=True)
    return "SPREAD" if is_spread else "DEFAULT"


def has_room(options: ActorOptions) -> bool:
    """True if some node has free what an actor with these options requests."""
    return bool(_free_cpus(options))


def find_apart(options: ActorOptions, avoided: str) -> str | None:
    """The node with the most free CPUs, apart from one, that has room for an actor with these options; None if none has."""
    free = {node: cpus for node, cpus in _free_cpus(options).items() if node != avoided}
    return max(free, key=lambda node: (free[node], node), default=None)


def _free_cpus(options: ActorOptions) -> dict[str, float]:
    """The free CPUs of each node that has free what an actor with these options requests."""
    free: Any = available_resources_per_node()
    found: dict[str, float] = {}
    for node in ray.nodes():
        left = free.get(node["NodeID"], {})
        has_all = all(left.get(name, 0) >= amount for name, amount in _wanted(options).items())
        if node["Alive"] and has_all and _has_labels(node.get("Labels", {}), options):
            found[node["NodeID"]] = left.get("CPU", 0)
    return found


def _wanted(options: ActorOptions) -> dict[str, float]:
    return {"CPU": options.num_cpus, "memory": options.memory_bytes or 0, **options.resources}


def is_restarting(actor: Any) -> bool:
    """True while Ray has no process for an actor that had one."""
    return _state_of(actor) == "RESTARTING"


def is_running(actor: Any) -> bool:
    return _state_of(actor) == "ALIVE"


def _state_of(actor: Any) -> str | None:
    known: Any = actors(actor._actor_id.hex())  # noqa: SLF001 - Ray has no public accessor
    return known["State"] if known else None


def _has_labels(labels: dict[str, str], options: ActorOptions) -> bool:
    # Ray knows sets and negations too, written as in(...) and !...: nodes that may match count.
    return all(labels.get(name) == value or "(" in value or "!" in value for name, value in options.labels.items())
