"""TRL's `SFTTrainer` on Overlord's steps.

The job tokenizes, applies chat templates, masks prompts and packs; `SFTTrainer` trains. See
`overlord.integrations.transformers` for checkpoints and for the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError
from overlord.integrations.frameworks import require
from overlord.integrations.transformers import OverlordMixin

if TYPE_CHECKING:
    _SFTTrainer: Any = object
else:
    _SFTTrainer = require("trl").SFTTrainer

_OF_THE_JOB = ("packing", "padding_free", "assistant_only_loss", "completion_only_loss")


class OverlordSFTTrainer(OverlordMixin, _SFTTrainer):
    """TRL's `SFTTrainer`, trained on the steps of a job. Takes `job`, `eval_job`, `eval_limit` and `options` as
    `OverlordTrainer` does, and no dataset."""

    def __init__(self, model: Any, args: Any = None, **kwargs: Any) -> None:
        trl = require("trl")
        args = trl.SFTConfig("trainer_output") if args is None else args
        for name in ("train_dataset", "eval_dataset", "data_collator", "formatting_func"):
            if kwargs.get(name) is not None:
                raise SpecError(f"the job says what to train on: leave {name} out, or use TRL's own SFTTrainer for it")
        for name in _OF_THE_JOB:
            if getattr(args, name, None):
                raise SpecError(
                    f"SFTConfig({name}=True) prepares a dataset, and here the job does that: leave it out, and declare "
                    "packing by Batch(layout=...) and masked tokens by the source's loss_mask"
                )
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        # SFTTrainer insists on a dataset that it can look into, though it never trains on this one.
        unread = require("trl", "datasets").Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
        super().__init__(model, args=args, train_dataset=unread, **kwargs)
