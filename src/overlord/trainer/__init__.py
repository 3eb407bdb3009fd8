"""Functions for the trainer's processes. They need torch; the rest of Overlord does not.

- `attach` returns the batch iterator of this process's rank in a torch training run.
- `token_loss` and `sum_gradients` compute the loss of a step as one sum over its tokens, for any strategy;
  `chunked_token_loss` never holds all logits, and `GradientSums` sums while the backward pass runs.
- `ring_attention` and `Ring` compute attention over documents that are split over ranks (`strategies.hdp`); `Rotary` rotates
  by `position_ids`; `OffloadedLayers` and `RecomputedLayers` free the memory that the plan assumes to be free, and
  `planned_ratio` is the share of it.
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

from overlord.batches.tensors import register_step as _register_step
from overlord.trainer.gradient_sums import GradientSums
from overlord.trainer.image_exchange import exchange
from overlord.trainer.offload import OffloadedLayers, RecomputedLayers, planned_ratio
from overlord.trainer.receiving import receive
from overlord.trainer.ring import Ring, ring_attention
from overlord.trainer.rotary import Rotary
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
from overlord.trainer.token_loss import chunked_token_loss, sum_gradients, token_loss

if TYPE_CHECKING:
    from overlord.trainer.launch import attach

_register_step()

__all__ = [
    "FixedAspectRatio",
    "GradientSums",
    "Linear",
    "Log2",
    "Normalised",
    "OffloadedLayers",
    "PerBlock",
    "PerLayer",
    "Rank",
    "RecomputedLayers",
    "Ring",
    "Rotary",
    "Sigmoid",
    "Sqrt",
    "TempBalance",
    "WholeMatrix",
    "attach",
    "chunked_token_loss",
    "exchange",
    "planned_ratio",
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
