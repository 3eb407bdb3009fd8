"""Lightning on Overlord's steps.

`OverlordDataModule(job)` gives every rank its own batches and keeps the loader's state in Lightning's checkpoints. Lightning
fetches a batch ahead of the one that it trains on when it does not know how many there are; the state goes by what was
trained on.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from overlord.errors import SpecError
from overlord.integrations.frameworks import require
from overlord.integrations.microbatches import OneByOne
from overlord.messages import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlord.declare.job import Job
    from overlord.messages import MicrobatchWithColumns
    from overlord.service.client import Client

    _DataModule: Any = object
else:
    _DataModule = require("lightning", "lightning.pytorch").LightningDataModule

_OPTION = "accumulate_grad_batches"


class OverlordDataModule(_DataModule):
    """The batches of a job for a Lightning `Trainer`.

    With per="micro" a batch is a microbatch, a dict with two more entries: `loss_tokens` and `step_number`. A step's
    microbatches on a rank are the `accumulate_grad_batches` of the trainer. With per="step" a batch is a whole `Step`, for
    manual optimization: the number of microbatches may change from step to step.

    Name it in `Trainer.fit(model, datamodule=...)`. Checkpoints hold the loader's state, which continues on any number of
    ranks.
    """

    def __init__(
        self,
        job: Job,
        *,
        per: Literal["micro", "step"] = "micro",
        eval_job: Job | None = None,
        eval_limit: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`eval_job`: what validation reads, from its beginning each time, up to `eval_limit` steps; one microbatch a batch.
        `options` are more arguments of `overlord.trainer.attach`, such as timeout_s, engine, log or accept_changes."""
        super().__init__()
        if per not in ("micro", "step"):
            raise SpecError(f"per is 'micro' or 'step', got {per!r}")
        self.job = job
        self._per = per
        self._eval_job, self._eval_limit = eval_job, eval_limit
        self._options = dict(options or {})
        self._resume: Mapping[str, Any] | None = None
        self._client: Client | None = None
        self._eval: _Evaluation | None = None
        self._ahead: _Ahead | None = None
        self._untrained: int | None = None  # the first step that the model was not given in whole

    def train_dataloader(self) -> Any:
        if self._client is None:
            self._client = self._attach(self.job, resume=self._resume)
        self._untrained = self._client.step
        if self._per == "step":
            self._ahead = _Ahead(self._client)
            return self._ahead
        if not self._model.automatic_optimization:
            raise SpecError("manual optimization takes whole steps, so that it sees where one ends: pass per='step'")
        self._ahead = _Ahead(OneByOne(self._client, self._accumulate, _with_count, option=_OPTION))
        return self._ahead

    def val_dataloader(self) -> Any:
        if self._eval_job is None:
            return []
        if self._eval is None:
            self._eval = _Evaluation(self._attach(self._eval_job), self._eval_limit)
        return self._eval

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Called with each batch right before the model gets it, however many were fetched ahead."""
        is_training = self._trainer.training and self._ahead is not None
        if is_training and self._ahead is not None:
            self._ahead.note_trained()
        if isinstance(batch, Step):
            if is_training:
                self._untrained = batch.number + 1
            micros = tuple(
                super(OverlordDataModule, self).transfer_batch_to_device(m, device, 0) for m in batch.microbatches
            )
            return Step(batch.number, batch.loss_tokens, micros)
        if is_training:
            self._untrained = batch["step_number"] + int(batch.pop("is_last"))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        if self._client is None:
            return dict(self._resume or {})
        return dict(self._client.state_dict(before=self._untrained))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._resume = state_dict or None

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self._client is not None:
            self._resume = self.state_dict()
            self._client.close()
            self._client = None
        if self._eval is not None:
            self._eval.client.close()
            self._eval = None

    def _attach(self, job: Job, **more: Any) -> Client:
        from overlord.trainer.launch import attach

        return attach(job, **more, **self._options)

    @property
    def _trainer(self) -> Any:
        return self.trainer

    @property
    def _model(self) -> Any:
        return self._trainer.lightning_module

    @property
    def _accumulate(self) -> int:
        return self._trainer.accumulate_grad_batches


def scaled_loss(module: Any, summed: Any, batch: Step | Mapping[str, Any]) -> Any:
    """The loss to return from `training_step`, or to pass to `manual_backward`: `summed`, the sum of token losses, over the
    loss tokens of the whole step, times the ranks over which gradients are averaged and, with automatic optimization, times
    the `accumulate_grad_batches` that Lightning divides by."""
    trainer = module.trainer
    mesh = trainer.datamodule.job.mesh
    factor = trainer.world_size // (mesh.tp * mesh.pp)
    if module.automatic_optimization:
        factor *= trainer.accumulate_grad_batches
    tokens = batch.loss_tokens if isinstance(batch, Step) else batch["loss_tokens"]
    return summed * (factor / tokens)


def _with_count(micro: MicrobatchWithColumns, step: Step) -> dict[str, Any]:
    is_last = micro is step.microbatches[-1]
    return {**micro, "loss_tokens": step.loss_tokens, "step_number": step.number, "is_last": is_last}


class _Ahead:
    """Batches for Lightning, which may fetch some before it trains on them, and leave its loop in between. The next loop
    then begins with these. It has no `state_dict`: Lightning would save that itself, one batch too far."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._fetched: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        left, self._fetched = self._fetched, deque()
        for batch in chain(left, self._batches):
            self._fetched.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)

    def note_trained(self) -> None:
        self._fetched.popleft()


class _Evaluation:
    """The microbatches of the same steps in every loop."""

    def __init__(self, client: Client, limit: int | None) -> None:
        self.client = client
        self._limit = limit

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.client.rewind()
        for step in islice(self.client, self._limit):
            for micro in step:
                yield {**micro, "loss_tokens": step.loss_tokens}
