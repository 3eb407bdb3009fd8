"""Attention over documents that are cut over ranks is plain attention, and a model trained on such a step has the gradients
of one that saw it whole."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import overlord as ol
from overlord.arrange.hdp.rings import chunks_of
from overlord.trainer import Ring, attach, ring_attention, sum_gradients, token_loss
from tests.small_sources import Numbered, job_of
from tests.trainer.ranks import join_world, run_ranks

_RANKS = 4
_STEPS = 2
_VOCABULARY = 61
_COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.01)


class Passing(Ring):
    """A ring whose ranks are threads of this process."""

    boxes: dict[int, queue.SimpleQueue[list[Tensor]]]

    def pass_on(self, tensors: list[Tensor], part: int) -> list[Tensor]:
        self.boxes[self.ranks[(self.index + 1) % self.size]].put(tensors)
        received = self.boxes[self.ranks[self.index]].get(timeout=60)
        assert [t.shape[0] for t in received] == [self.num_tokens(part)] * len(tensors)
        return received


def _micro(wholes: list[int], num_ranks: int, part: int) -> dict[str, Any]:
    pieces = [(whole, chunk) for whole in wholes for chunk in chunks_of(whole, num_ranks, part)]
    return {
        "hdp_ranks": np.arange(num_ranks),
        "hdp_index": part,
        "whole_lengths": np.array([whole for whole, _ in pieces]),
        "piece_offsets": np.array([chunk.begin for _, chunk in pieces]),
        "document_lengths": np.array([chunk.end - chunk.begin for _, chunk in pieces]),
    }


def _places(wholes: list[int], num_ranks: int, part: int) -> list[int]:
    starts = np.cumsum([0, *wholes]).tolist()
    chunks = [
        (start, chunk) for start, whole in zip(starts, wholes, strict=False) for chunk in chunks_of(whole, num_ranks, part)
    ]
    return [start + i for start, chunk in chunks for i in range(chunk.begin, chunk.end)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Each document alone, by torch's own."""
    outs = []
    for one in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        heads = [t.transpose(0, 1) for t in one]
        heads[1:] = [t.repeat_interleave(heads[0].shape[0] // t.shape[0], 0) for t in heads[1:]]
        outs.append(functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).transpose(0, 1))
    return torch.cat(outs) if outs else q


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _in_threads(wholes: list[int], num_ranks: int, tensors: list[Tensor], dout: Tensor) -> list[list[Tensor]]:
    """Outputs and gradients of each part."""
    boxes = {rank: queue.SimpleQueue() for rank in range(num_ranks)}

    def run(part: int) -> list[Tensor]:
        found = Ring.of(_micro(wholes, num_ranks, part))
        ring = Passing(found.ranks, found.index, found.pieces)
        object.__setattr__(ring, "boxes", boxes)
        places = _places(wholes, num_ranks, part)
        own = [tensor[places].requires_grad_() for tensor in tensors]
        out = ring_attention(own[0], own[1], own[2], ring)
        out.backward(dout[places])
        return [out.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


@settings(max_examples=25)
@given(
    num_ranks=st.integers(1, 5),
    wholes=st.lists(st.integers(5, 40), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    seed=st.integers(0, 99),
)
def test_a_ring_gives_what_plain_attention_gives_forward_and_backward(num_ranks, wholes, heads, seed):
    total = sum(wholes)
    tensors = [_random((total, h, 4), seed + i) for i, h in enumerate((heads[0], heads[1], heads[1]))]
    dout = _random((total, heads[0], 4), seed + 9)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    out = plain_attention(whole[0], whole[1], whole[2], wholes)
    out.backward(dout)
    expected = [out.detach(), *(tensor.grad for tensor in whole)]
    found = _in_threads(wholes, num_ranks, tensors, dout)
    for part, parts in enumerate(found):
        places = _places(wholes, num_ranks, part)
        for mine, theirs in zip(parts, expected, strict=True):
            torch.testing.assert_close(mine, theirs[places], rtol=1e-10, atol=1e-12)


def test_long_documents_are_taken_some_queries_at_a_time_and_low_precision_is_summed_in_single():
    wholes = [2500, 8]
    q, k, v = (_random((2508, 1, 4), i) for i in range(3))
    lengths = np.array(wholes)
    ring = Ring.of(_micro([1], 1, 0) | {"whole_lengths": lengths, "document_lengths": lengths, "piece_offsets": 0 * lengths})
    torch.testing.assert_close(ring_attention(q, k, v, ring), plain_attention(q, k, v, wholes))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    found, exact = ring_attention(q, k, v, ring), plain_attention(q.double(), k.double(), v.double(), wholes)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


def test_pieces_that_are_not_those_of_the_cut_and_wrong_shapes_are_refused():
    with pytest.raises(ol.errors.SpecError, match="do not change its fields"):
        Ring.of(_micro([16], 2, 0) | {"piece_offsets": np.array([0, 8])})
    with pytest.raises(ol.errors.SpecError, match=r"strategies\.hdp"):
        Ring.of({})
    q = torch.zeros(5, 2, 4)
    with pytest.raises(ol.errors.SpecError, match=r"takes q \[4, heads, dim\]"):
        ring_attention(q, q, q, Ring.of(_micro([4], 1, 0)))


class Model(nn.Module):
    """A decoder of two layers with grouped heads; attention is passed in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 16
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        angles = positions.double()[:, None] / 10.0 ** torch.arange(8)
        x = self.embedding(tokens) + torch.cat([angles.sin(), angles.cos()], 1)
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            heads = qkv(self.norm(x)).view(len(x), 8, 4)
            x = x + out(attend(heads[:, :4], heads[:, 4:6], heads[:, 6:]).reshape(len(x), 16))
            x = x + mlp(self.norm(x))
        return self.head(self.norm(x))


def _job(**fields: Any) -> ol.Job:
    sources = {
        "long": Numbered(rows=40, longest=170, first=1, with_mask=True, loss_mask="mask"),
        "short": Numbered(rows=60, longest=12, first=100),
    }
    return job_of(sources, ol.Batch(tokens=1024, sequence_length=256), **fields)


def _loss(model: Model, micro: Mapping[str, Any], loss_tokens: float, attend: Any) -> Tensor:
    labels = micro["labels"]
    logits = model(micro["tokens"].long() % _VOCABULARY, micro["position_ids"], attend)
    return token_loss(logits, torch.where(labels < 0, labels, labels % _VOCABULARY), loss_tokens)


def _gradients(model: Model) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, _RANKS, folder)
    job = _job(mesh=ol.Mesh(dp=2, cp=2), strategy=ol.strategies.hdp(_COST, capacity=72))
    model, found = Model(), []
    with attach(job, timeout_s=60) as client:
        for step, _ in zip(client, range(_STEPS), strict=False):
            model.zero_grad()
            total, sizes = torch.zeros((), dtype=torch.float64), []
            for micro in step:
                ring = Ring.of(micro)
                loss = _loss(model, micro, step.loss_tokens, lambda q, k, v: ring_attention(q, k, v, ring))  # noqa: B023
                loss.backward()
                total += loss.detach()
                sizes.append(ring.size)
            sum_gradients(model.parameters())
            dist.all_reduce(total)
            found.append({"loss": total.item(), "gradients": _gradients(model), "rings": sizes})
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each rank of a gloo world over loopback found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(_one_rank, _RANKS, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(_RANKS)]


def _alone() -> list[dict[str, Any]]:
    """The same steps in one process, whole documents and torch's own attention."""
    model, found = Model(), []
    with ol.start(_job()) as loader, loader.client(0, torch=True, timeout_s=60) as client:
        for step, _ in zip(client, range(_STEPS), strict=False):
            model.zero_grad()
            total = 0.0
            for micro in step:
                lengths = micro["cu_seqlens"].diff().tolist()
                loss = _loss(model, micro, step.loss_tokens, lambda q, k, v: plain_attention(q, k, v, lengths))  # noqa: B023
                loss.backward()
                total += loss.item()
            found.append({"loss": total, "gradients": _gradients(model)})
    return found


def test_a_step_cut_over_four_ranks_has_the_loss_and_every_gradient_of_the_whole(ranks):
    alone = _alone()
    for number, expected in enumerate(alone):
        for rank in ranks:
            assert rank[number]["loss"] == pytest.approx(expected["loss"], rel=1e-9)
            assert rank[number]["gradients"].keys() == expected["gradients"].keys()
            for name, gradient in expected["gradients"].items():
                off = (rank[number]["gradients"][name] - gradient).norm() / gradient.norm()
                assert off < 1e-9, f"step {number}: {name} is off by {off:.2e}"
    counts = [{len(step["rings"]) for step in steps} for steps in zip(*ranks, strict=True)]
    assert any(len(found) > 1 for found in counts), "ranks should run different numbers of microbatches"
    sizes = {size for rank in ranks for step in rank for size in step["rings"]}
    assert sizes == {1, 2, 3, 4}, "some documents should be whole, some cut over two, three and four ranks"
