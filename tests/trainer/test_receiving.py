"""Ranks that receive their arrays from the one that fetched them train on what they would have fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import overlord as ol
from overlord.trainer import receive
from tests.pictures import picture_documents, picture_job
from tests.small_sources import Numbered, job_of
from tests.trainer.ranks import join_world, run_ranks

_STEPS = 2
_VOCABULARY = 64


def _loss(model: nn.Module, micro: Any, divisor: float) -> torch.Tensor:
    """A loss for which order and neighbours of tokens do not matter, so that slices add up."""
    logits = model(torch.stack([micro["tokens"] % _VOCABULARY, micro["position_ids"] % _VOCABULARY], -1).double())
    labels = torch.where(micro["labels"] < 0, -100, micro["labels"] % _VOCABULARY)
    return cross_entropy(logits.reshape(-1, _VOCABULARY), labels.reshape(-1), reduction="sum") / divisor


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, _VOCABULARY).double()


def _plain(micro: Any) -> dict[str, Any]:
    as_lists = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in micro.items()}
    return {n: [each.tolist() for each in v] if isinstance(v, list) and n == "images" else v for n, v in as_lists.items()}


def _one_rank(rank: int, groups: list[list[int]], address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, sum(map(len, groups)), folder)
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    model, got = _model(), []
    with ol.connect(address, rank=rank, timeout_s=60, torch=True) as client:
        for _ in range(_STEPS):
            step = receive(next(client), mine)
            got.append([_plain(micro) for micro in step])
            for micro in step:
                if "tokens" in micro and "labels" in micro and "images" not in micro:
                    _loss(model, micro, step.loss_tokens).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.save({"steps": got, "gradients": gradients}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _received(job: ol.Job, broadcast: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    with ol.start(job) as loader:
        groups = loader.tree.broadcast_groups(broadcast)
        run_ranks(_one_rank, job.mesh.world_size, groups, loader.serve(), folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(job.mesh.world_size)]


def _fetched(job: ol.Job) -> list[list[list[dict[str, Any]]]]:
    """The steps of every rank where each fetches its own."""
    with ol.start(job) as loader:
        clients = [loader.client(rank, timeout_s=60, torch=True) for rank in range(job.mesh.world_size)]
        return [[[_plain(micro) for micro in next(client)] for _ in range(_STEPS)] for client in clients]


@pytest.mark.parametrize(
    ("mesh", "broadcast", "layout"),
    [
        (ol.Mesh(tp=2), ("tp",), "packed"),
        (ol.Mesh(cp=2), ("cp",), "padded"),
        (ol.Mesh(dp=2, tp=2), ("tp",), "padded"),
        (ol.Mesh(cp=2, tp=2), ("cp", "tp"), "packed"),
        (ol.Mesh(pp=2, cp=2), ("pp", "cp"), "packed"),
    ],
)
def test_every_rank_has_what_it_would_have_fetched(tmp_path, mesh, broadcast, layout):
    batch = ol.Batch(samples=8, sequence_length=16, layout=layout, micro_tokens=32 if layout == "padded" else None)
    whole = ol.pipelines.StageFields("all")  # along pp all stages get all fields

    def job(axes: tuple[str, ...]) -> ol.Job:
        strategy = ol.strategies.plain(broadcast=axes)  # pyright: ignore[reportArgumentType]
        return job_of({"a": Numbered(first=1)}, batch, mesh=mesh, strategy=strategy, stage_fields=whole)

    received = _received(job(broadcast), broadcast, tmp_path)
    assert [rank["steps"] for rank in received] == _fetched(job(()))

    # The gradients of all ranks with different tokens add up to those of one process.
    tree, alone = ol.ClientPlaceTree(mesh), _model()
    with ol.start(job_of({"a": Numbered(first=1)}, batch)) as loader:
        client = loader.client(0, timeout_s=60, torch=True)
        for step in (next(client) for _ in range(_STEPS)):
            for micro in step:
                _loss(alone, micro, step.loss_tokens).backward()
    distinct = [rank for rank in range(mesh.world_size) if tree.coordinates(rank).tp == tree.coordinates(rank).pp == 0]
    for i, parameter in enumerate(alone.parameters()):
        summed = sum(received[rank]["gradients"][i] for rank in distinct)
        torch.testing.assert_close(summed, parameter.grad, rtol=1e-9, atol=1e-12)


def test_images_of_different_sizes_are_received(tmp_path):
    path = picture_documents(tmp_path / "pictures.parquet", 40)

    def job(axes: tuple[str, ...]) -> ol.Job:
        return picture_job(path, ol.Mesh(tp=2), None, broadcast=axes)

    received = _received(job(("tp",)), ("tp",), tmp_path)
    fetched = _fetched(job(()))
    assert any("images" in micro for step in fetched[1] for micro in step)
    assert [rank["steps"] for rank in received] == fetched


def test_ranks_at_different_steps_do_not_mix(tmp_path):
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2), strategy=ol.strategies.plain(broadcast=("tp",)))
    with ol.start(job) as loader:
        run_ranks(_one_step_off, 2, loader.serve(), tmp_path)


def _one_step_off(rank: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, 2, folder)
    with ol.connect(address, rank=rank, timeout_s=60) as client:
        steps = [next(client), next(client)]
        with pytest.raises(ol.errors.SpecError, match=f"this rank is at step {rank} .* is at steps 0 to 1"):
            receive(steps[rank])
        assert len(receive(steps[0])) == len(steps[0])  # the group still works
    dist.barrier()
    dist.destroy_process_group()


def _no_broadcast(rank: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, 2, folder)
    mine = [dist.new_group([0]), dist.new_group([1])][rank]
    with ol.connect(address, rank=rank, timeout_s=60) as client:
        step = next(client)
        if rank == 1:
            with pytest.raises(ol.errors.SpecError, match="rank 0 of this group has shapes"):
                receive(step, mine)
        else:
            assert isinstance(receive(step, mine).microbatches[0]["tokens"], torch.Tensor)
            assert isinstance(step.microbatches[0]["tokens"], np.ndarray)
    dist.destroy_process_group()


def test_a_group_without_the_fetching_rank_is_refused(tmp_path):
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2), strategy=ol.strategies.plain(broadcast=("tp",)))
    with ol.start(job) as loader:
        run_ranks(_no_broadcast, 2, loader.serve(), tmp_path)
