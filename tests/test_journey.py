"""How far a reader must walk to follow one batch of the plainest job. `python -m tests.journey` prints the way."""

import pytest

from tests.journey import trace_plain_job

# What is reached today; lower both when the way gets shorter, never raise them. The aim is 30 modules and 35 frames.
MOST_MODULES = 46
MOST_FRAMES = 46


@pytest.mark.parametrize("num_workers", [0, None])
def test_one_batch_passes_few_modules_and_no_deep_stack(num_workers: int | None):
    journey = trace_plain_job(num_workers)
    assert len(journey.functions) <= MOST_MODULES, sorted(journey.functions)
    assert len(journey.deepest) <= MOST_FRAMES, journey.deepest


def test_the_trace_sees_the_whole_way_from_the_client_to_the_file_and_the_plan():
    journey = trace_plain_job(num_workers=0)
    assert "overlord.service.client.Client.__next__" in journey.deepest[0]
    assert {"overlord.sources.parquet", "overlord.stream.membership", "overlord.arrange.plan"} <= set(journey.functions)
