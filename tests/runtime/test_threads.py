"""Executors: a call is run once, by a thread or by the caller that needs it, and nobody waits for one that nobody runs."""

import threading
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet

import pytest

from overlord.runtime.threads import CallerRuns, StealingFuture, Threads, make_executor


@pytest.fixture
def one_thread():
    threads = Threads(1, "test")
    yield threads
    threads.shutdown()


@pytest.fixture
def busy(one_thread: Threads):
    """Keeps the one thread busy until the end of the test."""
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(30)

    one_thread.submit(work)
    assert begun.wait(10)
    yield one_thread
    release.set()


def test_a_call_that_no_thread_has_started_runs_in_the_thread_that_needs_it(busy: Threads):
    assert busy.submit(threading.get_ident).result() == threading.get_ident()


def test_with_a_timeout_a_call_is_left_to_the_threads(busy: Threads):
    future = busy.submit(threading.get_ident)
    with pytest.raises(NotYet):
        future.result(timeout=0.01)
    assert not future.done()


def test_calls_that_wait_for_each_other_do_not_deadlock(one_thread: Threads):
    def outer(depth: int) -> int:
        return 0 if depth == 0 else 1 + one_thread.submit(outer, depth - 1).result()

    assert one_thread.submit(outer, 20).result() == 20


def test_many_callers_run_a_call_once():
    calls: list[int] = []
    gate = threading.Barrier(8)

    def call() -> int:
        calls.append(1)
        return len(calls)

    future = StealingFuture(call)
    found: list[int] = []

    def need() -> None:
        gate.wait(10)
        found.append(future.result())

    needy = [threading.Thread(target=need) for _ in range(8)]
    for thread in needy:
        thread.start()
    for thread in needy:
        thread.join(10)
    assert found == [1] * 8


def test_an_error_reaches_every_caller():
    def fail() -> None:
        raise KeyError("a")

    future = StealingFuture(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="a"):
            future.result()


def test_a_cancelled_call_never_runs():
    calls: list[int] = []
    future = StealingFuture(lambda: calls.append(1))
    assert future.cancel()
    assert future.cancel(), "cancelling twice is the same as once"
    with pytest.raises(CancelledError):
        future.result()
    assert not calls


def test_a_call_that_was_run_cannot_be_cancelled():
    future = StealingFuture(lambda: 7)
    assert future.result() == 7
    assert not future.cancel()


def test_without_threads_a_call_runs_when_its_result_is_needed_and_work_ahead_is_declined():
    executor = make_executor(0, "test")
    assert isinstance(executor, CallerRuns)
    calls: list[int] = []
    future = executor.submit(calls.append, 1)
    assert not calls
    future.result(timeout=0.001)
    assert calls == [1]
    assert executor.submit_ahead(calls.append, 2) is None


def test_the_end_of_an_executor_cancels_what_nobody_has_started(busy: Threads):
    waiting = busy.submit(int)
    busy.shutdown(wait=False)
    assert waiting.cancelled()
    assert busy.submit(int).cancelled()
    closed = CallerRuns()
    closed.shutdown()
    assert closed.submit(int).cancelled()
