"""Selective offloading: move the planned share of a microbatch's activations to host memory, and back for the backward pass.

The plan (`hdp.Offload`) decides a ratio for each long document; batches carry it as `offload_ratios`. Here it is carried
out. What autograd saves for backward is caught by `saved_tensors_hooks`, in whole storages, because a storage is what holds
memory. Of all layers but the last two, as many storages are moved as come nearest to the ratio.

Weights stay, and do not count: parameters and buffers of the layer, frozen ones too, and the copies of weights that
autocast makes. A copy of a trained weight is known by how it was made. That of a frozen one has no such history, so it is
known by its shape and dtype; an activation without a gradient that has both stays with it.

Hooks turn off torch's own check for saved tensors that are changed in place afterwards. The version of each is compared here
instead, when the backward pass needs a tensor that stayed, and before the device memory of one that was moved is freed.

On a GPU two copy streams run beside the compute stream. A storage is copied to pinned memory as soon as it is saved, and
freed when the layer after next begins; so one layer is computed while one is moved, as the plan assumes. In the backward
pass the storages of a layer are fetched when the layer after it begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from overlord.errors import SpecError
from overlord.trainer.ring.pieces import is_on_device, lengths_of

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
    given = micro["document_lengths"]
    lengths = torch.as_tensor(lengths_of(micro) if is_on_device(given) else given).double()
    ratios = torch.as_tensor(micro["offload_ratios"]).double()
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


class OffloadedLayers:
    """A LayerRunner that moves a share `ratio` of the activations of `num_layers` layers to host memory, for one microbatch.

    `shared` are tensors that all layers save, such as rotary angles: they stay. So do weights of layers that are functions
    rather than modules, if they are listed here. Storages below `least_bytes` stay, too.
    """

    # A plain class: FSDP2 copies every dataclass among the arguments of a module when it casts tensors to its precision.

    def __init__(self, ratio: float, num_layers: int, shared: Iterable[Tensor] = (), least_bytes: int = 1 << 20) -> None:
        _check_ratio(ratio)
        self.ratio = ratio
        self.num_layers = num_layers
        self.least_bytes = least_bytes
        self.moved_bytes = 0
        """What has been moved so far."""
        self.seen_bytes = 0
        """What layers that may be moved have saved so far."""
        self._layers: dict[int, _LayerStorages] = {}
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in shared}
        self._copies: _HostCopies | None = None

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
        storages = self._layers[index] = _LayerStorages(index)
        weights = _Weights(layer)

        def pack(tensor: Tensor) -> _Saved:
            if index >= self.num_layers - _LAST_LAYERS or tensor.untyped_storage().data_ptr() in self._kept:
                return _Saved.that_stays(index, tensor)
            if weights.have(tensor):
                return _Saved.that_stays(index, tensor)
            return self._move(storages, tensor)

        with saved_tensors_hooks(pack, self._unpack):
            return layer(*args)

    def _move(self, storages: _LayerStorages, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
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
                found = tensor.detach()  # its storage is not moved
            storages.by_pointer[storage.data_ptr()] = found
        if not isinstance(found, _MovedStorage):
            return _Saved.that_stays(storages.index, tensor)
        storages.watch(tensor)
        view = _StorageView(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return _Saved(storages.index, None, found, view, 0)

    def _unpack(self, saved: _Saved) -> Tensor:
        # The first tensor of a layer that the backward pass needs: fetch what the layer before it will need.
        before = self._layers.pop(saved.index - 1, None)
        if before is not None:
            before.fetch()
        if saved.storage is None or saved.view is None:
            assert saved.tensor is not None
            _check_unchanged(saved.index, saved.tensor, saved.version)
            return saved.tensor
        return saved.storage.view(saved.view)


class _Weights:
    """The weights of a layer, among the tensors that it saves."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        owner = layer.func if isinstance(layer, partial) else layer
        owner = getattr(owner, "__self__", owner)  # of a bound method
        self._module = owner if isinstance(owner, nn.Module) else None
        self._pointers: set[int] | None = None
        self._frozen: set[tuple[torch.Size, torch.dtype]] = set()

    def have(self, tensor: Tensor) -> bool:
        # A weight is saved as a view of itself, and so is a copy of it.
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001
        if base.is_leaf and (base.requires_grad or isinstance(base, nn.Parameter)):
            return True
        if self._pointers is None:
            self._look_up()
        if tensor.untyped_storage().data_ptr() in (self._pointers or ()):
            return True
        return _is_cast_of_parameter(base) or self._look_like(base)

    def _look_up(self) -> None:
        """Read the weights of the layer when it first saves a tensor: FSDP gathers them when the layer begins."""
        parameters = [] if self._module is None else list(self._module.parameters())
        buffers = [] if self._module is None else list(self._module.buffers())
        self._pointers = {each.untyped_storage().data_ptr() for each in (*parameters, *buffers)} - {0}
        self._frozen = {(each.shape, each.dtype) for each in parameters if not each.requires_grad}

    def _look_like(self, base: Tensor) -> bool:
        """True if a tensor without a gradient is what autocast would make of a frozen weight. (Whether autocast is on
        cannot be asked here: it is off while an operation saves its tensors.)"""
        if base.requires_grad or base.dtype not in (torch.bfloat16, torch.float16):
            return False
        return any(shape == base.shape and dtype != base.dtype for shape, dtype in self._frozen)


def _is_cast_of_parameter(base: Tensor) -> bool:
    """True for a copy in another precision of a tensor that gradients are accumulated for."""
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    origin = made_by.next_functions[0][0]
    return isinstance(getattr(origin, "variable", None), nn.Parameter)


def _check_unchanged(index: int, tensor: Tensor, version: int) -> None:
    found = tensor._version  # noqa: SLF001 - what torch compares without hooks
    if found != version:
        raise SpecError(
            f"layer {index} saved a tensor {list(tensor.shape)} of {tensor.dtype} for its backward pass, and an operation "
            f"in place has changed it since (version {found}, saved at {version}): gradients would be wrong; use the "
            "operation that returns a new tensor, or clone the tensor first"
        )


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
    version: int

    @staticmethod
    def that_stays(index: int, tensor: Tensor) -> _Saved:
        # Without its history: autograd would hold this, and this would hold autograd's graph.
        return _Saved(index, tensor.detach(), None, None, tensor._version)  # noqa: SLF001 - see `_check_unchanged`


@dataclass(slots=True)
class _LayerStorages:
    """The storages that a layer has saved. A pointer stays valid while its tensor is held here."""

    index: int
    by_pointer: dict[int, _MovedStorage | Tensor] = field(default_factory=dict)
    moved: list[_MovedStorage] = field(default_factory=list)
    watched: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that are being copied to the host, and their versions."""
    is_released: bool = False

    def watch(self, tensor: Tensor) -> None:
        """Note the version of a tensor whose storage is moved."""
        self.watched.append((tensor.detach(), tensor._version))  # noqa: SLF001 - see `_check_unchanged`

    def release(self) -> None:
        """Free the device memory of what was moved. Raises SpecError if some of it was changed after it was saved: a copy
        may have the old numbers or the new ones."""
        if self.is_released:
            return
        self.is_released = True
        self.moved = [each for each in self.by_pointer.values() if isinstance(each, _MovedStorage)]
        self.by_pointer.clear()
        watched, self.watched = self.watched, []
        for tensor, version in watched:
            _check_unchanged(self.index, tensor, version)
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
