"""torchtitan: its Trainer with FSDP2, its checkpoints and its Validator, on two processes, stopped and resumed, also on
one."""

from pathlib import Path

import pytest

from overlord.errors import SpecError
from tests.integrations.training import check_stop_and_resume, import_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(1200)
def test_torchtitan_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path):
    check_stop_and_resume("torchtitan", tmp_path, reference=None)


def test_sizes_that_are_not_those_of_the_job_are_refused(tmp_path):
    from overlord.integrations.torchtitan import OverlordDataLoader, _check_batch

    job = import_tiny().declare(Path(tmp_path))
    with pytest.raises(SpecError, match=r"microbatches are 8 x 2048 tokens; the job's are 2 x 64: declare Batch\("):
        _check_batch(job, 2048, 8, 1)
    with pytest.raises(SpecError, match="a step of 512 tokens is no whole number of microbatches of 128 on 3 data-parallel"):
        _check_batch(job, 64, 2, 3)
    with pytest.raises(SpecError, match=r"needs a job: Config\(job=\.\.\.\)"):
        OverlordDataLoader(OverlordDataLoader.Config(), dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=2)
    loader = OverlordDataLoader(
        OverlordDataLoader.Config(job=job), dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=2
    )
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 64)
    with pytest.raises(
        SpecError, match="torchtitan saves in the middle of step 0 of the job: 3 of its microbatches are left"
    ):
        loader.state_dict()
    loader.close()
