"""Runs that delay outliers: one stream on every mesh, resumed anywhere, with the delay told."""

import json

import pytest

import overlord as ol
from overlord.arrange.explain import explain
from overlord.testing import assert_resumes_exactly, assert_same_stream
from tests.contract.streams import text_job

POLICY = ol.policies.OutlierDelay(lengths=(40, 52), together=4, most_steps=3)


def job(folder, policy: ol.policies.OutlierDelay | None = POLICY, **fields) -> ol.Job:
    return text_job(folder, batch=ol.Batch(tokens=512, sequence_length=64, outliers=policy), **fields)


def test_the_stream_is_the_same_on_any_mesh_and_resumes_exactly_on_another(tmp_path):
    balanced = ol.strategies.long_short(ol.TransformerCost(1.0, 0.1))
    assert_same_stream(job(tmp_path), job(tmp_path, mesh=ol.Mesh(dp=3), strategy=balanced, loaders=2), steps=6)
    assert_resumes_exactly(job(tmp_path), steps=6, stop_before=3, mesh=ol.Mesh(dp=2))


def test_a_delay_is_told_and_part_of_the_fingerprint(tmp_path):
    with ol.start(job(tmp_path)) as loader:
        client = loader.client(0, timeout_s=60)
        for _ in range(6):
            next(client)
        delay, planned = loader.report().delay, loader.plan(5)
        state = json.loads(json.dumps(loader.state_dict()))
    assert delay is not None
    assert delay.documents > 0
    assert 0 < delay.mean_steps <= 6
    assert 0 < delay.mean_steps_per_token < delay.mean_steps
    assert planned is not None
    assert "steps per token" in explain(planned.plan)
    with pytest.raises(ol.errors.StateError, match=r"batch\.outliers"):
        ol.start(job(tmp_path, ol.policies.OutlierDelay((40,), together=2)), resume=state)
    with ol.start(job(tmp_path, None)) as loader:
        assert loader.report(1).delay is None


def test_a_planner_that_is_lost_knows_from_its_log_what_waits(tmp_path):
    log, same_job = tmp_path / "log", job(tmp_path)
    with ol.start(same_job, log=log) as loader:
        client = loader.client(0, timeout_s=60)
        expected = [[micro["tokens"].tolist() for micro in next(client)] for _ in range(6)]
    with ol.start(same_job, log=log, resume="log") as loader:
        client = loader.client(0, timeout_s=60)
        first = client.step
        again = [[micro["tokens"].tolist() for micro in next(client)] for _ in range(6 - first)]
    assert 0 < first < 6
    assert again == expected[first:]
