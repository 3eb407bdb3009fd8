"""Lightning on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_lightning.py --until 10

`--per step` trains on whole steps with manual optimization.
"""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import LEARNING_RATE, Journal, TinyModel, declare, microbatches_per_rank, options, parser

from overlord.integrations.lightning import OverlordDataModule, scaled_loss


class Module(L.LightningModule):
    def __init__(self, journal: Journal, per: str) -> None:
        super().__init__()
        self.model, self.journal, self.losses = TinyModel(), journal, list[float]()
        self.automatic_optimization = per == "micro"

    def _scaled_loss(self, micro: dict[str, Any], batch: Any) -> torch.Tensor:
        self.journal.note(micro["tokens"], micro["position_ids"])
        summed = self.model(micro["tokens"], micro["position_ids"], micro["labels"])
        self.losses[-1] += summed.item() / (batch["loss_tokens"] if isinstance(batch, dict) else batch.loss_tokens)
        return scaled_loss(self, summed, batch)

    def training_step(self, batch: Any, index: int) -> Any:
        if self.automatic_optimization:
            if index % self.trainer.accumulate_grad_batches == 0:
                self.losses.append(0.0)
            return self._scaled_loss(batch, batch)
        self.losses.append(0.0)
        for micro in batch:
            self.manual_backward(self._scaled_loss(micro, batch))
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def main() -> None:
    parser.add_argument("--per", default="micro", choices=["micro", "step"])
    given = options()
    module = Module(Journal(given.folder, given.until), given.per)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_steps=given.until,
        accumulate_grad_batches=microbatches_per_rank() if given.per == "micro" else 1,
        callbacks=[ModelCheckpoint(given.folder, filename="{step}", every_n_train_steps=5, save_top_k=-1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = OverlordDataModule(declare(given.data), per=given.per)
    last = given.folder / "last.ckpt"
    trainer.fit(module, datamodule=data, ckpt_path=last if last.exists() else None)
    module.journal.write(module.losses, module.model, is_partial=True)


if __name__ == "__main__":
    main()
