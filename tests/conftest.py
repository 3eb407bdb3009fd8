"""Settings that every test shares."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "here",
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", parent=settings.get_profile("here"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "here"))
