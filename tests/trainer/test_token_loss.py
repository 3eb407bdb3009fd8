"""The loss in chunks is that of all logits, gradients summed in buckets are those summed one by one; rotary positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from overlord.errors import SpecError
from overlord.trainer import GradientSums, Ring, Rotary, chunked_token_loss, sum_gradients, token_loss
from tests.trainer.ranks import join_world, run_ranks
from tests.trainer.rings import micro_of, random_numbers


@settings(max_examples=30)
@given(tokens=st.integers(0, 30), chunk=st.integers(1, 40), weighted=st.booleans(), seed=st.integers(0, 99))
def test_the_loss_in_chunks_has_the_value_and_gradients_of_all_logits_at_once(tokens, chunk, weighted, seed):
    hidden, head = random_numbers((tokens, 6), seed), random_numbers((11, 6), seed + 1)
    labels = torch.randint(-1, 11, (tokens,), generator=torch.Generator().manual_seed(seed)).where(
        random_numbers((tokens,), seed + 2) > -1, -100
    )
    labels = labels.where(labels >= 0, -100)
    weights = random_numbers((tokens,), seed + 3).abs() if weighted else None
    found: list[list[Tensor | None]] = []
    for way in ("whole", "chunked"):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if way == "whole":
            loss = token_loss(h @ w.T, labels, 7.5, weights)
        else:
            loss = chunked_token_loss(h, w, labels, 7.5, weights, chunk_bytes=chunk * 4 * 11)
        (3 * loss).backward()
        found.append([loss.detach(), h.grad, w.grad])
    torch.testing.assert_close(found[1], found[0])


def test_the_loss_in_chunks_sums_low_precision_in_single_and_refuses_other_shapes():
    hidden, head = random_numbers((600, 16), 0, torch.bfloat16), random_numbers((50, 16), 1, torch.bfloat16)
    labels = torch.arange(600) % 50
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss = chunked_token_loss(h, w, labels, 600, chunk_bytes=16 * 200)
    loss.backward()
    exact_h, exact_w = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact = token_loss(exact_h @ exact_w.T, labels, 600)
    exact.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    for mine, theirs in ((h.grad, exact_h.grad), (w.grad, exact_w.grad)):
        assert mine is not None
        assert theirs is not None
        assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()
    with pytest.raises(SpecError, match=r"got \(600, 16\), \(50, 8\)"):
        chunked_token_loss(hidden, head[:, :8], labels, 1)


@pytest.mark.parametrize("tokens", [40, 3000])
@pytest.mark.parametrize("by_autocast", [False, True])
def test_the_loss_in_chunks_keeps_gradients_of_float16_under_a_scaler_and_a_large_step(tokens, by_autocast):
    hidden, head = random_numbers((tokens, 16), 0, torch.float16), random_numbers((50, 16), 1, torch.float16)
    hidden[:, 0] = 40.0  # its sum over the tokens of one label is beyond the range of float16
    labels = torch.zeros(tokens, dtype=torch.long)
    found: list[list[Tensor | None]] = []
    for dtype in (torch.float16, torch.float32):
        stored = torch.float32 if by_autocast else dtype
        h, w = (each.to(stored, copy=True).requires_grad_() for each in (hidden, head))
        with torch.autocast("cpu", torch.float16, enabled=by_autocast and dtype == torch.float16):
            loss = chunked_token_loss(h, w, labels, 3e7)
        (2.0**16 * loss).backward()
        assert h.grad is not None
        assert h.grad.dtype == stored
        found.append([h.grad, w.grad])
    for half, single in zip(*found, strict=True):
        assert half is not None
        assert single is not None
        assert (half.float() - single).norm() < 5e-3 * single.norm()


def test_rotary_scores_depend_on_distance_alone_even_two_million_tokens_in():
    rotary = Rotary(8, theta=10_000.0)
    q, k = random_numbers((1, 2, 8), 0), random_numbers((1, 2, 8), 1)

    def score(at: int, before: int) -> Tensor:
        angles = [rotary.angles(torch.tensor([place], dtype=torch.int32), torch.float64) for place in (at, before)]
        return (rotary.rotate(q, angles[0]) * rotary.rotate(k, angles[1])).sum(-1)

    torch.testing.assert_close(score(2_000_003, 2_000_000), score(3, 0), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rotary.rotate(q, rotary.angles(torch.tensor([0]), torch.float64)), q)
    slower = Rotary(8, rates=tuple(10_000.0 ** (-i / 4) / 2 for i in range(4)))
    torch.testing.assert_close(slower.angles(torch.tensor([14])), rotary.angles(torch.tensor([7])))
    with pytest.raises(SpecError, match="even, got 7"):
        Rotary(7)
    with pytest.raises(SpecError, match="4 pairs, but 2 rates"):
        Rotary(8, rates=(1.0, 2.0))


_RANKS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


def _one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, _RANKS, folder)
    found: dict[str, Any] = {}
    for name in ("one by one", "buckets"):
        model = _model()
        sums = GradientSums(model.parameters(), bucket_bytes=300) if name == "buckets" else None
        seen = []
        for step in range(3):
            num = (rank + step) % _RANKS  # some rank has no microbatch
            for index in range(num):
                loss = model(random_numbers((5, 4), 100 * rank + 10 * step + index)).square().sum()
                if sums is None:
                    loss.backward()
                else:
                    sums.backward(loss, is_last=index + 1 == num, ring=Ring.of(micro_of([5], 1 + step % 2, 0)))
            if sums is None:
                sum_gradients(model.parameters())
            else:
                sums.finish()
            seen.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            model.zero_grad(set_to_none=step % 2 == 0)
        found[name] = seen
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _sums_of_small_gradients(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, 2, folder)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        weight, unused = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
        sums = GradientSums([weight, unused], dtype=dtype)
        for step in range(2):
            for index in range(600):
                sums.backward(weight.sum(), is_last=index == 599)
            sums.finish()
            assert unused.grad is not None
            assert not unused.grad.any()
            found.append([weight.grad, sums.main_gradient(weight).clone()])
            if step == 0:
                weight.grad = unused.grad = None
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_gradients_in_bfloat16_are_accumulated_in_single_precision_unless_told_otherwise(tmp_path):
    run_ranks(_sums_of_small_gradients, 2, tmp_path)
    single, again, half, _ = torch.load(tmp_path / "0.pt")
    for grad, main in (single, again):
        assert main.dtype == torch.float32
        assert main.tolist() == [1200.0] * 3
        assert grad.dtype == torch.bfloat16
        assert grad.tolist() == [1200.0] * 3
    assert half[1].dtype == torch.bfloat16
    assert half[1].tolist() == [512.0] * 3, "bfloat16 loses what is added to 256"


def _gradients_in_buckets(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, 1, folder)
    weight = nn.Parameter(torch.ones(1000))
    sums = GradientSums([weight])
    places = []
    for to_none in (True, False, True):
        for index in range(2):
            sums.backward((weight * (index + 1)).sum(), is_last=index == 1)
            assert weight.grad is not None
            places.append(weight.grad.data_ptr())
        sums.finish()
        assert sums.main_gradient(weight) is weight.grad
        assert sums.main_gradient(weight).tolist() == [3.0] * 1000
        torch.optim.SGD([weight]).zero_grad(set_to_none=to_none)
    assert len(set(places)) == 1, "gradients should be made in their bucket, not beside it"
    dist.destroy_process_group()


def test_gradients_are_made_in_their_buckets_also_after_they_were_set_to_none(tmp_path):
    run_ranks(_gradients_in_buckets, 1, tmp_path)


def test_gradients_summed_in_buckets_are_those_summed_one_by_one(tmp_path):
    run_ranks(_one_rank, _RANKS, tmp_path)
    for rank in range(_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found["buckets"]) == 3
        torch.testing.assert_close(found["buckets"], found["one by one"])
    with pytest.raises(SpecError, match="at least 1, got 0"):
        GradientSums([], bucket_bytes=0)
    with pytest.raises(SpecError, match=r"floating-point one, got torch\.int32"):
        GradientSums([], dtype=torch.int32)
    with pytest.raises(SpecError, match=r"\[2\] is not among those that are summed"):
        GradientSums([]).main_gradient(torch.ones(2))
