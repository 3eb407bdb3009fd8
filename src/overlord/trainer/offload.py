"""Selective offloading: move the planned share of a microbatch's activations to host memory, and back for the backward pass.

The plan (`hdp.Offload`) decides a ratio for each long document; batches carry it as `offload_ratios`. Here it is carried
out. What autograd saves for backward is caught by `saved_tensors_hooks`, in whole storages, because a storage is what holds
memory. Of all layers but the last two, as many storages are moved as come nearest to the ratio. Parameters stay.

On a GPU two copy streams run beside the compute stream. A storage is copied to pinned memory as soon as it is saved, and
freed when the layer after next begins; so one layer is computed while one is moved, as the plan assumes. In the backward
pass the storages of a layer are fetched when the layer after it begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")
_LAST_LAYERS = 2
"""Layers whose activations stay: the backward pass needs them at once."""


class LayerRunner(Protocol):
    """Runs the layers of a model over one microbatch, and decides what becomes of their activations."""

    def run(self, index: int, layer: Callable[..., T], *args: Any) -> T:
        """Call a layer by its index. Layers are called in order."""
        ...


def planned_ratio(micro: Mapping[str, Any], num_layers: int, capacity: int | None = None) -> float:
    """The share of its activations that a microbatch of `strategies.hdp` should move: the mean over its tokens.

    With `capacity`, the tokens that a rank holds without offloading, it raises SpecError if the microbatch would not fit.
    """
    if "offload_ratios" not in micro:
        raise SpecError("the microbatch has no offload_ratios: offloading needs the job to use strategies.hdp(offload=...)")
    lengths, ratios = (torch.as_tensor(micro[name]).double() for name in ("document_lengths", "offload_ratios"))
    tokens = float(lengths.sum())
    ratio = float((lengths * ratios).sum()) / tokens if tokens else 0.0
    inner = num_layers - _LAST_LAYERS
    if capacity is not None and tokens > capacity:
        needed = 1 - (num_layers * capacity / tokens - _LAST_LAYERS) / inner if inner > 0 else 2.0
        if ratio < needed - 0.01:
            raise SpecError(
                f"a rank holds {capacity} tokens; a microbatch of {tokens:.0f} fits on {num_layers} layers if "
                f"{needed:.0%} of its activations are moved to the host, and its plan moves {ratio:.0%}; raise capacity "
                "where it is smaller than the plan's, or plan with strategies.hdp(offload=...)"
            )
    return ratio


@dataclass(slots=True)
class RecomputedLayers:
    """A LayerRunner that keeps only the input of a share `ratio` of the layers, and computes them again in the backward
    pass: the alternative to offloading where the bus is slow. The ranks of a ring must have one ratio."""

    ratio: float

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    def run(self, index: int, layer: Callable[..., T], *args: Any) -> T:
        if int((index + 1) * self.ratio + 1e-9) > int(index * self.ratio + 1e-9):
            return checkpoint(layer, *args, use_reentrant=False)
        return layer(*args)


@dataclass(slots=True)
class OffloadedLayers:
    """A LayerRunner that moves a share `ratio` of the activations of `num_layers` layers to host memory, for one microbatch.

    `shared` are tensors that all layers save, such as rotary angles: they stay. Storages below `least_bytes` stay, too.
    """

    ratio: float
    num_layers: int
    shared: Iterable[Tensor] = ()
    least_bytes: int = 1 << 20
    moved_bytes: int = 0
    """What has been moved so far."""
    seen_bytes: int = 0
    """What layers that may be moved have saved so far."""
    _layers: dict[int, _LayerStorages] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)
    _copies: _HostCopies | None = None

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in self.shared}

    @staticmethod
    def of(
        micro: Mapping[str, Any], num_layers: int, *, capacity: int | None = None, shared: Iterable[Tensor] = ()
    ) -> OffloadedLayers:
        """Make it from a microbatch, with the ratio that its plan assumes; see `planned_ratio`."""
        return OffloadedLayers(planned_ratio(micro, num_layers, capacity), num_layers, shared)

    def run(self, index: int, layer: Callable[..., T], *args: Any) -> T:
        if self.ratio == 0 or not torch.is_grad_enabled():
            return layer(*args)
        # One layer may still be under way to the host, not two.
        for earlier in [number for number in self._layers if number <= index - _LAST_LAYERS]:
            self._layers[earlier].release()
        storages = self._layers[index] = _LayerStorages()

        def pack(tensor: Tensor) -> _Saved:
            return _Saved(index, tensor, None, None) if self._stays(index, tensor) else self._move(index, storages, tensor)

        with saved_tensors_hooks(pack, self._unpack):
            return layer(*args)

    def _stays(self, index: int, tensor: Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - a weight is saved as a view of itself
        is_parameter = base.is_leaf and base.requires_grad
        return is_parameter or index >= self.num_layers - _LAST_LAYERS or tensor.untyped_storage().data_ptr() in self._kept

    def _move(self, index: int, storages: _LayerStorages, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        view = _StorageView(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        found = storages.by_pointer.get(storage.data_ptr())
        if found is None:
            size = storage.nbytes()
            self.seen_bytes += size
            is_moved = size >= self.least_bytes and self.moved_bytes + size / 2 <= self.ratio * self.seen_bytes
            if is_moved:
                self.moved_bytes += size
                if self._copies is None:
                    self._copies = _CudaCopies(tensor.device) if tensor.is_cuda else _HostCopies()
                found = _MovedStorage(self._copies, tensor)
            else:
                found = tensor  # its storage is not moved
            storages.by_pointer[storage.data_ptr()] = found
        return _Saved(index, None, found, view) if isinstance(found, _MovedStorage) else _Saved(index, tensor, None, None)

    def _unpack(self, saved: _Saved) -> Tensor:
        # The first tensor of a layer that the backward pass needs: fetch what the layer before it will need.
        before = self._layers.pop(saved.index - 1, None)
        if before is not None:
            before.fetch()
        if saved.storage is None or saved.view is None:
            assert saved.tensor is not None
            return saved.tensor
        return saved.storage.view(saved.view)


def _check_ratio(ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise SpecError(f"the ratio of activations to move is between 0 and 1, got {ratio}")


class _StorageView(NamedTuple):
    """A tensor as a view of its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Saved:
    """What autograd holds in place of a saved tensor: the tensor itself, or its moved storage."""

    index: int
    tensor: Tensor | None
    storage: _MovedStorage | None
    view: _StorageView | None


@dataclass(slots=True)
class _LayerStorages:
    """The storages that a layer has saved. A pointer stays valid while its tensor is held here."""

    by_pointer: dict[int, _MovedStorage | Tensor] = field(default_factory=dict)
    moved: list[_MovedStorage] = field(default_factory=list)
    is_released: bool = False

    def release(self) -> None:
        """Free the device memory of what was moved."""
        if self.is_released:
            return
        self.is_released = True
        self.moved = [each for each in self.by_pointer.values() if isinstance(each, _MovedStorage)]
        self.by_pointer.clear()
        for storage in self.moved:
            storage.release()

    def fetch(self) -> None:
        """Start to bring back what was moved, the last saved first."""
        self.release()
        for storage in reversed(self.moved):
            storage.fetch()
        self.moved.clear()  # from now on only autograd holds them


class _MovedStorage:
    """A storage on its way to the host, there, or on its way back."""

    def __init__(self, copies: _HostCopies, tensor: Tensor) -> None:
        self._copies = copies
        self._device: Tensor | None = _whole_storage(tensor)
        self._host, self._ready = copies.send(self._device)
        self._is_back = False

    def release(self) -> None:
        if not self._is_back:
            self._copies.await_copy(self._ready)
            self._device = None

    def fetch(self) -> None:
        if self._device is None:
            self._device, self._ready = self._copies.fetch(self._host)
            self._is_back = True

    def view(self, view: _StorageView) -> Tensor:
        self.fetch()
        assert self._device is not None
        self._copies.await_copy(self._ready)
        empty = torch.empty(0, dtype=view.dtype, device=self._device.device)
        return empty.set_(self._device.untyped_storage(), view.offset, view.shape, view.stride)


def _whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _HostCopies:
    """Copies that are done when they return: for the CPU, where the host is the device."""

    def send(self, flat: Tensor) -> tuple[Tensor, Any]:
        return flat.clone(), None

    def fetch(self, host: Tensor) -> tuple[Tensor, Any]:
        return host.clone(), None

    def await_copy(self, ready: Any) -> None:
        del ready


class _CudaCopies(_HostCopies):
    """Copies on two streams of their own, one to the host and one back."""

    _streams: dict[torch.device, tuple[Any, Any]] = {}  # noqa: RUF012 - streams outlive microbatches

    def __init__(self, device: torch.device) -> None:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device
        self._out, self._back = self._streams[device]

    def send(self, flat: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)  # torch caches pinned memory
        return host, self._copy(host, flat, self._out)

    def fetch(self, host: Tensor) -> tuple[Tensor, Any]:
        flat = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        return flat, self._copy(flat, host, self._back)

    def await_copy(self, ready: Any) -> None:
        # The compute stream waits, not the host. Memory that is freed afterwards is used again in the order of that stream.
        torch.cuda.current_stream(self._device).wait_event(ready)

    def _copy(self, target: Tensor, origin: Tensor, stream: Any) -> Any:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(origin, non_blocking=True)
            return stream.record_event()
