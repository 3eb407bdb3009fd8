"""Clusters that do not fit the run: an error before the first step, or a fall-back that is told."""

import json
import socket
import time
from dataclasses import dataclass

import pyarrow as pa
import pytest

import overlord as ol
from tests.commands import python
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


@pytest.mark.second_try(reason="two Ray nodes must start and send three large steps within 180 s")
def test_an_object_store_that_is_too_small_is_told_of_and_the_steps_are_the_same():
    facts = json.loads(python("-m", "tests.runtime.small_store", timeout_s=180).stdout.splitlines()[-1])
    (told,) = facts["warned"]
    assert f"the object store of the cluster has {facts['limit']:,} bytes" in told
    assert "3 steps that are kept ready take 176,160,768: Ray writes what does not fit to disk" in told
    assert facts["is_apart"], "rows go through the store"
    assert facts["is_same"]


def test_a_cluster_with_too_few_cpus_is_an_error_that_says_what_is_missing():
    engine = ol.Ray("auto", loader_hosts=9, patience_s=5)  # the cluster has 4
    many = job_of({f"s{i}": Numbered(first=1 + 100 * i) for i in range(9)}, num_workers=1)
    with pytest.raises(
        ol.errors.WaitTimeoutError, match=r"needs num_cpus=1, and the cluster has .* free of 4 CPUs.*loader_hosts="
    ):
        ol.start(many, engine=engine)


def test_an_address_where_no_cluster_is_is_an_error_at_once():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        program = f"import overlord as ol; ol.Ray({address!r})._cluster.join()"
        told = python("-c", program, expect=1, timeout_s=60).stderr
    assert f"no Ray cluster answers at '{address}'" in told
    assert "start one with `ray start --head`" in told


def test_two_jobs_on_one_cluster_do_not_see_each_other():
    jobs = [JOB, job_of({"a": Numbered(first=500)}, num_workers=1)]  # the names of roles and sources are the same
    expected: list[list[object]] = []
    for job in jobs:
        with ol.start(job) as alone:
            client = alone.client(0, timeout_s=60)
            expected.append([content(next(client)) for _ in range(6)])
    first, second = (ol.start(job, engine=ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE)) for job in jobs)
    with second:
        with first:
            clients = [loader.client(0, timeout_s=60) for loader in (first, second)]
            found = [[content(next(client)) for client in clients] for _ in range(3)]
        assert [list(steps) for steps in zip(*found, strict=True)] == [steps[:3] for steps in expected]
        assert [content(next(clients[1])) for _ in range(3)] == expected[1][3:], "the other one has ended"


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


def test_the_autoscaler_starts_no_more_hosts_than_the_cluster_has_cpus(caplog: pytest.LogCaptureFixture):
    job = job_of({"slow": Slow(rows=4000, unit_rows=4, first=1, buffer_bytes=64 << 20)}, num_workers=1)
    # Loaders that ask for no CPU, and memory for any number of them: Ray itself would start them all.
    budget = ol.scaling.Budget(cpus=1000, memory_bytes=1 << 50, workers_per_host=1)
    scale = ol.scaling.Autoscale(budget=budget, every_s=3600)
    caplog.set_level("INFO", "overlord.scaling")
    with ol.start(job, engine=ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE), autoscale=scale) as loader:
        client = loader.client(0, timeout_s=60)
        for _ in range(12):
            next(client)
        loader._roles.control_loop.reconcile()
        for _ in range(12):
            next(client)
        loader._roles.control_loop.reconcile()
        assert 1 < len([shares for shares in loader.partition.hosts if shares]) <= 4, loader.scaling()
        assert any("workers, and 4 hosts have 4" in str(decision) for decision in loader.scaling())
    assert "at most 4 loader hosts" in caplog.text


LEAVES_FIRST = """
import ray
import overlord as ol
from tests.runtime.test_bad_clusters import JOB, ANYWHERE

ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
loader = ol.start(JOB, engine=ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE))
next(loader.client(0, timeout_s=60))
print("started", flush=True)
{end}
"""


def _tables() -> set[str]:
    """The runs that have entries in the cluster's table."""
    from ray.experimental import internal_kv

    keys: list[bytes] = internal_kv._internal_kv_list(b"overlord-", namespace=b"overlord")
    return {key.decode().partition("/")[0] for key in keys}


def test_a_program_that_leaves_the_cluster_first_closes_its_loader_without_a_word():
    import ray

    address = ray.get_runtime_context().gcs_address
    done = python("-W", "error", "-c", LEAVES_FIRST.format(address=address, end="ray.shutdown()"))
    assert "started" in done.stdout
    assert "internal_kv" not in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_killed_program_left_in_the_clusters_table_goes_with_the_next_run():
    import ray

    address, before = ray.get_runtime_context().gcs_address, _tables()
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    python("-c", LEAVES_FIRST.format(address=address, end=end), expect=-9)
    left = _tables() - before
    assert len(left) == 1
    deadline = time.monotonic() + 30
    while left & _tables() and time.monotonic() < deadline:  # until Ray knows that the driver is dead
        with ol.start(JOB, engine=ol.Ray("auto", loader_hosts=1, loaders=ANYWHERE)):
            assert _tables() - before - left, "a run that lives keeps its entries"
    assert _tables() <= before
