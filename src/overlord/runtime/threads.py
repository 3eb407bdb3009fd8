"""A pool of daemon threads. Unlike the standard one it never holds up the end of the program for a read that hangs."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Threads(Executor):
    """Runs calls on up to `num_threads` threads, which start when first needed.

    With none, nothing is ever begun: whoever needs an answer cancels the call and makes it in its own thread, as one may
    do with any call that no thread has begun.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads = num_threads
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple, dict] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            if self.num_threads == 0:
                return future
            self._calls.put((future, fn, args, kwargs))
            if self._idle < self._calls.qsize() and len(self._threads) < self.num_threads:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float = 1.0) -> None:
        """Stop the threads. Calls not begun are dropped; calls that hang are waited for no longer than `timeout_s`, all of
        them together."""
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
                call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            self.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """After `shutdown`: wait for the threads to end, for so long in all. False when some are still busy."""
        deadline = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in others)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            call = self._calls.get()
            with self._lock:
                self._idle -= 1
            if call is None:
                return
            future, fn, args, kwargs = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, fn, args, kwargs
