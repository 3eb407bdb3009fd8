"""A client belongs to one process, and to one thread at a time: whoever else calls it is told so, and takes nothing."""

import threading

import pytest

import overlord as ol
from tests.commands import python
from tests.service.test_client import Gated
from tests.small_sources import Numbered, job_of

pytestmark = pytest.mark.strangers

FORKED = """
import os, sys
import overlord as ol
from tests.service.served import two_sources

loader = ol.start(two_sources(mesh=ol.Mesh(dp=2)), log=sys.argv[1])
address = loader.serve()
here, there = loader.client(0, timeout_s=20, fetch_ahead=2), ol.connect(address, rank=1, timeout_s=20)
assert next(here).number == next(there).number == 0
calls = {
    "next": lambda: next(here), "iter": lambda: iter(here), "state_dict": here.state_dict,
    "feedback": lambda: here.feedback(seconds=1.0), "rejoin": here.rejoin,
    "next, connected": lambda: next(there), "state_dict, connected": there.state_dict,
    "load_state_dict, connected": lambda: there.load_state_dict({}),
    "plan": lambda: loader.plan(0), "report": loader.report, "client": lambda: loader.client(0),
    "status": loader.status, "serve": loader.serve,
}
child = os.fork()
if child == 0:
    for name, call in calls.items():
        try:
            call()
        except ol.errors.SharedUseError as error:
            assert f"{os.getppid()}" in str(error) and f"{os.getpid()}" in str(error), error
        else:
            raise AssertionError(name)
    here.close(), there.close(), loader.close()  # close nothing, and raise nothing
    sys.exit(7)  # through all that happens at the end of a program
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
assert [(next(here).number, next(there).number) for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]
loader.close()
print("the parent went on")
"""


def test_a_forked_process_is_told_and_its_parent_goes_on(tmp_path):
    assert python("-c", FORKED, tmp_path / "log").stdout == "the parent went on\n"


WORKERS = """
import sys
import overlord as ol, torch
from tests.small_sources import Numbered, job_of

class Steps(torch.utils.data.IterableDataset):
    def __init__(self, client):
        self.client = client
    def __iter__(self):
        return (step.number for step in self.client)

with ol.start(job_of({"a": Numbered(first=1)})) as loader:
    try:
        next(iter(torch.utils.data.DataLoader(Steps(loader.client(0)), num_workers=2, multiprocessing_context="fork")))
    except ol.errors.SharedUseError as error:
        print("num_workers=0" in str(error), "which was forked from it" in str(error))
"""


def test_workers_of_a_data_loader_are_told_to_leave_it_to_the_main_process():
    pytest.importorskip("torch")
    assert python("-c", WORKERS).stdout == "True True\n"


@pytest.mark.parametrize("served", [False, True], ids=["in process", "connected"])
def test_no_step_is_handed_to_two_threads(served):
    source = Gated(rows=40, first=1)
    with ol.start(job_of({"slow": source})) as loader:
        client = ol.connect(loader.serve(), rank=0, timeout_s=30) if served else loader.client(0, timeout_s=30)
        taken: list[int] = []
        reader = threading.Thread(target=lambda: taken.append(next(client).number), name="reader")
        reader.start()
        while client._turn.user != reader.ident:
            pass
        for call in (lambda: next(client), lambda: iter(client), client.rejoin):
            with pytest.raises(
                ol.errors.SharedUseError, match=r"rank 0 is in use in thread 'reader' and was called in thread 'Main"
            ):
                call()
        source.gate.set()
        reader.join(30)
        taken += [next(client).number for _ in range(3)]
        assert taken == [0, 1, 2, 3]


def test_a_client_may_be_handed_to_another_thread_and_threads_may_take_turns():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        client = loader.client(0, timeout_s=30)
        turn, taken = threading.Condition(), []

        def read(parity: int) -> None:
            for _ in range(5):
                with turn:
                    turn.wait_for(lambda: len(taken) % 2 == parity)
                    taken.append(next(client).number)
                    turn.notify_all()

        threads = [threading.Thread(target=read, args=(parity,)) for parity in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert taken == list(range(10))


def test_an_error_leaves_the_client_to_the_next_caller():
    source = Gated(rows=40, first=1)
    with ol.start(job_of({"slow": source})) as loader:
        client = loader.client(0, timeout_s=0.2)
        with pytest.raises(ol.errors.WaitTimeoutError):
            next(client)
        source.gate.set()
        client._timeout_s = 30.0
        assert next(client).number == 0
