"""Calls that fail for a passing reason are repeated, as often and after as long as was said."""

from itertools import islice, pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.runtime.retry import Backoff, FailedAttempt, retry


class PassingError(Exception):
    pass


class Flaky:
    """Fails so many times, then returns how often it was called. Its clock moves only while it is slept on."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0
        self.now = 0.0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise PassingError(f"failure {self.calls}")
        return self.calls

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now


@given(failures=st.integers(0, 20), pauses=st.integers(0, 20))
def test_a_call_has_one_attempt_more_than_there_are_pauses(failures: int, pauses: int):
    flaky, seen = Flaky(failures), []

    def call() -> int:
        return retry(
            flaky, on=PassingError, pauses=repeat(2.0, pauses), on_failure=seen.append, sleep=flaky.sleep, clock=flaky.clock
        )

    if failures <= pauses:
        assert call() == failures + 1
    else:
        with pytest.raises(PassingError, match=f"failure {pauses + 1}"):
            call()
    assert flaky.now == 2.0 * min(failures, pauses)
    assert [(each.number, each.waited_s) for each in seen] == [(i + 1, 2.0 * i) for i in range(min(failures, pauses + 1))]
    assert [each.pause_s for each in seen] == [2.0 if i < pauses else None for i in range(len(seen))]


def test_other_errors_are_raised_at_once():
    flaky = Flaky(1)
    with pytest.raises(PassingError):
        retry(flaky, on=ValueError, pauses=repeat(0.0))
    assert flaky.calls == 1


def test_whoever_sees_a_failure_may_give_up():
    def give_up(failed: FailedAttempt[PassingError]) -> None:
        if failed.number == 3:
            raise TimeoutError(f"after {failed.number} attempts: {failed.error}") from failed.error

    with pytest.raises(TimeoutError, match="after 3 attempts: failure 3") as caught:
        retry(Flaky(9), on=PassingError, pauses=repeat(0.0), on_failure=give_up)
    assert isinstance(caught.value.__cause__, PassingError)


@given(first=st.floats(0.01, 1), longest=st.floats(1, 10), factor=st.floats(1, 4))
def test_pauses_grow_by_a_factor_up_to_the_longest(first: float, longest: float, factor: float):
    pauses = list(islice(Backoff(first, longest, factor).pauses(), 50))
    assert pauses[0] == first
    for before, after in pairwise(pauses):
        assert after == min(before * factor, longest)
