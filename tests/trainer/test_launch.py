"""`attach` inside the processes of a torch run: every rank gets its part, all of it together is the run, and all end."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlord as ol
from overlord.trainer import attach
from tests.service.served import served
from tests.small_sources import Numbered, job_of
from tests.trainer.ranks import join_world, run_ranks

FINITE = {"a": Numbered(rows=40, first=1, repeat=False), "b": Numbered(rows=23, unit_rows=4, first=100, repeat=False)}
SIZES = {"dp": 2, "cp": 2}


def _read(folder: Path, name: str, rank: int, job: ol.Job | None, **options: Any) -> None:
    """Read the whole run and write down what was in it."""
    with attach(job, timeout_s=60, **options) as client:
        steps = [[micro["tokens"].tolist() for micro in step] for step in client]
    (folder / f"{name}-{rank}.json").write_text(json.dumps(steps))


def _rank(rank: int, size: int, folder: Path, store: int, address: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store), TORCHELASTIC_USE_AGENT_STORE="True")
    # As under torchrun, before there is a process group.
    _read(folder, "environment", rank, job_of(FINITE, mesh=ol.Mesh(cp=2)))  # dp is what the world leaves
    # And with one.
    join_world(rank, size, folder)
    mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
    _read(folder, "device-mesh", rank, job_of(FINITE), device_mesh=mesh)
    _read(folder, "address", rank, None, address=address)
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


def test_when_rank_0_cannot_start_every_rank_is_told_why(world):
    found = [json.loads((world / f"broken-{rank}.json").read_text()) for rank in range(4)]
    assert found[0][0] == "SourceError"
    assert all(kind == "ServiceError" for kind, _ in found[1:])
    assert all("source 'a' has no data" in text for _, text in found)


def test_one_process_needs_no_service(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with attach(job_of({"a": Numbered(first=1)})) as client:
        step = next(client)
        assert all(isinstance(micro["tokens"], torch.Tensor) for micro in step)
    with pytest.raises(ol.errors.ClosedError):
        next(client)


def test_a_mesh_of_another_size_and_a_process_outside_any_run_are_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ol.errors.SpecError, match=r"not part of a torch training run.*RANK is None; start it with torchrun"):
        attach(job_of({"a": Numbered(first=1)}))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ol.errors.SpecError, match="has 1 ranks, but the world has 3") as refused:
        attach(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=1)))
    assert refused.value.__notes__ == [
        "leave dp out of the job's mesh, and attach takes it from the world; or pass device_mesh=..."
    ]
    with pytest.raises(ol.errors.SpecError, match="attach needs a job to start, or the address="):
        attach()


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
