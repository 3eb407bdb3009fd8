"""Executors for calls that may hang: their threads are daemons, so a read that never returns cannot hold up the end of the
program, and a call that no thread has started is run by the caller that needs its result.

Work that can be cut into short calls may be shared: the thread that has the work runs the calls one after the other, and
threads that are idle, or wait for a result, take calls from it meanwhile. Nobody ever waits for a call that no thread runs.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

P = ParamSpec("P")
T = TypeVar("T")

_lent = threading.local()


def cpu_time() -> float:
    """CPU seconds of this thread: with those that other threads spent on its shared calls, without those that this thread
    spent on the calls of others. For the difference of two moments."""
    return time.thread_time() + getattr(_lent, "balance_s", 0.0)


def _move_cpu_time(seconds: float) -> None:
    _lent.balance_s = getattr(_lent, "balance_s", 0.0) + seconds


class SharedCalls(Generic[T]):
    """Calls that several threads run side by side; each takes the first that nobody has taken.

    The error of the first call that fails is raised, as if they had run one after the other. No call is started after one
    has failed.
    """

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self._calls = calls
        self._owner = threading.get_ident()
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._next = 0
        self._num_running = 0
        self._helped_s = 0.0
        self._changed = threading.Condition()

    @property
    def has_more(self) -> bool:
        """True while there is a call that nobody has taken."""
        return self._next < len(self._calls) and not self._errors

    def run_next(self) -> bool:
        """Run one call. False if there is none left to take."""
        with self._changed:
            if not self.has_more:
                return False
            index, self._next = self._next, self._next + 1
            self._num_running += 1
        began = time.thread_time()
        found: list[T] = []
        error: BaseException | None = None
        try:
            found.append(self._calls[index]())
        except BaseException as raised:  # noqa: BLE001 - raised by `results`
            error = raised
        spent_s = 0.0 if threading.get_ident() == self._owner else time.thread_time() - began
        _move_cpu_time(-spent_s)
        with self._changed:
            self._helped_s += spent_s
            self._num_running -= 1
            if error is not None:
                self._errors[index] = error
            else:
                self._results[index] = found[0]
            self._changed.notify_all()
        return True

    def run_all(self) -> None:
        """Run calls until none is left to take."""
        while self.run_next():
            pass

    def results(self) -> list[T]:
        """Run what is left, wait for the calls of other threads, and return all results in order. For the owner."""
        self.run_all()
        with self._changed:
            while self._num_running:
                self._changed.wait()
        _move_cpu_time(self._helped_s)
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[index] for index in range(len(self._calls))]


class StealingFuture(Future[T], Generic[T]):
    """A call and its result. `result()` runs the call in the caller's thread if nobody has started it yet.

    So a caller never waits for a call that is still queued behind others, and calls that wait for each other cannot
    deadlock on a full pool. The first to claim a call, a worker thread, a caller or `cancel`, has it.
    """

    def __init__(self, call: Callable[[], T], *, waits_for_thread: bool = False) -> None:
        """`waits_for_thread`: with a timeout, `result` leaves the call to the threads of the pool it was submitted to."""
        super().__init__()
        self._call: Callable[[], T] | None = call
        self._claim = threading.Lock()
        self._waits_for_thread = waits_for_thread

    def result(self, timeout: float | None = None) -> T:
        if timeout is None or not self._waits_for_thread:
            self.run()
        return super().result(timeout)

    def run(self) -> None:
        """Run the call, unless it was claimed already."""
        if not self._claim.acquire(blocking=False):
            return
        call, self._call = self._call, None  # what the call refers to is released when it returns
        assert call is not None  # only the claimant takes it
        self.set_running_or_notify_cancel()
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self.set_exception(error)
        else:
            self.set_result(result)

    def cancel(self) -> bool:
        """Drop the call; False if it was started already."""
        if self._claim.acquire(blocking=False):
            self._call = None
            return super().cancel()
        return self.cancelled()


class Executor(Protocol):
    """Runs calls, on threads or without any."""

    @property
    def num_threads(self) -> int: ...

    @property
    def has_idle(self) -> bool:
        """True if a call that is queued now would be run at once, as far as is known."""
        ...

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        """Queue a call whose result somebody needs."""
        ...

    def submit_ahead(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T] | None:
        """Queue a call whose result nobody needs yet; None if nobody would run it before then."""
        ...

    def share(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run short calls side by side, in this thread and in those that have nothing else to do; the results in order."""
        ...

    def wait_for(self, future: StealingFuture[T]) -> T:
        """The result of a call. If another thread runs it, this one takes part in shared calls meanwhile."""
        ...

    def shutdown(self, wait: bool = True) -> None: ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after `shutdown`. False when some are still busy."""
        ...


def make_executor(num_threads: int, name: str) -> Executor:
    return Threads(num_threads, name) if num_threads else CallerRuns()


class CallerRuns:
    """The executor without threads: a call runs when its result is asked for, in the thread of the caller."""

    num_threads = 0
    has_idle = False

    def __init__(self) -> None:
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        future: StealingFuture[T] = StealingFuture(partial(fn, *args, **kwargs))
        if self._closed:
            future.cancel()
        return future

    def submit_ahead(self, _fn: Callable[P, T], /, *_: P.args, **__: P.kwargs) -> None:
        return None

    def share(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return [call() for call in calls]

    def wait_for(self, future: StealingFuture[T]) -> T:
        return future.result()

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002 - there is nothing to wait for
        self._closed = True

    def join(self, timeout_s: float) -> bool:  # noqa: ARG002 - likewise
        return True


class Threads:
    """Runs calls on up to `num_threads` daemon threads, which start when they are first needed."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads = num_threads
        self._name = name
        self._context = copy_context()  # its threads work for the run that made it
        self._calls: queue.SimpleQueue[StealingFuture[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0  # calls that are queued, or that a thread has taken
        self._num_busy = 0
        self._lock = threading.Lock()
        self._closed = False
        self._shared: list[SharedCalls[Any]] = []
        self._news = threading.Condition()
        """Notified when calls are shared, and when a call that somebody waits for has ended."""

    @property
    def has_idle(self) -> bool:
        with self._lock:
            # A thread of this pool that asks will be free soon.
            free = self.num_threads - self._num_busy + (threading.current_thread() in self._threads)
            return not self._closed and self._calls.qsize() < free

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        future: StealingFuture[T] = StealingFuture(partial(fn, *args, **kwargs), waits_for_thread=True)
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._calls.put(future)
            self._num_unfinished += 1
            # Calls are counted, not idle threads: one that has taken a call may not have said so yet.
            if len(self._threads) < min(self._num_unfinished, self.num_threads):
                name, run = f"{self._name}-{len(self._threads)}", self._context.copy().run
                thread = threading.Thread(target=run, args=(self._work,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def submit_ahead(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        return self.submit(fn, *args, **kwargs)

    def share(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if len(calls) < 2:
            return [call() for call in calls]
        shared = SharedCalls(calls)
        with self._news:
            self._shared.append(shared)
            self._news.notify_all()
        # Queued behind other work: a thread that comes to one of these later joins in then, if there is anything left.
        joining = [self.submit(shared.run_all) for _ in range(min(self.num_threads, len(calls) - 1))]
        try:
            return shared.results()
        finally:
            with self._news:
                self._shared.remove(shared)
            for future in joining:
                future.cancel()

    def wait_for(self, future: StealingFuture[T]) -> T:
        future.run()
        if not future.done():
            future.add_done_callback(self._note_end)
        while not future.done():
            with self._news:
                shared = self._first_shared()
                while shared is None and not future.done():
                    self._news.wait()
                    shared = self._first_shared()
            if shared is not None:
                shared.run_next()
        return future.result()

    def shutdown(self, wait: bool = True, timeout_s: float = 1.0) -> None:
        """Stop the threads. Calls that no thread has started are cancelled; calls that hang are waited for no longer than
        `timeout_s`, all of them together."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call.cancel()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            self.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            with suppress(RuntimeError):  # Ctrl-C came while it was being started
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in others)

    def _first_shared(self) -> SharedCalls[Any] | None:
        return next((shared for shared in self._shared if shared.has_more), None)

    def _note_end(self, _future: object) -> None:
        with self._news:
            self._news.notify_all()

    def _work(self) -> None:
        while True:
            future = self._calls.get()
            if future is None:
                return
            with self._lock:
                self._num_busy += 1
            future.run()
            del future
            with self._lock:
                self._num_busy -= 1
                self._num_unfinished -= 1
