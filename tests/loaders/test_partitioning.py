"""Loaders before a run: as many as the sources need, as few hosts as do, within the budget or not at all."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.declare.source import MIB
from overlord.errors import SpecError
from overlord.loaders.model import (
    Budget,
    Profile,
    by_share,
    chunks_per_step,
    weights_ahead,
)
from overlord.loaders.partition import partition
from tests.small_sources import Numbered, job_of, read_all, same

BUDGET = Budget(cpus=16, memory_bytes=4 << 30, workers_per_host=4, host_bytes=100 * MIB, headroom=1.0)


def profile(name: str, cpu_s: float, wait_s: float = 0.0, **fields) -> Profile:
    given = {"rows": 10.0, "tokens": 1000.0, "chunk_bytes": MIB, "num_chunks": 3, **fields}
    return Profile(source=name, cpu_s=cpu_s, wait_s=wait_s, **given)


def test_tiny_sources_share_one_host_and_a_heavy_one_gets_several():
    profiles = {f"tiny{i:03}": profile(f"tiny{i:03}", 0.001) for i in range(300)} | {"heavy": profile("heavy", 1.0, 0.5)}
    tiny_only = partition(profiles, [{name: 1.0 for name in profiles if name != "heavy"}], BUDGET)
    assert len(tiny_only.partition.hosts) == 1
    assert "in host 0 with 300 other source(s)" in tiny_only.sources["tiny007"].reason
    found = partition(profiles, [dict.fromkeys(profiles, 1.0) | {"heavy": 8.0}], BUDGET)
    assert found.sources["heavy"].loaders == 3  # 8 chunks/s of 1.5 s need 12 workers
    assert len(set(found.partition.hosts_of("heavy"))) == 3
    assert len(found.partition.hosts) == 4
    assert found.cpus == pytest.approx(8.3)
    assert "8 chunks/s of 1.5 s each (1 s CPU, 500 ms waiting) need 12 workers" in found.sources["heavy"].reason
    assert "so 3 loaders, each in another host" in found.sources["heavy"].reason


def test_a_source_that_is_cheap_but_large_gets_the_loaders_that_its_transfer_needs():
    profiles = {"images": profile("images", 0.01, sent_bytes=400e6), "text": profile("text", 0.5, sent_bytes=1e6)}
    rates = [{"images": 8.0, "text": 2.0}]
    assert partition(profiles, rates, BUDGET).sources["images"].loaders == 1
    found = partition(profiles, rates, replace(BUDGET, host_bytes_per_s=1e9))
    assert (found.sources["images"].loaders, found.sources["text"].loaders) == (4, 1)  # 3.2 GB/s at 1 GB/s each
    assert len(set(found.partition.hosts_of("images"))) == 4
    assert (
        "send 3.2e+09 bytes/s: with headroom more than the 1e+09 of one host, so 4 loaders" in found.sources["images"].reason
    )
    with pytest.raises(
        SpecError, match=r"as much as 3.2 loader hosts can at 1e\+09 .* there are 2: 'images' 3.2e\+09, 'text'"
    ):
        partition(profiles, rates, replace(BUDGET, host_bytes_per_s=1e9, num_hosts=2))
    with pytest.raises(SpecError, match="sends more than 0 bytes a second, got host_bytes_per_s=0"):
        replace(BUDGET, host_bytes_per_s=0)


@given(
    st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0, 5e8), st.floats(0, 4)), min_size=1, max_size=8),
    st.floats(1e8, 4e9),
)
def test_no_host_has_to_send_more_than_it_can(sources, per_s):
    profiles = {f"s{i}": profile(f"s{i}", cpu, sent_bytes=sent) for i, (cpu, sent, _) in enumerate(sources)}
    rates = {f"s{i}": rate for i, (_, _, rate) in enumerate(sources)}
    budget = replace(BUDGET, cpus=1000, memory_bytes=1 << 40, host_bytes_per_s=per_s)
    found = partition(profiles, [rates], budget).partition
    sent = [sum(rates[s.source] * profiles[s.source].sent_bytes / s.of for s in host) for host in found.hosts]
    workers = [sum(rates[s.source] * profiles[s.source].chunk_s / s.of for s in host) for host in found.hosts]
    assert max(sent) <= per_s * (1 + 1e-6)
    assert max(workers) <= budget.workers_per_host + 1e-6


def test_a_source_that_no_step_asks_for_is_only_held_open():
    found = partition({"a": profile("a", 1.0), "b": profile("b", 9.0, open_bytes=500)}, [{"a": 1.0}], BUDGET)
    b = found.sources["b"]
    assert (b.loaders, b.workers, b.cpus, b.needed_bytes) == (1, 0.0, 0.0, 500)
    assert b.reason == "no step draws from it: it is only held open"


def test_phases_that_do_not_come_together_need_not_fit_together():
    """Each of the two needs all processors, one after the other."""
    profiles = {"a": profile("a", 1.0), "b": profile("b", 1.0)}
    found = partition(profiles, [{"a": 16.0}, {"b": 16.0}], BUDGET)
    assert found.cpus == 16
    assert [gets.loaders for gets in found.sources.values()] == [4, 4]
    assert len(found.partition.hosts) == 4
    with pytest.raises(SpecError, match=r"need 32 CPUs at the peak of the schedule, the budget has 16: 'a' 16, 'b' 16"):
        partition(profiles, [{"a": 16.0, "b": 16.0}], BUDGET)


@pytest.mark.parametrize(
    ("rates", "budget", "message"),
    [
        (
            {"a": 20.0, "b": 2.0},
            BUDGET,
            r"need 22 CPUs .* has 16: 'a' 20, 'b' 2; give at least 22 CPUs, .* 0.73 times as fast",
        ),
        (
            {"a": 10.0, "b": 2.0},
            replace(BUDGET, num_hosts=2),
            r"need 12 workers .* 2 loader host\(s\) have 8: .* allow 3 hosts",
        ),
        (
            {"a": 4.0},
            replace(BUDGET, memory_bytes=105 * MIB),
            r"need 111,149,056 bytes .* budget has 110,100,480: 1 host\(s\)",
        ),
        (
            {"a": 4.0},
            replace(BUDGET, memory_bytes=105 * MIB),
            r"104,857,600 as processes, the sources 'a' 6,291,456; give more",
        ),
        ({"a": 8.0, "c": 8.0}, BUDGET, r"'c' needs buffer_bytes of at least 10,485,760: 10 chunks .* it has 5,242,880"),
    ],
)
def test_a_budget_that_does_not_suffice_says_what_is_needed_and_by_whom(rates, budget, message):
    profiles = {"a": profile("a", 1.0), "b": profile("b", 1.0), "c": profile("c", 1.0, buffer_bytes=5 * MIB)}
    with pytest.raises(SpecError, match=message):
        partition(profiles, [rates], budget)


PROFILES = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0, 3), st.integers(0, 60 * MIB), st.integers(0, 50 * MIB)), min_size=1, max_size=12
)
RATES = st.lists(st.lists(st.floats(0, 4), min_size=12, max_size=12), min_size=1, max_size=3)


@given(PROFILES, RATES, st.integers(1, 8))
def test_what_is_given_is_enough_in_every_phase_and_within_the_budget(costs, rates, workers_per_host):
    profiles = {
        f"s{i}": profile(f"s{i}", cpu, wait, chunk_bytes=chunk_bytes, open_bytes=open_bytes)
        for i, (cpu, wait, chunk_bytes, open_bytes) in enumerate(costs)
    }
    phases = [dict(zip(profiles, phase, strict=False)) for phase in rates]
    budget = replace(BUDGET, cpus=200, memory_bytes=1 << 37, workers_per_host=workers_per_host)
    found = partition(profiles, phases, budget)
    assert found.partition.num_shares() == {name: gets.loaders for name, gets in found.sources.items()}
    assert found.needed_bytes <= found.memory_bytes <= budget.memory_bytes
    for name, gets in found.sources.items():
        assert gets.loaders * workers_per_host >= gets.workers - 1e-6
        assert len(set(found.partition.hosts_of(name))) == gets.loaders
    for phase in phases:
        assert sum(phase[name] * p.cpu_s for name, p in profiles.items()) <= budget.cpus + 1e-6
        for host in found.partition.hosts:
            busy = sum(phase[s.source] * profiles[s.source].chunk_s / s.of for s in host)
            assert busy <= workers_per_host + 1e-6
    assert found == partition(profiles, phases, budget)


@given(st.floats(0.5, 4), st.floats(0.5, 4))
def test_demand_follows_the_unit_of_the_mixture_and_of_the_batch(a, b):
    """Documents of b are ten times as long."""
    profiles = {"a": profile("a", 1.0), "b": profile("b", 1.0, rows=1.0)}
    weights = {"a": a / (a + b), "b": b / (a + b)}
    in_tokens, in_samples = Batch(tokens=10_000, sequence_length=100), Batch(samples=50, sequence_length=100)
    for unit in ("samples", "tokens"):
        step = chunks_per_step(profiles, weights, in_tokens, unit)
        tokens = {name: chunks * profiles[name].tokens for name, chunks in step.items()}
        assert sum(tokens.values()) == pytest.approx(10_000)
        samples = {name: chunks * profiles[name].rows for name, chunks in step.items()}
        shared = tokens if unit == "tokens" else samples
        assert shared["a"] * b == pytest.approx(shared["b"] * a)
        step = chunks_per_step(profiles, weights, in_samples, unit)
        assert sum(chunks * profiles[name].rows for name, chunks in step.items()) == pytest.approx(50)


@given(st.dictionaries(st.integers(0, 30), st.floats(0.1, 9), min_size=1), st.integers(0, 30), st.integers(0, 20))
def test_nothing_between_the_looked_at_steps_asks_for_more(entries, first, more):
    for ramp in ("hold", "linear"):
        mixture = Mixture({0: {"a": 1, "b": 1}} | {step: {"a": 1, "b": w} for step, w in entries.items()}, ramp=ramp)
        looked_at = [weights for _, weights in weights_ahead(mixture, first, first + more)]
        for name in "ab":
            highest = max(mixture.at(step).get(name, 0.0) for step in range(first, first + more + 1))
            assert max(weights.get(name, 0.0) for weights in looked_at) == pytest.approx(highest)


def test_a_profile_learns_and_forgets_slowly():
    known = profile("a", 1.0, 1.0, open_s=2.0, num_chunks=100)
    after = known.with_measured(profile("a", 3.0, 0.0, chunk_bytes=100, num_chunks=16))
    assert (after.cpu_s, after.wait_s) == (2.0, 0.5)
    assert (after.chunk_bytes, after.open_s, after.num_chunks) == (MIB, 2.0, 116)
    assert known.with_measured(replace(known, cpu_s=9.0, num_chunks=0)) is known


@dataclass(frozen=True)
class MadeInItsOwnWay(Numbered):
    """A source that cannot be made from its fields."""

    def __init__(self, rows: int) -> None:
        for name, field in Numbered.__dataclass_fields__.items():
            object.__setattr__(self, name, field.default)
        object.__setattr__(self, "rows", rows)
        self.__post_init__()


def test_a_partition_applied_to_a_job_changes_no_byte_of_its_stream():
    job = job_of({"a": MadeInItsOwnWay(60), "b": Numbered(rows=30, first=500)}, mixture=ol.Mixture({"a": 2, "b": 1}))
    profiles = {name: profile(name, 1.0, chunk_bytes=10_000, buffer_bytes=256 * MIB) for name in job.sources}
    found = partition(profiles, [{"a": 9.0, "b": 2.0}], BUDGET)
    applied = found.applied_to(job)
    assert {name: source.loaders for name, source in applied.sources.items()} == {"a": 3, "b": 1}
    assert applied.sources["a"].buffer_bytes == found.sources["a"].buffer_bytes
    assert (applied.num_workers, job.sources["a"].loaders) == (3, 1)
    expected, state = read_all(job, 12)
    got, state_after = read_all(applied, 12)
    assert same(got, expected)
    assert state_after == state
    with pytest.raises(SpecError, match="lacks 'other'"):
        found.applied_to(replace(job, sources={**job.sources, "other": Numbered()}, mixture=None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(cpus=0, memory_bytes=1), "needs some processors, got cpus=0"),
        (lambda: Budget(cpus=1, memory_bytes=0), "needs some memory, got memory_bytes=0"),
        (lambda: replace(BUDGET, num_hosts=0), "at least 1 loader host, got num_hosts=0"),
        (lambda: replace(BUDGET, workers_per_host=0), "at least 1 worker, got workers_per_host=0"),
        (lambda: replace(BUDGET, headroom=0.5), "a factor of at least 1, got 0.5"),
        (lambda: profile("a", -1.0), "cpu_s of source 'a' must be a number >= 0, got -1.0"),
        (lambda: profile("a", 1.0, rows=0.0), "a chunk of source 'a' must have rows to be profiled, got 0.0"),
        (lambda: partition({}, [{}], BUDGET), "needs the profile of at least one source"),
        (lambda: by_share({"a": 1, "b": 1}).check_sources(["a"]), "has shares of 'b', which the job does not have"),
        (
            lambda: chunks_per_step(
                {"a": profile("a", 1.0, tokens=0.0)}, {"a": 1.0}, Batch(tokens=16, sequence_length=16), "samples"
            ),
            "the chunks of source 'a' have none",
        ),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()
