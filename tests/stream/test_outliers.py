"""Delayed outliers: every document still comes once, soon enough, in the same step wherever a run is cut."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.stream.membership import DrawnStep
from overlord.stream.outliers import (
    STEPS_WAITING,
    WAITED,
    Delay,
    count_delays,
)
from overlord.stream.progress import Progress
from tests.stream.streams import Stream, keys, steps, streams

LONGEST = 20
ROWS = 4

policies = st.builds(
    ol.policies.OutlierDelay,
    lengths=st.sets(st.integers(8, LONGEST), min_size=1, max_size=3).map(lambda lengths: tuple(sorted(lengths))),
    together=st.integers(1, 6),
    most_steps=st.integers(1, 5),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    policy = draw(policies)
    if draw(st.booleans()):
        return Batch(samples=draw(st.integers(1, 9)), sequence_length=LONGEST, outliers=policy)
    return Batch(tokens=ROWS * LONGEST, sequence_length=LONGEST, outliers=policy)


def _equal(stream: Stream) -> Mixture:
    return Mixture({name: 1.0 for name in stream.names})


def _without(batch: Batch) -> Batch:
    return Batch(sequence_length=LONGEST, samples=batch.samples, tokens=batch.tokens)


@given(streams(finite=True, longest=LONGEST), batches())
@settings(max_examples=50)
def test_a_finite_run_has_the_same_documents_as_without_the_policy_each_once(stream, batch):
    delayed = [key for step in steps(stream.drawer(batch, _equal(stream)), 500) for key in keys(step)]
    plain = [key for step in steps(stream.drawer(_without(batch), _equal(stream)), 500) for key in keys(step)]
    assert Counter(delayed) == Counter(plain)
    assert set(Counter(delayed).values()) <= {1}


@given(streams(finite=False, longest=LONGEST), batches(), st.data())
@settings(max_examples=40)
def test_a_run_that_is_cut_anywhere_goes_on_as_if_it_were_not(stream, batch, data):
    whole = steps(stream.drawer(batch, _equal(stream)), 9)
    cut = data.draw(st.integers(1, len(whole)))
    saved = Progress.from_plain(whole[cut - 1].after().to_plain())
    rest = steps(stream.drawer(batch, _equal(stream), saved), 9 - cut)
    assert [keys(step) for step in rest] == [keys(step) for step in whole[cut:]]
    assert [step.samples.sizes[WAITED].tolist() for step in rest] == [s.samples.sizes[WAITED].tolist() for s in whole[cut:]]


@given(streams(finite=False, longest=LONGEST), batches())
@settings(max_examples=25)
def test_no_document_waits_much_longer_than_allowed_and_only_long_ones_wait(stream, batch):
    policy = batch.outliers
    assert policy is not None
    for step in steps(stream.drawer(batch, _equal(stream)), 14):
        waited = step.samples.sizes[WAITED]
        # Those that come due together may not fit one step, and then come in the next ones.
        assert waited.max(initial=0) <= policy.most_steps + STEPS_WAITING + 2
        assert len(step.after().carried) <= (STEPS_WAITING + 2) * (batch.samples or 2 * ROWS)


def test_long_documents_come_together_as_many_as_asked_and_steps_are_more_even():
    stream = Stream((500,), (4,), (None,), 20, seed=5)
    tokens = 64 * 20
    policy = ol.policies.OutlierDelay(lengths=(19,), together=32, most_steps=20)
    plain = steps(stream.drawer(Batch(tokens=tokens, sequence_length=20), _equal(stream)), 40)
    delayed = steps(stream.drawer(Batch(tokens=tokens, sequence_length=20, outliers=policy), _equal(stream)), 40)

    def num_long(step: DrawnStep) -> int:
        return int((step.samples.tokens >= 19).sum())

    assert {num_long(step) % 32 for step in delayed} == {0}
    assert any(num_long(step) for step in delayed)
    assert any(num_long(step) % 32 for step in plain)


def test_what_was_delayed_is_told_by_source_and_in_all():
    stream = Stream((50, 50), (4, 4), (None, None), 20, seed=1)
    batch = Batch(tokens=200, sequence_length=20, outliers=ol.policies.OutlierDelay(lengths=(18,), together=5, most_steps=4))
    drawn = steps(stream.drawer(batch, _equal(stream)), 20)
    counts = {name: Counter() for name in stream.names}
    for step in drawn:
        count_delays(step.samples, counts)
    waited = np.concatenate([step.samples.sizes[WAITED] for step in drawn])
    tokens = np.concatenate([step.samples.tokens for step in drawn])
    delay = Delay.of(counts)
    assert delay is not None
    assert delay.documents == np.count_nonzero(waited) > 0
    assert delay.mean_steps == pytest.approx(waited[waited > 0].mean())
    assert delay.mean_steps_per_token == pytest.approx((waited * tokens).sum() / tokens.sum())
    assert Delay.of({"web": Counter()}) is None


@pytest.mark.parametrize("wrong", [{"lengths": ()}, {"lengths": (9, 8)}, {"together": 0}, {"most_steps": 0}])
def test_a_policy_that_cannot_be_is_refused(wrong):
    with pytest.raises(ol.errors.SpecError):
        ol.policies.OutlierDelay(**{"lengths": (8,), "together": 4, **wrong})


def test_documents_that_are_cut_cannot_be_delayed():
    with pytest.raises(ol.errors.SpecError, match="whole documents"):
        Batch(tokens=40, sequence_length=20, cut_documents=True, outliers=ol.policies.OutlierDelay((10,), 2))
