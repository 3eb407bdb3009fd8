"""Trainers on the service's host: their batches are mapped, not copied. Whatever they or the service do, memory comes back,
and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import overlord as ol
from overlord.batches.buffers import Arenas, LendLimit
from overlord.runtime import serving_threads
from overlord.runtime.shared_memory import Connection, Listener, connect_to
from overlord.service import constructor, serving, wire
from overlord.service.auth import Address, Listen
from overlord.service.channel import FlightChannel
from overlord.service.client import Client
from overlord.service.local_link import LocalLink, NotOnThisHostError
from overlord.service.local_steps import Act, Greeting
from overlord.service.serving import ServedGroups, ServerPerGroup
from tests.commands import environment, python
from tests.faults.trainers import wait_until
from tests.pictures import DECODE, GRID, IMAGE_TOKEN, MARKER, picture_documents
from tests.service.served import content, served, streams, two_sources, undisturbed
from tests.service.test_reconnect import free_port
from tests.small_sources import Numbered, job_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDE = ol.Batch(samples=64, sequence_length=64)
JOBS = {
    "dp-cp": two_sources(mesh=ol.Mesh(dp=2, cp=2)),
    "pp-tp": two_sources(mesh=ol.Mesh(pp=3, tp=2)),
    "padded": two_sources(batch=ol.Batch(samples=6, sequence_length=16, layout="padded", columns=("document",))),
    "broadcast": two_sources(
        mesh=ol.Mesh(tp=2), strategy=lambda graph: graph.pack().distribute("dp").deal().broadcast_at("tp").plan()
    ),
}


def over_flight(address: str, rank: int, **options: Any) -> Client:
    """A client that could be on another host."""
    return Client(rank, FlightChannel(address, rank, timeout_s=20, local=False, **options), timeout_s=20)


def link_of(client: Client) -> Any:
    return client._channel._steps  # type: ignore[attr-defined]


def local_address(address: str) -> str:
    local = FlightChannel(address, 0, timeout_s=20)._welcome.local
    assert local is not None
    return local


@pytest.mark.parametrize("name", JOBS)
def test_every_rank_gets_the_same_through_shared_memory_over_flight_and_in_one_process(name):
    job, ranks = JOBS[name], range(JOBS[name].mesh.world_size)
    with served(job) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=20) for rank in ranks]
        assert all(isinstance(link_of(client), LocalLink) for client in clients)
        expected = undisturbed(job, 6)
        assert streams(clients, 6) == expected
        for client in clients:
            client.close()
    with served(job) as (_, address):
        clients = [over_flight(address, rank) for rank in ranks]
        assert not any(isinstance(link_of(client), LocalLink) for client in clients)
        assert streams(clients, 6) == expected


TRAINER = """
import json, os, sys
import numpy as np
import overlord as ol

address, rank, num_steps, keep = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
client = ol.connect(address, rank=rank, timeout_s=60)
kept = []
for step in range(num_steps):
    kept.append(next(client))
    if keep == "last":
        del kept[:-1]
tokens = kept[-1].microbatches[0]["tokens"]
with open("/proc/self/maps") as maps:
    is_mapped = "memfd:overlord" in maps.read()
said = {"pid": os.getpid(), "number": kept[-1].number, "is_mapped": is_mapped, "is_writable": tokens.flags.writeable,
        "sums": [int(step.microbatches[0]["tokens"].sum()) for step in kept]}
print(json.dumps(said), flush=True)
line = sys.stdin.readline()
if line == "fork\\n":
    child = os.fork()
    if child == 0:
        try:
            next(client)
        except ol.errors.SharedUseError as error:
            print(json.dumps({"pid": os.getpid(), "error": str(error)}), flush=True)
        sys.stdin.readline()
        os._exit(0)
    os.waitpid(child, 0)
print(json.dumps({"number": next(client).number}), flush=True)
client.close()
"""


class Trainer:
    """A trainer in a process of its own that reads some steps, says so, and waits to be told to go on."""

    def __init__(self, address: str, rank: int, num_steps: int, keep: str = "last") -> None:
        command = [sys.executable, "-c", TRAINER, address, str(rank), str(num_steps), keep]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment(), **pipes)
        self.said: dict[str, Any] = {}

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the trainer ended early"
        self.said = json.loads(line)
        return self.said

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@contextmanager
def trainer(address: str, rank: int = 0, num_steps: int = 3, keep: str = "last") -> Iterator[Trainer]:
    made = Trainer(address, rank, num_steps, keep)
    try:
        made.line()
        yield made
    finally:
        made.end()


def in_dev_shm(process: int) -> set[str]:
    """What a process has open or mapped in that file system, and what was left there by name."""
    folder = Path("/proc", str(process))
    opened = [os.readlink(entry) for entry in (folder / "fd").iterdir() if entry.is_symlink()]
    mapped = [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
    return {entry for entry in (*opened, *mapped) if "/dev/shm" in entry} | set(map(str, Path("/dev/shm").glob("overlord*")))


def shared_bytes(loader: ol.Loader) -> int:
    store = loader.report().store
    return 0 if store is None else store.num_bytes


def test_a_trainer_in_a_process_of_its_own_maps_its_batches_and_nothing_lies_in_dev_shm():
    before = in_dev_shm(os.getpid())  # of other libraries
    with served(two_sources(batch=WIDE)) as (loader, address):
        assert shared_bytes(loader) == 0, "nothing is shared before a trainer reads"
        with trainer(address) as reader:
            assert reader.said["is_mapped"]
            assert not reader.said["is_writable"]
            assert shared_bytes(loader) > 0
            assert not in_dev_shm(reader.said["pid"])
            assert in_dev_shm(os.getpid()) <= before
            reader.tell("go on")
            assert reader.line() == {"number": 3}


def test_a_trainer_that_is_killed_while_it_holds_batches_costs_nothing_and_its_rank_goes_on(caplog):
    used: list[int] = []
    before = in_dev_shm(os.getpid())
    with served(two_sources(batch=WIDE)) as (loader, address):
        for _ in range(5):
            caplog.clear()  # a trainer may have more than one connection
            with trainer(address, num_steps=4, keep="all") as reader:
                os.kill(reader.said["pid"], signal.SIGKILL)
                assert wait_until(lambda: len(_ended(caplog)) > 0, 60), "the closed socket is noticed at once"
            used.append(shared_bytes(loader))
        assert max(used) < 20 << 16, "a step takes 64 KiB, and twenty were held"
        assert in_dev_shm(os.getpid()) <= before
        assert all("rank 0 ended without a leave" in line for line in _ended(caplog))
        with ol.connect(address, rank=0, timeout_s=20) as client:
            assert content(next(client)) == undisturbed(two_sources(batch=WIDE), 1)[0][0]


def _ended(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "ended without a leave" in line]


def test_a_client_that_closes_with_steps_requested_ahead_is_not_taken_for_dead(caplog):
    with served(two_sources(batch=WIDE)) as (loader, address):
        for _ in range(10):
            with ol.connect(address, rank=0, timeout_s=20, fetch_ahead=4) as client:
                next(client)
        with loader.client(0, timeout_s=20) as client:  # the requests of the last connection were served
            next(client)
    assert _ended(caplog) == []


def test_a_trainer_that_keeps_every_batch_is_named_and_the_service_does_not_grow(caplog):
    job, most = two_sources(batch=WIDE), LendLimit().most_steps
    with served(job) as (loader, address):
        client = ol.connect(address, rank=0, timeout_s=20)
        kept = [next(client) for _ in range(most + 4)]
        full = shared_bytes(loader)
        kept += [next(client) for _ in range(most)]
        assert shared_bytes(loader) <= full + full // 4
        (line,) = [line for line in caplog.messages if "further steps are copied" in line]
        assert line.startswith(f"rank 0 holds {most} steps (")
        assert [content(step) for step in kept] == undisturbed(job, len(kept))[0]


def test_a_trainer_may_hold_a_few_large_steps_and_further_ones_are_copied(monkeypatch, caplog):
    monkeypatch.setattr(constructor, "LendLimit", lambda least_steps: LendLimit(16, 100_000, least_steps))
    job, held = two_sources(batch=WIDE, prefetch=1), 3 * 8 << 16  # three steps of eight microbatches
    with served(job) as (loader, address):
        client = ol.connect(address, rank=0, timeout_s=20, fetch_ahead=0)
        kept = [next(client) for _ in range(12)]
        store = loader.report().store
        assert store is not None
        assert (store.lent_bytes, store.lent_limit_bytes) == (held, 100_000)
        (line,) = [line for line in caplog.messages if "further steps are copied" in line]
        assert line.startswith(f"rank 0 holds 3 steps ({held:,} bytes)")
        assert [content(step) for step in kept] == undisturbed(job, len(kept))[0]
        client.close()


def test_of_two_trainers_with_one_rank_the_newest_reads_and_the_other_is_told():
    with served(two_sources()) as (_, address):
        old = ol.connect(address, rank=0, timeout_s=20)
        held = next(old)
        before = content(held)
        new = ol.connect(address, rank=0, timeout_s=20)
        for _ in range(10):
            next(new)
        with pytest.raises(ol.errors.ClosedError, match="another client has taken the place of this one for rank 0"):
            next(old)
        assert content(held) == before


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_whatever_name_the_host_has_a_trainer_on_it_maps_its_batches(host):
    with served(two_sources()) as (_, address):
        port = address.rsplit(":", 1)[1]
        client = ol.connect(f"{host}:{port}", rank=0, timeout_s=20)
        assert isinstance(link_of(client), LocalLink)
        assert next(client).number == 0


def listens_here(host: str) -> bool:
    """True if a name or address is of this machine, and can be listened at."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(target)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", [socket.gethostname(), "127.0.0.2", "127.0.0.1"])
def test_through_any_name_of_the_host_a_trainer_of_a_service_on_all_interfaces_maps_its_batches(host):
    if not listens_here(host):
        pytest.skip(f"{host} is no name of this machine")
    token = "0123456789abcdef"
    with served(two_sources(), address="0.0.0.0:0", token=token, advertise=host) as (_, address):
        client = ol.connect(address, rank=0, token=token, timeout_s=20)
        assert isinstance(link_of(client), LocalLink)
        assert next(client).number == 0


@pytest.mark.skipif(not listens_here("::1"), reason="needs IPv6")
def test_on_ipv6_loopback_a_trainer_maps_its_batches_too():
    with served(two_sources(), address="[::1]:0") as (_, address):
        assert address.startswith("grpc://[::1]:")
        client = ol.connect(address, rank=0, timeout_s=20)
        assert isinstance(link_of(client), LocalLink)
        assert next(client).number == 0


def test_a_service_on_all_interfaces_lets_its_own_host_map_with_the_token_alone():
    token = "0123456789abcdef"
    with served(two_sources(), address="0.0.0.0:0", token=token, advertise="127.0.0.1") as (_, address):
        client = ol.connect(address, rank=0, token=token, timeout_s=20)
        assert isinstance(link_of(client), LocalLink)
        local = link_of(client).address
        for given in (None, "another"):
            connection = connect_to(local)
            connection.send_raw(wire.pack(Greeting(wire.VERSION, given)))
            reply, _ = connection.receive_raw(10)
            with pytest.raises(ol.errors.ServiceError, match=f"carried {'a wrong' if given else 'no'} token"):
                wire.HERE.unpack_reply(reply)
            with pytest.raises(EOFError):
                connection.receive_raw(10)
        assert next(client).number == 0


@pytest.mark.strangers
@pytest.mark.parametrize(
    "message", [b"\xff" * 100, wire.pack(Greeting(wire.VERSION + 1, None)), wire.pack(Act("here", b"")), b"\x91" * 5000]
)
def test_a_connection_that_does_not_greet_is_closed_and_the_service_goes_on(message):
    with served(two_sources()) as (_, address):
        client = ol.connect(address, rank=0, timeout_s=20)
        connection = connect_to(link_of(client).address)
        connection.send_raw(message)
        assert is_closed(connection)
        assert next(client).number == 0


@pytest.mark.strangers
def test_requests_that_are_wrong_are_refused_one_by_one():
    with served(two_sources()) as (_, address):
        client = ol.connect(address, rank=0, timeout_s=20)
        connection = greeted(link_of(client).address)
        presence = wire.Presence("another job", 0, "abcdefgh")
        for act, message in [
            (Act("nonsense", b""), "there is no action 'nonsense'"),
            (Act("here", b"\xff"), "not a Presence"),
            (Act("here", wire.pack(presence)), "this service runs job"),
        ]:
            connection.send_raw(wire.pack(act))
            reply, _ = connection.receive_raw(10)
            with pytest.raises(ol.errors.ServiceError, match=message):
                wire.HERE.unpack_reply(reply)
        assert next(client).number == 0


def is_closed(connection: Connection) -> bool:
    try:
        while True:  # a refusal comes first
            connection.receive_raw(10)
    except EOFError:
        return True


def greeted(address: str) -> Connection:
    connection = connect_to(address)
    connection.send_raw(wire.pack(Greeting(wire.VERSION, None)))
    wire.HERE.unpack_reply(connection.receive_raw(10)[0])
    return connection


def test_a_client_that_cannot_reach_the_socket_uses_flight_which_starts_only_then():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        channel, constructors = loader.client(0)._channel, loader._roles.constructors
        groups = ServedGroups(lambda: loader.tree, constructors, bring_near=lambda _rank, _names: None)
        serving = ServerPerGroup("job", channel, groups, listen=Listen(), leave_after_s=None)
        near = ol.connect(serving.address, rank=0, timeout_s=20)
        assert isinstance(link_of(near), LocalLink)
        services = [constructor.engine._roles[constructor.name]._service for constructor in constructors]  # type: ignore[attr-defined]
        assert services[0].addresses.flight is None
        far = over_flight(serving.address, 1)
        services[1] = constructors[1].engine._roles[constructors[1].name]._service  # type: ignore[attr-defined]
        assert services[0].addresses.flight is None
        assert link_of(far).address == services[1].addresses.flight
        assert streams([near, far], 4) == undisturbed(job, 4)
        near.close()
        far.close()
        serving.close()


REFUSED = """
import logging, resource, sys
import overlord as ol
from tests.service.served import content, two_sources, undisturbed

def main():
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    job = two_sources(batch=ol.Batch(samples=3000, sequence_length=64))
    expected = undisturbed(job, 5)[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    with ol.start(job, engine={engine}) as loader:
        client = ol.connect(loader.serve(), rank=0, timeout_s=60)
        assert [content(next(client)) for _ in range(5)] == expected
        assert loader.report().store is None
        print(type(client._channel._steps).__name__)

main()
"""


@pytest.mark.parametrize(("limit", "engine"), [(0, "None"), (4096, "None"), (1 << 16, "ol.Processes(2)")])
def test_where_shared_memory_is_refused_flight_is_used_and_the_log_says_so_once(limit, engine):
    said = python("-c", REFUSED.replace("{limit}", str(limit)).replace("{engine}", engine)).stdout
    assert "Link" in said.splitlines()  # a fetch ahead may say afterwards that the service is gone
    assert said.count("batches are built in private memory") == 1
    assert "File too large" in said
    assert said.count("long messages between processes are sent in packets") == (engine != "None")


FEW_FILES = """
import logging, resource, sys
import overlord as ol
from tests.service.served import streams, undisturbed
from tests.small_sources import Numbered, job_of

def main():
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    sources = {f"source-{number}": Numbered(rows=40, unit_rows=8, first=100 * number) for number in range(120)}
    job = job_of(sources, ol.Batch(samples=1200, sequence_length=64), mesh=ol.Mesh(dp=2))
    expected = undisturbed(job, 3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with ol.start(job, engine=ol.Processes(2)) as loader:
        address = loader.serve()
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        assert streams(clients, 3) == expected
        print("done")

main()
"""


def test_a_run_whose_processes_may_open_few_files_copies_what_it_cannot_share():
    said = python("-c", FEW_FILES).stdout
    assert "done" in said.splitlines()
    assert "a process may have 256 open files here (hard limit 256)" in said


def test_a_forked_child_of_a_trainer_can_neither_read_nor_hide_the_trainers_death(caplog):
    with served(two_sources(batch=WIDE)) as (_, address), trainer(address) as reader:
        reader.tell("fork")
        child = reader.line()
        try:
            assert "rank 0" in child["error"]
            os.kill(reader.process.pid, signal.SIGKILL)
            assert wait_until(lambda: len(_ended(caplog)) == 1, 20), "the child does not hold the socket open"
        finally:
            os.kill(child["pid"], signal.SIGKILL)


FORKED_SERVICE = """
import os, signal, sys
import overlord as ol
from tests.service.served import two_sources

loader = ol.start(two_sources())
address = loader.serve()
client = ol.connect(address, rank=0, timeout_s=20)
next(client)
child = os.fork()
if child == 0:
    try:
        loader.client(0)
    except ol.errors.SharedUseError as error:
        print("refused:", error, flush=True)
    loader.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("step", next(client).number, flush=True)
client.close()
loader.close()
"""


def test_a_fork_of_the_service_changes_nothing_for_its_trainers():
    said = python("-c", FORKED_SERVICE).stdout.splitlines()
    assert said[0].startswith("refused:")
    assert said[1] == "step 1"


@dataclass(frozen=True)
class StoppedDecode(ol.vision.DecodeImage):
    """Decodes images. Where it finds the file `armed`, it stops for ever once an image is decoded, and tells its process."""

    folder: str = ""

    def decode(self, data: Any, out: Any = None) -> Any:
        pixels = ol.vision.DecodeImage.decode(self, data, out)
        try:
            os.rename(Path(self.folder, "armed"), Path(self.folder, "taken"))
        except FileNotFoundError:
            return pixels
        Path(self.folder, "stopped").write_text(str(os.getpid()))  # a pipe: waits for its reader
        threading.Event().wait()


def kill_stopped(folder: Path, killed: list[int]) -> threading.Thread:
    """Let the next process that decodes an image stop, and kill it when it has: it is in the middle of a batch."""

    def kill() -> None:
        killed.append(int((folder / "stopped").read_text()))
        os.kill(killed[-1], signal.SIGKILL)

    (folder / "armed").touch()
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def memfds() -> list[str]:
    """The shared memory of batches that this process has open or mapped."""
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [entry for entry in (*opened, *mapped) if "memfd:overlord" in entry]


@pytest.mark.second_try(reason="processes are killed and replaced while a client waits")
def test_a_constructor_that_is_killed_while_it_builds_leaves_no_half_batch(tmp_path):
    os.mkfifo(tmp_path / "stopped")
    source = ol.Parquet(
        picture_documents(tmp_path / "pictures.parquet", 64),
        transform=ol.vision.PlaceImages(DECODE, GRID, IMAGE_TOKEN, marker=MARKER),
        decode=StoppedDecode("pictures", folder=str(tmp_path)),
        loss_mask="loss_mask",
    )
    batch = ol.Batch(samples=16, sequence_length=256, image_token=IMAGE_TOKEN)
    job = ol.Job(sources={"pictures": source}, batch=batch, mesh=ol.Mesh(dp=2))
    expected = undisturbed(job, 12)
    gc.collect()
    shared, in_shm, killed = len(memfds()), in_dev_shm(os.getpid()), list[int]()
    with ol.start(job, engine=ol.Processes(2)) as loader:
        address = loader.serve()
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        assert all(isinstance(link_of(client), LocalLink) for client in clients)
        found: list[list[tuple]] = [[], []]
        for _ in range(3):
            builders = {_process_of(loader, group) for group in range(2)}
            killing = kill_stopped(tmp_path, killed)
            for _ in range(4):
                for client, steps in zip(clients, found, strict=True):
                    steps.append(content(next(client)))
            killing.join(60)
            assert killed[-1] in builders
        for client in clients:
            client.close()
    assert found == expected
    assert len(set(killed)) == 3
    assert in_dev_shm(os.getpid()) <= in_shm
    gc.collect()
    assert len(memfds()) <= shared, "what the killed processes had lent is unmapped"


def _process_of(loader: ol.Loader, group: int) -> int:
    from overlord.service.constructor import ServingConstructor

    return loader._roles.constructors[group].call(ServingConstructor.store_use).result()[0]


# The door: calls on the run through a unix socket that is named after the service's address


WITHOUT_ARROW = """
import sys
import overlord as ol

client = ol.connect(sys.argv[1], rank=0, timeout_s=60)
steps = [next(client).number for _ in range(3)]
state = client.state_dict()
client.load_state_dict(state)
steps.append(next(client).number)
client.close()
print(steps, [name for name in ("pyarrow", "pyarrow.flight", "torch", "tokenizers") if name in sys.modules])
"""


@pytest.mark.parametrize("engine", [None, "processes"])
def test_a_trainer_on_the_host_imports_no_arrow(engine):
    with ol.start(two_sources(), engine=None if engine is None else ol.Processes(2)) as loader:
        assert python("-c", WITHOUT_ARROW, loader.serve()).stdout == "[0, 1, 2, 3] []\n"


def test_calls_that_are_longer_than_a_message_pass_the_door():
    sources = {f"{i:03d}{'x' * 200}": Numbered(rows=4, first=i) for i in range(400)}
    with served(job_of(sources)) as (loader, address), ol.connect(address, rank=0, timeout_s=60) as client:
        assert isinstance(client._channel._door, LocalLink)  # type: ignore[attr-defined]
        state = client.state_dict()
        assert len(state["state"]) > 1 << 16
        assert state == loader.state_dict()
        next(client)
        client.load_state_dict(state)
        assert next(client).number == 0


def test_a_client_waits_at_the_door_for_a_service_and_finds_it_again_after_a_restart():
    with served(two_sources()) as (_, address):
        pass
    assert Address.parse(address).unix_name is not None
    found: list[int] = []

    def read() -> None:
        with ol.connect(address, rank=0, timeout_s=60) as client:
            found.extend(next(client).number for _ in range(2))
            is_half.set()
            is_back.wait(60)
            found.append(next(client).number)

    is_half, is_back = threading.Event(), threading.Event()
    thread = threading.Thread(target=read)
    thread.start()
    with served(two_sources(), address=address.removeprefix("grpc://")):
        assert is_half.wait(60)
    with served(two_sources(), address=address.removeprefix("grpc://")):
        is_back.set()
        thread.join(60)
    assert found == [0, 1, 2]


def test_where_the_door_is_taken_calls_go_over_flight():
    with served(two_sources()) as (_, address):
        pass
    name = Address.parse(address).unix_name
    taken = Listener(address=name)
    try:
        with served(two_sources(), address=address.removeprefix("grpc://")) as (_, served_at):
            assert served_at == address
            taken.close()
            with ol.connect(address, rank=0, timeout_s=20) as client:
                assert not isinstance(client._channel._door, LocalLink)  # type: ignore[attr-defined]
                assert isinstance(link_of(client), LocalLink)
                assert next(client).number == 0
    finally:
        taken.close()


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1:5", "overlord-at-127.0.0.1:5"),
        ("localhost:5", "overlord-at-127.0.0.1:5"),
        ("0.0.0.0:5", "overlord-at-127.0.0.1:5"),
        ("[::1]:5", "overlord-at-::1:5"),
        ("10.0.0.1:5", None),
        ("trainers.example:5", None),
        ("grpc+tls://127.0.0.1:5", None),
    ],
)
def test_only_an_address_that_means_this_host_for_certain_has_a_door(address, name):
    assert Address.parse(address).unix_name == name


def test_the_door_hands_out_no_steps_and_takes_only_a_client_with_the_token():
    token = "0123456789abcdef"
    with served(two_sources(), token=token) as (_, address):
        name = Address.parse(address).unix_name
        assert name is not None
        link = LocalLink(name, token, for_steps=False)
        ticket = wire.Ticket("x", 0, 0, 0.0, "session0", "session0", 0)
        with pytest.raises(wire.Unreachable):
            link.fetch(ticket, 5.0, Arenas(1))
        link.close()
        with pytest.raises(NotOnThisHostError, match="carried a wrong token"):
            LocalLink(name, "another", for_steps=False)


def test_a_trainer_that_greets_the_moment_a_service_listens_gets_its_steps(monkeypatch):
    """Constructors learn where to listen a moment after the front server does."""
    found: list[int] = []
    job, address = two_sources(), f"127.0.0.1:{free_port()}"

    def listen_later(*args: Any) -> Any:
        time.sleep(0.5)
        return listen_behind(*args)

    def read() -> None:
        with ol.connect(address, rank=0, timeout_s=60) as client:
            found.extend(next(client).number for _ in range(3))

    listen_behind = serving._listen_behind
    monkeypatch.setattr(serving, "_listen_behind", listen_later)
    with ol.start(job, engine=ol.Processes(1)) as loader:
        reader = threading.Thread(target=read)
        reader.start()
        loader.serve(address)
        reader.join(60)
    assert found == [0, 1, 2]


def test_a_rank_that_waits_for_another_does_not_keep_the_thread_that_serves_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_threads, "_WATCH_S", 60.0)  # nobody sees that a thread waits: it has to say so
    began, goes_on = threading.Event(), threading.Event()
    ended = [threading.Event(), threading.Event()]
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (_, address):

        def read(rank: int) -> None:
            with ol.connect(address, rank=rank, timeout_s=100) as client:
                next(client)
                if rank == 1:
                    began.set()
                    goes_on.wait(100)
                for _ in range(100):
                    next(client)
                ended[rank].set()
                ended[1 - rank].wait(100)  # a rank that leaves holds nobody back

        readers = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
        readers[1].start()
        assert began.wait(20)
        readers[0].start()
        assert not ended[0].wait(0.5), "no group gets far ahead of another"
        goes_on.set()
        assert ended[1].wait(10), "every tenth step waited for three seconds"
        for reader in readers:
            reader.join()
