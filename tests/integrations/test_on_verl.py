"""verl: GRPO on two processes with verl's own advantages and loss, stopped and resumed, also on one; and what its trainer
does with batches and states."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import overlord as ol
from overlord.integrations.verl import Prompts
from tests.integrations.training import check_stop_and_resume, import_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(900)
def test_grpo_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path):
    check_stop_and_resume("verl", tmp_path, reference=None, declare=import_tiny().declare_prompts, per="step")


def test_verls_trainer_takes_prompts_for_rollouts_and_repeats_them(tmp_path):
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    with ol.start(import_tiny().declare_prompts(tmp_path)) as loader:
        fields = next(iter(Prompts(loader.client(0), pad_token=0)))
    batch = DataProto.from_single_dict(fields)
    assert len(batch) == 8
    assert batch.batch["input_ids"].dtype == batch.batch["attention_mask"].dtype == torch.int64
    rollouts = RayPPOTrainer._get_gen_batch(SimpleNamespace(), batch).repeat(4, interleave=True)
    assert len(rollouts) == 32
    found = rollouts.non_tensor_batch
    texts = [message["content"] for messages in found["raw_prompt"] for message in messages]
    assert texts == [" ".join(map(str, ids)) for ids in found["raw_prompt_ids"]]
    assert [each["ground_truth"] for each in found["reward_model"]] == [text.split()[-1] for text in texts]
    assert set(batch.non_tensor_batch) >= {"uid", "data_source", "reward_model"}  # what verl computes rewards from
    assert len(set(found["uid"])) == 8
    padded = rollouts.chunk(2)  # to two workers
    assert np.concatenate([part.non_tensor_batch["uid"] for part in padded]).tolist() == found["uid"].tolist()


def test_epochs_and_states_are_those_that_verls_trainer_counts(tmp_path):
    """It asks for the length, saves `data.pt` by torch.save, and loads it before the loop over epochs."""
    declared = import_tiny().declare_prompts(tmp_path)
    finite = ol.Parquet(str(tmp_path / "prompts.parquet"), repeat=False)
    job = ol.Job(sources={"prompts": finite}, batch=declared.batch)

    def names(prompts: Prompts) -> list[str]:
        return [text for fields in prompts for text in fields["uid"].tolist()]

    with ol.start(job) as loader:
        prompts = Prompts(loader.client(0), pad_token=0)
        assert len(prompts) == 200 // 8
        epoch = names(prompts)
        assert names(prompts) == epoch
    with ol.start(job) as loader:
        prompts = Prompts(loader.client(0), pad_token=0)
        for _, _ in zip(range(7), prompts, strict=False):
            pass
        torch.save(prompts.state_dict(), tmp_path / "data.pt")
    with ol.start(job) as loader:
        prompts = Prompts(loader.client(0), pad_token=0)
        prompts.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=False))
        assert names(prompts) == epoch[-8 * (25 - 7) :]
        assert names(prompts) == epoch
