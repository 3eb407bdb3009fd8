"""`TempBalance`: an add-on to any torch optimizer and schedule that scales the learning rate of every layer."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from overlord.errors import SpecError, StateError
from overlord.trainer.tempbalance import distributed, report
from overlord.trainer.tempbalance.groups import Layer, LayerGrouping, PerBlock, check_enough, find_layers
from overlord.trainer.tempbalance.mappings import Linear, compute_factors
from overlord.trainer.tempbalance.mappings import Mapping as FactorMapping
from overlord.trainer.tempbalance.spectra import AlphaSolver, Spectrum, WholeMatrix
from overlord.trainer.tempbalance.stepping import view_for_step, write_back
from overlord.trainer.tempbalance.weights import Matrix, matrices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_VERSION = 1


def usual_interval(steps_per_epoch: int) -> int:
    """The authors' `interval` for fine-tuning: a tenth of an epoch, at most 100 steps."""
    return max(1, min(100, steps_per_epoch // 10))


class TempBalance:
    """Scales the learning rate of each layer by a factor computed from its weights, inside `optimizer.step()`.

    Make one for an optimizer, before or after its scheduler, and train as before; nothing else has to be called. Before
    every `interval`-th step of the optimizer, the first included, it measures the spectra of the weights. A layer's `alpha`
    is the power-law exponent of the tail of its spectrum; a large alpha (little learned so far) gets a factor above 1. The
    rates in `optimizer.param_groups` and in schedulers stay those of the schedule. Under torch.distributed every rank of
    `process_group` must make one, and all must step together. It needs no change of the training loop, and can be saved and
    restored with `state_dict` and `load_state_dict`.
    """

    def __init__(  # noqa: PLR0913 - a declaration: all options but the first two are keyword-only
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        interval: int = 100,
        mapping: FactorMapping | None = None,
        unit: LayerGrouping | None = None,
        spectrum: Spectrum | None = None,
        tail: float = 0.5,
        exclude: Sequence[str] = (),
        min_eigenvalues: int = 50,
        lora_alone: bool = False,
        on_update: Callable[[int, dict[str, float]], None] | None = None,
        process_group: Any = None,
    ) -> None:
        """Attach to an optimizer that trains `model`.

        - `interval`: optimizer steps between two updates of the factors; `usual_interval` computes the authors' choice.
        - `mapping`: from alphas to factors; default `Linear()`, from 0.5 to 1.5.
        - `unit`: what gets one factor; default `PerBlock()`, a transformer block.
        - `spectrum`: the matrices whose spectrum counts; default `WholeMatrix()`.
        - `tail`: the share of eigenvalues in the tail, for the Hill estimator; the authors' GLUE runs use one third.
        - `exclude`: patterns (`*`, `?`) of module or parameter names that keep the base rate.
        - `min_eigenvalues`: matrices with fewer are not measured.
        - `lora_alone`: measure LoRA adapters alone, without the weight that they change.
        - `on_update`: called with the step and `metrics()` after each update.
        - `process_group`: the ranks that hold the same parameters; default all.
        """
        _check_settings(optimizer, interval, tail, min_eigenvalues)
        if isinstance(exclude, str):  # its letters would be patterns, and a `*` among them would exclude everything
            raise SpecError(f"exclude is a sequence of patterns: write exclude=({exclude!r},)")
        distributed.check_gatherable(model.modules())
        self.optimizer = optimizer
        self.interval = interval
        self.num_steps = 0
        self._mapping: FactorMapping = mapping or Linear()
        self._spectrum: Spectrum = spectrum or WholeMatrix()
        self._on_update = on_update
        self._solver = AlphaSolver(tail)
        self._layers = find_layers(
            model,
            matrices_of(model, lora_alone),
            unit := unit or PerBlock(),
            self._spectrum,
            exclude=exclude,
            min_eigenvalues=min_eigenvalues,
        )
        check_enough(self._layers, unit)
        self._matrices: tuple[Matrix, ...] = tuple(m for layer in self._layers.balanced for m in layer.matrices)
        self._check_trained()
        device = self._matrices[0].parameters[0].device
        self._ranks = distributed.Ranks(process_group, device)
        self._ranks.check_same(self._matrices)
        self._matrix_alphas: dict[str, float] = {}
        self._factors = {layer.name: 1.0 for layer in self._layers.balanced}
        self._by_parameter: dict[int, float] = {}
        self._warned: set[str] = set()
        self._running: tuple[Optimizer, list[int]] | None = None
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each balanced layer. Parameters of no such layer have the factor 1."""
        return dict(self._factors)

    @property
    def alphas(self) -> dict[str, float]:
        """The alpha of each balanced layer, the mean over its matrices; NaN if none of them has one."""
        return {layer.name: self._alpha_of(layer) for layer in self._layers.balanced}

    def update(self) -> None:
        """Compute alphas and factors from the present weights. The optimizer's step calls it every `interval` steps."""
        self._matrix_alphas = self._measure()
        alphas = np.array([self._alpha_of(layer) for layer in self._layers.balanced])
        known = np.isfinite(alphas)
        factors = np.ones_like(alphas)
        if known.any():
            factors[known] = compute_factors(self._mapping, alphas[known])
        self._set_factors(factors.tolist())
        self._warn([layer.name for layer, fine in zip(self._layers.balanced, known, strict=True) if not fine])
        if self._on_update is not None:
            self._on_update(self.num_steps, self.metrics())

    def explain(self) -> str:
        """A table of layers with their alpha and factor, and of modules that keep the base rate, with the reason."""
        return report.table(self._layers, self.alphas, self._factors)

    def metrics(self) -> dict[str, float]:
        """Alphas and factors by layer, and the mean and spread of alphas, under flat names for a logger."""
        return report.metrics(self.alphas, self._factors)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain numbers and strings."""
        return {
            "version": _VERSION,
            "num_steps": self.num_steps,
            "factors": dict(self._factors),
            "alphas": {name: None if math.isnan(alpha) else alpha for name, alpha in self._matrix_alphas.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state: the same factors, and the next update at the same step."""
        if state.get("version") != _VERSION:
            raise StateError(f"a TempBalance state of version {_VERSION} is needed, got {state.get('version')!r}")
        saved, here = set(state["factors"]), set(self._factors)
        if saved != here:
            raise StateError(
                "the state is of another model or another unit: "
                f"only in the state: {sorted(saved - here)}; only here: {sorted(here - saved)}"
            )
        self.num_steps = int(state["num_steps"])
        self._matrix_alphas = {name: math.nan if alpha is None else alpha for name, alpha in state["alphas"].items()}
        self._set_factors([state["factors"][layer.name] for layer in self._layers.balanced])

    def close(self) -> None:
        """Detach from the optimizer, which then steps as without TempBalance."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if optimizer is not self.optimizer:
            return None  # the step of a subclass called its parent's: this one runs on the view already
        if args[0] is not optimizer:
            raise SpecError("an optimizer takes one TempBalance, and this one has another; close() that first")
        if self.num_steps % self.interval == 0:
            self.update()
        self._running = view_for_step(optimizer, self._factor_of)
        return (self._running[0], *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs  # torch passes the arguments of the step
        if optimizer is not self.optimizer or self._running is None:
            return
        write_back(*self._running, optimizer)
        self._running = None
        self.num_steps += 1

    def _factor_of(self, parameter: Tensor) -> float:
        return self._by_parameter.get(id(parameter), 1.0)

    def _set_factors(self, factors: Sequence[float]) -> None:
        self._factors = {layer.name: factor for layer, factor in zip(self._layers.balanced, factors, strict=True)}
        self._by_parameter = {
            id(parameter): self._factors[layer.name] for layer in self._layers.balanced for parameter in layer.parameters
        }

    def _alpha_of(self, layer: Layer) -> float:
        alphas = [self._matrix_alphas.get(matrix.name, math.nan) for matrix in layer.matrices]
        finite = [alpha for alpha in alphas if math.isfinite(alpha)]
        return sum(finite) / len(finite) if finite else math.nan

    @torch.no_grad()
    def _measure(self) -> dict[str, float]:
        """The alpha of every matrix that the optimizer trains now. Parameters may join an optimizer later."""
        trained = self._ids_of_trained()
        matrices = [m for m in self._matrices if any(id(p) in trained for p in m.parameters)]
        owner = distributed.owners([distributed.cost(matrix) for matrix in matrices], self._ranks.size)
        found = self._solver.alphas(self._own_stacks(matrices, owner), len(matrices))
        alphas = self._ranks.total(found).tolist()
        return {matrix.name: alpha for matrix, alpha in zip(matrices, alphas, strict=True)}

    def _own_stacks(self, matrices: Sequence[Matrix], owner: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for number, matrix in enumerate(matrices):
            mine = owner[number] == self._ranks.rank
            if mine or any(distributed.is_sharded(parameter) for parameter in matrix.parameters):
                stack = matrix.stack(distributed.whole)
                if mine:
                    yield number, self._spectrum.pieces(stack)

    def _ids_of_trained(self) -> set[int]:
        return {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}

    def _check_trained(self) -> None:
        trained = self._ids_of_trained()
        if not any(id(p) in trained for layer in self._layers.balanced for p in layer.parameters):
            raise SpecError(
                "the optimizer trains no parameter of the model's layers; make it from this model's parameters, after "
                "wrapping or sharding the model"
            )

    def _warn(self, unknown: Sequence[str]) -> None:
        trained = self._ids_of_trained()
        by_name = {layer.name: layer for layer in self._layers.balanced}
        new = [name for name in unknown if name not in self._warned and _is_trained(by_name[name], trained)]
        if new:
            self._warned.update(new)
            warnings.warn(
                f"at step {self.num_steps} these layers have no alpha (weights that are zero, not finite, or without any "
                f"tail) and train at the base rate: {', '.join(new)}",
                stacklevel=2,
            )


def _is_trained(layer: Layer, trained: set[int]) -> bool:
    return any(id(parameter) in trained for parameter in layer.parameters)


def _check_settings(optimizer: Optimizer, interval: int, tail: float, min_eigenvalues: int) -> None:
    if isinstance(optimizer, LBFGS):
        raise SpecError("LBFGS takes one step for all parameters together; layers cannot have rates of their own")
    if interval < 1:
        raise SpecError(f"interval is a number of optimizer steps, at least 1, got {interval}")
    if not 0 < tail <= 1:
        raise SpecError(f"tail is the share of eigenvalues in the tail, above 0 and at most 1, got {tail}")
    if min_eigenvalues < 2:
        raise SpecError(f"min_eigenvalues must be at least 2, got {min_eigenvalues}")
