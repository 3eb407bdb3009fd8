"""Which weights of a model have a spectrum, and how each is read as a stack of matrices.

These are linear layers (also as bare 2-D parameters), convolutions (a stack over kernel positions), packed attention
projections (a stack of query, key and value), experts (a stack), and layers with LoRA adapters (the adapted weight, or the
adapter alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from overlord.trainer.tempbalance.spectra import StackShape

Whole: TypeAlias = Callable[[Tensor], Tensor]
"""A function that returns the whole tensor of a parameter, gathered from all ranks if it is sharded."""

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight with a spectrum. If a parameter is sharded, all ranks must call `stack` together."""

    name: str
    module: str
    parameters: tuple[Tensor, ...]
    """The parameters that the spectrum depends on."""
    shape: StackShape
    num_eigenvalues: int
    stack: Callable[[Whole], Tensor]


def matrices_of(model: nn.Module, lora_alone: bool) -> list[Matrix]:
    """Every weight with a spectrum, once, in the order of modules. Embeddings and weights tied to them are left out."""
    taken = {id(p) for module in model.modules() if is_embedding(module) for p in module.parameters(recurse=False)}
    found: list[Matrix] = []
    inside_lora: tuple[str, ...] = ()
    for raw_name, module in model.named_modules():
        name = plain_name(raw_name)
        if inside_lora and name.startswith(inside_lora):
            continue
        if _has_lora(module):
            inside_lora = (*inside_lora, f"{name}.")
            new = [_lora_matrix(name, module, lora_alone)]
        else:
            new = list(_own_matrices(name, module))
        for matrix in new:
            if not any(id(p) in taken for p in matrix.parameters):
                taken.update(id(p) for p in matrix.parameters)
                found.append(matrix)
    return found


def plain_name(name: str) -> str:
    """A module's name without the parts that wrappers (DDP, FSDP, torch.compile) add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _own_matrices(name: str, module: nn.Module) -> Iterator[Matrix]:
    is_attention = isinstance(module, nn.MultiheadAttention)
    if is_embedding(module) or (any(module.children()) and not is_attention):
        return  # bare parameters of a container are positions, tokens, scales
    for own, parameter in module.named_parameters(recurse=False):
        if parameter.ndim < 2:
            continue
        full_name = f"{name}.{own}" if name else own
        is_convolution = isinstance(module, _CONVOLUTIONS)
        if is_convolution:
            kernel = int(torch.Size(parameter.shape[2:]).numel())
            shape = (kernel, parameter.shape[0], parameter.shape[1])
        elif is_attention and own == "in_proj_weight":
            shape = (3, parameter.shape[0] // 3, parameter.shape[1])
        elif parameter.ndim == 2:
            shape = (1, parameter.shape[0], parameter.shape[1])
        elif parameter.ndim == 3 and not is_attention:
            shape = (parameter.shape[0], parameter.shape[1], parameter.shape[2])
        else:
            continue
        yield Matrix(full_name, name, (parameter,), shape, _count(shape), _stack_of(parameter, shape, is_convolution))


def _stack_of(parameter: Tensor, shape: StackShape, is_convolution: bool) -> Callable[[Whole], Tensor]:
    return lambda whole: _to_stack(whole(parameter).detach(), shape, is_convolution)


def _to_stack(weight: Tensor, shape: StackShape, is_convolution: bool) -> Tensor:
    # [out, in, kernel...] with kernel positions first
    return weight.flatten(2).permute(2, 0, 1) if is_convolution else weight.reshape(shape)


def _count(shape: StackShape) -> int:
    return shape[0] * min(shape[1], shape[2])


def _has_lora(module: nn.Module) -> bool:
    """loralib keeps lora_A and lora_B as parameters of the layer; PEFT as modules by adapter name, beside base_layer."""
    a, b = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
    bare = isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(getattr(module, "weight", None), Tensor)
    named = isinstance(a, nn.ModuleDict) and isinstance(b, nn.ModuleDict) and len(a) > 0 and hasattr(module, "base_layer")
    return bare or named


def _lora_matrix(name: str, module: Any, alone: bool) -> Matrix:
    """The weight W + scaling * B A of a LoRA layer; or scaling * B A alone, which has no more eigenvalues than A has
    rows."""
    weight: Tensor = module.base_layer.weight if hasattr(module, "base_layer") else module.weight
    adapters = _adapters(module)
    rank = sum(a.shape[0] for a, _, _ in adapters)
    turned = bool(getattr(module, "fan_in_fan_out", False))
    rows, columns = weight.shape[0], weight.shape[1]
    shape = (int(torch.Size(weight.shape[2:]).numel()), rows, columns)

    def stack(whole: Whole) -> Tensor:
        update = sum(
            (scaling * (whole(b).flatten(1).double() @ whole(a).flatten(1).double()) for a, b, scaling in adapters),
            start=torch.zeros((), dtype=torch.float64, device=weight.device),
        ).detach()
        update = (update.mT if turned else update).reshape(weight.shape)
        return _to_stack(update if alone else whole(weight).detach().double() + update, shape, weight.ndim > 2)

    frozen = () if alone else (weight,)
    parameters = (*(p for a, b, _ in adapters for p in (a, b)), *frozen)
    count = min(_count(shape), shape[0] * rank) if alone else _count(shape)
    return Matrix(f"{name}.weight+lora" if not alone else f"{name}.lora", name, parameters, shape, count, stack)


def _adapters(module: Any) -> list[tuple[Tensor, Tensor, float]]:
    if isinstance(module.lora_A, Tensor):
        return [(module.lora_A, module.lora_B, float(getattr(module, "scaling", 1.0)))]
    scalings: Mapping[str, float] = getattr(module, "scaling", {})
    active = [name for name in getattr(module, "active_adapters", module.lora_A) if name in module.lora_A]
    names = active or list(module.lora_A)
    return [(module.lora_A[n].weight, module.lora_B[n].weight, float(scalings.get(n, 1.0))) for n in names]
