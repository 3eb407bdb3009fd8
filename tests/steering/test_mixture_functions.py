"""Mixtures that are functions of the progress, or go by epochs: every value is written down before it is used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from tests.small_sources import Numbered, job_of, read_all, same, tokens_of
from tests.steering.steered import SOURCES

BATCH = ol.Batch(samples=8, sequence_length=16)
PHASES = {0: {"a": 3.0, "b": 1.0}, 4: {"a": 1.0, "b": 1.0, "c": 2.0}, 12: {"c": 1.0}}


def by_step(step: int, progress: ol.policies.MixtureProgress) -> Mapping[str, float]:
    return PHASES[max(start for start in PHASES if start <= step)]


def by_samples(step: int, progress: ol.policies.MixtureProgress) -> Mapping[str, float]:
    """Less of "a" the more of it there was."""
    return {"a": 1 / (1 + progress.samples["a"]), "b": 0.05, "c": 0.01 * (1 + progress.tokens["b"])}


class Fickle:
    """A function of nothing but how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int, progress: ol.policies.MixtureProgress) -> Mapping[str, float]:
        self.calls += 1
        return {"a": 1.0, "b": float(self.calls)}


def job_with(weights: Any, **options: Any) -> ol.Job:
    mixture = {name: options.pop(name) for name in ("every", "unit", "stop") if name in options}
    return job_of(SOURCES, options.pop("batch", BATCH), mixture=ol.Mixture(weights, **mixture), **options)


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_function_of_the_step_is_a_schedule(unit):
    scheduled, _ = read_all(job_with(PHASES, unit=unit), 20)
    called, _ = read_all(job_with(by_step, unit=unit, every=4), 20)
    assert same(scheduled, called)


def test_every_value_is_recorded_with_its_step():
    with ol.start(job_with(by_samples, every=5)) as loader:
        client = loader.client(0, timeout_s=30)
        for _ in range(12):
            next(client)
        found = [(d.step, d.value["by"], d.value["weights"]) for d in loader.decisions()]
    assert [(step, by) for step, by, _ in found][:3] == [(0, "function"), (5, "function"), (10, "function")]
    assert found[1][2]["a"] < found[0][2]["a"]
    assert all(sum(weights.values()) == pytest.approx(1) for _, _, weights in found)


@settings(max_examples=15)
@given(
    st.sampled_from([by_step, by_samples, ol.policies.Epochs({0: {"a": 1.0}, 1: {"b": 1.0, "c": 1.0}}, of="a")]),
    st.integers(0, 14),
    st.integers(1, 6),
    st.sampled_from([BATCH, ol.Batch(tokens=64, sequence_length=16, cut_documents=True)]),
)
def test_a_run_resumed_at_any_step_goes_on_as_if_uncut(weights, cut, every, batch):
    uncut, end = read_all(job_with(weights, every=every, batch=batch), 15)
    before, state = read_all(job_with(weights, every=every, batch=batch, mesh=ol.Mesh(dp=2)), cut)
    after, resumed_end = read_all(job_with(weights, every=every, batch=batch), 15 - cut, resume=state)
    assert same(before + after, uncut)
    assert resumed_end == end


def test_steps_that_are_read_again_have_the_weights_that_they_had_whatever_the_function_would_return():
    with ol.start(job_with(Fickle(), every=3)) as loader:
        client = loader.client(0, timeout_s=30)
        first = [tokens_of(next(client)) for _ in range(10)]
        client.rewind()
        again = [tokens_of(next(client)) for _ in range(10)]
    assert same(first, again)


def test_a_run_that_went_on_from_its_log_has_the_weights_that_it_had(tmp_path):
    job = job_with(Fickle(), every=3)
    with ol.start(job, log=tmp_path / "log") as loader:
        client = loader.client(0, timeout_s=30)
        first = [tokens_of(next(client)) for _ in range(7)]
        decided = [d for d in loader.decisions() if d.step == 6]
    with ol.start(job_with(Fickle(), every=3), log=tmp_path / "log", resume="log") as loader:
        assert [d for d in loader.decisions() if d.step == 6] == decided
    assert len(first) == 7


def test_phases_begin_with_epochs():
    sources = {
        "a": Numbered(rows=12, first=1),
        "b": Numbered(rows=20, unit_rows=4, first=100),
        "c": Numbered(rows=9, first=300),
    }
    phases = ol.policies.Epochs({0: {"a": 1.0, "b": 1.0}, 1: {"a": 1.0, "c": 1.0}, 2: {"c": 1.0}}, of="a")
    job = job_of(sources, ol.Batch(samples=4, sequence_length=16), mixture=ol.Mixture(phases))
    with ol.start(job) as loader:
        client = loader.client(0, timeout_s=30)
        drawn = [set((tokens_of(next(client)) // 100_000).tolist()) for _ in range(24)]
        changes = [d.step for d in loader.decisions()]
    assert len(changes) == 3  # a phase that goes on is not written down again
    of_b, of_c = 0, 3  # documents 1 to 12, 100 to 119 and 300 to 308, in hundreds
    assert of_b in drawn[0]
    assert all(of_c not in step for step in drawn[: changes[1]])
    assert all(step == {of_c} for step in drawn[changes[2] :])


def test_an_epoch_of_all_is_begun_when_the_last_source_with_weight_has_begun_it():
    phases = ol.policies.Epochs({0: {"a": 1.0, "b": 1.0}, 1: {"c": 1.0}})
    progress = ol.policies.MixtureProgress
    assert phases(0, progress()) == {"a": 1.0, "b": 1.0}
    assert phases(0, progress(epochs={"a": 5, "b": 0, "c": 0})) == {"a": 1.0, "b": 1.0}
    assert phases(0, progress(epochs={"a": 1, "b": 1, "c": 0})) == {"c": 1.0}


def test_weights_that_a_user_sets_hold_until_they_are_unset():
    with ol.start(job_with(by_step, every=1, prefetch=0)) as loader:
        client = loader.client(0, timeout_s=30)
        next(client)
        since = loader.set_weights({"c": 1.0})
        steps = [tokens_of(next(client)) for _ in range(since + 6)]
        assert all((tokens >= 300_000).all() for tokens in steps[since:])
        until = loader.set_weights(None)
        steps = [tokens_of(next(client)) for _ in range(until)]
        assert loader.decisions()[-1].value["by"] == "function"


def test_a_function_that_goes_wrong_changes_nothing_and_is_told_of(caplog):
    def wrong(step: int, progress: ol.policies.MixtureProgress) -> Mapping[str, float]:
        return {"a": 1.0} if step < 5 else {"z": 1.0}

    with ol.start(job_with(wrong, every=5)) as loader, caplog.at_level(logging.WARNING, "overlord.steering"):
        client = loader.client(0, timeout_s=30)
        tokens = np.concatenate([tokens_of(next(client)) for _ in range(8)])
    assert (tokens < 100_000).all()
    assert "there is no such source" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ol.Mixture(lambda step, progress: None), "returns {source: weight}, it returned None"),  # pyright: ignore[reportArgumentType]
        (lambda: ol.Mixture(lambda step, progress: {"a": 0}), "every weight is 0"),
        (lambda: ol.Mixture(by_step, ramp="linear"), "neither feedback nor a ramp"),
        (lambda: ol.Mixture(by_step, every=0), "at least 1, got 0"),
        (lambda: ol.Mixture(7), "a schedule or a function, got 7"),  # pyright: ignore[reportArgumentType]
        (lambda: ol.policies.Epochs({1: {"a": 1}}), "begins with epoch 0"),
        (lambda: ol.policies.Epochs({0: {"a": -1}}), "in epoch 0 must be a number >= 0"),
        (lambda: ol.policies.Epochs({0: 3}), "got 3 for epoch 0"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_a_mixture_is_refused(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()
