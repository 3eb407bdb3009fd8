"""Takes without a message: the service knows exactly what trainers have taken, whenever it matters."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest

import overlord as ol
from overlord.messages import Delivery, Later
from overlord.runtime.engine import Engine
from overlord.runtime.shared_memory import Listener, SharedSegment, connect_to
from overlord.service import taking
from overlord.service.channel import FlightChannel
from overlord.service.constructor import ServingConstructor
from overlord.service.local_channel import LocalChannel
from overlord.service.local_link import LocalLink, TakePage
from overlord.service.local_steps import TAKEN, TRYING
from overlord.service.server import Service
from overlord.service.taking import TakeBoard, TakenStep
from tests.service.served import content, served, two_sources, undisturbed
from tests.service.test_prefetch import fetch_ahead, wait_until
from tests.service.test_serve import environment

SESSION = "session0"


class Shared:
    """A page, with a board on one side and a trainer on the other."""

    def __init__(self) -> None:
        self.noted: list[TakenStep] = []
        self.board = TakeBoard(self.noted.append)
        self.shared = self.board.add(0, SESSION)
        listener = Listener()
        self.connection = connect_to(listener.address)
        self.server = listener.accept()
        listener.close()
        self.page = TakePage(self.shared.segment, self.connection)

    def open(self) -> None:
        self.board.open(0, SESSION, 0, self.board.epoch)


def num_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are taken by a message from now on."""
    asked: list[int] = []
    take = Service.take

    def count(self: Service, request: Any) -> Any:
        asked.append(request.step)
        return take(self, request)

    monkeypatch.setattr(Service, "take", count)
    return asked


# The page


def test_a_step_is_taken_only_on_an_open_page_and_noted_once():
    shared = Shared()
    assert not shared.page.take(1, 0.0)
    shared.open()
    assert shared.page.take(2, 0.5)
    shared.board.follow(0, SESSION)
    shared.board.follow_all()
    assert shared.noted == [TakenStep(0, SESSION, 0, 2, 0.5)]
    assert not shared.board.pause()
    assert not shared.page.take(3, 0.0)
    shared.open()
    assert not shared.page.take(3, 0.0), "the board is paused"
    shared.board.resume()
    assert not shared.page.take(3, 0.0), "a client that was stopped asks first"
    shared.open()
    assert shared.page.take(2, 0.0), "again, after a rewind"
    shared.board.follow_all()
    assert [taken.step for taken in shared.noted] == [2, 2]


def test_a_request_that_began_before_a_pause_does_not_open_the_page():
    shared = Shared()
    epoch = shared.board.epoch
    shared.board.pause()
    shared.board.resume()
    shared.board.open(0, SESSION, 0, epoch)
    assert not shared.page.take(1, 0.0)


def test_what_a_client_took_last_is_noted_when_its_connection_ends():
    shared = Shared()
    shared.open()
    assert shared.page.take(7, 0.0)
    shared.board.drop(shared.shared)
    assert [taken.step for taken in shared.noted] == [7]
    assert not shared.page.take(8, 0.0)


def test_without_its_service_nothing_is_taken():
    shared = Shared()
    shared.open()
    shared.server.close()
    assert not shared.page.take(1, 0.0)


def test_a_trainer_that_is_stopped_in_a_take_is_told_of(monkeypatch):
    monkeypatch.setattr(taking, "_DECIDE_S", 0.05)
    shared = Shared()
    shared.open()
    shared.shared.words[TRYING] = 1
    assert shared.board.pause() == [shared.shared]


def test_after_a_pause_everything_that_was_taken_is_known():
    shared = Shared()
    taken, is_done = [0], threading.Event()

    def take() -> None:
        while not is_done.is_set():
            if shared.page.take(taken[0], 0.0):
                taken[0] += 1

    thread = threading.Thread(target=take)
    thread.start()
    try:
        for _ in range(200):
            shared.open()
            threading.Event().wait(0.0005)
            assert not shared.board.pause()
            known = shared.noted[-1].step + 1 if shared.noted else 0
            threading.Event().wait(0.0005)
            assert known == taken[0]
            shared.board.resume()
    finally:
        is_done.set()
        thread.join()
    assert taken[0] > 0


# Clients and their service


def test_steps_that_were_fetched_ahead_are_taken_without_a_message_by_default(monkeypatch):
    asked = num_messages(monkeypatch)
    with served(two_sources()) as (loader, address):
        client = ol.connect(address, rank=0, timeout_s=30)
        found = []
        for step in islice(client, 12):
            found.append(content(step))
            fetch_ahead(client, 2)
            assert loader.state_dict()["step"] == client.step == step.number + 1
        assert asked == [1], "the first, which opens the page"
        client.close()
    assert found == undisturbed(two_sources(), 12)[0]


def test_without_memory_for_a_page_steps_are_taken_by_messages(monkeypatch):
    asked = num_messages(monkeypatch)
    make = SharedSegment.create

    def refuse(num_bytes: int) -> SharedSegment:
        if num_bytes == taking._PAGE_BYTES:
            raise OSError("none left")
        return make(num_bytes)

    with served(two_sources()) as (_, address):
        monkeypatch.setattr(SharedSegment, "create", refuse)
        client = ol.connect(address, rank=0, timeout_s=30)
        found = [content(step) for step in islice(client, 5)]
        assert client._ahead is None, "fetching ahead would save nothing"
        client.close()
        client = ol.connect(address, rank=0, timeout_s=30, fetch_ahead=2)
        found += [content(step) for step in islice(client, 5)]
        assert isinstance(client._channel, FlightChannel)
        assert isinstance(client._channel._steps, LocalLink)
        assert asked
        client.close()
    assert found == 2 * undisturbed(two_sources(), 5)[0]


def test_a_client_whose_place_was_taken_takes_no_step_that_it_has_fetched():
    with served(two_sources()) as (_, address):
        old = ol.connect(address, rank=0, timeout_s=30)
        assert [next(old).number for _ in range(4)] == [0, 1, 2, 3]
        fetch_ahead(old, 2)
        new = ol.connect(address, rank=0, timeout_s=30)
        new.rejoin(at=4)
        assert next(new).number == 4
        with pytest.raises(ol.errors.ClosedError, match="another client has taken the place"):
            next(old)
        assert [next(new).number for _ in range(4)] == [5, 6, 7, 8]
        old.close()
        new.close()


def test_a_client_takes_no_step_of_the_state_before():
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=30) for rank in range(2)]
        state = clients[0].state_dict()
        for client in clients:
            assert [next(client).number for _ in range(4)] == [0, 1, 2, 3]
        for client in clients:
            fetch_ahead(client, 2)
        clients[0].load_state_dict(state)
        with pytest.raises(ol.errors.ClosedError, match="the run was moved to another state"):
            next(clients[1])
        clients[1].load_state_dict(state)
        for client in clients:
            assert [next(client).number for _ in range(4)] == [0, 1, 2, 3]
            client.close()


def test_a_mesh_does_not_change_while_it_is_not_known_whether_a_step_is_taken(monkeypatch):
    monkeypatch.setattr(taking, "_DECIDE_S", 0.05)
    with served(two_sources()) as (loader, address):
        client = ol.connect(address, rank=0, timeout_s=30)
        assert [next(client).number for _ in range(3)] == [0, 1, 2]
        assert isinstance(client._channel, FlightChannel)
        page: Any = client._channel._steps
        words = page._page._words
        words[TRYING] += 1
        with pytest.raises(ol.errors.WaitTimeoutError, match="rank 0 does not say whether it takes its step"):
            loader.resize(ol.Mesh(dp=1))
        words[TRYING] = words[TAKEN]
        assert next(client).number == 3
        assert loader.resize(ol.Mesh(dp=1)) == 4
        client.close()


# Trainers in processes of their own

TRAINER = """
import sys
import overlord as ol

client = ol.connect(sys.argv[1], rank=int(sys.argv[2]), timeout_s=60)
out = sys.stdout
while True:
    try:
        out.write(f"{next(client).number}\\n")
    except ol.errors.ClosedError:
        out.write("moved\\n")
        client.rejoin()
    out.flush()
"""


class Trainer:
    """A process that takes steps as fast as it can, and rejoins when the mesh has changed."""

    def __init__(self, address: str, rank: int) -> None:
        command = [sys.executable, "-c", TRAINER, address, str(rank)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                if line.endswith("\n"):  # else it was killed while it wrote
                    self.lines.append(line.strip())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._thread.join(30)

    @property
    def moves(self) -> list[int]:
        """The step that came next each time that the mesh changed."""
        found, at = [], 0
        for line in self.lines:
            if line == "moved":
                found.append(at)
            else:
                at = int(line) + 1
        return found


@contextmanager
def trained(job: ol.Job, engine: Engine | None = None) -> Iterator[tuple[ol.Loader, list[Trainer]]]:
    with ol.start(job, engine=engine) as loader:
        address = loader.serve()
        trainers = [Trainer(address, rank) for rank in range(job.mesh.world_size)]
        try:
            yield loader, trainers
        finally:
            for trainer in trainers:
                trainer.kill()


def wait_for_steps(trainers: list[Trainer], num_more: int) -> None:
    before = [len(trainer.lines) for trainer in trainers]
    wait_until(lambda: all(len(t.lines) >= n + num_more for t, n in zip(trainers, before, strict=True)))


@pytest.mark.parametrize("engine", [None, "processes"])
@pytest.mark.parametrize("mesh", [ol.Mesh(dp=1), ol.Mesh(dp=2), ol.Mesh(tp=2)], ids=["one", "dp", "tp"])
def test_no_step_is_lost_or_repeated_when_the_mesh_changes_while_trainers_take_steps(mesh, engine):
    num_changes = 20 if engine is None else 8
    with trained(two_sources(mesh=mesh), None if engine is None else ol.Processes(2)) as (loader, trainers):
        changed: list[int] = []
        for i in range(num_changes):
            # A trainer that was changed twice before it noticed has moved once.
            wait_until(lambda: all(len(trainer.moves) == i for trainer in trainers))  # noqa: B023 - called here
            wait_for_steps(trainers, 3 + i % 3)
            changed.append(loader.resize(mesh, timeout_s=30))
        wait_until(lambda: all(len(trainer.moves) == num_changes for trainer in trainers))
        wait_for_steps(trainers, 3)
    for trainer in trainers:
        assert trainer.moves == changed, "no step at or after the change was returned before it"
        numbers = [int(line) for line in trainer.lines if line != "moved"]
        assert numbers == list(range(len(numbers)))


def test_a_drain_while_trainers_take_steps_leaves_all_at_the_same_step():
    for _ in range(3):
        with trained(two_sources(mesh=ol.Mesh(dp=2))) as (loader, trainers):
            wait_for_steps(trainers, 5)
            assert loader.drain(timeout_s=30)
            at = loader.state_dict()["step"]
            wait_until(lambda: all(trainer.lines[-1] == str(at - 1) for trainer in trainers))  # noqa: B023
            threading.Event().wait(0.2)
            assert [trainer.lines[-1] for trainer in trainers] == [str(at - 1)] * 2


def test_what_a_trainer_took_before_it_was_killed_is_known():
    with trained(two_sources(), None) as (loader, (trainer,)):
        wait_for_steps([trainer], 10)
        trainer.kill()
        serving = loader._readers.serving
        assert serving is not None
        taken = int(trainer.lines[-1]) + 1
        wait_until(lambda: serving.last()[0] in (taken, taken + 1))  # the last may not have been written


# A step that the service has counted as taken reaches its trainer, however soon the mesh changes after it


def once_after(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: Callable[[], None]) -> list[str]:
    """Make a call once, after a method has handed out a step and before its caller goes on. Returns what to do so for:
    nothing, until a name is added."""
    armed: list[str] = []
    original = getattr(owner, method)

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if armed and (found is None if method == "take" else isinstance(found, Delivery)):
            armed.clear()
            call()
        return found

    monkeypatch.setattr(owner, method, hooked)
    return armed


@pytest.mark.parametrize(
    ("owner", "method", "learns"),
    [
        pytest.param(FlightChannel, "take", True, id="taken-on-the-page"),
        pytest.param(LocalChannel, "take", False, id="taken-by-a-message"),
        pytest.param(LocalChannel, "fetch", False, id="fetched"),
        pytest.param(FlightChannel, "fetch", True, id="fetched-and-learned-of"),
    ],
)
def test_a_step_that_counts_as_taken_is_returned_although_the_mesh_changes_meanwhile(monkeypatch, owner, method, learns):
    if method == "fetch" or owner is LocalChannel:
        monkeypatch.setattr(LocalLink, "take", lambda *_: False)
    changed: list[int] = []

    def change() -> None:
        changed.append(loader.resize(ol.Mesh(dp=1)))
        if learns:
            client._channel.start()  # the thread that fetches ahead may learn of it at any moment

    armed = once_after(monkeypatch, owner, method, change)
    ahead = 2 if method == "take" else 0
    with served(two_sources()) as (loader, address), ol.connect(address, rank=0, timeout_s=30, fetch_ahead=ahead) as client:
        assert [next(client).number for _ in range(4)] == [0, 1, 2, 3]
        if method == "take":
            fetch_ahead(client, 2)
        armed.append(method)
        assert next(client).number == 4
        assert changed == [5]
        with pytest.raises(ol.errors.ClosedError, match="the run was moved to another state"):
            next(client)
        client.rejoin()
        assert [next(client).number for _ in range(3)] == [5, 6, 7]


def test_a_client_in_the_process_of_its_run_gets_what_counts_as_taken_although_the_mesh_changes_meanwhile(monkeypatch):
    changed: list[int] = []
    armed = once_after(monkeypatch, LocalChannel, "fetch", lambda: changed.append(loader.resize(ol.Mesh(dp=1))))
    with ol.start(two_sources()) as loader:
        client = loader.client(0)
        assert [next(client).number for _ in range(2)] == [0, 1]
        armed.append("fetch")
        assert next(client).number == 2
        assert changed == [3]
        with pytest.raises(ol.errors.ClosedError, match="the run was moved to another state"):
            next(client)
        client.rejoin()
        assert [next(client).number for _ in range(3)] == [3, 4, 5]


def test_a_request_of_the_mesh_before_takes_no_step_of_the_new_one(monkeypatch):
    with ol.start(two_sources()) as loader:
        client = loader.client(0)
        assert [next(client).number for _ in range(2)] == [0, 1]
        channel = client._channel
        assert loader.resize(ol.Mesh(dp=1)) == 2
        for answer in (channel.fetch(2, 0, 20.0, generation=0), channel.take(2, 0, generation=0)):
            assert isinstance(answer, Later)
            assert "moved" in answer.reason
        handed = loader._roles.constructors[0].call(ServingConstructor.freeze).result()
        assert not handed.next_of_rank
        assert handed.untaken == 0
