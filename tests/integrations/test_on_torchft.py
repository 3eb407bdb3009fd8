"""torchft: a replica that dies in the middle of a step takes no sample with it; the run goes on for the others, and with it
when it is back."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest

import overlord as ol
from overlord.errors import SpecError
from overlord.integrations.torchft import ReplicaSteps
from tests.integrations.training import CLOSE, import_tiny, run_example, train_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(600)
def test_replicas_that_die_and_come_back_train_on_every_sample_once(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    job = import_tiny().declare(data)
    run_example("torchft", data, tmp_path / "run", 12, ranks=None)
    tokens, losses, replicas = defaultdict(list), defaultdict(float), {}
    for path in (tmp_path / "run").glob("replica-*.jsonl"):
        for line in path.open():
            entry = json.loads(line)
            tokens[entry["step"]] += entry["tokens"]
            losses[entry["step"]] += entry["loss"]
            replicas[entry["step"]] = entry["replicas"]
    assert [replicas[step] for step in range(12)] == [2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2]
    with ol.start(job) as loader:
        client = loader.client(0)
        expected = [sorted(token for micro in next(client) for token in micro["tokens"].tolist()) for _ in range(12)]
    assert [sorted(tokens[step]) for step in range(12)] == expected
    assert [losses[step] for step in range(12)] == pytest.approx(train_tiny(job).losses[:12], rel=CLOSE)


def test_replicas_that_cannot_be_followed_are_refused():
    manager = SimpleNamespace(_use_async_quorum=True)
    with pytest.raises(SpecError, match="pass use_async_quorum=False to it"):
        ReplicaSteps(manager, "127.0.0.1:1")
    with pytest.raises(SpecError, match="takes replicas without pipeline stages"):
        ReplicaSteps(manager, "127.0.0.1:1", mesh=ol.Mesh(dp=1, pp=2))
