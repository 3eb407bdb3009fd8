"""Executors: a call is run once, by a thread or by the caller that needs it, and nobody waits for one that nobody runs."""

import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.runtime.threads import CallerRuns, StealingFuture, Threads, cpu_time, make_executor


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


@pytest.mark.parametrize("asks", [False, True])
def test_a_pool_starts_a_thread_for_each_call_that_needs_one(asks: bool):
    """Each of four calls waits for the other three, so none may be left in the queue."""
    for _ in range(200):
        threads, meeting = Threads(4, "test"), threading.Barrier(4)
        futures: list[StealingFuture[int]] = []
        for _ in range(4):
            if asks:
                assert threads.has_idle
            futures.append(threads.submit(meeting.wait, 30))
        assert sorted(future.result(timeout=30) for future in futures) == [0, 1, 2, 3]
        threads.shutdown()


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


def idents(num_calls: int, barrier: threading.Barrier) -> list:
    def call() -> int:
        barrier.wait(10)
        return threading.get_ident()

    return [call] * num_calls


def test_a_pool_ends_though_ctrl_c_came_while_a_thread_was_being_started(monkeypatch: pytest.MonkeyPatch):
    threads = Threads(1, "test")

    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            threads.submit(int)
    threads.shutdown()
    assert threads.join(0.0)


def test_shared_calls_run_side_by_side_in_their_owner_and_in_idle_threads(one_thread: Threads):
    found = one_thread.share(idents(2, threading.Barrier(2)))  # a single thread would wait here for ever
    assert len(set(found)) == 2
    assert threading.get_ident() in found


def test_shared_calls_of_a_pool_that_is_busy_run_in_their_owner(busy: Threads):
    assert busy.share([threading.get_ident] * 5) == [threading.get_ident()] * 5


def test_calls_shared_by_the_only_thread_of_a_pool_do_not_deadlock(one_thread: Threads):
    def outer(depth: int) -> int:
        return 1 if depth == 0 else sum(one_thread.share([lambda: outer(depth - 1)] * 2))

    assert one_thread.submit(outer, 6).result(30) == 2**6
    assert outer(6) == 2**6


def test_a_thread_that_waits_takes_part_in_shared_calls_that_begin_later(one_thread: Threads):
    waits = threading.Event()

    def work() -> list[int]:
        waits.wait(10)
        return one_thread.share(idents(2, threading.Barrier(2)))

    future = one_thread.submit(work)
    while not future.running():
        pass
    threading.Timer(0.05, waits.set).start()
    assert threading.get_ident() in one_thread.wait_for(future)


def test_a_thread_that_waits_takes_what_an_idle_pool_has_not_started(busy: Threads):
    assert busy.wait_for(busy.submit(threading.get_ident)) == threading.get_ident()
    done = busy.submit(int)
    done.run()
    assert busy.wait_for(done) == 0
    assert CallerRuns().wait_for(StealingFuture(int)) == 0


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 3))
def test_shared_calls_return_in_order_or_raise_the_first_error(fails, num_threads):
    def call(index: int) -> int:
        if fails[index]:
            raise ValueError(index)
        return index

    executor = make_executor(num_threads, "test")
    calls = [lambda index=index: call(index) for index in range(len(fails))]
    try:
        if any(fails):
            with pytest.raises(ValueError, match=f"^{fails.index(True)}$"):
                executor.share(calls)
        else:
            assert executor.share(calls) == list(range(len(fails)))
    finally:
        executor.shutdown()


def test_cpu_time_counts_what_others_did_for_this_thread_and_not_what_it_did_for_others(one_thread: Threads):
    barrier = threading.Barrier(2)

    def spin() -> None:
        barrier.wait(10)
        ends = time.thread_time() + 0.1
        while time.thread_time() < ends:
            pass

    def idle_while_helped() -> float:
        began = cpu_time()
        one_thread.share([spin, spin])
        return cpu_time() - began

    began = cpu_time()
    spent = one_thread.wait_for(one_thread.submit(idle_while_helped))
    if cpu_time() - began < 0.1:  # the thread of the pool had it, and this one helped
        assert spent >= 0.2
    else:
        assert cpu_time() - began >= 0.2


def test_the_end_of_a_pool_leaves_shared_calls_to_their_owner(one_thread: Threads):
    one_thread.shutdown()
    assert one_thread.share([int, int, int]) == [0, 0, 0]
