"""DeepSpeed on Overlord's steps.

`loader(job, engine)` returns the client of this rank, whose state is in the engine's checkpoints, in their `client_state`.
`train_step(engine, step, loss_of)` trains on one step, of however many microbatches.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError, StateError
from overlord.integrations.frameworks import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlord.declare.job import Job
    from overlord.messages import MicrobatchWithColumns, Step
    from overlord.service.client import Client

_KEY = "overlord"


def loader(job: Job | None, engine: Any, **options: Any) -> Client:
    """Return the client of this rank. The engine's `save_checkpoint` and `load_checkpoint` keep its state from now on.

    `options` are those of `overlord.trainer.attach`.
    """
    _check_engine(engine)
    from overlord.trainer.launch import attach

    client = attach(job, **options)
    _keep_state(engine, client)
    return client


def train_step(engine: Any, step: Step, loss_of: Callable[[MicrobatchWithColumns], Any]) -> Any:
    """Train on all microbatches of a step, and update the weights once. Returns this rank's part of the step's loss.

    `loss_of(micro)` returns the sum of the token losses of a microbatch. The engine's own gradient_accumulation_steps is not
    used: set it to 1. Ranks may run different numbers of microbatches with ZeRO stages 0 and 1.
    """
    _check_engine(engine)
    # Gradients are averaged over these ranks, and their sum over the step is wanted.
    factor = _num_averaged(engine) / step.loss_tokens
    total = 0.0
    for index, micro in enumerate(step, 1):
        engine.set_gradient_accumulation_boundary(index == len(step))
        summed = loss_of(micro)
        engine.backward(summed * factor, scale_wrt_gas=False)
        engine.step()
        total = total + summed.detach() / step.loss_tokens
    return total


def _keep_state(engine: Any, client: Client) -> None:
    """Let the engine's own calls save and load the client's state too."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @wraps(save)
    def save_checkpoint(save_dir: Any, tag: Any = None, client_state: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return save(save_dir, tag=tag, client_state={**(client_state or {}), _KEY: client.state_dict()}, **more)

    @wraps(load)
    def load_checkpoint(load_dir: Any, *args: Any, **more: Any) -> tuple[Any, Any]:
        path, found = load(load_dir, *args, **more)
        if path is None or more.get("load_module_only"):
            return path, found
        if _KEY not in found:
            raise StateError(
                f"the checkpoint {path} has no state of Overlord: overlord.integrations.deepspeed.loader was not called for "
                "the engine that saved it. Load only its weights, with load_module_only=True"
            )
        client.load_state_dict(found[_KEY])
        return path, {name: value for name, value in found.items() if name != _KEY}

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _num_averaged(engine: Any) -> int:
    return getattr(engine, "seq_dp_world_size", None) or engine.dp_world_size


def _check_engine(engine: Any) -> None:
    require("deepspeed")
    if hasattr(engine, "grid") or not hasattr(engine, "set_gradient_accumulation_boundary"):
        raise SpecError(
            f"train_step runs the microbatches of a step itself, and {type(engine).__name__} does that too: use an engine "
            "without pipeline parallelism"
        )
