"""Which hosts get a shadow: those that trainers would wait for, the longest wait first, as far as there is room."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.declare.source import MIB
from overlord.errors import SpecError
from overlord.loaders.model import (
    Budget,
    Partition,
    Profile,
    Share,
    evenly,
)
from overlord.loaders.shadowing import FAR, NEAR, is_copied, shadows

SPARE = Budget(cpus=8, memory_bytes=1 << 30, workers_per_host=2, host_bytes=100 * MIB)


def profile(name: str, chunk_s: float, **fields) -> Profile:
    given = {"rows": 10.0, "tokens": 100.0, "chunk_bytes": 10 * MIB, "num_chunks": 3, **fields}
    return Profile(source=name, cpu_s=chunk_s / 2, wait_s=chunk_s / 2, **given)


def one_each(*names: str) -> Partition:
    return Partition(tuple((Share(name),) for name in names))


def test_a_host_that_refills_within_the_prefetched_steps_needs_no_shadow():
    profiles = {"quick": profile("quick", 0.2), "slow": profile("slow", 3.0)}
    found = shadows(one_each("quick", "slow"), profiles, {"quick": 1.0, "slow": 1.0}, step_s=0.5, prefetch=2, spare=SPARE)
    quick, slow = found.hosts
    assert (quick.is_kept, slow.is_kept) == (False, True)
    assert (quick.refill_s, slow.refill_s, slow.slack_s) == (0.2, 3.0, 1.0)  # two chunks each, on two workers
    assert found.shadowed == (1,)
    assert found.sources == {"slow"}
    assert quick.reason.endswith("2 chunks 200 ms, 2 steps of 500 ms are ready: the steps that are ready outlast that")
    assert slow.reason.endswith("2 chunks 3 s, 2 steps of 500 ms are ready: trainers would wait 2 s")


def test_starting_a_process_and_opening_a_source_count():
    profiles = {"a": profile("a", 0.2, open_s=0.4)}
    given = {"step_s": 0.5, "prefetch": 2, "spare": SPARE}
    assert not shadows(one_each("a"), profiles, {"a": 1.0}, **given).hosts[0].is_kept
    found = shadows(one_each("a"), profiles, {"a": 1.0}, start_s=1.0, **given).hosts[0]
    assert found.is_kept
    assert found.refill_s == pytest.approx(1.6)


def test_the_most_endangered_come_first_when_memory_or_processors_are_short():
    profiles = {name: profile(name, seconds) for name, seconds in (("a", 3.0), ("b", 9.0), ("c", 6.0))}
    per_step = dict.fromkeys(profiles, 1.0)
    given = {"step_s": 1.0, "prefetch": 1}
    one = 100 * MIB + 2 * 10 * MIB
    short = replace(SPARE, cpus=100, memory_bytes=2 * one)
    found = shadows(one_each(*profiles), profiles, per_step, spare=short, **given)
    assert found.shadowed == (1, 2)
    assert found.hosts[0].reason.endswith("and only 0 bytes and 100 CPUs are left for shadows")
    profiles["c"] = replace(profiles["c"], chunk_bytes=100 * MIB)
    found = shadows(one_each(*profiles), profiles, per_step, spare=replace(SPARE, cpus=0.06), **given)
    assert found.shadowed == (1, 0)  # copying b takes 0.025 CPUs, which leaves too little for c but not for a


def test_a_shadow_that_would_copy_more_bytes_than_making_them_is_worth_makes_its_chunks():
    profiles = {"a": Profile(source="a", cpu_s=0.03, wait_s=0.0, rows=1.0, tokens=1.0, chunk_bytes=500 * MIB)}
    host = shadows(one_each("a"), profiles, {"a": 1.0}, step_s=0.01, prefetch=0, spare=replace(SPARE, memory_bytes=2 << 30))
    assert host.hosts[0].cpus == pytest.approx(3.0)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(0, 1 << 30), st.sampled_from([NEAR, FAR]))
def test_a_chunk_is_copied_exactly_where_that_costs_less(cpu_s, wait_s, num_bytes, cost):
    copied = is_copied(cpu_s, wait_s, num_bytes, cost)
    assert copied == (cost.of(num_bytes) < cpu_s + 0.05 * wait_s)
    assert is_copied(cpu_s + 1, wait_s, num_bytes, cost) >= copied
    assert is_copied(cpu_s, wait_s, num_bytes + (1 << 20), cost) <= copied


def test_the_cost_of_copies_follows_what_is_measured():
    cost = FAR
    for _ in range(40):
        cost = cost.with_measured(FAR.request_s + 0.01, 10 * MIB)
    assert cost.of(10 * MIB) == pytest.approx(FAR.request_s + 0.01, rel=1e-3)
    assert cost.with_measured(1.0, 100) == cost, "a few bytes say nothing about the cost of one"


def test_a_source_is_safe_only_if_all_its_loaders_are():
    profiles = {"a": profile("a", 4.0), "b": profile("b", 0.01)}
    partition = Partition(((Share("a", 0, 2), Share("b")), (Share("a", 1, 2),)))
    room_for_one = replace(SPARE, memory_bytes=145 * MIB)
    found = shadows(partition, profiles, {"a": 2.0, "b": 1.0}, step_s=1.0, prefetch=1, spare=room_for_one)
    assert len(found.shadowed) == 1
    assert "a" not in found.sources


def test_a_host_that_no_step_asks_has_no_shadow():
    found = shadows(one_each("a"), {"a": profile("a", 99.0)}, {"a": 0.0}, step_s=1.0, prefetch=0, spare=SPARE, start_s=9.0)
    assert found.shadowed == ()
    assert found.hosts[0].reason.startswith("no step draws from it")


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 4), st.integers(0, 80 * MIB)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 900 * MIB),
    st.floats(0.1, 20),
    st.integers(0, 4),
)
def test_shadows_keep_to_what_is_spare_and_nobody_more_endangered_is_left_out_for_less(costs, hosts, memory, cpus, prefetch):
    profiles = {f"s{i}": profile(f"s{i}", seconds, chunk_bytes=size) for i, (seconds, _, size) in enumerate(costs)}
    per_step = {f"s{i}": chunks for i, (_, chunks, _) in enumerate(costs)}
    partition = evenly(dict.fromkeys(profiles, 1), {name: p.chunk_s for name, p in profiles.items()}, hosts)
    spare = replace(SPARE, memory_bytes=memory, cpus=cpus)
    found = shadows(partition, profiles, per_step, step_s=1.0, prefetch=prefetch, spare=spare, start_s=0.5)
    kept = [shadow for shadow in found.hosts if shadow.is_kept]
    assert sum(shadow.memory_bytes for shadow in kept) <= memory
    assert sum(shadow.cpus for shadow in kept) <= cpus + 1e-6
    for shadow in found.hosts:
        if shadow.is_kept:
            assert shadow.refill_s > shadow.slack_s == prefetch
        elif shadow.refill_s > shadow.slack_s:
            before = [other for other in kept if other.refill_s >= shadow.refill_s]
            over_memory = sum(other.memory_bytes for other in before) + shadow.memory_bytes > memory
            assert over_memory or sum(other.cpus for other in before) + shadow.cpus > cpus - 1e-6


@pytest.mark.parametrize("wrong", [{"step_s": 0.0, "prefetch": 1}, {"step_s": 1.0, "prefetch": -1}])
def test_wrong_values_are_refused(wrong):
    with pytest.raises(SpecError, match="shadows need step_s above 0, and prefetch and start_s of at least 0"):
        shadows(one_each("a"), {"a": profile("a", 1.0)}, {"a": 1.0}, spare=SPARE, **wrong)
