"""What runs inside the trainer. Needs torch; the rest of Overlord does not."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("overlord.trainer needs torch: pip install 'overlord[torch]'", name="torch") from error

from overlord.trainer.tempbalance import (
    FixedAspectRatio,
    Linear,
    Log2,
    Normalised,
    PerBlock,
    PerLayer,
    Rank,
    Sigmoid,
    Sqrt,
    TempBalance,
    WholeMatrix,
    usual_interval,
)

__all__ = [
    "FixedAspectRatio",
    "Linear",
    "Log2",
    "Normalised",
    "PerBlock",
    "PerLayer",
    "Rank",
    "Sigmoid",
    "Sqrt",
    "TempBalance",
    "WholeMatrix",
    "usual_interval",
]
