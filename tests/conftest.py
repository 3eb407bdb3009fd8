"""Settings that every test shares, and the Ray cluster of those that need one."""

import gc
import os
import signal
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.second_tries import SecondTries

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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SecondTries())


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray 2.48 forgets processes that have not ended yet
        ray.shutdown()
        gc.collect()
