"""Where a process is: the names by which a cluster may know its node, so that roles can be placed beside a trainer."""

from __future__ import annotations

import ipaddress
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_NAMES = 4


def node_names(towards: str = "") -> tuple[str, ...]:
    """The names of this process's node, the surest first: its id if the process is inside a Ray cluster, the address from
    which it reaches the host `towards`, and the name of its host."""
    found: list[str] = []
    ray: Any = sys.modules.get("ray")  # a process that has not imported Ray is not in a cluster
    if ray is not None and ray.is_initialized():
        found.append(ray.get_runtime_context().get_node_id())
    if towards:
        with suppress(OSError, ValueError):
            found += [name for name in [_address_towards(towards)] if not ipaddress.ip_address(name).is_loopback]
    found.append(socket.gethostname())
    return tuple(found[:MOST_NAMES])


def match_node(nodes: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """The id of the node, among Ray's descriptions of nodes, that has one of these names. None if there is none, or if an
    address or a host's name is that of several, which share a machine."""
    for name in names:
        for keys in (("NodeID",), ("NodeManagerAddress", "NodeManagerHostname")):
            found = [node["NodeID"] for node in nodes if node["Alive"] and name in [node[key] for key in keys]]
            if len(found) == 1:
                return found[0]
    return None


def _address_towards(host: str) -> str:
    """The address of this machine on the way to a host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
