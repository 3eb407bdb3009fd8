"""The routing table: every chunk is in a host that is known, and what a host holds already stays its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.loaders.model import Partition, Share
from overlord.loaders.routing import RoutingTable, Stretch

HOSTS = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=4)
CHANGES = st.lists(st.tuples(HOSTS, st.integers(0, 60)), max_size=6)
CHUNKS = range(80)


def first_table() -> RoutingTable:
    return RoutingTable({"s": (Stretch(0, ("a",)),), "t": (Stretch(0, ("b",)),)})


@given(CHANGES)
def test_dealing_a_source_anew_moves_only_chunks_from_the_boundary_on(changes):
    table = first_table()
    for hosts, first in changes:
        before, table = table, table.with_hosts("s", hosts, first)
        for chunk in CHUNKS:
            expected = hosts[chunk % len(hosts)] if chunk >= first else before.host_of("s", chunk)
            assert table.host_of("s", chunk) == expected
            assert table.host_of("t", chunk) == "b"
        assert table.version > before.version


@given(CHANGES, st.integers(0, 80))
def test_letting_go_of_the_past_changes_nothing_that_is_still_needed(changes, needed):
    table = first_table()
    for hosts, first in changes:
        table = table.with_hosts("s", hosts, first)
    later = table.since({"s": needed})
    assert [later.host_of("s", chunk) for chunk in CHUNKS if chunk >= needed] == [
        table.host_of("s", chunk) for chunk in CHUNKS if chunk >= needed
    ]
    assert set(later.hosts) <= set(table.hosts)
    if needed >= 60:
        assert len(later.stretches["s"]) == 1, "all changes lie before it"
    assert later.since({"s": needed}) is later


def test_a_partition_becomes_a_table():
    partition = Partition(((Share("s", 0, 2), Share("t")), (Share("s", 1, 2),)))
    table = RoutingTable.of(partition, ["x", "y"])
    assert [table.host_of("s", chunk) for chunk in range(4)] == ["x", "y", "x", "y"]
    assert table.sources_of("x") == ("s", "t")
    assert table.sources_of("y") == ("s",)
    assert table.hosts == ("x", "y")


def test_a_shadow_stands_behind_one_host_until_it_is_taken_away():
    table = first_table().with_shadow("a", "s1")
    assert dict(table.shadows) == {"a": "s1"}
    assert dict(table.with_shadow("a", None).shadows) == {}
    exchanged = table.with_hosts("s", ["a", "b"], 5).with_shadow_in_place_of("a")
    assert [exchanged.host_of("s", chunk) for chunk in (0, 6, 7)] == ["s1", "s1", "b"]
    assert dict(exchanged.shadows) == {"s1": "a"}


def test_stretches_with_a_hole_are_refused():
    with pytest.raises(SpecError, match="must begin at 0 and follow each other, got \\[3\\]"):
        RoutingTable({"s": (Stretch(3, ("a",)),)})
    with pytest.raises(SpecError, match="has a host"):
        Stretch(0, ())
