"""Attention over documents that are cut over ranks is plain attention, and a model trained on such a step has the gradients
of one that saw it whole."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import overlord as ol
from overlord.trainer import Ring, attach, ring_attention, sum_gradients, token_loss
from overlord.trainer.ring import ReferenceKernel, TorchFlash, kernels
from overlord.trainer.ring.attention import RingOptions, attend_around, differentiate_around
from overlord.trainer.ring.kernels import AttentionMask, Bounds, OutputGradient, choose_kernel
from overlord.trainer.ring.messages import PendingMessages
from overlord.trainer.ring.schedule import NO_WINDOW, calls_of
from tests.small_sources import Numbered, job_of
from tests.trainer.memory import most_bytes_of
from tests.trainer.ranks import join_world, run_ranks
from tests.trainer.reference_ring import reference_ring_attention
from tests.trainer.rings import (
    Attend,
    ThreadMessages,
    masked_attention,
    micro_of,
    places_of,
    random_numbers,
    run_in_threads,
)

_RANKS = 4
_STEPS = 2
_VOCABULARY = 61
_COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.01)


@settings(max_examples=30)
@given(
    num_ranks=st.integers(1, 5),
    wholes=st.lists(st.integers(5, 40), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    window=st.none() | st.integers(0, 45),
    seed=st.integers(0, 99),
)
def test_a_ring_gives_what_plain_attention_gives_forward_and_backward(num_ranks, wholes, heads, window, seed):
    total = sum(wholes)
    tensors = [random_numbers((total, h, 4), seed + i) for i, h in enumerate((heads[0], heads[1], heads[1]))]
    dout = random_numbers((total, heads[0], 4), seed + 9)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    out = masked_attention(whole[0], whole[1], whole[2], wholes, window)
    out.backward(dout)
    expected = [out.detach(), *(tensor.grad for tensor in whole)]
    ways: list[Attend] = [partial(ring_attention, window=window, kernel=ReferenceKernel(most_bytes=2000))]
    if window is None:
        ways.append(reference_ring_attention)
    for way in ways:
        found = run_in_threads(way, wholes, num_ranks, tensors, dout)
        for part, parts in enumerate(found):
            places = places_of(wholes, num_ranks, part)
            for mine, theirs in zip(parts, expected, strict=True):
                torch.testing.assert_close(mine, theirs[places], rtol=1e-10, atol=1e-12)


@dataclass
class CountedMessages(ThreadMessages):
    """Counts the sets of keys that a rank has received and not forgotten, and tells the order of messages."""

    sizes: list[int] = field(default_factory=list)
    most_held: int = 0
    _held: list[weakref.ref[Tensor]] = field(default_factory=list)

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> CountedPending:
        self.sizes.append(len(tensors[0]))
        return CountedPending(self, super().exchange(ring, tensors, num_tokens))


@dataclass
class CountedPending:
    messages: CountedMessages
    pending: PendingMessages

    def wait(self) -> list[Tensor]:
        received = self.pending.wait()
        held = self.messages._held
        held[:] = [ref for ref in held if ref() is not None] + [weakref.ref(received[0])]
        self.messages.most_held = max(self.messages.most_held, len(held))
        return received


@settings(max_examples=20)
@given(num_ranks=st.integers(2, 6), ahead=st.integers(1, 3), seed=st.integers(0, 99))
def test_keys_may_be_sent_any_number_of_turns_ahead_and_few_are_held(num_ranks, ahead, seed):
    wholes = [30 + seed % 7, 13]
    tensors = [random_numbers((sum(wholes), heads, 4), seed + i) for i, heads in enumerate((4, 2, 2))]
    dout = random_numbers((sum(wholes), 4, 4), seed + 9)
    boxes = ThreadMessages.between(num_ranks).boxes

    def run(part: int, keys_ahead: int) -> list[Tensor]:
        messages = CountedMessages(boxes)
        ring = Ring.of(micro_of(wholes, num_ranks, part)).with_messages(messages)
        q, k, v, grad = (tensor[places_of(wholes, num_ranks, part)] for tensor in (*tensors, dout))
        options = RingOptions(ReferenceKernel(), 0.5, NO_WINDOW, True, keys_ahead=keys_ahead)
        out, lse = attend_around(q, [k, v], ring, options)
        assert messages.most_held <= keys_ahead + 1
        assert len(messages.sizes) == num_ranks - 1
        return [out, *differentiate_around(OutputGradient(q, grad, out, lse), [k, v], ring, options)]

    with ThreadPoolExecutor(num_ranks) as threads:
        early = list(threads.map(run, range(num_ranks), [ahead] * num_ranks))
        one = list(threads.map(run, range(num_ranks), [1] * num_ranks))
    for found, expected in zip(early, one, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@settings(max_examples=200)
@given(
    num_ranks=st.integers(1, 9),
    wholes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    window=st.none() | st.integers(0, 70),
)
def test_every_pair_of_tokens_that_attend_to_each_other_is_computed_once_by_one_rank(num_ranks, wholes, window):
    wholes = [max(whole, num_ranks) for whole in wholes]
    total = sum(wholes)
    seen = np.zeros((total, total), np.int64)
    for part in range(num_ranks):
        ring = Ring.of(micro_of(wholes, num_ranks, part))
        own = np.array(places_of(wholes, num_ranks, part))
        for other in range(num_ranks):
            theirs = np.array(places_of(wholes, num_ranks, other))
            for call in calls_of(ring, other, NO_WINDOW if window is None else window):
                for queries, keys in zip(call.queries, call.keys, strict=True):
                    rows, columns = own[slice(*queries)], theirs[slice(*keys)]
                    aligned = np.arange(len(rows))[:, None] + len(columns) - len(rows)
                    column = np.arange(len(columns))[None]
                    shown = (column <= aligned) if call.causal else np.full((len(rows), len(columns)), True)
                    if call.window != NO_WINDOW:
                        assert call.window >= 0
                        shown &= column >= aligned - call.window
                        assert shown.any(1).all(), "a kernel must not get a query that sees no key"
                    seen[np.ix_(rows, columns)] += shown
    document = np.repeat(np.arange(len(wholes)), wholes)
    far = np.arange(total)[:, None] - np.arange(total)[None]
    expected = (document[:, None] == document[None]) & (far >= 0) & (far <= (total if window is None else window))
    assert (seen == expected).all()


def test_long_documents_are_taken_some_queries_at_a_time_and_low_precision_is_summed_in_single():
    wholes = [2500, 8]
    q, k, v = (random_numbers((2508, 1, 4), i) for i in range(3))
    ring = Ring.of(micro_of(wholes, 1, 0))
    found = ring_attention(q, k, v, ring, kernel=ReferenceKernel(most_bytes=1 << 20))
    torch.testing.assert_close(found, masked_attention(q, k, v, wholes))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    found, exact = ring_attention(q, k, v, ring), masked_attention(q.double(), k.double(), v.double(), wholes)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


def test_a_ring_in_low_precision_is_as_near_to_the_exact_result_as_one_rank_is():
    wholes, num_ranks = [300, 45], 4
    tensors = [random_numbers((345, heads, 8), seed).bfloat16() for seed, heads in enumerate((4, 2, 2))]
    dout = random_numbers((345, 4, 8), 9).bfloat16()
    exact = run_in_threads(reference_ring_attention, wholes, 1, [t.double() for t in tensors], dout.double())[0]
    found = run_in_threads(ring_attention, wholes, num_ranks, tensors, dout)
    for part, parts in enumerate(found):
        places = places_of(wholes, num_ranks, part)
        for mine, theirs in zip(parts, exact, strict=True):
            assert mine.dtype == torch.bfloat16
            assert (mine.double() - theirs[places]).norm() < 6e-3 * theirs[places].norm()


class Refusing(ReferenceKernel):
    """A fused kernel that knows few heads."""

    def refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if head_dim == 128 else f"this kernel takes 128, not {head_dim}"


def test_the_kernel_is_chosen_by_what_is_there_and_takes_what_it_can(caplog):
    kernels._warn_of_reference.cache_clear()  # it warns once in a process
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    fused = Refusing()
    assert choose_kernel(gpu, torch.bfloat16, 128, [fused]) is fused
    assert choose_kernel(gpu, torch.float32, 128, [fused]) == ReferenceKernel()
    assert choose_kernel(cpu, torch.bfloat16, 128, [fused]) == ReferenceKernel()
    with pytest.raises(ol.errors.SpecError, match=r"takes 128, not 100; change the model, or pass kernel=ReferenceKernel"):
        choose_kernel(gpu, torch.bfloat16, 100, [fused])
    assert choose_kernel(gpu, torch.bfloat16, 128, []) == ReferenceKernel()
    assert "no fused attention kernel" in caplog.text
    assert "at most 256 MB of scores" in caplog.text
    assert TorchFlash().refusal(torch.float32, 128) is not None
    assert "multiple of 8 up to 256, not 264" in str(TorchFlash().refusal(torch.float16, 264))


def test_pieces_that_are_not_those_of_the_cut_and_wrong_shapes_are_refused():
    with pytest.raises(ol.errors.SpecError, match="do not change its fields"):
        Ring.of(micro_of([16], 2, 0) | {"piece_offsets": np.array([0, 8])})
    with pytest.raises(ol.errors.SpecError, match=r"strategies\.hdp"):
        Ring.of({})
    q = torch.zeros(5, 2, 4)
    with pytest.raises(ol.errors.SpecError, match=r"takes q \[4, heads, dim\]"):
        ring_attention(q, q, q, Ring.of(micro_of([4], 1, 0)))
    ring = Ring.of(micro_of([5], 1, 0))
    with pytest.raises(ol.errors.SpecError, match=r"one head dimension and one dtype, got 4 torch\.float32"):
        ring_attention(q, q.bfloat16(), q.bfloat16(), ring)
    with pytest.raises(ol.errors.SpecError, match=r"takes bfloat16 and float16, not torch\.float32; leave"):
        ring_attention(q, q, q, ring, kernel=TorchFlash())
    with pytest.raises(ol.errors.SpecError, match="at least 0, got -2"):
        ring_attention(q, q, q, ring, window=-2)
    with pytest.raises(ol.errors.SpecError, match="above 0, got 0"):
        Ring.of(micro_of([5], 1, 0), timeout_s=0)


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
                loss = _loss(model, micro, step.loss_tokens, lambda q, k, v: masked_attention(q, k, v, lengths))  # noqa: B023
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


@pytest.mark.parametrize(("window", "shared"), [(None, 2), (700, 1)])
def test_the_reference_holds_no_more_scores_and_masks_than_it_promises(window, shared):
    wholes, total, most_bytes = [1400], 1400, 1 << 18
    q, k, v = (random_numbers((total, heads, 4), seed, torch.float32) for seed, heads in enumerate((shared, 1, 1)))
    (call,) = calls_of(Ring.of(micro_of(wholes, 1, 0)), 0, NO_WINDOW if window is None else window)
    bounds = Bounds.of(call, q.device)
    mask, kernel = AttentionMask(True, call.window, 0.5), ReferenceKernel(most_bytes)
    out, lse = kernel.forward(q, k, v, bounds, mask)
    linear = 8 * (q.nbytes + 2 * total * torch.int64.itemsize)  # copies of what has one number for each token
    assert most_bytes + linear < total**2 / 2, "otherwise all masks would fit"
    assert most_bytes_of(lambda: kernel.forward(q, k, v, bounds, mask)) <= most_bytes + linear
    assert most_bytes_of(lambda: kernel.backward(OutputGradient(q, q, out, lse), k, v, bounds, mask)) <= most_bytes + linear
