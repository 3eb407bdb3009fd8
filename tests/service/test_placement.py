"""Constructors are on the nodes of their trainers, and the stream is the same wherever they are."""

import json
import sys
from types import SimpleNamespace

import pytest

from overlord.runtime.whereabouts import match_node, node_names
from overlord.service import wire
from tests.commands import python

NODES = [
    {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "one", "Alive": True},
    {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": True},
    {"NodeID": "c", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": False},
    {"NodeID": "d", "NodeManagerAddress": "10.0.0.4", "NodeManagerHostname": "four", "Alive": True},
    {"NodeID": "e", "NodeManagerAddress": "10.0.0.4", "NodeManagerHostname": "four", "Alive": True},
]


def facts_of(way: str) -> dict:
    pytest.importorskip("ray")
    return json.loads(python("-m", "tests.service.placement_facts", way).stdout.splitlines()[-1])


@pytest.mark.second_try(reason="three Ray nodes and their trainers must start within 100 s")
def test_constructors_follow_trainers_that_connect_and_the_stream_stays_the_same():
    facts = facts_of("connected")
    assert facts["before"]["constructor/0"] == "first", "nobody knows of trainers yet: it is the driver's node before others"
    assert facts["before"]["constructor/1"] != "first"
    assert facts["connected"] == {"constructor/0": "left", "constructor/1": "right"}
    assert facts["came_back"] == {"constructor/0": "first", "constructor/1": "right"}
    assert facts["is_same"]


@pytest.mark.second_try(reason="three Ray nodes and their trainers must start within 100 s")
def test_attach_places_constructors_beside_its_ranks():
    facts = facts_of("attached")
    assert facts["attached"] == {"constructor/0": "left", "constructor/1": "right"}
    assert facts["is_same_attached"]


@pytest.mark.second_try(reason="three Ray nodes and their roles must start within 100 s")
def test_constructors_of_trainers_outside_the_cluster_are_spread_over_its_nodes_and_cores():
    facts = facts_of("outside")
    nodes = {group: node for group, (node, _) in sorted(facts["before"].items())}
    assert list(nodes.values()) in (["small"] * 2 + ["large"] * 2, ["large"] * 2 + ["small"] * 2), "none on the driver's"
    processes = {size: {pid for node, pid in facts["before"].values() if node == size} for size in ("small", "large")}
    assert len(processes["small"]) == 1, "two cores: one process"
    assert len(processes["large"]) == 2, "three cores: a process for each group"
    assert facts["after"] == facts["before"]
    assert list(facts["read_here"]) == ["constructor/3"], "the group of a rank that the driver itself reads"
    assert facts["is_same"]


@pytest.mark.parametrize(
    ("names", "node"),
    [
        (["b", "one"], "b"),
        (["unknown", "10.0.0.1", "two"], "a"),
        (["two"], "b"),  # the other one is gone
        (["10.0.0.4", "four"], None),  # two nodes of one machine: only an id tells them apart
        (["d", "four"], "d"),
        (["c"], None),
        ([], None),
    ],
)
def test_a_node_is_found_by_the_surest_of_its_names(names, node):
    assert match_node(NODES, names) == node


def test_a_process_names_its_ray_node_first_and_no_loopback_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    (host,) = node_names("127.0.0.1")
    assert host
    inside = SimpleNamespace(get_node_id=lambda: "f00d")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: inside))
    assert node_names() == ("f00d", host)
    assert node_names("no such host.") == ("f00d", host)


@pytest.mark.strangers
def test_a_greeting_has_few_and_short_names_of_nodes():
    for nodes in (("n" * 256,), ("n",) * 5):
        with pytest.raises(wire.Refused, match="not a Hello"):
            wire.parse(wire.pack(wire.Hello(wire.VERSION, 0, nodes=nodes)), wire.Hello)
