"""A ring that cannot go on says so on every rank that waits in it: none of them hangs."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlord.errors import RingError
from overlord.trainer import Ring, ring_attention
from overlord.trainer.ring import GroupMessages
from overlord.trainer.ring.messages import _lost
from tests.trainer.ranks import join_world, run_ranks
from tests.trainer.rings import micro_of

_RANKS = 3
_LONG_S = 60.0


def _attend(
    rank: int,
    number: int,
    *,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = _LONG_S,
    by_store: bool = False,
    **options: Any,
) -> torch.Tensor:
    micro: dict[str, Any] = micro_of([40], _RANKS, rank) | {"hdp_number": number}
    ring = Ring.of(micro).with_messages(GroupMessages(None, timeout_s, by_store))
    q, k, v = (torch.ones(ring.num_tokens(rank), h, 4, requires_grad=True, dtype=dtype) for h in (heads, 1, 1))
    return ring_attention(q, k, v, ring, **options)


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


def _hangs(rank: int, folder: Path, by_store: bool) -> None:
    join_world(rank, _RANKS, folder)
    if rank == 1:
        _wait_for_notes(folder, 2)
    else:
        with pytest.raises(RingError) as caught:
            _attend(rank, 7, timeout_s=1.5, by_store=by_store)
        _note(folder, rank, caught.value)
    os._exit(0)


def _differs(rank: int, folder: Path, what: str, by_store: bool) -> None:
    join_world(rank, _RANKS, folder)
    others: dict[str, Any] = {
        "heads": {"heads": 4},
        "window": {"window": 5},
        "scale": {"scale": 0.25},
        "dtype": {"dtype": torch.float64},
    }
    calls: dict[int, dict[str, Any]] = {2: {}, 3: {}}
    if rank == 1:
        calls = {3: {}, 2: {}} if what == "order" else {2: others[what], 3: others[what]}
    try:
        for number, options in calls.items():
            _attend(rank, number, timeout_s=5, by_store=by_store, **options)
    except RingError as error:
        _note(folder, rank, error)
    _wait_for_notes(folder, 2)
    os._exit(0)


def _agrees_by_store(rank: int, folder: Path) -> None:
    logging.getLogger("overlord.trainer.ring").setLevel(logging.DEBUG)
    lines: list[str] = []
    found: list[list[int]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("overlord.trainer.ring").addHandler(handler)
    for world in range(2):  # a group that is made anew begins anew
        (folder / str(world)).mkdir(exist_ok=True)
        join_world(rank, _RANKS, folder / str(world))
        num_keys = []
        for number in (1, 2, 3):
            _attend(rank, number, by_store=True).sum().backward()
            dist.barrier()
            num_keys.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier()
        dist.destroy_process_group()
        found.append(num_keys)
    torch.save({"lines": lines, "keys": found}, folder / f"{rank}.pt")


def _said(folder: Path) -> dict[int, str]:
    return {int(path.stem): path.read_text() for path in folder.glob("*.txt")}


def _check_that_rank_1_is_named(said: dict[int, str]) -> None:
    assert said.keys() == {0, 2}
    for rank, text in said.items():
        assert f"rank {rank} lost rank" in text
        assert "in ring 7 over ranks [0, 1, 2]" in text
        assert "restart from the last checkpoint" in text
    assert "lost rank 1 " in said[2], "it waits for what rank 1 should have sent"


def test_a_rank_that_dies_in_a_ring_is_named_with_its_ring(tmp_path):
    run_ranks(_dies, _RANKS, tmp_path)
    _check_that_rank_1_is_named(_said(tmp_path))


@pytest.mark.parametrize("by_store", [False, True])
def test_a_rank_that_hangs_is_named_with_its_ring(by_store, tmp_path):
    run_ranks(_hangs, _RANKS, tmp_path, by_store)
    said = _said(tmp_path)
    assert "no answer within 1.5 s" in said[2]
    _check_that_rank_1_is_named(said)


@pytest.mark.parametrize("by_store", [False, True])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("order", "rank 2 has hdp_number 2, but rank 1 has 3"),
        ("heads", "rank 2 has heads 2, but rank 1 has 4"),
        ("window", "rank 2 has window none, but rank 1 has 5"),
        ("scale", "rank 2 has scale 0.5, but rank 1 has 0.25"),
        ("dtype", "rank 2 has dtype torch.float32, but rank 1 has torch.float64"),
    ],
)
def test_ranks_that_run_other_microbatches_or_models_are_told_which(what, told, by_store, tmp_path):
    run_ranks(_differs, _RANKS, tmp_path, what, by_store)
    assert told in _said(tmp_path)[2]


def test_ranks_that_agree_through_the_store_leave_nothing_there_and_log_for_whom_they_wait(tmp_path):
    run_ranks(_agrees_by_store, _RANKS, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(_RANKS)]
    assert "rank 0 waits for rank 2 in ring 2 over ranks [0, 1, 2]" in found[0]["lines"]
    for num_keys in [keys for rank in found for keys in rank["keys"]]:
        assert len(set(num_keys)) == 1


def test_a_time_out_of_the_group_is_told_as_such():
    ring = Ring((0, 1), 0, ((), ()), 4)
    assert "no answer within the time-out of the process group: it died" in str(_lost(ring, 1, None))


def test_a_ring_of_one_rank_sends_nothing():
    assert not dist.is_initialized()
    ring = Ring.of(micro_of([9, 4], 1, 0))
    q = torch.ones(13, 1, 4, requires_grad=True)
    ring_attention(q, q, q, ring).sum().backward()
    assert q.grad is not None
