"""Ray Train: a group of workers trains, another one resumes from its checkpoint, and a service follows the group's size."""

import pytest
import torch

from overlord.errors import SpecError, StateError
from overlord.integrations import ray_train
from tests.integrations.training import (
    CLOSE,
    END,
    STOP,
    assert_same_weights,
    import_tiny,
    journals,
    rows_of,
    run_example,
    train_tiny,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(1200)
def test_ray_train_stops_resumes_exactly_and_resizes_the_run_of_a_service(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    job = import_tiny().declare(data.absolute())
    rows, expected = rows_of(job, 2), train_tiny(job)
    run_example("ray_train", data, tmp_path / "two", STOP, "--workers", 2, ranks=None)
    run_example("ray_train", data, tmp_path / "two", END, "--workers", 2, ranks=None)
    run_example("ray_train", data, tmp_path / "whole", END, "--workers", 2, ranks=None)
    run_example("ray_train", data, tmp_path / "served", END, "--serve", ranks=None)
    for folder in ("two", "served"):
        stopped = journals(tmp_path / folder, STOP, 2)
        for rank in range(2):
            assert stopped[rank].rows == [micro for step in rows[rank][:STOP] for micro in step]
        assert stopped[0].losses == pytest.approx(expected.losses[:STOP], rel=CLOSE)
        assert_same_weights(stopped[0].weights, expected.weights[STOP])
    resumed, alone = journals(tmp_path / "two", END, 2), journals(tmp_path / "served", END, 1)[0]
    for rank in range(2):
        assert resumed[rank].rows == [micro for step in rows[rank][STOP:] for micro in step]
    assert alone.rows == [micro for step in rows_of(job, 1)[0][STOP:] for micro in step]
    for found in (resumed[0], alone):
        assert found.losses == pytest.approx(expected.losses[STOP:], rel=CLOSE)
        assert_same_weights(found.weights, expected.weights[END])
    whole = journals(tmp_path / "whole", END, 2)
    assert journals(tmp_path / "two", STOP, 2)[0].losses + resumed[0].losses == whole[0].losses
    assert torch.equal(resumed[0].weights, whole[0].weights)


def test_a_checkpoint_without_a_state_and_a_call_without_a_job_are_refused(tmp_path):
    from ray.train import Checkpoint

    with pytest.raises(StateError, match=r"has no overlord.json: call overlord.integrations.ray_train.save_state\(client"):
        ray_train.saved_state(Checkpoint.from_directory(str(tmp_path)))
    with pytest.raises(SpecError, match="cannot go on for Mesh"):
        ray_train._resize("127.0.0.1:1", None, import_tiny().ol.Mesh(dp=2))
