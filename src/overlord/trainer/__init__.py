"""Functions for the trainer's processes. They need torch; the rest of Overlord does not.

- `attach` returns the batch iterator of this process's rank in a torch training run.
- `token_loss` and `sum_gradients` compute the loss of a step as one sum over its tokens, for any strategy.
- `ring_attention` and `Ring` compute attention over documents that are split over ranks (`strategies.hdp`).
- `receive` gets the arrays of a step from the rank that fetched them (`broadcast_at`).
- `exchange` sends encoded images to the ranks that train on them (`strategies.multimodal`).
- `TempBalance` sets a learning rate for every layer; the other names are its options.

`attach` imports the loader on first use. Everything else needs only torch and numpy.
"""

from typing import TYPE_CHECKING

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "overlord.trainer needs torch: pip install 'overlord-dataloader[torch]'", name="torch"
    ) from error

from overlord.trainer.image_exchange import exchange
from overlord.trainer.receiving import receive
from overlord.trainer.ring import Ring, ring_attention
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
from overlord.trainer.token_loss import sum_gradients, token_loss

if TYPE_CHECKING:
    from overlord.trainer.launch import attach

__all__ = [
    "FixedAspectRatio",
    "Linear",
    "Log2",
    "Normalised",
    "PerBlock",
    "PerLayer",
    "Rank",
    "Ring",
    "Sigmoid",
    "Sqrt",
    "TempBalance",
    "WholeMatrix",
    "attach",
    "exchange",
    "receive",
    "ring_attention",
    "sum_gradients",
    "token_loss",
    "usual_interval",
]


def __getattr__(name: str) -> object:
    if name != "attach":
        raise AttributeError(f"module 'overlord.trainer' has no attribute {name!r}")
    from overlord.trainer.launch import attach

    return attach
