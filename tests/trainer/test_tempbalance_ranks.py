"""Several ranks, as processes on this machine: shared work, sharded weights, the same result everywhere."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import overlord as ol
from overlord.trainer import TempBalance
from overlord.trainer.tempbalance import distributed
from overlord.trainer.tempbalance.weights import Matrix
from tests.trainer.models import loss_of, tiny
from tests.trainer.ranks import join_world, run_ranks

_RANKS = 3
_MATRICES = 9


@given(costs=st.lists(st.floats(1, 100), min_size=1, max_size=60), num_ranks=st.integers(1, 9))
def test_work_is_shared_so_that_no_rank_has_more_than_a_matrix_above_its_part(costs, num_ranks):
    owner = distributed.owners(costs, num_ranks)
    load = [sum(cost for cost, rank in zip(costs, owner, strict=True) if rank == r) for r in range(num_ranks)]
    assert max(load) <= sum(costs) / num_ranks + max(costs) + 1e-9


class Watched(TempBalance):
    """Notes which matrices this rank solves."""

    solved: list[str]

    def _own_stacks(self, matrices: Any, owner: Any) -> Any:
        self.solved = [matrices[number].name for number, rank in enumerate(owner) if rank == self._ranks.rank]
        yield from super()._own_stacks(matrices, owner)


def _train(model: nn.Module, group: Any = None) -> dict[str, Any]:
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    balance = Watched(optimizer, model, interval=2, min_eigenvalues=8, process_group=group)
    history = []
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((balance.state_dict()["alphas"], balance.factors))
    return {"history": history, "solved": balance.solved}


def _sharded() -> dict[str, Any]:
    model = tiny()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(distributed.is_sharded(parameter) for parameter in model.parameters())
    return _train(model)


def _refusal(model: nn.Module) -> str:
    try:
        TempBalance(optim.SGD(model.parameters(), lr=0.1), model, min_eigenvalues=8)
    except ol.errors.SpecError as error:
        return str(error)
    return "was taken"


def _one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, _RANKS, folder)
    pair = dist.new_group([0, 1])
    found = {
        "replicated": _train(tiny()),
        "sharded": _sharded(),
        "in a group": _train(tiny(), pair) if rank < 2 else None,
        "outside a group": _refusal_of_group(pair) if rank == 2 else None,
        "different": _refusal(tiny(num_blocks=2 + rank)),
        "flattened": _refusal(FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=True)),
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _refusal_of_group(group: Any) -> str:
    try:
        _train(tiny(), group)
    except ol.errors.SpecError as error:
        return str(error)
    return "was taken"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a gloo world over loopback found, all in one world."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(_one_rank, _RANKS, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(_RANKS)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return _train(tiny())


def _assert_close(history: list[Any], expected: list[Any], tolerance: float) -> None:
    for (alphas, factors), (expected_alphas, expected_factors) in zip(history, expected, strict=True):
        assert alphas == pytest.approx(expected_alphas, rel=tolerance)
        assert factors == pytest.approx(expected_factors, rel=100 * tolerance)


@pytest.mark.parametrize(("world", "size"), [("replicated", 3), ("in a group", 2)])
def test_ranks_share_the_work_and_agree_with_a_single_process(world, size, ranks, alone):
    found = [rank[world] for rank in ranks[:size]]
    assert all(rank["history"] == found[0]["history"] for rank in found)
    _assert_close(found[0]["history"], alone["history"], 1e-9)
    assert sorted(name for rank in found for name in rank["solved"]) == sorted(alone["solved"])
    assert all(0 < len(rank["solved"]) < _MATRICES for rank in found)


def test_sharded_matrices_are_gathered_and_give_what_whole_ones_give(ranks, alone):
    found = [rank["sharded"] for rank in ranks]
    assert all(rank["history"] == found[0]["history"] for rank in found)
    _assert_close(found[0]["history"], alone["history"], 1e-5)  # gradients are summed in another order
    assert sorted(name for rank in found for name in rank["solved"]) == sorted(alone["solved"])


def test_ranks_with_different_layers_are_told_instead_of_waiting_for_ever(ranks):
    assert all("pass the data-parallel group of the stage" in rank["different"] for rank in ranks)


def test_a_rank_outside_the_group_and_the_older_fsdp_are_refused_with_the_way_out(ranks):
    assert "pass the group it belongs to" in ranks[2]["outside a group"]
    assert all("fully_shard" in rank["flattened"] for rank in ranks)


def test_a_gathered_matrix_is_let_go_before_the_next_is_asked_for(monkeypatch):
    """Only Gram matrices wait for a batch, so sharded weights need the memory of one whole matrix, not of all."""
    model = tiny(width=16)
    balance = TempBalance(optim.SGD(model.parameters(), lr=0.1), model, min_eigenvalues=8)
    handed: list[weakref.ref[torch.Tensor]] = []

    def gathered(parameter: torch.Tensor) -> torch.Tensor:
        assert [ref() for ref in handed if ref() is not None] == []
        full = parameter.detach().clone()
        handed.append(weakref.ref(full))
        return full

    monkeypatch.setattr(distributed, "whole", gathered)
    balance.update()
    assert len(handed) == _MATRICES


def test_a_sharded_matrix_is_asked_for_on_every_rank_and_kept_by_its_owner(monkeypatch):
    model = tiny()
    balance = TempBalance(optim.SGD(model.parameters(), lr=0.1), model, min_eigenvalues=8)
    asked: list[torch.Size] = []
    monkeypatch.setattr(distributed, "is_sharded", lambda parameter: True)
    monkeypatch.setattr(distributed, "whole", lambda parameter: asked.append(parameter.shape) or parameter)
    matrices: list[Matrix] = list(balance._matrices)
    kept = [number for number, _ in balance._own_stacks(matrices, [0, 1, 2] * 3)]
    assert len(asked) == _MATRICES
    assert kept == [0, 3, 6]
