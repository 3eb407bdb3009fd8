"""The checks that users get: they pass for what keeps its promises and fail, saying why, for what does not."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pytest

import overlord as ol
from overlord.testing import (
    assert_resumes_exactly,
    assert_same_stream,
    assert_source_keeps_its_promises,
    assert_strategy_conserves,
)
from tests.small_sources import Numbered, job_of

COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.01)
BATCH = ol.Batch(tokens=64, sequence_length=16)


def test_a_good_source_passes():
    assert_source_keeps_its_promises(Numbered(first=1))


@dataclass(frozen=True)
class Moody(Numbered):
    def read(self, unit: ol.Unit) -> pa.Table:
        table = super().read(unit)
        return table.take(random.sample(range(table.num_rows), table.num_rows))


@dataclass(frozen=True)
class Liar(Numbered):
    def read(self, unit: ol.Unit) -> pa.Table:
        return super().read(unit).slice(1)


@pytest.mark.parametrize(
    ("source", "message"), [(Moody(unit_rows=20), "returned two different tables"), (Liar(), "promised 5 rows and has 4")]
)
def test_a_source_that_breaks_its_promises_is_caught(source, message):
    with pytest.raises(AssertionError, match=message):
        assert_source_keeps_its_promises(source)


@pytest.mark.parametrize("strategy", [ol.strategies.plain(), ol.strategies.long_short(COST)])
@pytest.mark.parametrize("batch", [BATCH, replace(BATCH, cut_documents=True)])
def test_the_built_in_strategies_conserve(strategy, batch):
    assert_strategy_conserves(strategy, [16, 3, 5, 8, 16, 9, 4], batch, ol.Mesh(dp=2))


def test_a_strategy_that_forgets_a_sample_is_caught():
    def forgetful(graph: ol.DGraph) -> ol.Plan:
        plan = ol.strategies.plain()(graph)
        return replace(
            plan, samples=plan.samples.take(np.arange(len(plan.samples) - 1)), order=plan.order[plan.order > 0] - 1
        )

    with pytest.raises(AssertionError, match="at its end are lost"):
        assert_strategy_conserves(forgetful, [16, 3, 5, 8], BATCH, ol.Mesh(dp=2))


def test_jobs_that_differ_only_in_arrangement_have_the_same_stream():
    job = job_of({"a": Numbered(first=1)})
    assert_same_stream(job, replace(job, mesh=ol.Mesh(dp=2), strategy=ol.strategies.long_short(COST)), 5)
    with pytest.raises(AssertionError, match="step 0 differs between the two jobs"):
        assert_same_stream(job, replace(job, seed=1), 5)


def test_a_job_resumes_exactly_on_another_mesh():
    assert_resumes_exactly(job_of({"a": Numbered(first=1)}), steps=6, stop_before=3, mesh=ol.Mesh(dp=2, cp=2))
