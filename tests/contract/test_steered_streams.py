"""A steered run, on Ray, whose planner is killed: what was decided is followed, byte for byte."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import overlord as ol
from tests.contract.conftest import on_ray
from tests.contract.streams import part, text_job

FEEDBACK = ol.policies.Feedback(rule=ol.policies.MultiplicativeWeights(rate=1.0, bound=2.0), every=4, lag=4)
STEPS = 18


def lived(loader: ol.Loader, kills: bool) -> list[list]:
    clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
    found = []
    for number in range(STEPS):
        if number == 3:
            assert loader.set_weights({"web": 1, "code": 2, "chat": 3}, from_step=14) == 14
        if kills and number in (5, 11, 15):
            os.kill(loader.status().process, signal.SIGKILL)
        found.append([part(next(client)) for client in clients])
        for client in clients:
            client.feedback(losses={"web": 2.0, "code": 1.0 + client.rank, "chat": 3.0}, tokens={"code": 5})
    return found


def test_a_steered_run_whose_planner_is_killed_is_the_same(ray_cluster: None, tmp_path: Path):
    mixture = ol.Mixture({"web": 5, "code": 3, "chat": 1}, unit="tokens", feedback=FEEDBACK)
    job = replace(text_job(tmp_path, mesh=ol.Mesh(dp=2)), mixture=mixture)
    with ol.start(job) as loader:
        expected = lived(loader, kills=False)
        decided = [(d.step, d.value["by"], d.value["weights"]) for d in loader.decisions()]
    assert [step for step, _, _ in decided] == [8, 12, 14, 16]
    with on_ray(job, log=str(tmp_path / "log")) as loader:
        assert lived(loader, kills=True) == expected
        assert [(d.step, d.value["by"], d.value["weights"]) for d in loader.decisions()] == decided
