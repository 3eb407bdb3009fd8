"""Loaders during a run: more before they are needed, fewer only after calm, never to and fro, never over the budget."""

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.declare.source import MIB
from overlord.errors import SpecError
from overlord.loaders.autoscaling import (
    Observed,
    Scaling,
    ScalingDecision,
    ScalingPolicy,
    ScalingState,
    decide,
)
from overlord.loaders.model import (
    Budget,
    Partition,
    Profile,
    Share,
    by_share,
    evenly,
    held_bytes,
)

BATCH = Batch(samples=100, sequence_length=16)
ROOMY = Budget(cpus=64, memory_bytes=1 << 40, workers_per_host=1, headroom=1.0)
POLICY = ScalingPolicy(ahead_s=10, calm_s=20, settle_s=5, margin=0.15)


def profile(name: str, chunk_s: float, wait: float = 0.0, rows: float = 100, chunk_bytes: int = MIB) -> Profile:
    """A chunk of as many rows as a step has samples: a step takes one chunk of a source that has all the weight."""
    return Profile(
        source=name,
        cpu_s=chunk_s * (1 - wait),
        wait_s=chunk_s * wait,
        rows=rows,
        tokens=rows * 10,
        chunk_bytes=chunk_bytes,
        num_chunks=4,
    )


def profiles(**chunk_s: float) -> dict[str, Profile]:
    return {name: profile(name, seconds) for name, seconds in chunk_s.items()}


class Run:
    """A run that does what is decided, one look a second."""

    def __init__(self, mixture: Mixture, costs: dict[str, Profile], budget: Budget = ROOMY, step_s: float = 1.0) -> None:
        self.mixture, self.costs, self.budget, self.step_s = mixture, costs, budget, step_s
        self.partition: Partition = by_share(dict.fromkeys(costs, 1))
        self.state = ScalingState()
        self.at_s = 0.0
        self.log: list[tuple[float, ScalingDecision]] = []

    def look(self, waited: dict[str, float] | None = None) -> Scaling:
        step = int(self.at_s / self.step_s)
        now = Observed(step=step, at_s=self.at_s, step_s=self.step_s, profiles=self.costs, waited=waited or {})
        found = decide(now, self.mixture, BATCH, self.partition, budget=self.budget, state=self.state, policy=POLICY)
        self.partition, self.state = found.partition, found.state
        self.log += [(self.at_s, decision) for decision in found.decisions]
        self.at_s += 1
        return found

    def looks(self, number: int) -> list[dict[str, int]]:
        """The loaders after each look."""
        found = []
        for _ in range(number):
            self.look()
            found.append(self.partition.num_shares())
        return found

    def changes(self, source: str) -> list[tuple[float, int, int]]:
        return [(at_s, d.before, d.after) for at_s, d in self.log if d.source == source and d.before != d.after]


def test_a_heavy_source_gets_loaders_before_the_schedule_turns_to_it_and_gives_them_back_after():
    schedule = Mixture({0: {"light": 1}, 100: {"heavy": 1}, 200: {"light": 1}})
    run = Run(schedule, profiles(light=0.1, heavy=4.0))
    run.looks(260)
    (grown_s, *up), (shrunk_s, *down) = run.changes("heavy")
    assert (up, down) == ([1, 4], [4, 1])
    assert 90 <= grown_s < 100  # the look-ahead is 10 s
    assert 200 + POLICY.calm_s <= shrunk_s <= 202 + POLICY.calm_s
    assert run.changes("light") == []
    reasons = [
        decision.reason for _, decision in run.log if decision.source == "heavy" and decision.before != decision.after
    ]
    assert "from step 100 on, in 10 s, 1 chunks/s of 4 s need 4 workers with headroom, and 1 x 1 are there" in reasons[0]
    assert "it has needed no more (now 0 workers)" in reasons[1]


def test_hosts_that_are_no_longer_needed_are_left_empty_and_filled_again_later():
    schedule = Mixture({0: {"light": 1}, 20: {"heavy": 1}, 60: {"light": 1}, 150: {"heavy": 1}})
    run = Run(schedule, profiles(light=0.1, heavy=3.6))
    used = []
    for _ in range(200):
        run.look()
        used.append(sum(1 for host in run.partition.hosts if host))
    assert used[0] == 1
    assert used[50] == 4
    assert used[130] == 1
    assert used[-1] == 4
    assert len(run.partition.hosts) == 4


def test_a_source_that_ramps_up_is_looked_at_where_the_ramp_is_highest():
    run = Run(Mixture({0: {"a": 1}, 100: {"b": 1}}, ramp="linear"), profiles(a=0.01, b=10.0))
    for at_s, loaders in enumerate(run.looks(95)):
        share = min((at_s + POLICY.ahead_s) / 100, 1.0)
        assert 10 * share <= loaders["b"] < 10 * share + 1


def test_many_light_sources_that_grow_dearer_spread_over_more_hosts():
    names = [f"s{i}" for i in range(8)]
    run = Run(Mixture(dict.fromkeys(names, 1.0)), {name: profile(name, 0.5) for name in names})
    run.look()
    assert len(run.partition.hosts) == 1
    run.costs = {name: profile(name, 2.5) for name in names}
    run.look()
    busy = [sum(2.5 / 8 for _ in host) for host in run.partition.hosts]
    assert max(busy) <= 1
    assert sorted(share.source for host in run.partition.hosts for share in host) == names
    moved = [decision for _, decision in run.log if "to host" in decision.reason]
    assert len(moved) == 8 - len(run.partition.hosts[0])
    assert all(decision.before == decision.after == 1 for decision in moved)
    assert "host 0 had work for 2.5 workers and has 1" in moved[0].reason


def test_steps_that_wait_for_a_source_get_it_more_than_was_computed_and_not_at_every_look():
    run = Run(Mixture({"a": 1}), profiles(a=0.9))
    run.look({"a": 0.3})
    assert run.partition.num_shares() == {"a": 2}  # 0.9 workers, taken 1.5 times
    assert "taken 1.5 times since steps waited for it" in run.log[-1][1].reason
    for _ in range(4):
        run.look({"a": 0.3})  # a new loader is given time to show
    assert run.partition.num_shares() == {"a": 2}
    run.look({"a": 0.3})
    assert run.partition.num_shares() == {"a": 3}
    run.looks(200)
    assert run.partition.num_shares() == {"a": 2}  # 0.9 workers and a margin


def test_a_source_of_which_nothing_was_measured_keeps_its_loaders():
    run = Run(Mixture({"a": 1}), {"a": replace(profile("a", 9.0), num_chunks=0)})
    run.looks(100)
    assert run.partition.num_shares() == {"a": 1}
    assert run.log == []


def test_a_worker_that_waits_costs_only_the_processor_time_it_uses():
    budget = replace(ROOMY, cpus=1)
    waiting = Run(Mixture({"a": 1}), {"a": profile("a", 8.0, wait=0.9)}, budget)
    working = Run(Mixture({"a": 1}), {"a": profile("a", 8.0, wait=0.0)}, budget)
    waiting.look()
    working.look()
    assert waiting.partition.num_shares() == {"a": 8}
    assert working.partition.num_shares() == {"a": 1}
    (decision,) = (decision for _, decision in working.log)
    assert "it needs 8 for 8 workers, but from step 0 on the sources need 8 CPUs with headroom" in decision.reason
    working.looks(50)
    assert len(working.log) == 1  # told once


def test_what_is_idle_is_given_up_early_when_another_source_needs_the_memory():
    budget = Budget(cpus=64, memory_bytes=700 * MIB, workers_per_host=1, headroom=1.0, host_bytes=0)
    schedule = Mixture({0: {"a": 1}, 50: {"b": 1}})
    run = Run(schedule, {name: replace(profile(name, 4.0), open_bytes=100 * MIB) for name in "ab"}, budget)
    run.looks(40)
    assert run.partition.num_shares() == {"a": 4, "b": 1}
    run.looks(40)  # until step 79: a is idle from step 50 on
    assert run.partition.num_shares()["b"] == 4
    (_, (given_up_s, *_)) = run.changes("a")
    assert 50 + POLICY.settle_s <= given_up_s < 50 + POLICY.calm_s
    (reason,) = (d.reason for _, d in run.log if d.source == "a" and d.after < d.before)
    assert "others need the memory" in reason
    assert any("the memory budget of 734,003,200 bytes has no room for more" in d.reason for _, d in run.log)


def test_loaders_never_split_a_buffer_below_two_chunks():
    costs = {"a": replace(profile("a", 8.0), buffer_bytes=7 * MIB)}
    run = Run(Mixture({"a": 1}), costs)
    run.look()
    assert run.partition.num_shares() == {"a": 3}
    assert "buffer_bytes of 7,340,032 would not hold 2 chunks of 1,048,576 bytes in each" in run.log[0][1].reason


def test_decisions_read_as_lines_and_the_state_travels():
    run = Run(Mixture({"a": 1}), profiles(a=2.0))
    scaling = run.look()
    assert str(scaling.decisions[0]).startswith("step 0: source 'a': 1 -> 2 loaders: now 1 chunks/s of 2 s need 2 workers")
    assert pickle.loads(pickle.dumps(scaling.state)) == scaling.state
    assert (scaling.workers, scaling.num_workers) == ({"a": 2.0}, 2)


@given(st.lists(st.floats(0.93, 1.07), min_size=30, max_size=60), st.floats(0.2, 12.0))
def test_costs_that_swing_less_than_the_margin_never_bring_loaders_to_and_fro(swings, chunk_s):
    run = Run(Mixture({"a": 1}), profiles(a=chunk_s))
    for swing in swings:
        run.costs = profiles(a=chunk_s * swing)
        run.look()
    assert all(after > before for _, before, after in run.changes("a"))


COSTS = st.lists(st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 6.0), st.floats(0.0, 6.0)), min_size=40, max_size=90)
BUDGETS = st.builds(
    Budget,
    cpus=st.floats(0.5, 16),
    memory_bytes=st.integers(300 * MIB, 3000 * MIB),
    num_hosts=st.none() | st.integers(1, 6),
    workers_per_host=st.integers(1, 3),
    host_bytes=st.just(100 * MIB),
)


@given(COSTS, BUDGETS)
def test_whatever_the_demand_there_is_no_flapping_and_no_more_than_the_budget(costs, budget):
    mixture = Mixture({0: {"a": 1, "b": 1}, 30: {"b": 1, "c": 3}, 50: {"a": 5, "c": 1}})
    run = Run(mixture, profiles(a=0.1, b=0.1, c=0.1), budget)
    for a, b, c in costs:
        before = run.partition
        run.costs = {"a": profile("a", a), "b": profile("b", b, wait=0.5), "c": profile("c", c, chunk_bytes=20 * MIB)}
        found = run.look()
        assert run.partition.num_shares().keys() == run.costs.keys()  # a Partition checks that every share is there
        if not found.decisions:
            assert run.partition == before
        hosts, hosts_before = (sum(1 for host in partition.hosts if host) for partition in (run.partition, before))
        held = sum(held_bytes(run.costs[n], k, found.workers[n]) for n, k in run.partition.num_shares().items())
        grew = any(d.after > d.before for d in found.decisions)
        if grew or hosts > hosts_before:
            assert hosts * budget.host_bytes + held <= budget.memory_bytes
        assert budget.num_hosts is None or hosts <= budget.num_hosts
    for source in run.costs:
        changes = run.changes(source)
        for (earlier_s, _, after), (later_s, then, later) in pairwise(changes):
            assert then == after
            if later < then:  # gives back only what it had not needed for a while
                assert later_s - earlier_s >= POLICY.settle_s


@given(st.lists(st.floats(0.0, 6.0), min_size=40, max_size=90))
def test_with_room_enough_two_changes_down_are_a_calm_apart(costs):
    run = Run(Mixture({"a": 1}), profiles(a=1.0))
    for seconds in costs:
        run.costs = profiles(a=seconds)
        run.look()
        assert run.partition.num_shares()["a"] >= seconds - 1e-6  # never starved
    changes = run.changes("a")
    for (earlier_s, *_), (later_s, before, after) in pairwise(changes):
        assert after > before or later_s - earlier_s >= POLICY.calm_s


def test_hundreds_of_sources_get_hosts_with_room_for_their_work():
    names = [f"s{i}" for i in range(306)]
    costs = {name: profile(name, 0.05 * (i % 40), rows=3) for i, name in enumerate(names)}
    run = Run(Mixture(dict.fromkeys(names, 1.0)), costs, Budget(cpus=64, memory_bytes=1 << 36))
    run.partition = evenly(dict.fromkeys(names, 1), dict.fromkeys(names, 1.0), 4)
    found = run.look()
    room = run.budget.workers_per_host
    busy = [sum(found.workers[share.source] / share.of for share in host) for host in run.partition.hosts]
    assert max(busy) <= room + 1e-6
    assert sum(busy) == pytest.approx(sum(found.workers.values()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Observed(step=0, at_s=0, step_s=0, profiles={}), "step_s is a positive number of seconds, got 0"),
        (lambda: ScalingPolicy(calm_s=-1), "calm_s of a scaling policy must be a number >= 0, got -1"),
        (lambda: ScalingPolicy(calm_s=1, settle_s=2), "settle_s must not be longer than calm_s, got 2 and 1"),
        (
            lambda: decide(
                Observed(step=0, at_s=0, step_s=1, profiles=profiles(b=1.0)),
                Mixture({"b": 1}),
                BATCH,
                Partition(((Share("a"),),)),
                budget=ROOMY,
                state=ScalingState(),
            ),
            "lacks 'b'",
        ),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_a_source_that_is_cheap_but_large_gets_the_loaders_that_its_transfer_needs():
    budget = replace(ROOMY, workers_per_host=4)
    costs = {
        "images": replace(profile("images", 0.01), sent_bytes=8e8),
        "text": replace(profile("text", 1.0), sent_bytes=1e6),
    }
    unlimited = Run(Mixture({"images": 1, "text": 1}), costs, budget)
    assert unlimited.looks(1) == [{"images": 1, "text": 1}]
    run = Run(Mixture({"images": 1, "text": 1}), costs, replace(budget, host_bytes_per_s=1e8))
    assert run.looks(1) == [{"images": 4, "text": 1}]  # half a chunk a second of 800 MB
    (_, decision) = run.log[0]
    assert (
        "0.5 chunks/s of 800,000,000 bytes are as much as 4 hosts can send with headroom, at 100,000,000" in decision.reason
    )
    few = Run(Mixture({"images": 1, "text": 1}), costs, replace(budget, host_bytes_per_s=1e8, num_hosts=2))
    assert few.looks(1) == [{"images": 2, "text": 1}]
    reasons = " ".join(decision.reason for _, decision in few.log)
    assert "it needs 4 to send its chunks, but from step 0 on the sources send as much as 4" in reasons
    assert "hosts can at 100,000,000 bytes/s, and there are 2" in reasons


@given(
    st.lists(st.tuples(st.floats(0.001, 4), st.floats(0, 5e8)), min_size=1, max_size=8),
    st.floats(1e7, 1e9),
    st.integers(1, 4),
)
def test_no_host_has_to_send_more_than_it_can_or_to_make_more(sources, per_s, workers_per_host):
    costs = {f"s{i}": replace(profile(f"s{i}", seconds), sent_bytes=sent) for i, (seconds, sent) in enumerate(sources)}
    budget = replace(ROOMY, workers_per_host=workers_per_host, host_bytes_per_s=per_s)
    run = Run(Mixture(dict.fromkeys(costs, 1)), costs, budget)
    run.look()
    rate = 1 / len(costs)  # a step a second takes 100 rows, as many as each chunk has
    for host in run.partition.hosts:
        assert sum(rate * costs[share.source].sent_bytes / share.of for share in host) <= per_s * (1 + 1e-6)
        assert sum(rate * costs[share.source].chunk_s / share.of for share in host) <= workers_per_host + 1e-6
    assert run.looks(3)[-1] == run.partition.num_shares(), "and then it is at rest"
