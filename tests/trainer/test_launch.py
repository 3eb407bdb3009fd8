"""`attach` inside the processes of a torch run: every rank gets its part, all of it together is the run, and all end."""

from __future__ import annotations

import json
import os
import socket
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlord as ol
from overlord.runtime.cores import num_usable_cores
from overlord.runtime.processes.engine import default_engine
from overlord.trainer import attach
from tests.service.served import served
from tests.small_sources import Numbered, job_of, tokens_of
from tests.trainer.ranks import join_world, run_ranks

FINITE = {"a": Numbered(rows=40, first=1, repeat=False), "b": Numbered(rows=23, unit_rows=4, first=100, repeat=False)}
SIZES = {"dp": 2, "cp": 2}


def _read(folder: Path, name: str, own: int, job: ol.Job | None, **options: Any) -> None:
    """Read the whole run and write down what was in it."""
    with attach(job, timeout_s=60, **options) as client:
        steps = [[micro["tokens"].tolist() for micro in step] for step in client]
    (folder / f"{name}-{own}.json").write_text(json.dumps(steps))


def _rank(rank: int, size: int, folder: Path, store: int, address: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store), TORCHELASTIC_USE_AGENT_STORE="True")
    # As under torchrun, before there is a process group.
    with (folder / f"said-{rank}").open("w") as said, redirect_stderr(said):
        _read(folder, "environment", rank, job_of(FINITE, mesh=ol.Mesh(cp=2)))  # dp is what the world leaves
    _read(folder, "turned-environment", rank, job_of(FINITE, mesh=ol.Mesh(cp=2)), rank=size - 1 - rank)
    # And with one.
    join_world(rank, size, folder)
    mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
    _read(folder, "device-mesh", rank, job_of(FINITE), device_mesh=mesh)
    _read(folder, "address", rank, None, address=address)
    _read(folder, "turned", rank, job_of(FINITE, mesh=ol.Mesh(dp=2, cp=2)), rank=size - 1 - rank)
    _read(folder, "uncut", rank, job_of(FINITE, mesh=ol.Mesh(dp=2, cp=2)), cut=())
    try:
        attach(job_of(FINITE), rank=min(rank, 2), timeout_s=30)
    except ol.OverlordError as error:
        (folder / f"twice-{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
    with attach(job_of(FINITE), timeout_s=1) as client:
        if rank < 3:  # as where a library reads on some ranks and hands batches to the others
            try:
                numbers = [step.number for step in client]
            except ol.errors.WaitTimeoutError as error:
                numbers = [client.step, str(error)]
            (folder / f"absent-{rank}.json").write_text(json.dumps(numbers))
        dist.barrier()
    broken = job_of({"a": Numbered(rows=0, first=1)}, mesh=ol.Mesh(dp=2, cp=2))
    try:
        attach(broken, timeout_s=30)
    except ol.OverlordError as error:
        (folder / f"broken-{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as listening:  # the store that torchrun would have, on loopback
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=False
        )
        with served(job_of(FINITE, mesh=ol.Mesh(dp=2, cp=2))) as (_, address):
            run_ranks(_rank, 4, 4, folder, port, address)
        del store
    return folder


@pytest.mark.second_try(reason="four torch processes must meet within 60 s")
@pytest.mark.parametrize("way", ["environment", "device-mesh", "address"])
def test_the_ranks_together_get_the_run_and_all_end_together(world, way):
    found = [json.loads((world / f"{way}-{rank}.json").read_text()) for rank in range(4)]
    with ol.start(job_of(FINITE, mesh=ol.Mesh(dp=2, cp=2))) as loader:
        clients = [loader.client(rank) for rank in range(4)]
        expected: list[list] = [[] for _ in clients]
        while steps := [step for client in clients if (step := next(client, None)) is not None]:
            for step, taken in zip(steps, expected, strict=True):
                taken.append([micro["tokens"].tolist() for micro in step])
    assert len(expected[0]) > 3
    assert found == expected


@pytest.mark.second_try(reason="four torch processes must meet within 60 s")
@pytest.mark.parametrize("way", ["turned", "turned-environment"])
def test_a_process_may_read_as_another_rank_than_that_of_torch(world, way):
    found = [json.loads((world / f"{way}-{rank}.json").read_text()) for rank in range(4)]
    expected = [json.loads((world / f"device-mesh-{rank}.json").read_text()) for rank in range(4)]
    assert found == expected[::-1]


def test_without_a_cut_every_rank_of_a_group_gets_all_of_its_microbatches(world):
    found = [json.loads((world / f"uncut-{rank}.json").read_text()) for rank in range(4)]
    slices = [json.loads((world / f"device-mesh-{rank}.json").read_text()) for rank in range(4)]
    for group in range(2):
        assert found[2 * group] == found[2 * group + 1]
        for whole, left, right in zip(found[2 * group], slices[2 * group], slices[2 * group + 1], strict=True):
            assert [sorted(micro) for micro in whole] == [sorted(a + b) for a, b in zip(left, right, strict=True)]


def test_ranks_that_are_given_twice_are_refused_on_every_process(world):
    found = [json.loads((world / f"twice-{rank}.json").read_text()) for rank in range(4)]
    assert [kind for kind, _ in found] == ["SpecError", "ServiceError", "ServiceError", "ServiceError"]
    assert all("another rank=, from 0 to 3: 2 came more than once, and 3 not at all" in text for _, text in found)


def test_a_rank_that_never_reads_is_named_and_the_others_do_not_run_on_alone(world):
    for rank in range(3):
        step, error = json.loads((world / f"absent-{rank}.json").read_text())
        assert step < 8
        assert f"rank {rank} waited" in error
        assert (
            "rank 3 (data-parallel group 3) did not read a step yet, and all ranks are expected to; close the client"
            in error
        )


def test_when_rank_0_cannot_start_every_rank_is_told_why(world):
    found = [json.loads((world / f"broken-{rank}.json").read_text()) for rank in range(4)]
    assert found[0][0] == "SourceError"
    assert all(kind == "ServiceError" for kind, _ in found[1:])
    assert all("source 'a' has no data" in text for _, text in found)


def test_rank_0_says_what_loads_and_where_and_the_others_say_nothing(world):
    (line,) = (world / "said-0").read_text().splitlines()
    assert line.startswith("overlord: rank 0 loads for 4 ranks at grpc://127.0.0.1:")
    engine, reason = default_engine(None)
    own = f"in its own process on {num_usable_cores()} cores ({reason})"
    assert (own if engine is None else "worker processes on") in line
    assert [(world / f"said-{rank}").read_text() for rank in (1, 2, 3)] == ["", "", ""]


@pytest.mark.usefixtures("no_world")
@pytest.mark.parametrize("processes", [None, 1])
def test_the_line_of_a_process_that_reads_alone_names_what_encodes_its_texts(tmp_path, capsys, processes):
    pq.write_table(pa.table({"text": ["some text " * 20] * 8}), tmp_path / "texts.parquet")
    tokenize = ol.Tokenize("text", encoding=ol.ByteTokenizer())
    texts = ol.Parquet(tmp_path / "texts.parquet", transform=tokenize)
    called = ol.Parquet(tmp_path / "texts.parquet", transform=ol.InProcesses(ol.Tokenize("text", encoding=_length)))
    engine = None if processes is None else ol.Processes(processes)
    with attach(job_of({"a": texts, "b": called, "c": texts}), engine=engine) as client:
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("overlord: this process reads alone: ")
        assert ("in its own process" if engine is None else "1 worker processes on") in line
        assert line.endswith("; texts are encoded by bytes, function")
        assert next(client).number == 0


def _length(text: str) -> list[int]:
    return [len(text)] * 8


def test_one_process_needs_no_service(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with attach(job_of({"a": Numbered(first=1)})) as client:
        step = next(client)
        assert all(isinstance(micro["tokens"], torch.Tensor) for micro in step)
    with pytest.raises(ol.errors.ClosedError):
        next(client)


@pytest.fixture
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_world")
def test_a_process_outside_any_run_of_torch_is_a_world_of_one():
    job = job_of(FINITE)
    with ol.start(job) as loader:
        expected = [tokens_of(step).tolist() for step in loader.client(0)]
    ways: list[dict[str, Any]] = [{}, {"rank": 0}, {"rank": 0, "world": 1}, {"world": 1}]
    for given in ways:
        with attach(job, **given) as client:
            assert [tokens_of(step).tolist() for step in client] == expected


@pytest.mark.usefixtures("no_world")
def test_a_process_of_a_larger_world_may_have_a_run_of_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with attach(job_of(FINITE), world=1) as client:
        assert client.rank == 0
        assert next(client).number == 0


@pytest.mark.usefixtures("no_world")
def test_a_world_that_does_not_fit_the_mesh_is_refused(monkeypatch):
    def refused(*notes: str, job: ol.Job | None = None, **options: Any) -> str:
        with pytest.raises(ol.errors.SpecError) as error:
            attach(job or job_of({"a": Numbered(first=1)}), **options)
        assert list(getattr(error.value, "__notes__", ())) == list(notes)
        return str(error.value)

    leave_out = "leave dp out of the job's mesh, and attach takes it from the world; or pass device_mesh=..."
    alone = (
        "this process is in no training run of torch (no process group, no RANK), so it is a world of one: start it with "
        "torchrun, or pass rank= and world="
    )
    eight = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=8))
    assert "dp=8 x cp=1 x tp=1 x pp=1 has 8 ranks, but the world has 1" in refused(leave_out, alone, job=eight)
    assert "rank=1 is not one of the world's ranks 0 to 0; pass world=" in refused(rank=1)
    assert "rank=5 is not one of the world's ranks 0 to 3" in refused(rank=5, world=4)
    assert "world=4 needs the rank of this process too: attach(job, rank=..., world=4)" in refused(world=4)
    assert "at MASTER_ADDR and MASTER_PORT, and MASTER_ADDR is not set" in refused(rank=0, world=2)
    assert "rank must be at least 0, got -1" in refused(rank=-1)
    assert "world must be at least 1, got 0" in refused(world=0)
    monkeypatch.setenv("RANK", "1")
    assert "WORLD_SIZE is None while RANK is '1'; start it with torchrun" in refused()
    monkeypatch.setenv("WORLD_SIZE", "3")
    one = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=1))
    assert "has 1 ranks, but the world has 3" in refused(leave_out, job=one)
    assert "world=2, but torch's training run has 3 processes; leave it out, or pass world=1" in refused(world=2)
    with pytest.raises(ol.errors.SpecError, match="attach needs a job to start, or the address="):
        attach()
    with pytest.raises(ol.errors.SpecError, match=r"cut are options of the run that the service at `address`"):
        attach(address="127.0.0.1:1", cut=())
    with pytest.raises(ol.errors.SpecError, match=r"cut names the axes.*'cp' and 'pp' or none, got 'tp'"):
        attach(job_of(FINITE), cut=("tp",))


@pytest.mark.strangers
def test_a_mesh_without_dp_takes_it_from_the_world(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ol.Mesh().dp == 1
    assert ol.Mesh() == ol.Mesh(dp=1)
    assert ol.Mesh(cp=2, tp=2).for_world(16) == ol.Mesh(dp=4, cp=2, tp=2)
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2)), world_size=6) as loader:
        assert loader.tree.mesh == ol.Mesh(dp=3, tp=2)
    with pytest.raises(
        ol.errors.SpecError, match="takes 2 ranks for each data-parallel group, which does not divide the world of 1"
    ):
        attach(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2)))
