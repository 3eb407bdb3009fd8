"""Threads that serve many connections: each request once and in order, and none behind one that waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.runtime.serving_threads import ServingThreads, let_others_serve
from overlord.runtime.shared_memory import Connection

PATIENCE_S = 30.0


class Served:
    """A connection that is served by `handle`, which gets what the caller sends and returns the answer; None ends it."""

    def __init__(self, threads: ServingThreads, handle) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.caller, self.connection = Connection(theirs), Connection(ours)
        self.on_answer: Callable[[], None] = lambda: None
        self.ended = threading.Event()
        self.num_ends = 0
        self._handle = handle
        threads.add(self.connection, self._serve_next, self._end)

    def ask(self, value):
        self.caller.send(value)
        return self.caller.receive(PATIENCE_S)

    def _serve_next(self) -> bool:
        try:
            answer = self._handle(self.connection.receive())
        except EOFError:
            return False
        if answer is not None:
            self.connection.send(answer)
            self.on_answer()
        return answer is not None

    def _end(self) -> None:
        self.num_ends += 1
        self.connection.close()
        self.ended.set()


@pytest.fixture
def threads() -> Iterator[ServingThreads]:
    threads = ServingThreads("test-serving")
    yield threads
    threads.close()


def num_serving() -> int:
    return sum(thread.name == "test-serving" for thread in threading.enumerate())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_each_request_is_answered_once_and_in_the_order_of_its_connection(requests: list[tuple[int, bool]]) -> None:
    threads, gate = ServingThreads("test-serving"), threading.Event()
    seen: dict[int, list[int]] = {}

    def handle(message: tuple[int, int, bool]) -> int:
        connection, number, is_slow = message
        if is_slow:
            gate.wait(0.03)
        seen.setdefault(connection, []).append(number)
        return number

    served = [Served(threads, handle) for _ in range(4)]
    expected: dict[int, list[int]] = {}
    for number, (connection, is_slow) in enumerate(requests):
        served[connection].caller.send((connection, number, is_slow))
        expected.setdefault(connection, []).append(number)
    answers = {c: [served[c].caller.receive(PATIENCE_S) for _ in numbers] for c, numbers in expected.items()}
    threads.close()
    assert answers == seen == expected


def test_quick_requests_of_many_connections_are_served_by_one_thread(threads: ServingThreads) -> None:
    names = set[int]()
    served = [Served(threads, lambda value: names.add(threading.get_ident()) or value) for _ in range(8)]
    assert [each.ask(i) for i, each in enumerate(served)] == list(range(8))
    assert num_serving() <= 2  # a machine that stops for a moment makes a request long


def test_requests_that_wait_for_those_of_other_connections_are_all_answered(threads: ServingThreads) -> None:
    everybody = threading.Barrier(6)
    served = [Served(threads, lambda _: everybody.wait(PATIENCE_S) + 1) for _ in range(6)]
    for _ in range(3):
        for each in served:
            each.caller.send(0)
        assert sorted(each.caller.receive(PATIENCE_S) for each in served) == [1, 2, 3, 4, 5, 6]


def test_a_thread_that_says_it_waits_is_relieved_at_once(threads: ServingThreads) -> None:
    came = threading.Event()

    def wait(_: object) -> bool:
        let_others_serve()
        return came.wait(PATIENCE_S)

    waiting, quick = Served(threads, wait), Served(threads, lambda _: came.set() or True)
    waiting.caller.send(0)
    assert quick.ask(0) is True
    assert waiting.caller.receive(PATIENCE_S) is True
    let_others_serve()  # of a thread that serves nobody: no effect


def test_idle_threads_are_few(threads: ServingThreads) -> None:
    everybody = threading.Barrier(20)
    served = [Served(threads, lambda _: everybody.wait(PATIENCE_S) + 1) for _ in range(20)]
    for each in served:
        each.caller.send(0)
    for each in served:
        each.caller.receive(PATIENCE_S)
    for _ in range(1000):
        if num_serving() <= 6:
            break
        threading.Event().wait(0.01)
    assert num_serving() <= 6
    assert Served(threads, lambda value: value).ask(5) == 5


def test_a_connection_ends_once_when_its_caller_is_gone_or_its_request_fails(
    threads: ServingThreads, caplog: pytest.LogCaptureFixture
) -> None:
    gone, failing, other = (Served(threads, lambda value: value), Served(threads, lambda _: 1 / 0), Served(threads, abs))
    gone.caller.close()
    failing.caller.send(0)
    assert gone.ended.wait(PATIENCE_S)
    assert failing.ended.wait(PATIENCE_S)
    assert "ZeroDivisionError" in caplog.text
    assert other.ask(-3) == 3
    assert (gone.num_ends, failing.num_ends, other.num_ends) == (1, 1, 0)


def test_closing_answers_what_is_in_progress_and_ends_every_connection(threads: ServingThreads) -> None:
    began, may_end = threading.Event(), threading.Event()

    def handle(value: int) -> int:
        began.set()
        may_end.wait(PATIENCE_S)
        return value

    busy, idle = Served(threads, handle), Served(threads, abs)
    busy.caller.send(7)
    assert began.wait(PATIENCE_S)
    threads.close()
    assert idle.ended.wait(PATIENCE_S)
    assert not busy.ended.is_set()
    may_end.set()
    assert busy.caller.receive(PATIENCE_S) == 7
    assert busy.ended.wait(PATIENCE_S)
    late = Served(threads, abs)
    assert late.ended.is_set()
    with pytest.raises(EOFError):
        idle.caller.receive(PATIENCE_S)
    for _ in range(1000):
        if num_serving() == 0:
            break
        threading.Event().wait(0.01)
    assert num_serving() == 0


def test_a_connection_that_is_ended_right_after_a_request_harms_no_thread(
    threads: ServingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is closed by then, or belongs to another connection."""
    served = Served(threads, lambda value: value)

    class EndsAtRelease:
        """The lock of the threads. Whenever one that serves releases it after an answer, somebody ends the connection."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            if answered.is_set() and threading.current_thread().name == "test-serving" and not ending:
                ending.append(threading.Thread(target=threads.end, args=(served.connection,)))
                ending[0].start()
                ending[0].join(PATIENCE_S)

    answered, ending = threading.Event(), list[threading.Thread]()
    monkeypatch.setattr(threads, "_lock", EndsAtRelease())
    served.on_answer = answered.set
    assert served.ask(1) == 1
    assert served.ended.wait(PATIENCE_S)
    assert served.num_ends == 1
    assert Served(threads, abs).ask(-2) == 2, "the thread goes on serving others"
