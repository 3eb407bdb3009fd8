"""Conversion of batches from numpy to torch: without a copy, into pinned memory, or onto a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from overlord.declare.arguments import switch
from overlord.errors import SpecError
from overlord.messages import HOST_FIELDS, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from overlord.messages import Fields

_ALIGNMENT = 256
"""Where arrays begin in a buffer that they share: kernels read aligned memory faster."""
_LARGE_BYTES = 1 << 20
"""Arrays of this size get memory of their own on a device. Smaller ones share a buffer: copying each would cost more than
the bytes do, and a trainer that keeps one of them keeps little else."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a trainer gets its arrays: in numpy, as torch tensors over the same memory, in pinned memory, or on a device."""

    torch: bool = False
    pin_memory: bool = False
    device: Any = None
    """A torch device, or its name; None and the CPU leave arrays where they are."""

    def __post_init__(self) -> None:
        is_torch, is_pinned = switch(self.torch, "torch"), switch(self.pin_memory, "pin_memory")
        if is_pinned and not is_torch:
            raise SpecError("pin_memory needs torch=True: only torch tensors can be pinned")
        if self.device is not None and not is_torch:
            raise SpecError(f"device={self.device!r} needs torch=True: only torch tensors can be on a device")
        if self.device is not None:
            object.__setattr__(self, "device", _device(self.device))
        if is_pinned:
            _check_cuda("pin_memory=True")

    @property
    def copies(self) -> bool:
        """True if a batch is copied, which takes time that a trainer need not wait for."""
        return self.pin_memory or (self.device is not None and self.device.type != "cpu")

    def open(self) -> Placer:
        """Returns what places batches. Called by the thread of the trainer: its current CUDA device is the one that is
        meant by "cuda", and in whose context memory is pinned."""
        if not self.torch:
            return _Unchanged()
        torch = _torch()
        register_step()
        if self.device is None or self.device.type == "cpu":
            return _OnHost(torch.cuda.current_device() if self.pin_memory else None)
        if self.device.type != "cuda":
            return _OnDevice(self.device)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return _OnCuda(torch.device("cuda", index))


@dataclass(frozen=True, slots=True)
class Placed:
    """Batches where they belong; a copy to a CUDA device may still be under way."""

    microbatches: tuple[Fields, ...]
    event: Any = None
    """The CUDA event of the copy."""
    copies: Sequence[torch.Tensor] = field(default=())
    """The memory on the device."""

    def use(self) -> tuple[Fields, ...]:
        """Returns the batches, for work on the caller's current stream: that stream waits for the copy, the caller does
        not. The memory is not given to another copy before that stream is done with it."""
        if self.event is not None:
            stream = _torch().cuda.current_stream(self.copies[0].device)
            stream.wait_event(self.event)
            for tensor in self.copies:
                tensor.record_stream(stream)
        return self.microbatches


class Placer(Protocol):
    """Places batches, in any thread."""

    def place(self, microbatches: tuple[Fields, ...]) -> Placed: ...


class _Unchanged:
    def place(self, microbatches: tuple[Fields, ...]) -> Placed:
        return Placed(microbatches)


class _OnHost:
    """Tensors over the same memory, or in pinned memory where `pinned_for` is the number of a CUDA device. Without it a
    thread would pin memory in the context of the first device, and take memory there."""

    def __init__(self, pinned_for: int | None) -> None:
        self._pinned_for = pinned_for

    def place(self, microbatches: tuple[Fields, ...]) -> Placed:
        if self._pinned_for is None:
            return Placed(tuple(to_torch(fields) for fields in microbatches))
        with _torch().cuda.device(self._pinned_for):
            return Placed(tuple(to_torch(fields, pin_memory=True) for fields in microbatches))


class _OnDevice:
    """Tensors on a device that is copied to while the caller waits."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def place(self, microbatches: tuple[Fields, ...]) -> Placed:
        return Placed(copy_arrays(microbatches, self._device)[0])


class _OnCuda:
    """Tensors on a CUDA device. They are copied from pinned memory, on a stream of their own, beside the trainer's work."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = _torch().cuda.Stream(device)

    def place(self, microbatches: tuple[Fields, ...]) -> Placed:
        torch = _torch()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved, copies = copy_arrays(microbatches, self._device, pin_memory=True)
            if not copies:
                return Placed(moved)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Placed(moved, event, copies)


def register_step() -> None:
    """Make `Step` a node of torch's pytrees, unless it is one: functions that map over the tensors of a batch find them in
    its microbatches. The number and the loss tokens are leaves too, so that all steps of a run have one structure."""
    from torch.utils import _pytree as pytree

    if Step in pytree.SUPPORTED_NODES:
        return

    def flatten(step: Step) -> tuple[list[Any], Any]:
        return [step.number, step.loss_tokens, list(step.microbatches)], step.origin

    def flatten_with_keys(step: Step) -> tuple[list[Any], Any]:
        children, origin = flatten(step)
        names = ("number", "loss_tokens", "microbatches")
        return [(pytree.GetAttrKey(name), child) for name, child in zip(names, children, strict=True)], origin

    def unflatten(children: Iterable[Any], origin: Any) -> Step:
        number, loss_tokens, microbatches = children
        return Step(number, loss_tokens, tuple(microbatches), origin)

    pytree.register_pytree_node(
        Step,
        flatten,
        unflatten,
        serialized_type_name="overlord.Step",
        flatten_with_keys_fn=flatten_with_keys,
    )


def to_torch(batch: Fields, pin_memory: bool = False) -> Fields:
    """The batch with every array as a tensor over the same memory; numbers and Arrow columns stay.

    A read-only array (from the wire, or mapped from a file) becomes a tensor that must not be written to in place: torch
    has no read-only tensors. With `pin_memory` tensors are copied once into page-locked
    memory, so that `.to(device, non_blocking=True)` overlaps with compute.
    """
    _torch()
    if pin_memory:
        _check_cuda("pin_memory=True")

    def convert(array: NDArray[Any]) -> torch.Tensor:
        tensor = _tensor(array)
        return tensor.pin_memory() if pin_memory else tensor

    return {name: _map_arrays(value, convert) for name, value in batch.items()}


def copy_arrays(
    microbatches: tuple[Fields, ...], device: Any, pin_memory: bool = False
) -> tuple[tuple[Fields, ...], list[torch.Tensor]]:
    """Copy every array but `HOST_FIELDS` to a device; returns the batches with the copies, and the memory that these lie in.
    With `pin_memory` the copies are only begun, on the current stream."""
    torch = _torch()
    arrays: list[NDArray[Any]] = []

    def note(array: NDArray[Any]) -> None:
        arrays.append(array)

    for fields in microbatches:
        _map_arrays([value for name, value in fields.items() if name not in HOST_FIELDS], note)
    begins: dict[int, int] = {}
    num_bytes = 0
    for number, array in enumerate(arrays):
        if array.nbytes < _LARGE_BYTES:
            begins[number] = num_bytes
            num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT

    def upload(host: torch.Tensor) -> torch.Tensor:
        # Pinned memory goes back to torch's pool, which waits for the copy before it gives the memory out again.
        copies.append(host.to(device, non_blocking=pin_memory))
        return copies[-1]

    copies: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    shared = None
    if begins:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        memory: NDArray[np.uint8] = host.numpy()
        for number, begin in begins.items():
            array = arrays[number]
            np.copyto(memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape), array)
        shared = upload(host)
    for number, array in enumerate(arrays):
        begin, dtype = begins.get(number), _tensor(np.empty(0, array.dtype)).dtype
        if begin is not None and shared is not None:
            found.append(shared[begin : begin + array.nbytes].view(dtype).view(array.shape))
        else:
            host = torch.empty(math.prod(array.shape), dtype=dtype, pin_memory=pin_memory).view(array.shape)
            np.copyto(host.numpy(), array)
            found.append(upload(host))
    next_found = iter(found)

    def take(_: NDArray[Any]) -> torch.Tensor:
        return next(next_found)

    moved = (
        {name: _map_arrays(value, _owned_tensor if name in HOST_FIELDS else take) for name, value in fields.items()}
        for fields in microbatches
    )
    return tuple(moved), copies


def _owned_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor of its own memory: a batch that was copied to a device is given back at once."""
    return _tensor(array.copy())


def _map_arrays(value: Any, convert: Callable[[NDArray[Any]], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return convert(value)
    if isinstance(value, list):
        return [_map_arrays(entry, convert) for entry in value]
    return value


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise SpecError("torch tensors need torch: pip install 'overlord-dataloader[torch]', or use numpy") from error
    return torch


def _device(given: Any) -> Any:
    torch = _torch()
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise SpecError(f"device is a torch device or its name, as 'cuda' or 'cuda:1', got {given!r}: {error}") from None
    if device.type == "cuda":
        _check_cuda(f"device={str(device)!r}")
    return device


def _check_cuda(option: str) -> None:
    if not _torch().cuda.is_available():
        raise SpecError(f"{option} needs a CUDA device, and torch sees none in this process; leave it out on CPU")


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    torch = _torch()
    # from_numpy warns about read-only memory, which is the normal case here; from_dlpack takes it quietly.
    return torch.from_numpy(array) if array.flags.writeable else torch.from_dlpack(array)
