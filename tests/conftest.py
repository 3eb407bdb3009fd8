"""Settings that every test shares, and the Ray cluster of those that need one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read when Ray is imported, by whichever test comes first: listen on loopback only, and tell nobody.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

# A suite started in the background may have Ctrl-C ignored, and programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "here",
    max_examples=60,
    deadline=None,
    derandomize=True,  # the same examples every time: what one change passes, the next does not trip over by chance
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", parent=settings.get_profile("here"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "here"))


# Tests in these start, kill and wait for real processes. A machine that does ten other things may starve one for longer than
# any sensible deadline, so such a test may try a second time; what is really broken breaks twice.
WITH_PROCESSES = (
    "cli/",
    "contract/",
    "faults/",
    "fleet/",
    "planlog/",
    "roles/",
    "runtime/",
    "service/",
    "steering/",
    "trainer/",
    "chunks/test_processes.py",
    "sources/test_s3.py",
    "test_demo.py",
    "test_end_of_program.py",
    "test_examples.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("SECOND_TRIES") == "0":
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(WITH_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small cluster for all tests of this process."""
    ray = pytest.importorskip("ray")
    from overlord.runtime.ray.cluster import SYSTEM_CONFIG

    ray.init(
        address="local",
        num_cpus=4,  # Ray starts a process for each in advance
        object_store_memory=150 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config=dict(SYSTEM_CONFIG),
    )
    yield
    ray.shutdown()
