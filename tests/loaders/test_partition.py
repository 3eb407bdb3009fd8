"""Sources spread over loader hosts: every share in one place, loads nearly even, the same each time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.loaders.model import (
    Partition,
    Share,
    by_share,
    evenly,
    hosts_beside,
    in_balance,
    shares_by_load,
)

NAMES = st.sampled_from([f"source {i}" for i in range(12)])
SOURCES = st.dictionaries(NAMES, st.tuples(st.integers(1, 4), st.floats(0, 100)), min_size=1)


@given(SOURCES, st.integers(1, 8))
def test_every_share_lives_in_one_host_and_no_host_is_idle(sources, num_hosts):
    num_shares = {name: n for name, (n, _) in sources.items()}
    partition = evenly(num_shares, {name: load for name, (_, load) in sources.items()}, num_hosts)
    assert len(partition.hosts) == min(num_hosts, sum(num_shares.values()))
    assert all(len(partition.hosts_of(name)) == n for name, n in num_shares.items())
    assert partition == evenly(num_shares, {name: load for name, (_, load) in sources.items()}, num_hosts)


@given(st.dictionaries(NAMES, st.floats(0.1, 100), min_size=1), st.integers(1, 6))
def test_no_host_has_more_than_its_part_and_one_share(loads, num_hosts):
    partition = evenly(dict.fromkeys(loads, 1), loads, num_hosts)
    carried = [sum(loads[share.source] for share in host) for host in partition.hosts]
    assert max(carried) <= sum(loads.values()) / len(partition.hosts) + max(loads.values()) + 1e-9


@given(st.integers(1, 256), st.integers(1, 64))
def test_hosts_leave_a_process_to_every_constructor_or_use_all_of_them(num_processes, num_groups):
    num_hosts = hosts_beside(num_processes, num_groups)
    assert 1 <= num_hosts <= num_processes
    if num_hosts < num_processes:
        assert num_hosts + num_groups <= num_processes
        assert 0.75 * num_groups <= num_hosts <= num_groups


@pytest.mark.parametrize(
    ("num_processes", "num_groups", "num_hosts"), [(16, 8, 8), (16, 4, 4), (14, 8, 6), (13, 8, 13), (4, 4, 4), (2, 1, 1)]
)
def test_hosts_beside_constructors(num_processes, num_groups, num_hosts):
    assert hosts_beside(num_processes, num_groups) == num_hosts


@given(SOURCES, st.integers(1, 8))
def test_shares_by_load_are_each_within_the_part_of_one_host(sources, num_hosts):
    given_shares = {name: n for name, (n, _) in sources.items()}
    loads = {name: load for name, (_, load) in sources.items()}
    shares = shares_by_load(given_shares, loads, num_hosts)
    for name, n in shares.items():
        assert given_shares[name] <= n <= max(given_shares[name], num_hosts)
        assert loads[name] / n <= sum(loads.values()) / num_hosts * (1 + 1e-6)


def test_one_source_is_spread_over_every_host_and_light_ones_stay_whole():
    assert shares_by_load({"only": 1}, {"only": 3.0}, 16) == {"only": 16}
    assert shares_by_load({"a": 1, "b": 1, "c": 3}, {"a": 90.0, "b": 10.0, "c": 0.0}, 4) == {"a": 4, "b": 1, "c": 3}
    assert shares_by_load({"a": 1, "b": 2}, {"a": 0.0, "b": 0.0}, 4) == {"a": 1, "b": 2}


def busiest(partition, loads):
    return max(sum(loads[share.source] / share.of for share in host) for host in partition.hosts)


@given(SOURCES, st.integers(1, 16), st.integers(1, 8))
def test_finer_shares_never_make_the_busiest_host_busier(sources, num_hosts, most):
    num_shares = {name: n for name, (n, _) in sources.items()}
    loads = {name: load for name, (_, load) in sources.items()}
    found = in_balance(num_shares, {name: most for name in sources}, loads, num_hosts)
    assert busiest(found, loads) <= busiest(evenly(num_shares, loads, num_hosts), loads)
    for name, n in found.num_shares().items():
        assert num_shares[name] <= n <= max(num_shares[name], min(most, num_hosts))


def test_sources_are_shared_as_finely_as_even_loads_need_and_no_finer():
    uneven = {f"source {i}": 1.0 + i % 4 for i in range(8)}  # twice 1, 2, 3 and 4: 1.25 for each of 16 hosts
    found = in_balance(dict.fromkeys(uneven, 1), dict.fromkeys(uneven, 100), uneven, 16)
    assert len(found.hosts) == 16
    assert busiest(found, uneven) < 1.25 * 1.1
    assert sum(found.num_shares().values()) <= 32
    even = {f"source {i}": 1.0 for i in range(64)}
    assert in_balance(dict.fromkeys(even, 1), dict.fromkeys(even, 100), even, 16).num_shares() == dict.fromkeys(even, 1)


def test_the_shares_of_a_heavy_source_go_to_different_hosts():
    partition = evenly({"heavy": 3, "a": 1, "b": 1}, {"heavy": 90.0, "a": 1.0, "b": 1.0}, 3)
    assert sorted(partition.hosts_of("heavy")) == [0, 1, 2]


def test_in_one_process_share_i_of_every_source_is_in_host_i():
    partition = by_share({"a": 2, "b": 1})
    assert partition.hosts == ((Share("a", 0, 2), Share("b", 0, 1)), (Share("a", 1, 2),))
    assert partition.hosts_of("a") == (0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Share("a", 2, 2), "'a' in 2 shares has shares 0 to 1, not 2"),
        (lambda: Partition(((Share("a", 0, 2),),)), "every share of source 'a' must live in one .* have 0 of 2"),
        (lambda: Partition(((Share("a"),), (Share("a"),))), "the hosts have 0 of 1, 0 of 1"),
        (lambda: by_share({"a": 1}).hosts_of("b"), "no loader host holds source 'b'"),
        (lambda: evenly({"a": 1}, {"a": 1.0}, 0), "at least 1 loader host, got 0"),
    ],
)
def test_a_wrong_partition_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()
