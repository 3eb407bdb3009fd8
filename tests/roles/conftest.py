"""What several tests of roles compare with."""

import pytest

import overlord as ol
from tests.roles.mortal import stream_of
from tests.roles.recovering import JOBS, STEPS


@pytest.fixture(scope="module")
def undisturbed() -> list[list]:
    found = []
    for job in JOBS:
        with ol.start(job) as loader:
            found.append(stream_of(loader, STEPS))
    return found
