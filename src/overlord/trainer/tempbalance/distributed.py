"""Computing spectra on several ranks, and gathering matrices that are sharded over ranks.

Every rank solves its share of the matrices, and an all-reduce adds up the results, so all ranks have the same alphas to the
last bit. Sharded matrices are gathered by all ranks together, one at a time, and only the rank that solves one keeps it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlord.trainer.tempbalance.weights import Matrix


class Ranks:
    """The ranks that hold the same parameters, whole or sharded: those of `group`, or all ranks if it is None."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._together = dist.is_available() and dist.is_initialized()
        self._group = group
        self._device = device
        self.size = dist.get_world_size(group) if self._together else 1
        self.rank = dist.get_rank(group) if self._together else 0
        if self.rank < 0:
            raise SpecError("this rank is not in the process_group given to TempBalance; pass the group it belongs to")

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` over ranks (an all-reduce), on the CPU."""
        if self.size == 1:
            return values
        there = values.to(self._device)
        dist.all_reduce(there, group=self._group)
        return there.cpu()

    def check_same(self, matrices: Sequence[Matrix]) -> None:
        """Raise SpecError unless all ranks have the same matrices: otherwise they would deadlock in collectives."""
        if self.size == 1:
            return
        text = repr([(matrix.name, matrix.shape) for matrix in matrices]).encode()
        mine = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
        extremes = torch.tensor([mine, -mine], device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        if extremes.tolist() != [mine, -mine]:
            raise SpecError(
                f"ranks of one process_group must hold the same layers, but they differ (rank {self.rank} has "
                f"{len(matrices)} matrices); with pipeline parallelism pass the data-parallel group of the stage"
            )


def owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """The rank that solves each matrix: by falling cost, each to the rank with the least work."""
    load = [0.0] * num_ranks
    owner = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[index] = load.index(min(load))
        load[owner[index]] += costs[index]
    return owner


def cost(matrix: Matrix) -> float:
    """The rough cost of the Gram matrix and its eigenvalues, in multiplications."""
    num_matrices, rows, columns = matrix.shape
    short = min(rows, columns)
    return float(num_matrices) * short * short * (max(rows, columns) + 4 * short)


def whole(parameter: Tensor) -> Tensor:
    """The parameter itself, or the whole of it gathered from the ranks that shard it."""
    return parameter.full_tensor() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]


def is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "full_tensor")  # a DTensor: FSDP2, tensor parallelism


def check_gatherable(modules: Iterable[nn.Module]) -> None:
    """Raise SpecError for FSDP1, which flattens parameters together and so loses the shapes that spectra need."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise SpecError(
            "TempBalance gathers whole matrices from FSDP2; wrap the model with torch.distributed.fsdp.fully_shard "
            "instead of FullyShardedDataParallel"
        )
