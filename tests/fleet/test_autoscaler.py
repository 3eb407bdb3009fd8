"""The autoscaler at work: more loaders before they are needed, fewer when they are not, and the stream unchanged."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from itertools import islice

import pyarrow as pa
import pytest

import overlord as ol
from overlord.fleet.control_loop import Meter
from overlord.loaders.autoscaling import ScalingDecision
from overlord.roles.loader_host import HostStatus, LoaderHost
from overlord.roles.rank_pace import Pace, PaceMeter
from overlord.roles.source_loader import Work
from tests.roles.mortal import bytes_of
from tests.small_sources import Numbered, job_of

BUDGET = ol.scaling.Budget(cpus=8, memory_bytes=1 << 30)
NEVER_S = 3600.0  # tests look themselves


@dataclass(frozen=True)
class Far(Numbered):
    """Storage that takes a while for each unit."""

    def read(self, unit: ol.Unit) -> pa.Table:
        threading.Event().wait(0.02)
        return super().read(unit)


def curriculum(**fields) -> ol.Job:
    sources = {"near": Numbered(rows=60, first=1), "far": Far(rows=60, first=100)}
    mixture = ol.Mixture({0: {"near": 1}, 30: {"far": 1}, 60: {"near": 1}})
    return job_of(sources, ol.Batch(samples=5, sequence_length=16), mixture=mixture, **fields)


def hosts_of(loader: ol.Loader, source: str) -> set[str]:
    return {host for stretch in loader._roles.fleet.table.stretches[source] for host in stretch.hosts}


def test_a_source_gets_loaders_before_its_phase_and_gives_them_back_after_it(caplog: pytest.LogCaptureFixture):
    policy = ol.scaling.ScalingPolicy(calm_s=0.0, settle_s=0.0)
    scale = ol.scaling.Autoscale(budget=BUDGET, policy=policy, every_s=NEVER_S)
    with ol.start(curriculum()) as loader:
        expected = [bytes_of(step) for step in islice(loader.client(0, timeout_s=60), 100)]
    caplog.set_level(logging.INFO, "overlord.scaling")
    with ol.start(curriculum(), autoscale=scale) as loader:
        client = loader.client(0, timeout_s=60)
        found = [bytes_of(step) for step in islice(client, 10)]
        loader._roles.control_loop.reconcile()  # no step draws from the far source yet: one chunk is made, to measure it
        loader._roles.fleet.hosts[0].call(LoaderHost.describe, "far", 0).result()  # waits until that is done
        loader._roles.control_loop.reconcile()
        had = hosts_of(loader, "far")
        assert len(had) == loader.report().loaders["far"] > 1
        found += [bytes_of(step) for step in islice(client, 60 - len(found))]
        for _ in range(20):
            found += [bytes_of(step) for step in islice(client, 2)]
            loader._roles.control_loop.reconcile()
        assert loader.report().loaders["far"] == 1
        running = {host.name for host in loader._roles.fleet.hosts}
        assert had & running <= hosts_of(loader, "near") | hosts_of(loader, "far"), "the others were stopped"
        assert loader.report().buffers["far"].num_bytes == 0, "nothing of a source that does not come again"
        assert found == expected
        decisions = [decision for decision in loader.scaling() if isinstance(decision, ScalingDecision)]
        grown = [decision for decision in decisions if decision.source == "far" and decision.after > decision.before]
        assert grown[0].step < 30
        assert "from step 30 on" in grown[0].reason
        assert str(grown[0]) in caplog.messages


@pytest.mark.parametrize("options", [{"autoscale": BUDGET}, {"autoscale": BUDGET, "partition": None}])
def test_a_budget_alone_turns_it_on(options):
    with ol.start(curriculum(), **options) as loader:
        assert loader._roles.control_loop._thread.is_alive()
        next(loader.client(0, timeout_s=60))
    assert not loader._roles.control_loop._thread.is_alive()


def test_what_cannot_be_is_refused():
    with pytest.raises(ol.errors.SpecError, match=r"shadows take over .*engine=ol\.Ray\(\)"):
        ol.start(curriculum(), shadows=BUDGET)
    with pytest.raises(ol.errors.SpecError, match=r"num_workers=0 .* need threads"):
        ol.start(curriculum(num_workers=0), autoscale=BUDGET)
    limited = replace(BUDGET, host_bytes_per_s=1e9)
    with pytest.raises(ol.errors.SpecError, match=r"host_bytes_per_s \(host-bandwidth=\) .* in one process: leave it out"):
        ol.start(curriculum(), autoscale=limited)
    with pytest.raises(ol.errors.SpecError, match=r"leave host_bytes_per_s \(host-bandwidth=\) out of their budget"):
        ol.start(curriculum(), engine=ol.Processes(2), shadows=limited)
    with pytest.raises(ol.errors.SpecError, match="every_s is a positive number"):
        ol.scaling.Autoscale(budget=BUDGET, every_s=0)


def test_a_pace_tells_work_from_waiting():
    now = [0.0]
    paces = PaceMeter(lambda: now[0])

    def at(second: float) -> float:
        now[0] = second
        return second

    for step, (asked, got) in enumerate([(0.0, 3.0), (5.0, 5.0), (7.0, 8.0)]):
        at(asked)
        paces.note_request(0, step)
        paces.note_request(0, step)  # asked again, as clients do that wait
        at(got)
        paces.note_delivery(0, step)
    assert paces.pace == Pace(num_steps=2, busy_s=4.0, num_waits=3, waited_s=4.0)


def test_a_host_that_was_made_anew_is_measured_from_the_beginning():
    job = curriculum()
    units = {name: source.units() for name, source in job.sources.items()}
    meter = Meter(job, units, lambda: 1.0)
    paces = [Pace(num_steps=10, busy_s=5.0, num_waits=10, waited_s=1.0)]
    done = Work(num_chunks=4, cpu_s=0.4, wait_s=1.6, rows=20, tokens=100, num_bytes=4000, waited_s=1.0)
    seen = meter.observe(10, {"h": HostStatus("first", 1, {}, {"far": done})}, paces)
    assert seen is not None
    assert seen.step_s == 0.5
    assert seen.profiles["far"].chunk_s == pytest.approx(0.5)
    assert seen.profiles["far"].sent_bytes == 1000
    assert seen.profiles["near"].num_chunks == 0
    assert seen.waited == {"far": pytest.approx(1 / 6)}
    less = Work(num_chunks=1, cpu_s=0.1, wait_s=0.4, rows=5, tokens=25, num_bytes=1000)
    seen = meter.observe(10, {"h": HostStatus("second", 2, {}, {"far": less})}, paces)
    assert seen is not None
    assert seen.profiles["far"].num_chunks == 5
    assert seen.waited == {}


def test_a_meter_knows_nothing_before_a_step_was_taken():
    job = curriculum()
    units = {name: source.units() for name, source in job.sources.items()}
    assert Meter(job, units).observe(0, {}, [Pace()]) is None


def test_work_is_counted_where_it_is_done():
    with ol.start(curriculum()) as loader:
        client = loader.client(0, timeout_s=60)
        for _ in range(40):
            next(client)
        work = loader._roles.fleet.hosts[0].call(LoaderHost.status).result().work["far"]
    assert work.num_chunks >= 3
    assert work.wait_s >= 0.02 * work.num_chunks * 0.9
    assert work.rows == 5 * work.num_chunks
