"""A served run is steered from other processes: reports of its trainers, and weights that are changed by hand."""

import json
import logging

import pytest

import overlord as ol
from overlord.cli import main
from overlord.service.admin import Control
from tests.service.served import served, streams
from tests.small_sources import job_of, planned
from tests.steering.steered import NAMES, SOURCES, job_with


def test_connected_trainers_report_and_the_stream_is_that_of_trainers_beside_the_loader():
    losses = [{name: (1 + i + rank) % 4 for i, name in enumerate(NAMES)} for rank in range(2)]

    def trained(clients: list[ol.Client]) -> list:
        found = []
        for _ in range(20):
            found.append(streams(clients, 1))
            for client, of_rank in zip(clients, losses, strict=True):
                client.feedback(losses=of_rank, tokens=dict.fromkeys(of_rank, 10))
        return found

    with ol.start(job_with(mesh=ol.Mesh(dp=2))) as loader:
        here = trained([loader.client(rank, timeout_s=60) for rank in range(2)])
        decided = loader.decisions()
    with served(job_with(mesh=ol.Mesh(dp=2))) as (loader, address):
        there = trained([ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)])
        assert loader.decisions() == decided
    assert there == here
    assert len(decided) >= 3


def test_what_is_wrong_with_a_report_is_told_where_it_was_made(caplog):
    with served(job_with()) as (_, address), ol.connect(address, rank=0, timeout_s=60) as client:
        next(client)
        with caplog.at_level(logging.WARNING, "overlord.service.client"):
            client.feedback(losses={"a": float("nan"), "z": 1.0})
            client.feedback(seconds=[1.0, 2.0])
        next(client)
    assert "the loss of 'a' is nan" in caplog.text
    assert "there is no source 'z'" in caplog.text
    assert "times are not used" in caplog.text


def test_a_report_to_a_service_that_has_gone_is_left_out_and_training_goes_on(caplog):
    with served(job_with()) as (loader, address):
        client = ol.connect(address, rank=0, timeout_s=60)
        next(client)
        loader.close()
        with caplog.at_level(logging.WARNING, "overlord.service.client"):
            client.feedback(losses={"a": 1.0})
        assert "the service did not take it" in caplog.text


def test_weights_are_changed_from_the_command_line_and_every_rank_sees_the_same(capsys):
    def told(*arguments: object) -> str:
        assert main(["mix", address, *map(str, arguments)]) == 0
        return capsys.readouterr().out

    with served(job_of(SOURCES, mesh=ol.Mesh(dp=2))) as (loader, address):
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        streams(clients, 2)
        assert "no weights were changed" in told()
        answer = json.loads(told("a=1", "c=3", "--json"))
        step = answer["from_step"]
        assert answer["weights"] == {"a": 1.0, "c": 3.0}
        assert planned(loader, step).step.weights.tolist() == [0.25, 0, 0.75]
        streams(clients, step + 3 - clients[0].step)
        assert "as declared" not in told()
        later = step + 100
        assert f"Weights from step {later} on: as the job declares" in told("--declared", "--from-step", later)
        assert [d.step for d in loader.decisions()] == [step, later]
        assert "as declared" in told()


def test_nobody_steers_without_the_token(tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("hard-to-guess\n")
    with served(job_of(SOURCES), token="hard-to-guess") as (loader, address):
        for given in ([], ["--token", "wrong"]):
            assert main(["mix", address, "a=1", *given]) == 1
            assert "requires its token" in capsys.readouterr().err
        assert loader.decisions() == ()
        assert main(["mix", address, "a=1", "--token-file", str(token)]) == 0
        assert len(loader.decisions()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing=1"], "there is no source 'nothing'"),
        (["a=-1"], "must be a number >= 0"),
        (["a=0"], "every weight is 0"),
        (["a"], "a weight is written as source=number"),
        (["a=1", "a=2"], "'a' has two weights"),
        (["a=1", "--declared"], "leave out the weights"),
        (["--from-step", "5"], "give some, such as"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_changes(capsys, arguments, message):
    with served(job_of(SOURCES)) as (loader, address):
        assert main(["mix", address, *arguments]) == 1
        assert loader.decisions() == ()
    assert message in capsys.readouterr().err


def test_an_address_where_nothing_is_served_is_an_error_that_says_so():
    with (
        Control("127.0.0.1:9", timeout_s=0.1) as control,
        pytest.raises(ol.errors.ServiceError, match="is it running, and is the address right"),
    ):
        control.decisions()
