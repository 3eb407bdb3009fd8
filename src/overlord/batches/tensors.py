"""Conversion of batches from numpy to torch without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from overlord.messages import Fields


def to_torch(batch: Fields, pin_memory: bool = False) -> Fields:
    """The batch with every array as a tensor over the same memory; numbers and Arrow columns stay.

    A read-only array (from the wire, or mapped from a file) becomes a tensor that must not be written to in place: torch
    has no read-only tensors. With `pin_memory` tensors are copied once into page-locked
    memory, so that `.to(device, non_blocking=True)` overlaps with compute.
    """
    torch = _torch()
    if pin_memory and not torch.cuda.is_available():
        raise SpecError("pin_memory=True needs a CUDA device, and torch sees none in this process; leave it out on CPU")
    return {name: _convert(value, pin_memory) for name, value in batch.items()}


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise SpecError("torch tensors need torch: pip install 'overlord-dataloader[torch]', or use numpy") from error
    return torch


def _convert(value: Any, pin_memory: bool) -> Any:
    if isinstance(value, np.ndarray):
        tensor = _tensor(value)
        return tensor.pin_memory() if pin_memory else tensor
    if isinstance(value, list):
        return [_convert(entry, pin_memory) for entry in value]
    return value


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    torch = _torch()
    # from_numpy warns about read-only memory, which is the normal case here; from_dlpack takes it quietly.
    return torch.from_numpy(array) if array.flags.writeable else torch.from_dlpack(array)
