"""Lightning: two processes train, stop, and resume exactly, also on one, by microbatches and by steps."""

from typing import Any

import lightning as L
import pytest
import torch

from overlord.errors import SpecError
from overlord.integrations.lightning import OverlordDataModule, scaled_loss
from tests.integrations.training import check_stop_and_resume, train_tiny
from tests.small_sources import Numbered, job_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(900)
@pytest.mark.parametrize("per", ["micro", "step"])
def test_lightning_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path, per):
    check_stop_and_resume("lightning", tmp_path, "--per", per, reference=train_tiny, other_ranks="program")


class Module(L.LightningModule):
    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[int] = []
        self.validated: list[list[int]] = []
        self.stop_at = stop_at

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == self.stop_at and not self.trainer.current_epoch else None  # leave the epoch

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(batch["step_number"])
        return scaled_loss(self, (self.weight * batch["tokens"]).sum(), batch)

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated[-1] += batch["tokens"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def fit(module: Module, data: OverlordDataModule, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", accumulate_grad_batches=4, **quiet, **options)
    trainer.fit(module, datamodule=data)
    return trainer


def test_a_batch_that_was_fetched_ahead_and_not_trained_on_is_not_lost():
    module = Module(stop_at=8)
    data = OverlordDataModule(job_of({"a": Numbered(first=1)}))
    fit(module, data, max_steps=4)  # the loader has no length, so Lightning looks one batch ahead
    # The ninth batch is the one that the module refuses; the tenth was fetched then, and comes in the next epoch.
    assert module.seen == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]


def test_a_second_fit_goes_on_where_the_first_one_stopped():
    module, data = Module(), OverlordDataModule(job_of({"a": Numbered(first=1)}))
    fit(module, data, max_steps=3)
    assert data.state_dict()["step"] == 3
    fit(module, data, max_steps=3)
    assert module.seen == [step for step in range(6) for _ in range(4)]


def test_validation_reads_the_same_steps_every_time():
    module = Module()
    data = OverlordDataModule(job_of({"a": Numbered(first=1)}), eval_job=job_of({"b": Numbered(first=90)}), eval_limit=2)
    fit(module, data, max_steps=6, val_check_interval=12, check_val_every_n_epoch=None)
    first, *others = module.validated[1:]  # after the check before training
    assert first
    assert others == [first]


def test_steps_that_do_not_fit_lightning_are_refused():
    job = job_of({"a": Numbered(first=1)})
    with pytest.raises(
        SpecError, match=r"accumulate_grad_batches is 3, but step 0 has 4 microbatches on this rank\. A rank has"
    ):
        L.Trainer(accelerator="cpu", accumulate_grad_batches=3, max_steps=2, logger=False, enable_checkpointing=False).fit(
            Module(), datamodule=OverlordDataModule(job)
        )
    with pytest.raises(SpecError, match="per is 'micro' or 'step', got 'batch'"):
        OverlordDataModule(job, per="batch")  # type: ignore[arg-type]
