"""Cost coefficients in a JSON file, as `overlord calibrate` writes them. Needs numpy and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.arrange.cost import TransformerCost
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
_NAMES = ("per_token", "per_length_squared", "constant")


def load_cost(path: str | Path) -> TransformerCost:
    """The coefficients that a file holds, in seconds."""
    try:
        saved = json.loads(Path(path).expanduser().read_text())
        if saved["overlord_cost"] != VERSION:
            raise SpecError(f"{path} has version {saved['overlord_cost']!r}; this release reads version {VERSION}")
        return TransformerCost(*(float(saved[name]) for name in _NAMES))
    except OSError as error:
        raise SpecError(f"the costs cannot be read from {path}: {error}; `overlord calibrate --out` writes them") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise SpecError(
            f"{path} holds no costs ({type(error).__name__}: {error}); `overlord calibrate --out` writes them"
        ) from error


def save_cost(path: str | Path, cost: TransformerCost, about: Mapping[str, Any]) -> None:
    """Write coefficients, with whatever else is known about them."""
    coefficients = dict(zip(_NAMES, cost.coefficients, strict=True))
    Path(path).expanduser().write_text(json.dumps({"overlord_cost": VERSION, **coefficients, **about}, indent=1) + "\n")
