"""A pool of worker processes that survives the death of any of them.

Each worker has a supervisor: a thread of this process that starts the worker, sends it one slice of rows at a time and
waits for the result. When the worker dies or does not answer in time, the supervisor starts another and repeats the slice.
After two deaths on one slice its rows are run one by one, and a row that kills two workers alone is returned as a bad row.
Slices are cut by row count and joined in order, so results depend neither on the number of workers nor on deaths.

Workers are fresh interpreters, not forks: they are safe to start beside running threads, do not run the user's script
again, and inherit none of this process's files. They exit when this process does. No worker starts before the first run.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import cloudpickle

from overlord.chunks.transforms.apply import name_of
from overlord.chunks.transforms.outcome import (
    Context,
    OnBadRow,
    Outcome,
    RowError,
    join_outcomes,
)
from overlord.chunks.transforms.per_row import PerRow
from overlord.chunks.workers.process import START_TIMEOUT_S, WorkerGoneError, WorkerProcess
from overlord.chunks.workers.worker import (
    Done,
    Failed,
    Load,
    NotLoaded,
    RunSlice,
)
from overlord.errors import ClosedError, DataError, SchemaError, SpecError
from overlord.runtime.liveness import WORKER_HUNG
from overlord.runtime.retry import retry
from overlord.sources.views import compact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from overlord.chunks.transforms.apply import InProcesses
    from overlord.stream.facts import Ints


@dataclass(frozen=True, slots=True)
class _Function:
    """A function and its pickled form. `original` is held so that no other function can get its id."""

    load: Load
    name: str
    original: Callable[..., pa.Table]

    @property
    def is_per_row(self) -> bool:
        return isinstance(self.original, PerRow)


@dataclass(frozen=True, slots=True)
class _Slice:
    function: _Function
    table: pa.Table
    origin: Ints
    context: Context
    stop_at_error: bool
    timeout_s: float | None

    def part(self, begin: int, end: int) -> _Slice:
        return _Slice(
            self.function,
            self.table.slice(begin, end - begin),
            self.origin[begin:end],
            self.context,
            self.stop_at_error,
            self.timeout_s,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    outcome: Outcome
    bad: list[tuple[int, str]]


_Task = tuple[_Slice, "Future[_Part]"]


class ProcessPool:
    """Worker processes for transforms marked `InProcesses`. Thread-safe; call `close`, or use it in a `with` block."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise SpecError(f"a process pool needs at least 1 worker, got {num_workers}")
        self.num_workers = num_workers
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._supervisors: list[_WorkerSupervisor] = []
        self._functions: dict[int, _Function] = {}
        self._closed = False
        self._process = os.getpid()

    def run(
        self,
        mark: InProcesses,
        table: pa.Table,
        origin: Ints,
        context: Context,
        *,
        on_bad: OnBadRow,
        stop_at_error: bool,
    ) -> Outcome:
        """Run `mark.fn` over the table, a slice at a time.

        With `stop_at_error` an exception of the function is raised here; otherwise its rows are passed to `on_bad`. Rows
        that kill workers are passed to `on_bad` in both cases.
        """
        function = self._function(mark.fn)
        whole = _Slice(function, table, origin, context, stop_at_error, mark.timeout_s)
        starts = range(0, max(table.num_rows, 1), mark.batch_rows)
        slices = [whole.part(start, min(start + mark.batch_rows, table.num_rows)) for start in starts]
        if not function.is_per_row:
            return join_outcomes(list(self._outcomes(slices, on_bad)), function.name)
        bad: list[tuple[int, str]] = []
        outcomes = list(self._outcomes(slices, lambda row, error: bad.append((row, error))))
        try:
            outcome = join_outcomes(outcomes, function.name, is_per_row=True)
        except SchemaError:
            # The rows that do not fit the others' types must not depend on where slices were cut: run the table whole.
            return join_outcomes(list(self._outcomes([whole], on_bad)), function.name, is_per_row=True)
        for row, error in bad:
            on_bad(row, error)
        return outcome

    def _outcomes(self, slices: list[_Slice], on_bad: OnBadRow) -> Iterator[Outcome]:
        futures = self._submit(slices)
        try:
            for future in futures:
                part = future.result()
                for row, error in part.bad:
                    on_bad(row, error)
                yield part.outcome
        except CancelledError:
            raise ClosedError("the process pool was closed while a transform was running") from None
        finally:
            for future in futures:
                future.cancel()

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        with self._lock:
            return [pid for supervisor in self._supervisors if (pid := supervisor.pid) is not None]

    def close(self) -> None:
        """Kill the workers and wait for their exit; runs under way raise ClosedError. Idempotent."""
        with self._lock:
            self._closed = True
            supervisors, self._supervisors = self._supervisors, []
        if os.getpid() != self._process:
            return  # a forked process has no supervisor threads, and the workers are its parent's
        for supervisor in supervisors:
            supervisor.stop()
        for _ in supervisors:
            self._tasks.put(None)
        for supervisor in supervisors:
            supervisor.thread.join()
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[1].cancel()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _function(self, fn: Callable[..., pa.Table]) -> _Function:
        with self._lock:
            known = self._functions.get(id(fn))
            if known is not None:
                return known
        try:
            pickled = cloudpickle.dumps(fn)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise SpecError(
                f"InProcesses({name_of(fn)}): the function cannot be sent to another process: {error}; keep locks, "
                "files and connections out of it, or open them inside"
            ) from error
        with self._lock:
            function = _Function(Load(len(self._functions), pickled), name_of(fn), fn)
            return self._functions.setdefault(id(fn), function)

    def _submit(self, slices: list[_Slice]) -> list[Future[_Part]]:
        tasks: list[_Task] = [(piece, Future()) for piece in slices]
        with self._lock:
            if self._closed:
                raise ClosedError("the process pool is closed")
            if os.getpid() != self._process:
                raise ClosedError("a process pool does not survive a fork; make one in the new process")
            while len(self._supervisors) < self.num_workers:
                self._supervisors.append(_WorkerSupervisor(self._tasks))
            for task in tasks:
                self._tasks.put(task)
        return [future for _, future in tasks]


class _WorkerSupervisor:
    """The thread that starts, feeds and replaces one worker. On Linux the kernel kills the worker when this thread ends."""

    def __init__(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._stopped = False
        self.thread = threading.Thread(target=self._run_tasks, name="overlord-worker-supervisor", daemon=True)
        self.thread.start()

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.pid

    def stop(self) -> None:
        """Kill the worker, which ends the thread's wait for its answer."""
        with self._lock:
            self._stopped = True
            if self._worker is not None:
                self._worker.kill()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            piece, future = task
            if self._stopped:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                self._complete(piece, future)
        self._discard_worker()

    def _complete(self, piece: _Slice, future: Future[_Part]) -> None:
        try:
            part = self._run(piece)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for the future
            future.set_exception(error)
        else:
            future.set_result(part)

    def _run(self, piece: _Slice) -> _Part:
        """Run a slice, however many workers it kills."""
        try:
            pauses = repeat(0.0, WORKER_HUNG.misses - 1)
            return retry(
                lambda: self._try(piece), on=WorkerGoneError, pauses=pauses, on_failure=lambda _: self._discard_worker()
            )
        except WorkerGoneError as error:
            death = str(error)
        if piece.table.num_rows > 1:
            return self._one_by_one(piece)
        bad = [(int(row), f"kills its worker process: {death}") for row in piece.origin]
        return _Part(Outcome(None, piece.origin[:0]), bad)

    def _one_by_one(self, piece: _Slice) -> _Part:
        """Run each row alone. Halving the slice would take fewer requests but more deaths, and only deaths are costly."""
        parts = [self._run(piece.part(row, row + 1)) for row in range(piece.table.num_rows)]
        outcome = join_outcomes([part.outcome for part in parts], piece.function.name, piece.function.is_per_row)
        return _Part(outcome, [entry for part in parts for entry in part.bad])

    def _try(self, piece: _Slice) -> _Part:
        worker = self._ensure_worker()
        self._load(worker, piece.function)
        run = RunSlice(piece.function.load.number, piece.context, piece.origin, piece.stop_at_error)
        answer, table = worker.request(run, compact(piece.table), piece.timeout_s)
        if isinstance(answer, Failed):
            error = answer.error.open(DataError)
            raise error if answer.origin is None else RowError(answer.origin, error)
        assert isinstance(answer, Done)
        return _Part(Outcome(table, answer.origin), answer.bad)

    def _load(self, worker: WorkerProcess, function: _Function) -> None:
        if function.load.number in worker.loaded:
            return
        answer, _ = worker.request(function.load, timeout_s=START_TIMEOUT_S)  # unpickling may import as much as a start
        if isinstance(answer, NotLoaded):
            raise SpecError(f"InProcesses({function.name}): a worker process cannot load the function: {answer.error}")
        worker.loaded.add(function.load.number)

    def _ensure_worker(self) -> WorkerProcess:
        if self._worker is None:
            try:
                WorkerProcess.start(self._admit)
            except BaseException:
                self._discard_worker()
                raise
        worker = self._worker
        if worker is None or self._stopped:
            raise ClosedError("the process pool was closed while a transform was running")
        return worker

    def _admit(self, worker: WorkerProcess) -> bool:
        """Register a worker before it is ready, so that `stop` can kill it at once. False once stopped."""
        with self._lock:
            if not self._stopped:
                self._worker = worker
            return not self._stopped

    def _discard_worker(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
