"""How far a reader must walk to follow one batch of the plainest job. `python -m tests.journey` prints the way."""

import pytest

from tests.journey import trace_plain_job

MOST_MODULES = 43
MOST_FRAMES = {None: 42, 0: 54}
"""With worker threads, the default, and without: there, everything happens inside one call of `next`, and a chunk may be
read a frame or two deeper."""


@pytest.mark.parametrize("num_workers", [0, None])
def test_one_batch_passes_few_modules_and_no_deep_stack(num_workers: int | None):
    journey = trace_plain_job(num_workers)
    assert len(journey.functions) <= MOST_MODULES, sorted(journey.functions)
    assert len(journey.deepest) <= MOST_FRAMES[num_workers], journey.deepest


@pytest.mark.parametrize("num_workers", [0, None])
def test_features_that_a_job_does_not_use_are_not_visited(num_workers: int | None):
    visited = set(trace_plain_job(num_workers).functions)
    features = ("hdp", "vision", "pipelines", "steering", "planlog", "outliers", "workers", "media", "fleet", "loaders")
    assert not [name for name in visited if set(name.split(".")) & set(features)]


def test_the_trace_sees_the_whole_way_from_the_client_to_the_file_and_the_plan():
    journey = trace_plain_job(num_workers=0)
    assert "overlord.service.client.Client.__next__" in journey.deepest[0]
    assert {"overlord.sources.parquet", "overlord.stream.membership", "overlord.arrange.plan"} <= set(journey.functions)
