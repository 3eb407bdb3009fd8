"""Reports of TempBalance: a table for people, flat numbers for loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from overlord.trainer.tempbalance.groups import Layers


def table(layers: Layers, alphas: Mapping[str, float], factors: Mapping[str, float]) -> str:
    head = ("layer", "matrices", "parameters", "alpha", "factor", "note")
    rows = [
        (
            layer.name,
            str(len(layer.matrices)),
            f"{sum(parameter.numel() for parameter in layer.parameters):,}",
            _number(alphas[layer.name]),
            _number(factors[layer.name]),
            "" if np.isfinite(alphas[layer.name]) else "no alpha: base rate",
        )
        for layer in layers.balanced
    ]
    rows += [
        (left.name or "(model)", "-", f"{left.num_parameters:,}", "-", _number(1.0), left.reason) for left in layers.left
    ]
    return "\n".join(_align([head, *rows]))


def metrics(alphas: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    found = {f"tempbalance/alpha/{name}": alpha for name, alpha in alphas.items() if np.isfinite(alpha)}
    known = list(found.values())
    found.update({f"tempbalance/factor/{name}": factor for name, factor in factors.items()})
    if known:
        found["tempbalance/alpha_mean"] = float(np.mean(known))
        # the authors' diagnostic: it grows as data shrinks
        found["tempbalance/alpha_std"] = float(np.std(known))
    return found


def _number(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "-"


def _align(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < 5 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
