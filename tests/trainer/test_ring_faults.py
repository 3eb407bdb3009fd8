"""A ring that cannot go on says so on every rank that waits in it: none of them hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlord.errors import RingError
from overlord.trainer import Ring, ring_attention
from tests.trainer.ranks import join_world, run_ranks
from tests.trainer.rings import micro_of

_RANKS = 3
_LONG_S = 60.0


def _attend(rank: int, number: int, *, heads: int = 2, timeout_s: float = _LONG_S) -> torch.Tensor:
    micro: dict[str, Any] = micro_of([40], _RANKS, rank) | {"hdp_number": number}
    ring = Ring.of(micro, timeout_s=timeout_s)
    q, k, v = (torch.ones(ring.num_tokens(rank), h, 4, requires_grad=True) for h in (heads, 1, 1))
    return ring_attention(q, k, v, ring)


def _note(folder: Path, rank: int, error: RingError) -> None:
    (folder / f"{rank}.txt").write_text(str(error))


def _wait_for_notes(folder: Path, num: int) -> None:
    until = time.monotonic() + _LONG_S
    while len(list(folder.glob("*.txt"))) < num:
        assert time.monotonic() < until, "the other ranks said nothing"
        time.sleep(0.02)


def _dies(rank: int, folder: Path) -> None:
    join_world(rank, _RANKS, folder)
    out = _attend(rank, 7)
    if rank == 1:
        os._exit(0)
    with pytest.raises(RingError) as caught:
        out.sum().backward()
    _note(folder, rank, caught.value)
    _wait_for_notes(folder, 2)
    os._exit(0)  # the group of a dead rank cannot be destroyed


def _hangs(rank: int, folder: Path) -> None:
    join_world(rank, _RANKS, folder)
    if rank == 1:
        _wait_for_notes(folder, 2)
    else:
        with pytest.raises(RingError) as caught:
            _attend(rank, 7, timeout_s=1.5)
        _note(folder, rank, caught.value)
    os._exit(0)


def _swaps(rank: int, folder: Path) -> None:
    join_world(rank, _RANKS, folder)
    try:
        for number in (3, 2) if rank == 1 else (2, 3):
            _attend(rank, number, timeout_s=5)
    except RingError as error:
        _note(folder, rank, error)
    _wait_for_notes(folder, 2)
    os._exit(0)


def _has_other_heads(rank: int, folder: Path) -> None:
    join_world(rank, _RANKS, folder)
    try:
        _attend(rank, 0, heads=4 if rank == 2 else 2, timeout_s=5)
    except RingError as error:
        _note(folder, rank, error)
    _wait_for_notes(folder, 2)
    os._exit(0)


def _said(folder: Path) -> dict[int, str]:
    return {int(path.stem): path.read_text() for path in folder.glob("*.txt")}


@pytest.mark.parametrize("one_rank", [_dies, _hangs])
def test_a_rank_that_dies_or_hangs_in_a_ring_is_named_with_its_ring(one_rank, tmp_path):
    run_ranks(one_rank, _RANKS, tmp_path)
    said = _said(tmp_path)
    assert said.keys() == {0, 2}
    for rank, text in said.items():
        assert f"rank {rank} lost rank" in text
        assert "in ring 7 over ranks [0, 1, 2]" in text
        assert "restart from the last checkpoint" in text
    assert "lost rank 1 " in said[2], "it waits for what rank 1 should have sent"


@pytest.mark.parametrize(
    ("one_rank", "what"),
    [(_swaps, r"hdp_number 2, but rank 1 has 3"), (_has_other_heads, r"rank 0 has heads 2, but rank 2 has 4")],
)
def test_ranks_that_run_other_microbatches_or_models_are_told_which(one_rank, what, tmp_path):
    run_ranks(one_rank, _RANKS, tmp_path)
    assert any(what in text for text in _said(tmp_path).values()), _said(tmp_path)


def test_a_ring_of_one_rank_sends_nothing():
    assert not dist.is_initialized()
    ring = Ring.of(micro_of([9, 4], 1, 0))
    q = torch.ones(13, 1, 4, requires_grad=True)
    ring_attention(q, q, q, ring).sum().backward()
    assert q.grad is not None
