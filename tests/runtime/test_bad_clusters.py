"""Clusters that do not fit the run: an error before the first step, or a fall-back that is told."""

import time
from dataclasses import dataclass

import pyarrow as pa
import pytest

import overlord as ol
from tests.service.served import content
from tests.small_sources import Numbered, job_of

pytestmark = pytest.mark.usefixtures("ray_cluster")
JOB = job_of({"a": Numbered(first=1)}, num_workers=1)
ANYWHERE = ol.scaling.ActorOptions()


def test_a_node_with_another_release_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("overlord.runtime.ray.role_actor.own_release", lambda: "9.9.9")
    with pytest.raises(
        ol.errors.SpecError, match=r"which has overlord .*the run was started with 9\.9\.9: install the same"
    ):
        ol.start(JOB, engine=ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE))


def test_an_object_store_that_is_too_small_is_told_of_before_the_first_step(caplog: pytest.LogCaptureFixture):
    large = job_of({"a": Numbered(first=1)}, ol.Batch(tokens=64 << 20, sequence_length=1 << 20), num_workers=1)
    with ol.start(large, engine=ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE)):
        assert "3 steps that are kept ready take 805,306,368: Ray writes what does not fit to disk" in caplog.text


def test_a_cluster_with_too_few_cpus_is_an_error_that_says_what_is_missing():
    engine = ol.Ray("auto", loader_hosts=9, patience_s=5)  # the cluster has 4
    many = job_of({f"s{i}": Numbered(first=1 + 100 * i) for i in range(9)}, num_workers=1)
    with pytest.raises(
        ol.errors.WaitTimeoutError, match=r"needs num_cpus=1, and the cluster has .* free of 4 CPUs.*loader_hosts="
    ):
        ol.start(many, engine=engine)


@dataclass(frozen=True)
class Slow(Numbered):
    def read(self, unit: ol.Unit) -> pa.Table:
        time.sleep(0.15)
        return super().read(unit)


@pytest.mark.second_try(reason="Ray must start loader hosts within 60 s")
def test_the_autoscaler_adds_loaders_on_ray_and_the_stream_stays_the_same():
    job = job_of({"slow": Slow(rows=4000, unit_rows=4, first=1, buffer_bytes=64 << 20)}, num_workers=1)
    with ol.start(job_of({"slow": Numbered(rows=4000, unit_rows=4, first=1)}, num_workers=1)) as loader:
        client = loader.client(0, timeout_s=60)
        expected = [content(next(client)) for _ in range(150)]
    # Room for a few hosts: a trainer that does nothing but take steps could use any number.
    budget = ol.scaling.Budget(cpus=4, memory_bytes=8 << 30, workers_per_host=1, host_bytes=2 << 30)
    scale = ol.scaling.Autoscale(budget=budget, every_s=0.2)
    engine = ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE)
    with ol.start(job, engine=engine, autoscale=scale) as loader:
        client = loader.client(0, timeout_s=60)
        found = []
        while len(found) < 150:
            found.append(content(next(client)))
            if loader.report().loaders["slow"] > 1 and len(found) > 20:
                break
        assert loader.report().loaders["slow"] > 1, loader.scaling()
        found += [content(next(client)) for _ in range(10)]
    assert found == expected[: len(found)]
