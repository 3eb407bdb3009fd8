"""Accelerate on Overlord's steps.

`loader(job, accelerator)` returns the client of this rank. `accelerator.save_state` and `load_state` save and load its
state. It is not passed to `accelerator.prepare`, which would deal the batches of rank 0 to all ranks; `prepare` refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError
from overlord.integrations.frameworks import require
from overlord.service.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlord.declare.job import Job
    from overlord.messages import MicrobatchWithColumns, Step


def loader(job: Job | None, accelerator: Any, **options: Any) -> Client:
    """Return the client of this rank, on the accelerator's device and registered for checkpointing.

    `options` are those of `overlord.trainer.attach`. On a GPU the client copies steps to the device ahead of the trainer.
    """
    require("accelerate")
    from overlord.trainer.launch import attach

    if accelerator.device.type != "cpu":
        options.setdefault("device", accelerator.device)
    client = attach(job, **options)
    accelerator.register_for_checkpointing(client)
    _guard(accelerator)
    return client


def microbatches(accelerator: Any, model: Any, step: Step) -> Iterator[MicrobatchWithColumns]:
    """Iterate over the microbatches of a step; ranks exchange gradients in the backward pass of the last one. The number of
    microbatches may differ between steps, and must be the same on all ranks (`equal_counts=True`, the default)."""
    for index, micro in enumerate(step, 1):
        is_last = index == len(step)
        # The optimizer and the scheduler that accelerate prepared do nothing before the gradients are complete.
        accelerator.gradient_state._set_sync_gradients(is_last)  # noqa: SLF001 - as transformers' Trainer does
        if is_last:
            yield micro
        else:
            with accelerator.no_sync(model):
                yield micro


def scaled_loss(accelerator: Any, summed: Any, step: Step) -> Any:
    """The loss to pass to `accelerator.backward`: `summed`, the sum of the token losses of a microbatch, over the loss
    tokens of the whole step, times the ranks over which gradients are averaged, times what `backward` divides by."""
    return summed * (_num_averaged(accelerator) * accelerator.gradient_accumulation_steps / step.loss_tokens)


def _num_averaged(accelerator: Any) -> int:
    config = getattr(accelerator, "parallelism_config", None)
    return accelerator.num_processes // (1 if config is None else config.tp_size)


def _guard(accelerator: Any) -> None:
    """Let this accelerator refuse to prepare clients, also inside a DataLoader."""
    if getattr(accelerator.prepare, "refuses_clients", False):
        return

    def guarded(call: Any) -> Any:
        def refuse_clients(*objects: Any, **options: Any) -> Any:
            for each in objects:
                if _holds_client(each):
                    raise SpecError(
                        f"accelerator.prepare got {_named(each)}, and would deal the batches of rank 0 to all ranks. A "
                        "client of Overlord is of its rank already: leave it out of prepare, and iterate over it as it is"
                    )
            return call(*objects, **options)

        refuse_clients.refuses_clients = True  # type: ignore[attr-defined]
        return refuse_clients

    accelerator.prepare = guarded(accelerator.prepare)
    accelerator.prepare_data_loader = guarded(accelerator.prepare_data_loader)


def _holds_client(value: Any) -> bool:
    dataset = getattr(value, "dataset", None)
    held = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    return any(isinstance(each, Client) for each in (value, dataset, *held))


def _named(value: Any) -> str:
    return "a client of Overlord" if isinstance(value, Client) else f"a {type(value).__name__} over a client of Overlord"
