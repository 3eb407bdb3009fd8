"""The Ray engine by itself: names that outlive actors, errors that come home, and nothing left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter as Counters
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pyarrow as pa
import pytest

import overlord as ol
from overlord.runtime.engine import WorkplaceSize
from overlord.service.client import Client
from overlord.service.constructor import ServingConstructor
from tests.commands import python
from tests.faults.disturbance import pause, send
from tests.runtime.roles import (
    Asker,
    Counter,
    Neighbour,
    Probe,
    make_asker,
    make_counter,
    make_length,
    make_neighbour,
    make_nothing,
    make_probe,
)
from tests.small_sources import Numbered, job_of

pytestmark = pytest.mark.usefixtures("ray_cluster")
SMALL = ol.scaling.ActorOptions(max_concurrency=4)


class TwoPartError(Exception):
    """Does not pickle: its pickled form calls it with one argument."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


@pytest.fixture
def engine() -> Iterator[ol.Ray]:
    engine = ol.Ray("auto", others=SMALL, patience_s=20)
    engine.open(WorkplaceSize(1, 1))
    yield engine
    engine.close()


@pytest.mark.second_try(reason="Ray must replace a killed actor within 20 s")
def test_a_killed_role_is_made_anew_and_answers_under_its_name(engine: ol.Ray):
    counter = engine.spawn("counter", partial(make_counter, 5))
    assert counter.call(Counter.add, 2).result() == 7
    pid = counter.call(Counter.pid).result()
    hanging = counter.call(Counter.hang)
    os.kill(pid, signal.SIGKILL)
    assert counter.call(Counter.add, 1).result() == 6
    assert counter.call(Counter.pid).result() != pid
    with pytest.raises(ol.errors.WaitTimeoutError, match=r"role 'counter' did not answer 'hang' within 0\.5 s"):
        hanging.result(0.5)  # it was asked again, of the new one


@pytest.mark.second_try(reason="Ray must replace a killed actor within 20 s")
def test_a_call_that_is_not_to_be_repeated_ends_with_its_role_and_does_not_wait_for_the_next(engine: ol.Ray):
    counter = engine.spawn("counter", partial(make_counter, 5))
    pid = counter.call(Counter.pid).result()
    hanging = engine.call_once("counter", Counter.hang)
    assert engine.call_once("counter", Counter.add, 1).result(60) == 6
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ol.errors.ClosedError, match="role 'counter' is not on this node, or was lost"):
        hanging.result(60)
    assert counter.call(Counter.add, 1).result() == 6, "another is made all the same"


@pytest.mark.second_try(reason="Ray must start an actor within 20 s")
def test_a_name_can_mean_another_role_also_for_handles_inside_actors_and_for_asks_under_way(engine: ol.Ray):
    counter = engine.spawn("counter", partial(make_counter, 0))
    asker = engine.spawn("asker", partial(make_asker, counter))
    assert asker.call(Asker.add, 1).result() == 1
    stopped = counter.call(Counter.pid).result()
    pause(stopped)
    try:
        waiting = asker.call(Asker.add, 1)
        engine.spawn("counter/shadow", partial(make_counter, 100))
        engine.rebind("counter", "counter/shadow")
        assert waiting.result(20) == 101
        assert counter.call(Counter.add, 1).result(20) == 102
    finally:
        send(stopped, signal.SIGCONT)


def test_relative_paths_begin_where_the_run_was_started(engine: ol.Ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert engine.spawn("probe", make_probe).call(Probe.folder).result() == str(tmp_path)
    other = tmp_path / "removed"
    other.mkdir()
    monkeypatch.chdir(other)
    other.rmdir()
    assert engine.spawn("another probe", make_probe).call(Probe.folder).result() != str(other)


def test_a_role_that_dies_whenever_it_is_asked_is_named_when_patience_ends(ray_cluster: None):
    engine = ol.Ray("auto", others=SMALL, patience_s=1.5)
    engine.open(WorkplaceSize(1, 1))
    try:
        counter = engine.spawn("counter", partial(make_counter, 0))
        with pytest.raises(ol.errors.WorkerDiedError, match="role 'counter' died and did not come back"):
            counter.call(Counter.die).result(30)
    finally:
        engine.close()


def test_errors_come_home_as_themselves_with_notes_and_where_they_were_raised(engine: ol.Ray):
    counter = engine.spawn("counter", partial(make_counter, 0))
    asker = engine.spawn("asker", partial(make_asker, counter))
    error = KeyError("gone")
    error.add_note("while looking for it")
    with pytest.raises(KeyError) as caught:
        asker.call(Asker.fail, error).result()
    assert caught.value.args == ("gone",)
    notes = caught.value.__notes__
    assert notes[0] == "while looking for it"
    raised = [note for note in notes if note.startswith("raised in role 'counter'")]
    assert len(raised) == 1
    assert "raise error" in raised[0]


def test_an_error_that_does_not_pickle_is_told_in_words(engine: ol.Ray):
    def make(workplace: object) -> Counter:
        class Odd(Counter):
            def add(self, amount: int) -> int:
                raise TwoPartError("this", "that")

        return Odd()

    with pytest.raises(ol.OverlordError, match="TwoPartError: this and that"):
        engine.spawn("odd", make).call(Counter.add, 1).result()


def test_an_error_in_making_a_role_is_raised_when_roles_have_started(engine: ol.Ray):
    engine.spawn("counter", partial(make_counter, 0))
    engine.spawn("nothing", make_nothing)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        engine.wait_until_started()


def test_a_role_that_no_node_has_room_for_is_named_with_what_it_needs(ray_cluster: None):
    engine = ol.Ray("auto", loaders=ol.scaling.ActorOptions(num_cpus=1000), loader_hosts=1, patience_s=1)
    with pytest.raises(
        ol.errors.WaitTimeoutError, match=r"role 'loaders/0' did not start .* needs num_cpus=1000, and the cluster"
    ):
        ol.start(job_of({"a": Numbered(first=1)}), engine=engine)


@pytest.mark.second_try(reason="Ray must replace a killed actor within 20 s")
def test_large_arguments_of_several_roles_are_stored_once_and_found_again_after_a_kill(engine: ol.Ray):
    large, own = bytes(3 << 20), bytes(2 << 20)
    counters = [engine.spawn(f"length/{i}", partial(make_length, large, {"own": own, "small": "abc"})) for i in range(2)]
    assert engine._calls.num_stored == 2 + len(counters)
    assert [counter.call(Counter.add, 0).result() for counter in counters] == [(5 << 20) + 3] * 2
    os.kill(counters[0].call(Counter.pid).result(), signal.SIGKILL)
    assert counters[0].call(Counter.add, 0).result() == (5 << 20) + 3


def test_closing_wakes_an_ask_that_waits(engine: ol.Ray):
    counter = engine.spawn("counter", partial(make_counter, 0))
    engine.wait_until_started()
    hanging = counter.call(Counter.hang)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            hanging.result()
        except ol.errors.ClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    engine.close()
    waiting.join(20)
    assert len(raised) == 1
    with pytest.raises(ol.errors.ClosedError):
        counter.call(Counter.pid).result()


def test_many_small_sources_share_a_few_loader_hosts(ray_cluster: None):
    sources = {f"s{i:02}": Numbered(rows=10, first=1 + 10 * i, loaders=3 if i == 0 else 1) for i in range(20)}
    with ol.start(job_of(sources), engine=ol.Ray("auto", loader_hosts=3)) as loader:
        next(loader.client(0, timeout_s=60))
        assert len(loader._roles.fleet.hosts) == 3
        assert list(loader.report().buffers) == list(sources)


def shared_bytes(process: int) -> int:
    """The bytes of memory shared with other processes of the run that a process maps."""
    lines = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "memfd:overlord" in line]
    ends = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    return sum(end - begin for begin, end in ends)


def test_memory_that_roles_share_stays_bounded_however_long_a_run_is(ray_cluster: None):
    source = Numbered(rows=64, unit_rows=64, first=1, longest=900)
    batch = ol.Batch(tokens=131_072, sequence_length=65_536, micro_tokens=131_072)
    with ol.start(job_of({"a": source}, batch), engine=ol.Ray("auto", loader_hosts=1)) as loader:
        client = loader.client(0, timeout_s=60)
        step_bytes = sum(field.nbytes for micro in next(client) for field in micro.values() if isinstance(field, np.ndarray))
        assert step_bytes > 1 << 20
        builder, _ = loader._roles.constructors[0].call(ServingConstructor.store_use).result()
        here, there, stored = [], [], []
        for _ in range(40):
            step = next(client)  # held while it is looked at
            use = loader.report().store
            assert use is not None
            stored.append(use.num_bytes)
            here.append(shared_bytes(os.getpid()))
            there.append(shared_bytes(builder))
            del step
    assert max(stored) < 8 * step_bytes
    assert step_bytes <= max(here) < 8 * step_bytes
    assert 0 < max(there) < 16 * step_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ol.Ray(loader_hosts=0), "loader_hosts must be at least 1, got 0"),
        (lambda: ol.Ray(patience_s=0), "patience_s is a positive number"),
        (lambda: ol.Ray(hung_after_s=0), "hung_after_s is a positive number of seconds or None, got 0"),
        (lambda: ol.scaling.ActorOptions(num_cpus=-1), "num_cpus cannot be negative, got -1"),
        (lambda: cast("Any", ol.scaling.ActorOptions)(placement="near"), "placement is spread, here or any, not 'near'"),
        (lambda: ol.start(job_of({"a": Numbered()}), engine=ol.Ray("10.1.1.1:6379")), "is connected to the Ray cluster at"),
        (lambda: ol.start(job_of({"a": Numbered()}), engine=ol.Ray("auto", near=["nowhere"])), "the node 'nowhere', but"),
    ],
)
def test_a_wrong_option_is_refused_and_says_why(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()


SCRIPT = """
import overlord as ol
from tests.small_sources import Numbered, job_of

job = job_of({"a": Numbered(first=1)}, num_workers=1)
with ol.start(job, engine=ol.Ray(num_cpus=2, object_store_bytes=80 << 20, loader_hosts=1)) as loader:
    for step in loader.client(0, timeout_s=60):
        print("step", step.number, flush=True)
"""


@pytest.mark.second_try(reason="all processes of a Ray cluster must end within 20 s")
def test_an_interrupted_program_leaves_no_process_behind_and_listens_on_loopback_only():
    with tempfile.TemporaryDirectory(prefix="ol", dir="/tmp") as folder:  # sockets have short paths
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        program = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, "RAY_TMPDIR": folder},
            start_new_session=True,
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "step 0\n"
            family = psutil.Process(program.pid).children(recursive=True)
            assert len(family) > 3
            listeners = {
                connection.laddr.ip
                for process in [psutil.Process(program.pid), *family]
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
            assert {address.removeprefix("::ffff:") for address in listeners} <= {"127.0.0.1", "::1"}
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does
            program.stdout.close()
            program.wait(30)
            _, left = psutil.wait_procs(family, timeout=20)
            assert left == []
        finally:
            program.kill()
            program.wait()


IMPORTED_BEFORE = """
import os
del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # of these tests
import ray  # before Overlord can say anything about it
import psutil
import overlord as ol
from tests.small_sources import Numbered, job_of

engine = ol.Ray(num_cpus=2, object_store_bytes=100 << 20, loader_hosts=1)
with ol.start(job_of({"a": Numbered(first=1)}), engine=engine) as loader:
    next(loader.client(0, timeout_s=60))
    here = psutil.Process()
    listening = [
        (process.name(), connection.laddr)
        for process in [here, *here.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
print(listening)
"""


@pytest.mark.strangers
def test_a_cluster_of_our_own_listens_on_loopback_also_where_ray_was_imported_before():
    run = python("-c", IMPORTED_BEFORE)
    assert run.stdout.splitlines()[-1] == "[]"


@dataclass(frozen=True)
class AfterFile(Numbered):
    """Its reads wait until a file is there."""

    gate: str = ""

    def read(self, unit: ol.Unit) -> pa.Table:
        while not Path(self.gate).exists():
            time.sleep(0.01)
        return super().read(unit)


@pytest.mark.strangers
def test_how_a_run_stands_is_told_while_a_source_hangs_and_a_client_says_what_it_waits_for(tmp_path, caplog):
    source = AfterFile(rows=40, first=1, gate=str(tmp_path / "gate"))
    with ol.start(job_of({"slow": source}), engine=ol.Ray("auto", loader_hosts=1)) as loader:
        client = Client(0, loader.client(0)._channel, warn_after_s=0.2)
        reader = threading.Thread(target=next, args=(client,))
        reader.start()
        while "rank 0 waits for step 0" not in caplog.text or "source 'slow'" not in caplog.text:
            assert reader.is_alive()
        report = loader.report()
        assert (report.step, report.mix["slow"].samples, loader.status().reached) == (0, 0, 0)
        assert reader.is_alive(), "and all that while the source hung"
        (tmp_path / "gate").touch()
        reader.join(60)
        assert client.step == 1


def test_a_role_whose_name_means_another_answers_no_more_also_where_callers_remember_it(engine: ol.Ray):
    counter = engine.spawn("counter", partial(make_counter, 0))
    asker = engine.spawn("asker", partial(make_asker, counter))
    for number in range(1, 6):
        assert asker.call(Asker.add, 1).result(60) == 1000 * (number - 1) + 1
        engine.spawn("counter/new", partial(make_counter, 1000 * number))
        engine.wait_until_started()
        engine.rebind("counter", "counter/new")


@pytest.mark.parametrize(("num_groups", "num_processes", "num_decoders"), [(1, 1, 4), (2, 2, 2), (8, 4, 1)])
def test_the_constructors_of_a_node_have_a_process_for_each_of_its_cores_and_share_all_of_them(
    engine: ol.Ray, num_groups: int, num_processes: int, num_decoders: int
):
    engine.expect_groups(num_groups, are_light=False)
    roles = [engine.spawn(f"constructor/{group}", make_neighbour) for group in range(num_groups)]
    found = [role.call(Neighbour.describe, num_groups).result(60) for role in roles]
    in_process = Counters(process for process, _ in found)
    assert len(in_process) == num_processes
    assert set(in_process.values()) == {num_groups // num_processes}, "as many in each"
    assert {decoders for _, decoders in found} == {num_decoders}
    engine.stop("constructor/0")
    again = engine.spawn("constructor/0", make_neighbour).call(Neighbour.describe, num_groups).result(60)[0]
    others = {process for process, _ in found[1:]}
    assert again in others or num_groups <= num_processes, "no process more than there are cores"
