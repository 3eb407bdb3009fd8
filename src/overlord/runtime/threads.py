"""Executors for calls that may hang: their threads are daemons, so a read that never returns cannot hold up the end of the
program, and a call that no thread has started is run by the caller that needs its result."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


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

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        """Queue a call whose result somebody needs."""
        ...

    def submit_ahead(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T] | None:
        """Queue a call whose result nobody needs yet; None if nobody would run it before then."""
        ...

    def shutdown(self, wait: bool = True) -> None: ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after `shutdown`. False when some are still busy."""
        ...


def make_executor(num_threads: int, name: str) -> Executor:
    return Threads(num_threads, name) if num_threads else CallerRuns()


class CallerRuns:
    """The executor without threads: a call runs when its result is asked for, in the thread of the caller."""

    def __init__(self) -> None:
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        future: StealingFuture[T] = StealingFuture(partial(fn, *args, **kwargs))
        if self._closed:
            future.cancel()
        return future

    def submit_ahead(self, _fn: Callable[P, T], /, *_: P.args, **__: P.kwargs) -> None:
        return None

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002 - there is nothing to wait for
        self._closed = True

    def join(self, timeout_s: float) -> bool:  # noqa: ARG002 - likewise
        return True


class Threads:
    """Runs calls on up to `num_threads` daemon threads, which start when they are first needed."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._calls: queue.SimpleQueue[StealingFuture[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        future: StealingFuture[T] = StealingFuture(partial(fn, *args, **kwargs), waits_for_thread=True)
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._calls.put(future)
            if self._idle < self._calls.qsize() and len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def submit_ahead(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StealingFuture[T]:
        return self.submit(fn, *args, **kwargs)

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
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in others)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            future = self._calls.get()
            with self._lock:
                self._idle -= 1
            if future is None:
                return
            future.run()
            del future
