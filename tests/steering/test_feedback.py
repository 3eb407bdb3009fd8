"""Weights by the losses that trainers report: the same decision whoever reports first, and no report breaks a run."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from tests.small_sources import read_all, same, tokens_of
from tests.steering.steered import FEEDBACK, job_with


def test_reports_of_all_ranks_make_one_decision_whatever_their_order():
    def decided(order: Sequence[int]) -> list[Any]:
        with ol.start(job_with(mesh=ol.Mesh(dp=4))) as loader:
            clients = [loader.client(rank, timeout_s=60) for rank in range(4)]
            for _ in range(12):
                for client in clients:
                    next(client)
                for rank in order:
                    clients[rank].feedback(
                        losses={"a": 2.0 + rank / 7, "b": 1.0, "c": 3.0 / (1 + rank)}, tokens={"a": 3 + rank}
                    )
            return [(d.step, d.value) for d in loader.decisions()]

    first = decided([0, 1, 2, 3])
    assert first == decided([3, 1, 0, 2])
    assert first[0][0] == FEEDBACK.every + FEEDBACK.lag
    assert first[0][1]["reports"] == 4 * FEEDBACK.every
    assert sum(first[0][1]["weights"].values()) == pytest.approx(1)


def test_losses_move_the_weights_towards_what_is_hard():
    with ol.start(job_with()) as loader:
        client = loader.client(0, timeout_s=60)
        for _ in range(30):
            next(client)
            client.feedback(losses={"a": 1.0, "b": 2.0, "c": 3.0})
        shares = [d.value["weights"] for d in loader.decisions()]
        assert len(shares) >= 4
        assert shares[-1]["c"] > shares[0]["c"] > 1 / 3
        assert shares[-1]["a"] < shares[0]["a"] < 1 / 3
        assert min(shares[-1].values()) >= 0.01
        assert {name: mix.weight for name, mix in loader.report().mix.items()} == shares[-1]


def swapped(weights: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
    """A rule of a user's own: all weight to the source of the highest loss, however little weight it had."""
    return {max(losses, key=lambda name: losses[name]): 1.0}


def test_a_rule_of_ones_own_is_a_function_of_weights_and_losses():
    with ol.start(job_with(feedback=ol.policies.Feedback(rule=swapped, every=5, lag=3))) as loader:
        client = loader.client(0, timeout_s=60)
        for number in range(20):
            next(client)
            client.feedback(losses={"a": 1.0, "b": 9.0 if number < 5 else 0.0, "c": 2.0})
        assert [d.value["weights"] for d in loader.decisions()][:2] == [{"b": 1.0}, {"c": 1.0}]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda weights, losses: {"a": math.nan}, "must give numbers >= 0"),
        (lambda weights, losses: {"a": 0}, "must give numbers >= 0"),
        (lambda weights, losses: {"z": 1}, "there is no such source"),
        (lambda weights, losses: 1 / 0, "the rule raised ZeroDivisionError"),
        (lambda weights, losses: None, "the rule raised AttributeError"),
    ],
)
def test_a_rule_that_goes_wrong_changes_nothing_and_is_told_of(caplog, rule, message):
    with ol.start(job_with(feedback=ol.policies.Feedback(rule=rule, every=5, lag=3))) as loader:
        client = loader.client(0, timeout_s=60)
        with caplog.at_level(logging.WARNING, "overlord.steering"):
            found = []
            for _ in range(12):
                found.append(np.sort(tokens_of(next(client))))
                client.feedback(losses={"a": 1.0})
        assert message in loader.decisions()[0].value["note"]
    assert message in caplog.text
    assert same(found, read_all(job_with(feedback=None), 12)[0])


def test_reports_that_make_no_sense_are_told_once_and_break_nothing(caplog):
    bad: list[dict[str, Any]] = [
        {"losses": {"a": math.nan}},
        {"losses": {"a": math.inf, "b": 1e300}},
        {"losses": {"nothing": 1.0}},
        {"losses": {"a": 1.0}, "tokens": {"a": -5}},
        {"losses": {"a": 1.0}, "tokens": {"a": math.nan}},
        {"losses": {"a": 1.0}, "step": 10_000},
        {"losses": {"a": 1.0}, "step": -1},
        {"seconds": 1.0},
        {},
    ]
    with ol.start(job_with()) as loader, caplog.at_level(logging.WARNING, "overlord.service.client"):
        client = loader.client(0, timeout_s=60)
        found = []
        for _ in range(14):
            found.append(np.sort(tokens_of(next(client))))
            for report in bad:
                client.feedback(**report)
        assert loader.decisions()[0].value["note"] == "no losses were reported"
    assert same(found, read_all(job_with(feedback=None), 14)[0])
    for text in ("the loss of 'a' is nan", "there is no source 'nothing'", "it is for step 10000", "times are not used"):
        assert caplog.text.count(text) == 1


def test_a_report_that_comes_twice_or_late_is_counted_once_or_not(caplog):
    with ol.start(job_with()) as loader, caplog.at_level(logging.WARNING, "overlord.service.client"):
        client = loader.client(0, timeout_s=60)
        for _ in range(14):
            next(client)
            client.feedback(losses={"a": 1.0, "b": 2.0})
            client.feedback(losses={"a": 100.0})
        client.feedback(losses={"a": 100.0}, step=1)
        value = loader.decisions()[0].value
    assert value["losses"] == {"a": 1.0, "b": 2.0}
    assert value["reports"] == FEEDBACK.every
    assert "rank 0 had reported step 0 before" in caplog.text
    # The planner has decided at step 5, and at step 10 too if it was that far ahead.
    assert re.search(r"for step 1 is not used: it is late: steps before (5|10) were decided on", caplog.text)


def test_what_is_not_a_number_is_an_error_at_once():
    with ol.start(job_with()) as loader:
        client = loader.client(0, timeout_s=60)
        next(client)
        with pytest.raises(ol.errors.SpecError, match=r"losses\['a'\] must be a number, got 'high'"):
            client.feedback(losses={"a": "high"})  # type: ignore[dict-item] - that is the point


def test_a_run_whose_trainers_never_report_keeps_its_weights_and_says_so_in_its_decisions():
    found, _ = read_all(job_with(), 20)
    assert same(found, read_all(job_with(feedback=None), 20)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ol.policies.Feedback(every=0), "every is a number of steps"),
        (lambda: ol.policies.Feedback(lag=0), "lag is a number of steps"),
        (lambda: cast("Any", ol.policies.Feedback)(rule="up"), "a feedback rule is a function"),
        (lambda: ol.policies.MultiplicativeWeights(rate=-1), "rate is a number >= 0"),
        (lambda: ol.policies.MultiplicativeWeights(bound=0.5), "bound is the largest factor"),
        (lambda: ol.policies.MultiplicativeWeights(floor=1.0), "floor is a share"),
        (lambda: ol.Mixture({0: {"a": 1}, 5: {"b": 1}}, feedback=ol.policies.Feedback()), "by its schedule or by feedback"),
        (lambda: job_with(feedback=ol.policies.Feedback(lag=2), prefetch=2), "a lag of more than prefetch=2"),
    ],
)
def test_a_feedback_that_cannot_work_is_refused(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.floats(1e-6, 1e6), min_size=1, max_size=8),
    st.data(),
    st.floats(0, 50),
    st.floats(1, 10),
    st.floats(0, 0.5),
)
def test_multiplicative_weights_are_shares_within_their_bounds(weights, data, rate, bound, floor):
    losses = data.draw(st.dictionaries(st.sampled_from(sorted(weights)), st.floats(-1e6, 1e6)))
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    found = ol.policies.MultiplicativeWeights(rate=rate, bound=bound, floor=floor)(shares, losses)
    assert found.keys() == shares.keys()
    assert sum(found.values()) == pytest.approx(1)
    if losses:
        assert min(found.values()) >= min(floor, 1 / len(weights)) * (1 - 1e-9)
