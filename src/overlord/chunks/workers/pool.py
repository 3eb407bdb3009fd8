"""A pool of worker processes that survives the death of any of them.

Each worker has an attendant: a thread of this process that starts it, gives it one slice at a time and
waits. When the worker dies or is silent for too long, the attendant starts another and tries the slice
again; when a slice has killed twice, its rows are run one by one, and those that kill twice alone are
handed back as bad. Slices are cut by row count and joined in order, so results do not depend on the number
of workers or on deaths.

Workers are fresh interpreters, not forks: they are safe to start beside running threads, do not run the
user's script again, and hold none of this process's files. They exit when this process does. Nothing starts
before the first run.
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

from overlord.chunks.transforms.invoke import name_of
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

    from overlord.chunks.transforms.invoke import InProcesses
    from overlord.stream.facts import Ints


@dataclass(frozen=True, slots=True)
class _Function:
    """A function as it travels; `original` keeps its id from being given to another."""

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
    """Worker processes for transforms marked `InProcesses`. Threads may share it; `close` it or use it in a `with`."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise SpecError(f"a process pool needs at least 1 worker, got {num_workers}")
        self.num_workers = num_workers
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._attendants: list[_Attendant] = []
        self._functions: dict[int, _Function] = {}
        self._closed = False
        self._process = os.getpid()

    def run(
        self,
        mark: InProcesses,
        table: pa.Table,
        origin: Ints,
        context: Context,
        on_bad: OnBadRow,
        stop_at_error: bool,
    ) -> Outcome:
        """Run `mark.fn` over the table, a slice at a time.

        With `stop_at_error` an exception of the function is raised here; otherwise its rows go to `on_bad`.
        Rows that kill workers go to `on_bad` in both cases.
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
            # Which rows do not go with the others is not to be told from slices: it must not depend on how rows were cut.
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
        """The processes that run now."""
        with self._lock:
            return [pid for attendant in self._attendants if (pid := attendant.pid) is not None]

    def close(self) -> None:
        """Kill the workers and wait until they are gone; runs under way raise ClosedError. May be called again."""
        with self._lock:
            self._closed = True
            attendants, self._attendants = self._attendants, []
        if os.getpid() != self._process:
            return  # a fork of the pool's process has no attendants and must not touch their workers
        for attendant in attendants:
            attendant.stop()
        for _ in attendants:
            self._tasks.put(None)
        for attendant in attendants:
            attendant.thread.join()
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
            while len(self._attendants) < self.num_workers:
                self._attendants.append(_Attendant(self._tasks))
            for task in tasks:
                self._tasks.put(task)
        return [future for _, future in tasks]


class _Attendant:
    """The thread that looks after one worker. The worker dies with it."""

    def __init__(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._stopped = False
        self.thread = threading.Thread(target=self._attend, name="overlord-attendant", daemon=True)
        self.thread.start()

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.pid

    def stop(self) -> None:
        """Kill the worker, so that the thread stops waiting for it."""
        with self._lock:
            self._stopped = True
            if self._worker is not None:
                self._worker.kill()

    def _attend(self) -> None:
        while (task := self._tasks.get()) is not None:
            piece, future = task
            if self._stopped:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                self._answer(piece, future)
        self._bury()

    def _answer(self, piece: _Slice, future: Future[_Part]) -> None:
        try:
            part = self._run(piece)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the thread that asked
            future.set_exception(error)
        else:
            future.set_result(part)

    def _run(self, piece: _Slice) -> _Part:
        """Run a slice, whatever it does to workers."""
        try:
            pauses = repeat(0.0, WORKER_HUNG.misses - 1)
            return retry(lambda: self._try(piece), on=WorkerGoneError, pauses=pauses, on_failure=lambda _: self._bury())
        except WorkerGoneError as error:
            death = str(error)
        if piece.table.num_rows > 1:
            return self._one_by_one(piece)
        bad = [(int(row), f"kills its worker process: {death}") for row in piece.origin]
        return _Part(Outcome(None, piece.origin[:0]), bad)

    def _one_by_one(self, piece: _Slice) -> _Part:
        """Each row alone. Halving would take fewer asks, but an ask is cheap and the start of a worker is not."""
        parts = [self._run(piece.part(row, row + 1)) for row in range(piece.table.num_rows)]
        outcome = join_outcomes([part.outcome for part in parts], piece.function.name, piece.function.is_per_row)
        return _Part(outcome, [entry for part in parts for entry in part.bad])

    def _try(self, piece: _Slice) -> _Part:
        worker = self._living()
        self._load(worker, piece.function)
        run = RunSlice(piece.function.load.number, piece.context, piece.origin, piece.stop_at_error)
        answer, table = worker.ask(run, compact(piece.table), piece.timeout_s)
        if isinstance(answer, Failed):
            error = answer.error.open(DataError)
            raise error if answer.origin is None else RowError(answer.origin, error)
        assert isinstance(answer, Done)
        return _Part(Outcome(table, answer.origin), answer.bad)

    def _load(self, worker: WorkerProcess, function: _Function) -> None:
        if function.load.number in worker.loaded:
            return
        answer, _ = worker.ask(function.load, timeout_s=START_TIMEOUT_S)  # it may import as much as a start
        if isinstance(answer, NotLoaded):
            raise SpecError(f"InProcesses({function.name}): a worker process cannot load the function: {answer.error}")
        worker.loaded.add(function.load.number)

    def _living(self) -> WorkerProcess:
        if self._worker is None:
            try:
                WorkerProcess.started(self._admit)
            except BaseException:
                self._bury()
                raise
        worker = self._worker
        if worker is None or self._stopped:
            raise ClosedError("the process pool was closed while a transform was running")
        return worker

    def _admit(self, worker: WorkerProcess) -> bool:
        """Take a worker that is starting as this thread's own, so that `stop` need not wait until it is ready."""
        with self._lock:
            if not self._stopped:
                self._worker = worker
            return not self._stopped

    def _bury(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
