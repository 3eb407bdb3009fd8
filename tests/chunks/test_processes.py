"""Worker processes: the same results as here, whatever happens to the workers, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.transforms.apply import InProcesses, Reporter, Transforms
from overlord.chunks.transforms.outcome import Context
from overlord.chunks.transforms.per_row import per_row
from overlord.chunks.workers.pool import ProcessPool
from overlord.declare.source import BadRows
from overlord.errors import BadRowError, ClosedError, SchemaError, SpecError
from overlord.sources.views import views_into
from overlord.stream.facts import Ints

CONTEXT = Context("web", 3, 17)
Ran = tuple[pa.Table, Ints, BadRowLog]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as pool:
        yield pool


def numbers(count: int) -> pa.Table:
    return pa.table({"n": np.arange(count)})


def run(pool: ProcessPool | None, fn: Callable[..., Any], table: pa.Table, policy: str = "fail", **options: Any) -> Ran:
    log = BadRowLog("web", BadRows(policy))  # type: ignore[arg-type]
    transforms = Transforms([InProcesses(fn, **options)], pool)
    made, origin = transforms.run(
        table, CONTEXT, np.arange(table.num_rows), Reporter(log, lambda row: ("part.parquet", row))
    )
    return made, origin, log


@per_row
def noisy_odds(row: dict[str, Any], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Drops even numbers and gives every odd one twice, with noise."""
    for copy in range(2 * (row["n"] % 2)):
        yield {"n": row["n"], "copy": copy, "noise": float(rng.random())}


def odds(table: pa.Table) -> pa.Table:
    return table.filter(pa.array([n % 2 == 1 for n in table["n"].to_numpy()], pa.bool_()))


class Lethal:
    """Kills its process in the ways that processes die, when it meets the row."""

    def __init__(self, row: int, how: Callable[[], object]) -> None:
        self.row = row
        self.how = how

    def __call__(self, table: pa.Table) -> pa.Table:
        if self.row in table["n"].to_pylist():
            self.how()
        return table


# Results


@pytest.mark.parametrize("fn", [noisy_odds, odds])
def test_results_do_not_depend_on_where_or_how_many_at_a_time(pool: ProcessPool, fn: Callable[..., Any]) -> None:
    here, where_here, _ = run(None, fn, numbers(100))
    for batch_rows in (7, 100, 1000):
        there, where_there, _ = run(pool, fn, numbers(100), batch_rows=batch_rows)
        assert there == here
        assert where_there.tolist() == where_here.tolist()


MIXED = {
    "whole numbers, then fractions": lambda n: {"v": n if n < 50 else n / 2},
    "empty lists, then lists": lambda n: {"v": [n] if n > 60 else []},
    "nulls, then text": lambda n: {"v": str(n) if n > 60 else None},
    "keys that come and go": lambda n: {"a": n} if n < 50 else {"b": n},
    "objects with other keys": lambda n: {"v": {"a": n} if n < 50 else {"b": str(n)}},
    "numbers, then text": lambda n: {"v": n if n < 50 else str(n)},
    "text among numbers": lambda n: {"v": str(n) if n % 30 == 3 else n},
    "fractions, and a number that is no double": lambda n: {"v": 2**60 + 1 if n == 77 else n / 2 if n > 60 else n},
    "arrays of other widths": lambda n: {"v": np.arange(n % 3, dtype=np.int32 if n < 50 else np.int64)},
    "nothing but the last": lambda n: {"v": n} if n == 99 else None,
}


@pytest.mark.strangers
@pytest.mark.parametrize("what", MIXED)
def test_types_and_bad_rows_of_a_row_function_do_not_depend_on_slices(pool: ProcessPool, what: str) -> None:
    made = MIXED[what]
    fn = per_row(lambda row: made(row["n"]))
    here, where_here, log_here = run(None, fn, numbers(100), "skip")
    for batch_rows in (7, 100):
        there, where_there, log_there = run(pool, fn, numbers(100), "skip", batch_rows=batch_rows)
        assert there == here
        assert where_there.tolist() == where_here.tolist()
        assert log_there.dropped == log_here.dropped


def test_an_empty_table_comes_back_empty(pool: ProcessPool) -> None:
    made, origin, _ = run(pool, odds, numbers(0))
    assert made.num_rows == len(origin) == 0


def test_many_threads_share_the_workers(pool: ProcessPool) -> None:
    results: dict[int, list[int | None]] = {}

    def work(i: int) -> None:
        made, _, _ = run(pool, odds, numbers(10 * i), batch_rows=4)
        results[i] = made["n"].to_pylist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: list(range(1, 10 * i, 2)) for i in range(1, 9)}


def test_views_into_a_large_file_travel_alone(pool: ProcessPool) -> None:
    data = pa.py_buffer(os.urandom(1 << 20))
    column = views_into(data, np.array([5, 500_000]), np.array([20, 30]))
    made, _, _ = run(pool, per_row(lambda row: {"length": len(row["v"]), "head": row["v"][:2]}), pa.table({"v": column}))
    content = data.to_pybytes()
    assert made.to_pylist() == [{"length": 20, "head": content[5:7]}, {"length": 30, "head": content[500_000:500_002]}]


# Errors


def test_an_exception_comes_back_as_itself_with_its_remote_traceback(pool: ProcessPool) -> None:
    def look_up(table: pa.Table) -> pa.Table:
        return table.select(["missing"])

    with pytest.raises(KeyError, match="missing") as caught:
        run(pool, look_up, numbers(3))
    notes = "\n".join(caught.value.__notes__)
    assert "in a worker process" in notes
    assert "return table.select" in notes
    assert "look_up of source 'web', chunk 3" in notes


def test_an_error_of_a_row_function_names_the_row(pool: ProcessPool) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(pool, per_row(lambda row: {"n": 1 // (row["n"] - 60)}), numbers(100), batch_rows=16)
    assert "part.parquet, row 60" in caught.value.__notes__[-1]


class TwoArgumentsError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("lost")


def test_an_exception_that_cannot_travel_is_told_by_its_name(pool: ProcessPool) -> None:
    def fail(table: pa.Table) -> pa.Table:
        raise TwoArgumentsError(1, 2)

    with pytest.raises(Exception, match="TwoArgumentsError: lost"):
        run(pool, fail, numbers(1))


def test_bad_rows_are_found_in_the_worker_and_reported_here(pool: ProcessPool) -> None:
    def refuse(table: pa.Table) -> pa.Table:
        if any(n % 10 == 3 for n in table["n"].to_numpy()):
            raise ValueError("a three")
        return table

    made, origin, log = run(pool, refuse, numbers(50), policy="skip", batch_rows=16)
    assert made["n"].to_pylist() == origin.tolist() == [n for n in range(50) if n % 10 != 3]
    assert log.num_dropped == 5
    assert log.last_error == "part.parquet, row 43: ValueError: a three"


def test_another_schema_for_some_rows_is_an_error(pool: ProcessPool) -> None:
    def change(table: pa.Table) -> pa.Table:
        return table if table["n"][0].as_py() < 8 else table.append_column("more", table["n"])

    with pytest.raises(SchemaError, match=r"\(n: int64\) for some rows and \(n: int64, more: int64\) for others"):
        run(pool, change, numbers(16), batch_rows=4)


def test_a_function_that_cannot_be_pickled_is_named(pool: ProcessPool) -> None:
    lock = threading.Lock()

    def locked(table: pa.Table) -> pa.Table:
        with lock:
            return table

    with pytest.raises(SpecError, match=r"InProcesses\(.*locked\): the function cannot be sent to another process"):
        run(pool, locked, numbers(1))


class NotHere:
    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse_in_worker, (os.getpid(),))

    def __call__(self, table: pa.Table) -> pa.Table:
        return table


def _refuse_in_worker(pid: int) -> NotHere:
    raise ImportError("no module for this")


def test_a_function_that_a_worker_cannot_load_is_named(pool: ProcessPool) -> None:
    with pytest.raises(SpecError, match=r"InProcesses\(NotHere\): a worker process cannot load .* no module for this"):
        run(pool, NotHere(), numbers(1))


def test_a_mark_checks_itself() -> None:
    for make in (
        lambda: InProcesses(odds, batch_rows=0),
        lambda: InProcesses(odds, timeout_s=0),
        lambda: InProcesses(InProcesses(odds)),
        lambda: InProcesses("odds"),  # type: ignore[arg-type]
        lambda: ProcessPool(0),
    ):
        with pytest.raises(SpecError):
            make()


# Deaths


@pytest.mark.parametrize(
    ("how", "word", "batch_rows"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", 16),
        (lambda: ctypes.string_at(0), "SIGSEGV", 1),
        (lambda: os._exit(7), "exit code 7", 1),
    ],
    ids=["killed", "segfault", "exit"],
)
def test_only_the_row_that_kills_is_lost(pool: ProcessPool, how: Callable[[], object], word: str, batch_rows: int) -> None:
    made, origin, log = run(pool, Lethal(21, how), numbers(40), policy="skip", batch_rows=batch_rows)
    assert made["n"].to_pylist() == origin.tolist() == [n for n in range(40) if n != 21]
    assert log.num_dropped == 1
    assert str(log.last_error).startswith(f"part.parquet, row 21: kills its worker process: {word}")


def test_under_fail_a_row_that_kills_stops_the_run(pool: ProcessPool) -> None:
    with pytest.raises(BadRowError, match=r"part.parquet, row 0: kills its worker process: exit code 7"):
        run(pool, Lethal(0, lambda: os._exit(7)), numbers(1))


def test_a_worker_killed_once_costs_no_row(pool: ProcessPool, tmp_path: Path) -> None:
    once = tmp_path / "once"

    def die_once(table: pa.Table) -> pa.Table:
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return table

    made, _, log = run(pool, die_once, numbers(40), batch_rows=16)
    assert made == numbers(40)
    assert log.num_dropped == 0


def test_a_row_that_hangs_is_a_bad_row(pool: ProcessPool) -> None:
    made, _, log = run(
        pool, Lethal(1, lambda: threading.Event().wait()), numbers(2), policy="skip", batch_rows=1, timeout_s=1.5
    )
    assert made["n"].to_pylist() == [0]
    assert "row 1: kills its worker process: no answer within 1.5 s" in str(log.last_error)


# Life and death of the pool


def test_nothing_is_started_before_the_first_run_and_nothing_stays_after_close() -> None:
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    files = _open_files()
    pool = ProcessPool(2)
    assert {child.pid for child in me.children(recursive=True)} <= before
    run(pool, odds, numbers(10), batch_rows=2)
    assert len(pool.worker_pids()) >= 1
    pool.close()
    pool.close()
    assert {child.pid for child in me.children(recursive=True)} <= before
    assert _open_files() <= files
    with pytest.raises(ClosedError):
        run(pool, odds, numbers(10))


def _open_files() -> set[tuple[str, str]]:
    """The descriptors of this process and what they are of. What other tests have left may be closed at any time."""
    found: set[tuple[str, str]] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


def test_closing_ends_a_run_that_would_never_end(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)

    def hang(table: pa.Table) -> pa.Table:
        started.write_text("x")
        threading.Event().wait()
        return table

    pool = ProcessPool(1)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            run(pool, hang, numbers(4), batch_rows=1)
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.read_text()
    pids = pool.worker_pids()
    pool.close()
    thread.join()
    assert len(caught) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


def script(body: str) -> str:
    return textwrap.dedent(
        """
        import os, sys, threading
        import numpy as np, pyarrow as pa
        from overlord.chunks.bad_rows import BadRowLog
        from overlord.chunks.workers.pool import ProcessPool
        from overlord.chunks.transforms.apply import InProcesses
        from overlord.chunks.transforms.outcome import Context
        from overlord.chunks.transforms.apply import Reporter, Transforms
        from overlord.declare.source import BadRows

        print("started", flush=True)
        pool = ProcessPool(2)
        def run(fn, rows=4):
            to = Reporter(BadRowLog("s", BadRows()), lambda row: ("f", row))
            table = pa.table({"n": np.arange(rows)})
            return Transforms([InProcesses(fn, batch_rows=2)], pool).run(table, Context("s", 0, 0), np.arange(rows), to)
        """
    ) + textwrap.dedent(body)


HANGING = """
    def hang(table):
        os.write(1, f"{os.getpid()}\\n".encode())
        threading.Event().wait()
    run(hang)
"""


def start(body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script(body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def test_workers_do_not_run_the_users_script_again() -> None:
    process = start('def f(table):\n    return table\nprint(run(f)[0].num_rows, "rows")\npool.close()')
    out, err = process.communicate(timeout=60)
    assert out.split() == ["started", "4", "rows"], err


def test_busy_workers_die_with_their_parent() -> None:
    process = start(HANGING)
    _, *pids = lines(process, 3)
    workers = [psutil.Process(int(pid)) for pid in pids]
    process.kill()
    gone, alive = psutil.wait_procs(workers, timeout=20)
    process.communicate()
    assert not alive
    assert len(gone) == 2


def test_ctrl_c_is_the_parents_alone_and_leaves_nothing() -> None:
    body = HANGING.replace(
        "    run(hang)", "    try: run(hang)\n    except KeyboardInterrupt: print('interrupted')\n    pool.close()"
    )
    process = start(body)
    _, *pids = lines(process, 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    out, err = process.communicate(timeout=60)
    assert (out.strip(), err, process.returncode) == ("interrupted", "", 0)
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_a_thread_that_ends_takes_no_worker_with_it(pool: ProcessPool) -> None:
    thread = threading.Thread(target=run, args=(pool, odds, numbers(8)))
    thread.start()
    thread.join()
    before = pool.worker_pids()
    run(pool, odds, numbers(8))
    assert set(before) <= set(pool.worker_pids())
