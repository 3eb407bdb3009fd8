"""Faults of several kinds, one of each, and the whole stream compared. `make chaos` does it with hundreds, at random."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.as_service import AsService
from tests.faults.comparison import compared
from tests.faults.disturbance import Disturbed, Met, met_faults
from tests.faults.jobs import disturbed_job, write_files
from tests.faults.schedule import Fault
from tests.faults.store import Store

PACE_S = 0.02
HUNG_AFTER_S = 5.0  # so that a loaded machine makes nothing seem to hang
pytestmark = pytest.mark.timeout(400)  # a loaded machine takes its time to start processes

ON_SERVICE = (
    "log torn",
    "storage shut",
    "disk full",
    "log corrupted",
    "trainers restarted from their state",
)
IN_PROCESSES = ("host killed", "worker killed", "host paused", "trainer killed", "service killed", "host killed")
ON_RAY = ("planner killed", "loader stopped", "constructor killed", "trainer killed")
KEPT = ("driver killed", "run killed with its driver", "planner killed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    files = tmp_path / "files"
    files.mkdir()
    write_files(files)
    made = Store(files)
    yield made
    made.close()


def disturb(run: Disturbed, kinds: Sequence[str]) -> None:
    faults = [Fault(kind, 0.1 * number, 0.5, 0.4, is_alone=True) for number, kind in enumerate(kinds)]
    done: list[Met] = []
    met_faults(run, faults, done)
    assert [met.kind for met in done] == list(kinds)


@pytest.mark.second_try(reason="each fault has a deadline by which processes must have come back")
@pytest.mark.parametrize(("num_processes", "kinds"), [(0, ON_SERVICE), (2, IN_PROCESSES)], ids=["service", "processes"])
def test_the_stream_of_a_service_is_the_same_whatever_happens_to_it(
    tmp_path: Path, store: Store, num_processes: int, kinds: Sequence[str]
):
    run = AsService(tmp_path, store, PACE_S, num_processes)
    try:
        disturb(run, kinds)
    finally:
        run.close()
    stream = compared(disturbed_job(store.url), run.trainers.lives)
    assert stream.is_same, stream.first


@pytest.mark.second_try(reason="each fault has a deadline by which processes must have come back")
def test_the_stream_of_a_run_on_ray_is_the_same_whatever_happens_to_it(ray_cluster: None, tmp_path: Path, store: Store):
    from tests.faults.on_ray import OnRay

    run = OnRay(tmp_path, store, PACE_S, hung_after_s=HUNG_AFTER_S)
    try:
        disturb(run, ON_RAY)
    finally:
        run.close()
    stream = compared(disturbed_job(store.url), run.trainers.lives)
    assert stream.is_same, stream.first


@pytest.mark.second_try(reason="each fault has a deadline by which processes must have come back")
def test_the_stream_of_a_run_that_is_kept_in_a_cluster_is_the_same_without_its_driver(
    ray_cluster: None, tmp_path: Path, store: Store
):
    from tests.faults.kept_on_ray import KeptOnRay

    run = KeptOnRay(tmp_path, store, PACE_S)
    try:
        disturb(run, KEPT)
    finally:
        run.close()
    stream = compared(disturbed_job(store.url), run.trainers.lives)
    assert stream.is_same, stream.first
