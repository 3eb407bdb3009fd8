"""Grouping a model's parameters into layers that each get one factor: transformer blocks, or single layers.

Parameters that cannot be compared keep the base rate; `Layers.left` has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from overlord.errors import SpecError
from overlord.trainer.tempbalance.spectra import Spectrum, num_eigenvalues
from overlord.trainer.tempbalance.weights import Matrix, is_embedding, plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that share a factor, and the matrices whose mean alpha decides it."""

    name: str
    parameters: tuple[Tensor, ...]
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class BaseRateModule:
    """A module that keeps the base rate, and why."""

    name: str
    num_parameters: int
    reason: str


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that get a factor, and the modules that keep the base rate."""

    balanced: tuple[Layer, ...]
    left: tuple[BaseRateModule, ...]


class LayerGrouping(Protocol):
    """How a model is divided into layers. `homes` maps the name of each module to the name of its layer, or to None."""

    def homes(self, model: nn.Module, matrices: Sequence[Matrix]) -> dict[str, str | None]: ...


@dataclass(frozen=True, slots=True)
class PerBlock:
    """One factor per numbered block: `encoder.layer.3.attention.key` belongs to `encoder.layer.3`.

    Norms and biases of a block belong to it. Embeddings, heads and everything else outside numbered blocks keep the base
    rate, and so does a numbered module that is a single layer, such as `classifier.0`.
    """

    def homes(self, model: nn.Module, matrices: Sequence[Matrix]) -> dict[str, str | None]:
        single = {plain_name(name) for name, module in model.named_modules() if not any(module.children())}
        single |= {matrix.module for matrix in matrices}
        return {name: self._block_of(name, single) for name in _module_names(model)}

    def _block_of(self, name: str, single: set[str]) -> str | None:
        parts = name.split(".")
        for end, part in enumerate(parts, start=1):
            if part.isdecimal():
                block = ".".join(parts[:end])
                return None if block in single else block
        return None


@dataclass(frozen=True, slots=True)
class PerLayer:
    """One factor per layer with a weight matrix, for models without numbered blocks, such as image models."""

    skip_first: bool = True
    """The first layer keeps the base rate, as published."""
    skip_last: bool = True
    """The last layer keeps the base rate, as published."""
    norms_follow: bool = True
    """A norm gets the factor of the layer registered before it in the same parent."""

    def homes(self, model: nn.Module, matrices: Sequence[Matrix]) -> dict[str, str | None]:
        owners = list(dict.fromkeys(matrix.module for matrix in matrices))
        skipped = {*(owners[:1] if self.skip_first else ()), *(owners[-1:] if self.skip_last else ())}
        homes: dict[str, str | None] = {}
        before: dict[str, str] = {}
        for name in _module_names(model):
            parent = name.rpartition(".")[0]
            around = [owner for owner in owners if name == owner or name.startswith(f"{owner}.")]
            inside = max(around, key=len, default=None)
            if inside is not None:
                homes[name] = None if inside in skipped else inside
                before[inside.rpartition(".")[0]] = inside
            elif self.norms_follow and before.get(parent) not in skipped:
                homes[name] = before.get(parent)
            else:
                homes[name] = None
        return homes


def find_layers(
    model: nn.Module,
    matrices: Sequence[Matrix],
    unit: LayerGrouping,
    spectrum: Spectrum,
    *,
    exclude: Sequence[str],
    min_eigenvalues: int,
) -> Layers:
    """Group the parameters of a model. A parameter that is used in several places belongs to the first, or to no layer if
    one of the places is an embedding."""
    homes = unit.homes(model, matrices)
    usable = [m for m in matrices if _num_pooled(m, spectrum) >= min_eigenvalues and not _is_excluded(m.name, exclude)]
    members: dict[str, list[Tensor]] = {}
    left: dict[str, BaseRateModule] = {}
    embedded = {id(p) for module in model.modules() if is_embedding(module) for p in module.parameters(recurse=False)}
    measured = {homes[matrix.module] for matrix in usable}
    seen: set[int] = set()
    for raw_name, module in model.named_modules():
        name = plain_name(raw_name)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            home = homes[name]
            if id(parameter) in embedded:
                reason = "embedding" if is_embedding(module) else "tied to an embedding"
            elif _is_excluded(f"{name}.{own}", exclude):
                reason = "excluded"
            elif home is None:
                reason = _why_homeless(unit)
            elif home not in measured:
                reason = f"no matrix of {home} has {min_eigenvalues} eigenvalues"
            else:
                members.setdefault(home, []).append(parameter)
                continue
            known = left.get(name)
            left[name] = BaseRateModule(name, parameter.numel() + (known.num_parameters if known else 0), reason)
    own_matrices = {name: tuple(m for m in usable if homes[m.module] == name) for name in members}
    balanced = tuple(Layer(name, tuple(parameters), own_matrices[name]) for name, parameters in members.items())
    return Layers(balanced, tuple(left.values()))


def check_enough(layers: Layers, unit: LayerGrouping) -> None:
    """Raise SpecError unless there are two layers to compare."""
    if len(layers.balanced) >= 2:
        return
    reasons = "".join(f"\n  {left.name or '(the model itself)'}: {left.reason}" for left in layers.left[:12])
    raise SpecError(
        f"TempBalance compares at least 2 layers, and {unit!r} finds {len(layers.balanced)} in this model; use "
        f"unit=PerLayer() for models without numbered blocks, or a smaller min_eigenvalues. Left at the base rate:{reasons}"
    )


def _module_names(model: nn.Module) -> list[str]:
    return [plain_name(name) for name, _ in model.named_modules()]


def _num_pooled(matrix: Matrix, spectrum: Spectrum) -> int:
    if matrix.num_eigenvalues < num_eigenvalues(matrix.shape):
        return matrix.num_eigenvalues  # a LoRA adapter alone: windows cannot raise its rank
    return num_eigenvalues(spectrum.pieces_shape(matrix.shape))


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    starts = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(start, pattern) for start in starts for pattern in patterns)


def _why_homeless(unit: LayerGrouping) -> str:
    return "outside the numbered blocks" if isinstance(unit, PerBlock) else "first, last, or without a matrix to follow"
