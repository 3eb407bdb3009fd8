"""A pipeline of two stages whose attention goes around rings has the loss and the gradients of plain data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import overlord as ol
from overlord.trainer import Ring, Rotary, attach, ring_attention, sum_gradients, token_loss
from tests.small_sources import Numbered, job_of
from tests.trainer.ranks import join_world, run_ranks
from tests.trainer.rings import masked_attention

MESH = ol.Mesh(pp=2, dp=2)
RANKS = 4
STEPS, WIDTH, VOCABULARY = 2, 16, 61
COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.01)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Stage(nn.Module):
    """Half of a decoder: the first one embeds tokens, the last one has the head. Both rotate by the positions they get."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.rotary = Rotary(4)
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.head = nn.Linear(WIDTH, VOCABULARY) if number == 1 else None
        self.double()

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x.long() % VOCABULARY)
        angles = self.rotary.angles(positions, torch.float64)
        heads = self.qkv(rms_norm(x, (WIDTH,))).view(len(x), 8, 4)
        q, k = self.rotary.rotate(heads[:, :4], angles), self.rotary.rotate(heads[:, 4:6], angles)
        x = x + self.out(attend(q, k, heads[:, 6:]).reshape(len(x), WIDTH))
        x = x + self.mlp(rms_norm(x, (WIDTH,)))
        return x if self.head is None else self.head(x)


def _loss(logits: Tensor, labels: Tensor, loss_tokens: float) -> Tensor:
    return token_loss(logits, torch.where(labels < 0, labels, labels % VOCABULARY), loss_tokens)


def _job(**fields: Any) -> ol.Job:
    sources = {
        "long": Numbered(rows=40, longest=170, first=1, with_mask=True, loss_mask="mask"),
        "short": Numbered(rows=60, longest=12, first=100),
    }
    return job_of(sources, ol.Batch(tokens=1024, sequence_length=256), **fields)


def _gradients(stage: Stage) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in stage.named_parameters() if each.grad is not None}


def _run_first(stage: Stage, micro: Any, attend: Attend, other: int) -> None:
    assert "labels" not in micro
    out = stage(micro["tokens"], micro["position_ids"], attend)
    dist.send(out.detach(), other)
    gradient = torch.empty_like(out)
    dist.recv(gradient, other)
    out.backward(gradient)


def _run_last(stage: Stage, micro: Any, attend: Attend, other: int, loss_tokens: float) -> Tensor:
    assert "tokens" not in micro
    x = torch.empty(len(micro["position_ids"]), WIDTH, dtype=torch.float64)
    dist.recv(x, other)
    loss = _loss(stage(x.requires_grad_(), micro["position_ids"], attend), micro["labels"], loss_tokens)
    loss.backward()
    assert x.grad is not None
    dist.send(x.grad, other)
    return loss.detach()


def _one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, RANKS, folder)
    tree = ol.ClientPlaceTree(MESH)
    place = tree.coordinates(rank)
    stages = [[tree.rank_of(pp=pp, dp=dp) for dp in range(2)] for pp in range(2)]
    groups: list[Any] = [dist.new_group(ranks) for ranks in stages]
    other = tree.rank_of(pp=1 - place.pp, dp=place.dp)
    stage, found = Stage(place.pp), []
    with attach(_job(mesh=MESH, strategy=ol.strategies.hdp(COST, capacity=128)), timeout_s=60) as client:
        for step, _ in zip(client, range(STEPS), strict=False):
            stage.zero_grad()
            total, sizes = torch.zeros((), dtype=torch.float64), []
            for micro in step:
                ring = Ring.of(micro)
                attend: Attend = lambda q, k, v, ring=ring: ring_attention(q, k, v, ring)  # noqa: E731
                if place.pp == 0:
                    _run_first(stage, micro, attend, other)
                else:
                    total += _run_last(stage, micro, attend, other, step.loss_tokens)
                sizes.append(ring.size)
            sum_gradients(stage.parameters(), groups[place.pp])
            dist.all_reduce(total)
            found.append({"loss": total.item(), "gradients": _gradients(stage), "rings": sizes, "stage": place.pp})
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _alone() -> list[tuple[float, list[dict[str, Tensor]]]]:
    """The same steps in one process: both halves, on whole documents."""
    stages, found = [Stage(0), Stage(1)], []
    with ol.start(_job()) as loader, loader.client(0, torch=True, timeout_s=60) as client:
        for step, _ in zip(client, range(STEPS), strict=False):
            total = 0.0
            for stage in stages:
                stage.zero_grad()
            for micro in step:
                lengths = micro["cu_seqlens"].diff().tolist()
                attend: Attend = lambda q, k, v, lengths=lengths: masked_attention(q, k, v, lengths)  # noqa: E731
                x = micro["tokens"]
                for stage in stages:
                    x = stage(x, micro["position_ids"], attend)
                loss = _loss(x, micro["labels"], step.loss_tokens)
                loss.backward()
                total += loss.item()
            found.append((total, [_gradients(stage) for stage in stages]))
    return found


def test_two_stages_on_rings_have_the_loss_and_gradients_of_whole_documents(tmp_path):
    run_ranks(_one_rank, RANKS, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for number, (loss, gradients) in enumerate(_alone()):
        for rank in ranks:
            found = rank[number]
            assert found["loss"] == pytest.approx(loss, rel=1e-9)
            expected = gradients[found["stage"]]
            assert found["gradients"].keys() == expected.keys()
            for name, gradient in expected.items():
                off = (found["gradients"][name] - gradient).norm() / gradient.norm()
                assert off < 1e-9, f"step {number}, stage {found['stage']}: {name} is off by {off:.2e}"
    assert {size for rank in ranks for step in rank for size in step["rings"]} == {1, 2}
