"""Run an optimizer's step with a factor on each parameter's learning rate, invisibly to everything else.

The step runs on a view: an object of the optimizer's class that shares its state and all other attributes, but whose groups
are split by factor, with `lr` multiplied. The optimizer itself keeps its groups and their rates. So schedulers (which
compute the next rate from the present one), checkpoints, loggers and `zero_grad` see what they would see without
TempBalance, at any time, even when a step fails halfway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

Group = dict[str, Any]

_OF_VIEW = ("param_groups",)
_PER_PARAMETER = ("params", "param_names")


def view_for_step(optimizer: Optimizer, factor_of: Callable[[Tensor], float]) -> tuple[Optimizer, list[int]]:
    """Make the view. Returns it, and for each of its groups the index of the group that it came from."""
    groups: list[Group] = []
    origins: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        parts = _split(group, factor_of)
        groups += parts
        origins += [number] * len(parts)
    view = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    view.param_groups = groups
    return view, origins


def write_back(view: Optimizer, origins: list[int], optimizer: Optimizer) -> None:
    """Copy the attributes and group options that the step changed on the view to the optimizer. Parameters and state are
    shared already."""
    for name, value in view.__dict__.items():
        if name not in _OF_VIEW and optimizer.__dict__.get(name) is not value:
            setattr(optimizer, name, value)
    for number, group in enumerate(optimizer.param_groups):
        parts = [part for part, origin in zip(view.param_groups, origins, strict=True) if origin == number]
        for key in dict.fromkeys(key for part in parts for key in part):
            if key not in (*_PER_PARAMETER, "lr"):
                _write_option(optimizer, group, key, [part.get(key) for part in parts])


def _split(group: Group, factor_of: Callable[[Tensor], float]) -> list[Group]:
    members: dict[float, list[int]] = {}
    for index, parameter in enumerate(group["params"]):
        members.setdefault(factor_of(parameter), []).append(index)
    return [_part(group, indices, factor) for factor, indices in members.items()]


def _part(group: Group, indices: list[int], factor: float) -> Group:
    lists = {key: [group[key][index] for index in indices] for key in _PER_PARAMETER if key in group}
    return {**group, **lists, "lr": group["lr"] if factor == 1 else group["lr"] * factor}


def _write_option(optimizer: Optimizer, group: Group, key: str, values: list[Any]) -> None:
    if not all(_same(value, values[0]) for value in values):
        raise SpecError(
            f"{type(optimizer).__name__} computes the group option {key!r} from the learning rate in each step and got "
            f"{values} for one group: layers with rates of their own cannot share it. Use an optimizer that keeps such "
            "values per parameter"
        )
    group[key] = values[0]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)
