"""Accelerate: two processes train, stop, and resume exactly, also on one; a client is not prepared."""

import accelerate
import pytest
import torch

from overlord.errors import SpecError
from overlord.integrations.accelerate import loader
from tests.integrations.training import check_stop_and_resume, train_tiny
from tests.small_sources import Numbered, job_of, tokens_of


@pytest.mark.timeout(500)
@pytest.mark.second_try(reason="torchrun and its ranks must meet and end within minutes")
def test_accelerate_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path):
    check_stop_and_resume("accelerate", tmp_path, reference=train_tiny, other_ranks="program")


class Wrapped(torch.utils.data.IterableDataset):
    def __init__(self, client):
        self.client = client

    def __iter__(self):
        yield from self.client


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_client_is_registered_and_refuses_to_be_prepared(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    with loader(job_of({"a": Numbered(first=1)}), accelerator) as client:
        with pytest.raises(SpecError, match=r"prepare got a client of Overlord.*leave it out of prepare"):
            accelerator.prepare(torch.nn.Linear(1, 1), client)
        for dataset in (Wrapped(client), client):
            with pytest.raises(
                SpecError, match="a DataLoader over a client of Overlord, and would deal the batches of rank 0"
            ):
                accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
        assert isinstance(accelerator.prepare(torch.nn.Linear(1, 1)), torch.nn.Module)
        next(client)
        accelerator.save_state(str(tmp_path / "saved"))
        after = tokens_of(next(client)).tolist()
        accelerator.load_state(str(tmp_path / "saved"))
        assert client.step == 1
        assert tokens_of(next(client)).tolist() == after
