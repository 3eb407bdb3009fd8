"""The engine of processes by itself: names that outlive processes, errors that come home, and nothing left behind."""

import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.runtime.cores import choose_process, lay_out, num_usable_cores
from overlord.runtime.engine import Handle, Workplace, WorkplaceSize
from overlord.runtime.shared_memory import SharedObject
from overlord.runtime.whereabouts import node_names
from tests.faults.disturbance import pause, send
from tests.faults.trainers import wait_until
from tests.runtime.roles import Asker, Counter, make_asker, make_counter, make_length, make_nothing
from tests.service.served import content, streams, undisturbed
from tests.small_sources import Numbered, job_of


class TwoPartError(Exception):
    """Does not pickle: its pickled form calls it with one argument."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


@pytest.fixture(scope="module")
def engine() -> Iterator[ol.Processes]:
    """Shared by tests whose processes may be killed, but whose roles have names of their own."""
    engine = open_engine()
    yield engine
    engine.close()


def open_engine(num_processes: int = 2, patience_s: float = 60.0, hung_after_s: float | None = 30.0) -> ol.Processes:
    engine = ol.Processes(num_processes, patience_s=patience_s, hung_after_s=hung_after_s)
    engine.open(WorkplaceSize(1, 1))
    return engine


def test_roles_live_in_other_processes_and_the_planner_in_this_one(engine: ol.Processes):
    counters = [engine.spawn(f"places/{i}", partial(make_counter, i)) for i in range(3)]
    here = engine.spawn("planner/places", partial(make_counter, 7))
    pids = [counter.call(Counter.pid).result() for counter in counters]
    assert os.getpid() not in pids
    assert len(set(pids)) == 2, "spread over both"
    assert here.call(Counter.pid).result() == os.getpid()
    assert here.call(Counter.add, 1).result() == 8


def test_a_process_without_roles_is_not_started():
    engine = open_engine(num_processes=4)
    try:
        roles = [engine.spawn(f"few/{i}", partial(make_counter, i)) for i in range(2)]
        pids = {role.call(Counter.pid).result() for role in roles}
        assert {child.pid for child in template_of(roles[0]).children()} == pids
    finally:
        engine.close()


def test_a_killed_role_is_made_anew_and_answers_under_its_name(engine: ol.Processes):
    counter = engine.spawn("killed", partial(make_counter, 5))
    assert counter.call(Counter.add, 2).result() == 7
    pid = counter.call(Counter.pid).result()
    hanging = counter.call(Counter.hang)
    os.kill(pid, signal.SIGKILL)
    assert counter.call(Counter.add, 1).result() == 6
    assert counter.call(Counter.pid).result() != pid
    with pytest.raises(ol.errors.WaitTimeoutError, match=r"role 'killed' did not answer 'hang' within 0\.5 s"):
        hanging.result(0.5)  # it was asked again, of the new one


def template_of(role: Handle[Counter]) -> psutil.Process:
    template = psutil.Process(role.call(Counter.pid).result()).parent()
    assert template is not None
    assert template.name() == "overlord-fork"
    return template


def test_a_call_that_is_not_to_be_repeated_ends_with_its_role_and_does_not_wait_for_the_next(engine: ol.Processes):
    counter = engine.spawn("once", partial(make_counter, 5))
    pid = counter.call(Counter.pid).result()
    hanging = engine.call_once("once", Counter.hang)
    assert engine.call_once("once", Counter.add, 1).result(60) == 6
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ol.errors.ClosedError, match="role 'once' was lost"):
        hanging.result(60)
    assert counter.call(Counter.add, 1).result() == 6, "another is made all the same"


def test_when_the_template_is_killed_its_processes_end_and_all_are_replaced():
    engine = open_engine()
    try:
        counters = [engine.spawn(f"lost/{i}", partial(make_counter, i)) for i in range(2)]
        before = [psutil.Process(counter.call(Counter.pid).result()) for counter in counters]
        template = template_of(counters[0])
        template.kill()
        assert psutil.wait_procs(before, timeout=20)[1] == []
        assert [counter.call(Counter.add, 1).result() for counter in counters] == [1, 2]
        assert template_of(counters[0]) == template_of(counters[1]) != template
    finally:
        engine.close()


def test_the_template_has_one_thread_so_that_forking_it_is_safe(engine: ol.Processes):
    assert template_of(engine.spawn("one-thread", partial(make_counter, 0))).num_threads() == 1


def test_a_worker_process_starts_in_the_folder_of_the_program_and_leaves_its_siblings_alone(
    engine: ol.Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = (engine.spawn(f"folder/{i}", partial(make_counter, i)) for i in range(2))
    monkeypatch.chdir(tmp_path)
    pid = first.call(Counter.pid).result()
    os.kill(pid, signal.SIGKILL)
    replaced = psutil.Process(first.call(Counter.pid).result())
    assert replaced.cwd() == str(tmp_path)
    targets = [_target(replaced.pid, each) for each in os.listdir(f"/proc/{replaced.pid}/fd")]
    assert "anon_inode:[pidfd]" not in targets
    assert second.call(Counter.add, 1).result() == 2


def _target(pid: int, descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except FileNotFoundError:  # closed meanwhile
        return ""


def test_roles_of_other_processes_ask_a_killed_role_again(engine: ol.Processes):
    counter = engine.spawn("asked", partial(make_counter, 5))
    asker = engine.spawn("asked-by", partial(make_asker, counter))
    assert asker.call(Asker.add, 1).result() == 6
    for _ in range(2):
        os.kill(counter.call(Counter.pid).result(), signal.SIGKILL)
        assert asker.call(Asker.add, 1).result() == 6


def test_a_name_can_mean_another_role_also_for_handles_elsewhere_and_for_asks_under_way(engine: ol.Processes):
    counter = engine.spawn("bound", partial(make_counter, 0))
    # Not where the counter is: roles of other tests would decide that.
    asker = engine.spawn("bound-by", partial(make_asker, counter), apart_from="bound")
    assert asker.call(Asker.add, 1).result() == 1
    stopped = counter.call(Counter.pid).result()
    pause(stopped)
    try:
        waiting = asker.call(Asker.add, 1)
        engine.spawn("bound/other", partial(make_counter, 100), apart_from="bound")
        engine.rebind("bound", "bound/other")
        assert waiting.result(20) == 101
        assert counter.call(Counter.add, 1).result(20) == 102
    finally:
        send(stopped, signal.SIGCONT)


def test_a_role_that_is_stopped_is_gone_and_another_can_have_its_name(engine: ol.Processes):
    counter = engine.spawn("stopped", partial(make_counter, 1))
    asker = engine.spawn("stopped-by", partial(make_asker, counter))
    assert asker.call(Asker.add, 1).result() == 2
    engine.stop("stopped")
    with pytest.raises(ol.errors.ClosedError, match="no role named 'stopped' is running"):
        asker.call(Asker.add, 1).result()
    engine.spawn("stopped", partial(make_counter, 10))
    assert asker.call(Asker.add, 1).result() == 11


def test_a_role_that_dies_whenever_it_is_asked_is_named_when_patience_ends():
    engine = open_engine(1, patience_s=1.0)
    try:
        counter = engine.spawn("counter", partial(make_counter, 0))
        with pytest.raises(
            ol.errors.WorkerDiedError, match=r"role 'counter' died and did not come back .*ended with exit code 1\."
        ):
            counter.call(Counter.die).result(60)
    finally:
        engine.close()


def test_errors_come_home_as_themselves_with_notes_and_where_they_were_raised(engine: ol.Processes):
    counter = engine.spawn("raising", partial(make_counter, 0))
    asker = engine.spawn("raising-by", partial(make_asker, counter))
    error = KeyError("gone")
    error.add_note("while looking for it")
    with pytest.raises(KeyError) as caught:
        asker.call(Asker.fail, error).result()
    assert caught.value.args == ("gone",)
    notes = caught.value.__notes__
    assert notes[0] == "while looking for it"
    assert len([note for note in notes if note.startswith("raised in role 'raising'")]) <= 1
    assert "raise error" in "\n".join(notes)


@pytest.mark.parametrize("error", [ConnectionResetError("by the peer"), TimeoutError("too late"), EOFError("no more")])
def test_an_error_of_a_role_is_not_taken_for_a_lost_process(engine: ol.Processes, error: Exception):
    counter = engine.spawn(f"{type(error).__name__}", partial(make_counter, 0))
    here = engine.spawn(f"planner/{type(error).__name__}", partial(make_counter, 0))
    for handle in (counter, here):
        with pytest.raises(type(error), match=str(error)):
            handle.call(Counter.fail, error).result(20)


def test_an_error_that_does_not_pickle_is_told_in_words(engine: ol.Processes):
    def make(workplace: object) -> Counter:
        class Odd(Counter):
            def add(self, amount: int) -> int:
                raise TwoPartError("this", "that")

        return Odd()

    with pytest.raises(ol.OverlordError, match="TwoPartError: this and that"):
        engine.spawn("odd", make).call(Counter.add, 1).result()


class Unpicklable(Counter):
    """Answers with an object that cannot travel."""

    def lock(self) -> object:
        return threading.Lock()


def test_an_answer_that_does_not_pickle_is_an_error_and_the_next_call_works(engine: ol.Processes):
    counter: Handle[Unpicklable] = engine.spawn("unpicklable", lambda workplace: Unpicklable(3))
    with pytest.raises(TypeError, match="pickle"):
        counter.call(Unpicklable.lock).result()
    assert counter.call(Unpicklable.add, 1).result() == 4


class Unsendable(Counter):
    def shared(self) -> list[SharedObject]:
        return [SharedObject.of(number) for number in range(65)]

    def refused(self) -> "Unsendable":
        return self

    def __reduce__(self) -> Any:
        raise OSError("the system refuses it")


@pytest.mark.parametrize(
    ("method", "message"),
    [(Unsendable.shared, "65 objects in shared memory; at most 64 fit"), (Unsendable.refused, "the system refuses it")],
)
def test_an_answer_that_the_system_cannot_send_is_an_error_and_not_the_death_of_its_role(
    engine: ol.Processes, method: Any, message: str, caplog: pytest.LogCaptureFixture
):
    counter: Handle[Unsendable] = engine.spawn(f"unsendable/{method.__name__}", lambda workplace: Unsendable(3))
    with pytest.raises((ol.errors.OverlordError, OSError), match=message):
        counter.call(method).result(30)
    assert counter.call(Unsendable.add, 1).result() == 4
    said = f"the answer of 'unsendable/{method.__name__}' to {method.__name__} cannot be sent"
    assert wait_until(lambda: any(said in line for line in caplog.messages), 10)  # it comes by a way of its own
    assert sum(said in line for line in caplog.messages) == 1


def test_an_error_in_making_a_role_is_raised_when_roles_have_started(engine: ol.Processes):
    engine.spawn("made", partial(make_counter, 0))
    engine.spawn("nothing", make_nothing)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        engine.wait_until_started()


def test_a_role_that_cannot_be_sent_is_named_when_roles_have_started(engine: ol.Processes):
    lock = threading.Lock()
    engine.spawn("unsendable", lambda workplace: Counter(int(lock.locked())))
    with pytest.raises(ol.errors.SpecError, match=r"role 'unsendable' cannot be sent to another process: .*lock"):
        engine.wait_until_started()


def exit_at_once(workplace: Workplace) -> Counter:
    os._exit(3)


def test_processes_that_die_while_they_make_a_role_are_an_error_that_says_how():
    engine = open_engine(1)
    try:
        engine.spawn("counter", exit_at_once)
        with pytest.raises(ol.errors.WorkerDiedError, match=r"before role 'counter' is made, 3 in a row, .* exit code 3"):
            engine.wait_until_started()
    finally:
        engine.close()


def test_large_arguments_and_answers_travel_and_are_found_again_after_a_kill(engine: ol.Processes):
    large, own = bytes(3 << 20), bytes(2 << 20)
    counter = engine.spawn("large", partial(make_length, large, {"own": own, "small": "abc"}))
    assert counter.call(Counter.add, 0).result() == (5 << 20) + 3
    os.kill(counter.call(Counter.pid).result(), signal.SIGKILL)
    assert counter.call(Counter.add, 0).result() == (5 << 20) + 3


def test_an_answer_that_nobody_read_is_not_taken_for_the_next(engine: ol.Processes):
    counter = engine.spawn("unread", partial(make_counter, 0))
    for _ in range(3):
        counter.call(Counter.add, 100)
    assert counter.call(Counter.pid).result() != os.getpid()
    first, second = counter.call(Counter.pid), counter.call(Counter.add, 0)
    assert isinstance(second.result(), int)
    assert second.result() == second.result()
    assert first.result() == counter.call(Counter.pid).result()


class Listening(Counter):
    """Says when it was told something."""

    def __init__(self) -> None:
        super().__init__()
        self._told = threading.Event()

    def hear(self) -> None:
        self._told.set()

    def wait(self) -> bool:
        return self._told.wait(20)


@pytest.mark.parametrize("name", ["told", "planner/told"])
def test_a_role_can_be_told_without_waiting_and_errors_are_nobodys(engine: ol.Processes, name: str):
    role: Handle[Listening] = engine.spawn(name, lambda workplace: Listening())
    engine.wait_until_started([name])  # a role that is not made yet hears nothing
    role.tell(Counter.fail, KeyError("nobody waits"))
    role.tell(Listening.hear)
    assert role.call(Listening.wait).result(20)
    engine.stop(name)
    role.tell(Listening.hear)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(60)


class Stuck(Counter):
    """Can hold the GIL in native code for a minute."""

    def stick(self) -> None:
        hold_the_gil()


@pytest.mark.parametrize("way", ["stopped", "GIL"])
def test_a_process_that_hangs_is_killed_and_replaced(way: str, caplog: pytest.LogCaptureFixture):
    engine = open_engine(1, hung_after_s=1.0)
    try:
        counter: Handle[Stuck] = engine.spawn("counter", lambda workplace: Stuck(5))
        pid = counter.call(Counter.pid).result()
        if way == "stopped":
            pause(pid)
        else:
            counter.tell(Stuck.stick)
        while counter.call(Counter.pid).result(60) == pid:
            pass  # it may answer a few times before it hangs
        assert counter.call(Counter.add, 1).result() == 6
        assert "(counter) ended with no answer for" in caplog.text
    finally:
        engine.close()


def test_a_busy_process_is_not_taken_for_a_hung_one():
    engine = open_engine(1, hung_after_s=0.5)
    try:
        counter = engine.spawn("counter", partial(make_counter, 0))
        pid = counter.call(Counter.pid).result()
        with pytest.raises(ol.errors.WaitTimeoutError):
            counter.call(Counter.hang).result(2)
        assert counter.call(Counter.pid).result() == pid
    finally:
        engine.close()


def test_closing_wakes_an_ask_that_waits_and_leaves_no_process():
    engine = open_engine()
    counters = [engine.spawn(f"counter/{i}", partial(make_counter, 0)) for i in range(2)]
    processes = [psutil.Process(counter.call(Counter.pid).result()) for counter in counters]
    hanging = counters[0].call(Counter.hang)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            hanging.result()
        except ol.errors.ClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    engine.close()
    assert [process for process in processes if process.is_running()] == []
    waiting.join(20)
    assert len(raised) == 1
    with pytest.raises(ol.errors.ClosedError):
        counters[0].call(Counter.pid).result()
    with pytest.raises(ol.errors.ClosedError):
        engine.spawn("late", partial(make_counter, 0))


class Warning_(Counter):
    """Logs a warning."""

    def warn(self) -> None:
        logging.getLogger("overlord.waiting").warning("source %r is slow", "web")


def test_warnings_of_processes_reach_the_loggers_of_this_one(engine: ol.Processes, caplog: pytest.LogCaptureFixture):
    role: Handle[Warning_] = engine.spawn("warning", lambda workplace: Warning_())
    role.call(Warning_.warn).result()
    deadline = time.monotonic() + 20
    while "is slow" not in caplog.text and time.monotonic() < deadline:  # records come over a connection of their own
        time.sleep(0.01)
    assert [r.name for r in caplog.records if r.getMessage().endswith("source 'web' is slow")] == ["overlord.waiting"]
    assert "(worker process " in caplog.text


def test_a_forked_process_cannot_use_the_engine_of_its_parent(engine: ol.Processes):
    counter = engine.spawn("forked", partial(make_counter, 0))
    assert counter.call(Counter.add, 1).result() == 1
    child = os.fork()
    if child == 0:
        try:
            counter.call(Counter.add, 1).result()
        except ol.errors.SharedUseError:
            engine.close()  # does nothing
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert counter.call(Counter.add, 1).result() == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ol.Processes(0), "num_processes must be at least 1, got 0"),
        (lambda: ol.Processes(patience_s=0), "patience_s is a positive number of seconds, got 0"),
        (lambda: ol.Processes(hung_after_s=-1), "hung_after_s is a positive number of seconds or None, got -1"),
        (
            lambda: ol.start(
                job_of({"a": Numbered()}), engine=ol.Processes(1), shadows=ol.scaling.Budget(cpus=1, memory_bytes=1 << 20)
            ),
            "a shadow and its loader must be in different processes, and this engine has one",
        ),
    ],
)
def test_a_wrong_option_is_refused_and_says_why(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "held", "chosen"),
    [
        ("loaders/0", [[], [], []], 0),
        ("loaders/1", [["loaders/0"], [], []], 1),
        ("constructor/0", [["loaders/0"], ["loaders/1"], []], 2),
        ("constructor/1", [["loaders/0"], ["loaders/1"], ["constructor/0"]], 0),
        ("loaders/9", [["loaders/0"], ["loaders/1"], ["constructor/0", "constructor/1"]], 2),
    ],
)
def test_a_role_goes_where_the_fewest_of_its_kind_are(name: str, held: list[list[str]], chosen: int):
    assert choose_process(name, held) == chosen


@given(st.integers(1, 256), st.integers(1, 512))
def test_a_layout_leaves_cores_to_trainers_and_does_not_grow_with_them_for_ever(num_processes: int, num_groups: int):
    found = lay_out(num_processes, num_groups)
    assert found.hosts >= 1
    assert found.constructors >= 1
    assert sum(found) <= max(2, math.ceil(5 / 8 * num_processes))
    assert found.hosts <= num_groups
    assert found.constructors <= num_groups
    assert sum(found) <= sum(lay_out(num_processes, num_groups + 1)) <= sum(lay_out(num_processes, 10**6))


@pytest.mark.parametrize(
    ("num_processes", "num_groups", "layout"),
    [(16, 4, (3, 2)), (16, 8, (6, 4)), (16, 64, (6, 4)), (128, 8, (6, 4)), (4, 4, (2, 1)), (2, 4, (1, 1)), (1, 8, (1, 1))],
)
def test_layouts(num_processes: int, num_groups: int, layout: tuple[int, int]):
    assert lay_out(num_processes, num_groups) == layout


def tokens_of(folder: Path, num_sources: int) -> dict[str, ol.Parquet]:
    """Sources that take no work beside reading."""
    for i in range(num_sources):
        rows = [[i * 1000 + place for place in range(5 + row % 7)] for row in range(40)]
        pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), folder / f"{i}.parquet")
    return {f"source {i}": ol.Parquet(folder / f"{i}.parquet") for i in range(num_sources)}


@pytest.mark.parametrize(
    ("are_here", "described"), [(True, "4 worker processes on {}: 3 loader hosts, "), (False, "6 worker processes on {}: ")]
)
def test_constructors_share_processes_where_trainers_of_this_machine_build_their_batches(tmp_path, are_here, described):
    job = job_of(tokens_of(tmp_path, 8), mesh=ol.Mesh(dp=4))
    engine = ol.Processes(6)
    engine.expect_trainers([node_names() if are_here or group else ("elsewhere",) for group in range(4)])
    with ol.start(job, engine=engine) as loader:
        assert str(engine).startswith(described.format(f"{num_usable_cores()} cores"))
        assert str(engine).endswith("4 data constructors")
        address = loader.serve()
        with ExitStack() as stack:
            clients = [stack.enter_context(ol.connect(address, rank=rank, timeout_s=60)) for rank in range(4)]
            assert streams(clients, 4) == undisturbed(job, 4)


def test_a_killed_process_of_several_constructors_or_loaders_changes_no_step_of_any_trainer(tmp_path):
    job = job_of(tokens_of(tmp_path, 8), mesh=ol.Mesh(dp=4))
    engine = ol.Processes(6)
    engine.expect_trainers([node_names()] * 4)
    found: list[list[tuple]] = [[] for _ in range(4)]
    with ol.start(job, engine=engine) as loader:
        address = loader.serve()
        victims = {role: engine._roles[role][1] for role in ("constructor/0", "loaders/1")}
        assert len({engine._roles[f"constructor/{group}"][1] for group in range(4)}) == 1
        with ExitStack() as stack:
            clients = [stack.enter_context(ol.connect(address, rank=rank, timeout_s=60)) for rank in range(4)]
            for number in range(24):
                victim = victims["loaders/1"] if number % 12 == 9 else victims["constructor/0"] if number % 12 == 4 else None
                if victim is not None:
                    wait_until(lambda victim=victim: victim.pid is not None, timeout_s=30)
                    send(cast("int", victim.pid), signal.SIGKILL)
                for client, steps in zip(clients, found, strict=True):
                    steps.append(content(next(client)))
    assert found == undisturbed(job, 24)


def test_a_run_that_is_moved_keeps_its_constructors_in_few_processes(tmp_path):
    engine = ol.Processes(6)
    engine.expect_trainers([node_names()] * 2)
    with ol.start(job_of(tokens_of(tmp_path, 8), mesh=ol.Mesh(dp=2)), engine=engine) as loader:
        assert str(engine).endswith("2 loader hosts, 2 data constructors")
        loader.resize(ol.Mesh(dp=6))
        assert str(engine).startswith("3 worker processes")
        assert str(engine).endswith("6 data constructors")
        with ExitStack() as stack:
            clients = [stack.enter_context(loader.client(rank, timeout_s=60)) for rank in range(6)]
            assert [next(client).number for client in clients] == [0] * 6


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 10**9),
        ({"cpu.max": "max 100000"}, 10**9),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 10**9),
        ({"cpu/cpu.cfs_quota_us": "90000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.max": "nonsense"}, 10**9),
    ],
)
def test_a_container_gets_no_more_processes_than_it_has_cpu_time_for(files: dict[str, str], most: int, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_usable_cores(tmp_path) == min(len(os.sched_getaffinity(0)), most)


SCRIPT = """
import overlord as ol
from tests.small_sources import Numbered, job_of

job = job_of({"a": Numbered(first=1)}, num_workers=1)
with ol.start(job, engine=ol.Processes(2)) as loader:
    for step in loader.client(0, timeout_s=60):
        print("step", step.number, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_program_that_is_ended_leaves_no_process_behind(number: signal.Signals):
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=os.getcwd(),
    )
    try:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == "step 0\n"
        family = psutil.Process(program.pid).children(recursive=True)
        assert len(family) == 3, "two worker processes, and the template that they were forked from"
        if number == signal.SIGINT:
            os.killpg(program.pid, number)  # as a terminal does
        else:
            os.kill(program.pid, number)
        program.stdout.close()
        program.wait(30)
        _, left = psutil.wait_procs(family, timeout=20)
        assert left == []
        if number == signal.SIGINT:
            said = program.stderr.read()
            errors_told = said.count("Traceback") - said.count("During handling of the above exception")
            assert errors_told == 1, said
            assert "worker process" not in said, "Ctrl-C reaches only the parent"
    finally:
        program.kill()
        program.wait()
        assert program.stderr is not None
        program.stderr.close()
