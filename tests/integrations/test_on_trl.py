"""TRL's SFTTrainer: the rows and losses of transformers' Trainer, whose labels are shifted once."""

import pytest
from trl import SFTConfig

from overlord.errors import SpecError
from overlord.integrations.trl import OverlordSFTTrainer
from tests.integrations.test_on_transformers import small_model, train_llama
from tests.integrations.training import check_stop_and_resume, import_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(900)
def test_the_sft_trainer_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path):
    check_stop_and_resume("trl", tmp_path, reference=train_llama, other_ranks="program")


def test_what_the_job_does_is_refused_in_the_trainers_arguments(tmp_path):
    job = import_tiny().declare(tmp_path)
    with pytest.raises(SpecError, match=r"SFTConfig\(packing=True\) prepares a dataset, and here the job does that"):
        OverlordSFTTrainer(small_model(), SFTConfig(str(tmp_path), packing=True, use_cpu=True, bf16=False), job=job)
    with pytest.raises(SpecError, match="the job says what to train on: leave train_dataset out"):
        OverlordSFTTrainer(small_model(), SFTConfig(str(tmp_path), use_cpu=True, bf16=False), job=job, train_dataset=[1])
