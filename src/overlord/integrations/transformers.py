"""transformers' `Trainer` on Overlord's steps.

`OverlordTrainer(job=..., model=..., args=...)` is a `Trainer` whose batches come from a job. The loader's state is in
`trainer_state.json` of every checkpoint, so `train(resume_from_checkpoint=True)` continues with the next sample, on any
number of ranks. Batches are read by every rank itself: accelerate neither dispatches nor shards them. Labels are shifted
already and are passed as `shift_labels`, so that the model does not shift them again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.batches.framework_layouts import huggingface
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError, StateError
from overlord.integrations.frameworks import require
from overlord.integrations.microbatches import OneByOne

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlord.declare.job import Job
    from overlord.messages import MicrobatchWithColumns, Step
    from overlord.service.client import Client

_KEY = "Overlord"  # in trainer_state.json, among the states of callbacks
_OPTION = "gradient_accumulation_steps"

if TYPE_CHECKING:
    _Trainer: Any = object
else:
    _Trainer = require("transformers").Trainer


class OverlordMixin:
    """Gives a subclass of transformers' `Trainer` its batches: `class MyTrainer(OverlordMixin, Seq2SeqTrainer)`."""

    args: Any
    state: Any
    model: Any
    accelerator: Any

    def __init__(
        self,
        *args: Any,
        job: Job,
        eval_job: Job | None = None,
        eval_limit: int | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """- `job`: what to train on. A rank's microbatches of a step are the `gradient_accumulation_steps` of the trainer.
        - `eval_job`: what `evaluate` reads, up to `eval_limit` steps; the same ones every time. Its loss is the mean over
          all tokens.
        - `options`: more arguments of `overlord.trainer.attach`, such as timeout_s, engine, log or accept_changes.
        """
        super().__init__(*args, **kwargs)
        self._job, self._eval_job, self._eval_limit = job, eval_job, eval_limit
        self._options = dict(options or {})
        self._checkpoint: Path | None = None
        self._client: Client | None = None
        self._eval_client: Client | None = None
        self._loss_tokens: int | float = 0  # of the step that is being trained on
        _check_loss(self)
        self.args.ignore_data_skip = True  # the client begins at the right step

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        self._checkpoint = _checkpoint_folder(resume_from_checkpoint, self.args.output_dir)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._close_client()

    def get_train_dataloader(self) -> OneByOne:
        self._close_client()
        saved = None if self._checkpoint is None else saved_state(self._checkpoint)
        self._client = self._attach(self._job, resume=saved)
        return OneByOne(self._client, self.args.gradient_accumulation_steps, self._note_step, option=_OPTION)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The microbatches of a step, and by what the trainer divides its summed loss."""
        import torch

        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        # The trainer multiplies by the number of ranks that average gradients only with average_tokens_across_devices.
        ranks = 1 if self.args.average_tokens_across_devices else self.accelerator.num_processes // self._num_copies
        return batches, torch.tensor(self._loss_tokens / ranks, device=device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights = inputs.pop("loss_weights", None)
        if weights is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        labels, _ = inputs.pop("labels"), inputs.pop("shift_labels")
        outputs = model(**inputs)
        loss = _weighted_loss(outputs["logits"], labels, weights) / num_items_in_batch
        if self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self._num_copies)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """The mean loss over all tokens of `eval_job`, or what the trainer does with a dataset of its own."""
        if self._eval_job is None or eval_dataset is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[misc]
        metrics = {f"{metric_key_prefix}_loss": self._mean_eval_loss()}
        self.log(metrics)  # type: ignore[attr-defined]
        handler: Any = self.callback_handler  # type: ignore[attr-defined]
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _mean_eval_loss(self) -> float:
        import torch

        if self._eval_client is None:
            assert self._eval_job is not None
            self._eval_client = self._attach(self._eval_job)
        self._eval_client.rewind()
        model = self.model_wrapped  # type: ignore[attr-defined]
        was_training = model.training
        model.eval()
        total, tokens = torch.zeros((), device=self.args.device), 0.0
        with torch.no_grad():
            for step in islice(self._eval_client, self._eval_limit):
                tokens += step.loss_tokens
                for micro in step:
                    inputs = self._prepare_inputs(batch_of(micro))  # type: ignore[attr-defined]
                    total += self.compute_loss(model, inputs, num_items_in_batch=torch.ones((), device=self.args.device))
        model.train(was_training)
        if not tokens:
            raise SpecError("eval_job has no loss tokens: give it sources with data, and an eval_limit above 0")
        if self.args.average_tokens_across_devices:
            total = total / (self.accelerator.num_processes // self._num_copies)
        return float(self.accelerator.reduce(total, "sum") / self._num_copies / tokens)

    def _attach(self, job: Job, **more: Any) -> Client:
        from overlord.trainer.launch import attach

        return attach(_with_copies(job, self._num_copies), **more, **self._options)

    @property
    def _num_copies(self) -> int:
        """How many ranks train on the same batch: transformers cuts it for tensor and context parallelism by itself."""
        trainer: Any = self
        return trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()

    def _note_step(self, micro: MicrobatchWithColumns, step: Step) -> dict[str, Any]:
        self._loss_tokens = step.loss_tokens
        return batch_of(micro)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self._client is not None
        self.state.stateful_callbacks[_KEY] = {"args": {}, "attributes": {"state": self._client.state_dict()}}
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _close_client(self) -> None:
        for client in (self._client, self._eval_client):
            if client is not None:
                client.close()
        self._client = self._eval_client = None


class OverlordTrainer(OverlordMixin, _Trainer):
    """transformers' `Trainer`, trained on the steps of a job. See `OverlordMixin` for what it takes beside the `Trainer`'s
    own arguments."""


def batch_of(micro: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch as the arguments of transformers' models, with its loss weights if it has some."""
    batch = huggingface(micro)
    if "loss_weights" in micro:
        batch["loss_weights"] = micro["loss_weights"].reshape(batch["labels"].shape)
    return batch


def saved_state(checkpoint: str | Path) -> dict[str, Any]:
    """The loader's state in a checkpoint of the trainer."""
    path = Path(checkpoint) / "trainer_state.json"
    try:
        return json.loads(path.read_text("utf-8"))["stateful_callbacks"][_KEY]["attributes"]["state"]
    except (FileNotFoundError, KeyError):
        raise StateError(
            f"the checkpoint {checkpoint} has no state of Overlord in trainer_state.json: it was written by another "
            "trainer. Load its weights into the model and train without resume_from_checkpoint"
        ) from None


def _weighted_loss(logits: Any, labels: Any, weights: Any) -> Any:
    import torch.nn.functional as F

    flat = logits.float().flatten(0, -2)
    losses = F.cross_entropy(flat, labels.flatten().to(flat.device), ignore_index=-100, reduction="none")
    return (losses * weights.flatten().to(flat.device)).sum()


def _with_copies(job: Job, num_copies: int) -> Job:
    if num_copies == 1:
        return job
    if job.mesh.cp * job.mesh.tp * job.mesh.pp > 1:
        raise SpecError(
            f"the trainer has {num_copies} ranks for each batch by its own settings; leave the sizes of tp, cp and pp out "
            f"of the job's mesh, got {job.mesh}"
        )
    return replace(job, mesh=Mesh(tp=num_copies))


def _checkpoint_folder(given: str | bool | None, output_dir: str) -> Path | None:
    if isinstance(given, bool):
        last = require("transformers", "transformers.trainer_utils").get_last_checkpoint
        found: str | None = last(output_dir) if given else None
    else:
        found = given
    return Path(found) if found else None


def _check_loss(trainer: Any) -> None:
    """Refuse what would shift labels again, or average losses of unequal microbatches, without a word."""
    if trainer.label_smoother is not None:
        raise SpecError(
            "label_smoothing_factor shifts labels, which Overlord has shifted already: set it to 0, or pass a "
            "compute_loss_func(outputs, labels, num_items_in_batch) that smooths and does not shift"
        )
    if trainer.compute_loss_func is None and not trainer.model_accepts_loss_kwargs:
        raise SpecError(
            f"{type(trainer.model).__name__}.forward takes no **kwargs, so it can be told neither that labels are shifted "
            "nor the number of loss tokens of the step: pass compute_loss_func(outputs, labels, num_items_in_batch), which "
            "gets labels that are shifted already"
        )
