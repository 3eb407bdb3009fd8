"""How much memory tensors take, counted from what operations return: the same on every machine and at every load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.most_live = 0
        self.largest = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = func(*args, **(kwargs or {}))
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.most_live = max(self.most_live, sum(size for _, size in self._live.values()))
        return found


def most_bytes_of(run: Callable[[], object]) -> int:
    """The most bytes that the tensors made by a function take at a time."""
    with CountedBytes() as counted, torch.no_grad():
        run()
    return counted.most_live
