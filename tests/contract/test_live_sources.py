"""A source that is added or removed while a run runs: the others come in the same order, wherever the run is cut."""

import json
import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.cli import main
from overlord.errors import SpecError, StateError, WaitTimeoutError
from tests.contract.conftest import Start, on_ray
from tests.contract.test_stream import BATCHES
from tests.service.served import served
from tests.small_sources import Numbered, job_of, planned, tokens_of

A = Numbered(rows=40, first=1, window=2)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
C = Numbered(rows=31, unit_rows=3, first=200, longest=9)
TWO, THREE = {"a": A, "b": B}, {"a": A, "b": B, "c": C}
MIXTURES = st.sampled_from(
    [
        ol.Mixture({"a": 3, "b": 2}),
        ol.Mixture({"a": 3, "b": 2}, unit="tokens"),
        ol.Mixture({0: {"a": 5, "b": 3}, 9: {"a": 1, "b": 1}}, ramp="linear"),
    ]
)
FEW = settings(max_examples=12)


def tables(loader: ol.Loader, steps: range) -> list[list]:
    return [planned(loader, step).step.samples.table[:4].T.tolist() for step in steps]


def of_source(steps: list[list], source: int) -> list[tuple]:
    """The documents of a source in their order, each once for the pieces that follow each other."""
    found: list[tuple] = []
    for number, chunk, row, start in (draw for step in steps for draw in step):
        if number == source and not (start > 0 and found and found[-1] == (chunk, row)):
            found.append((chunk, row))
    return found


@FEW
@given(BATCHES, MIXTURES, st.integers(0, 5), st.integers(0, 4), st.integers(0, 10), st.floats(0.05, 0.8))
def test_the_others_come_in_the_same_order_and_any_state_goes_on_exactly(batch, mixture, at, later, cut, share):
    job = job_of(TWO, batch, mixture=mixture)
    with ol.start(job) as loader:
        plain = tables(loader, range(24))
    with ol.start(job) as loader:
        client = loader.client(0)
        for _ in range(at):
            next(client)
        since = loader.add_source("c", C, share, from_step=at + later)
        assert since == at + later
        assert next(client).number == at, "the client goes on by itself"
        found = plain[:at] + tables(loader, range(at, since + 12))
        state, end = loader.state_before(since + cut), loader.state_before(since + 12)
        early = loader.state_before(at)
        weights = planned(loader, since).step.weights
        assert weights[2] == pytest.approx(share)
        assert weights[0] / weights[1] == pytest.approx(job.mix.at(since)["a"] / job.mix.at(since)["b"])
    assert found[:since] == plain[:since]
    assert any(draw[0] == 2 for step in found[since:] for draw in step)
    # Packing puts whole documents that do not fit into the next step, so there it is the draws that keep their order.
    for source in (0, 1) if batch.samples is not None or batch.cut_documents else ():
        others = of_source(found, source)
        assert others == of_source(plain, source)[: len(others)]
    grown = job_of(THREE, batch, mixture=mixture)
    for resume in (state, early):
        with ol.start(grown, resume=resume) as loader:
            assert tables(loader, range(loader.start_step, since + 12)) == found[loader.start_step :]
            assert loader.state_before(since + 12) == end


def test_it_is_the_same_on_every_engine_and_goes_on_from_the_log(start: Start, tmp_path):
    job = job_of(TWO, mesh=ol.Mesh(dp=2), mixture=ol.Mixture({"a": 3, "b": 2}))

    def history(loader: ol.Loader) -> list:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]

        def steps(count: int) -> list:
            return [np.sort(np.concatenate([tokens_of(next(client)) for client in clients])).tolist() for _ in range(count)]

        found = steps(3)
        assert loader.add_source("c", C, 0.5, timeout_s=20) == 3
        found += steps(5)
        assert loader.remove_source("a", from_step=30) == 30
        return found + steps(26)

    with ol.start(job) as loader:
        expected = history(loader)
    assert any(200_000 <= token < 300_000 for token in expected[3])
    assert not any(token < 100_000 for step in expected[32:] for token in step)
    with start(job, log=str(tmp_path / "log")) as loader:
        assert history(loader) == expected
    grown = job_of(THREE, mesh=ol.Mesh(dp=2), mixture=job.mix)
    with start(grown, log=str(tmp_path / "log"), resume="log") as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        for number in range(loader.start_step, 34):
            found = np.concatenate([tokens_of(next(client)) for client in clients])
            assert np.sort(found).tolist() == expected[number]


def test_a_planner_that_is_killed_knows_the_source(ray_cluster: None, tmp_path):
    job = job_of(TWO, mixture=ol.Mixture({"a": 3, "b": 2}))
    with ol.start(job) as loader:
        loader.add_source("c", C, 0.4, from_step=6)
        expected = tables(loader, range(16))
    with on_ray(job, log=str(tmp_path / "log")) as loader:
        loader.add_source("c", C, 0.4, from_step=6)
        for step in range(16):
            if step in (3, 10):
                os.kill(loader.status().process, signal.SIGKILL)
            assert tables(loader, range(step, step + 1)) == [expected[step]]


def test_trainers_in_other_processes_go_on_and_the_source_comes_from_the_job_file(tmp_path):
    with served(job_of(TWO, mesh=ol.Mesh(dp=2), mixture=ol.Mixture({"a": 3, "b": 2}))) as (loader, address):
        clients = [ol.connect(address, rank=rank, timeout_s=30) for rank in range(2)]
        for client in clients:
            assert [next(client).number for _ in range(2)] == [0, 1]
        with ol.Control(address) as control:
            with pytest.raises(SpecError, match="this run was not started from a job file"):
                control.add_source("c", 0.5)
            loader.reload_job = lambda: job_of(THREE)
            with pytest.raises(SpecError, match="the job file declares no source 'd'; it has 'a', 'b', 'c'"):
                control.add_source("d", 0.5)
            assert control.add_source("c", 0.5) == 2
            assert control.remove_source("b", from_step=40) == 40
        found = [np.concatenate([tokens_of(next(client)) for client in clients]) for _ in range(3)]
        assert any(token >= 200_000 for token in found[0])
        for client in clients:
            client.close()


def test_sources_are_added_and_removed_from_the_command_line(capsys):
    def told(*arguments: object, expect: int = 0) -> str:
        assert main(["sources", address, *map(str, arguments)]) == expect
        out, error = capsys.readouterr()
        return out if expect == 0 else error

    with served(job_of(TWO, mixture=ol.Mixture({"a": 3, "b": 2}))) as (loader, address):
        assert "60.00%" in told()
        loader.reload_job = lambda: job_of(THREE)
        assert told("--add", "c", "--share", 0.25) == "From step 0 on 25.00% of the mixture comes from source c.\n"
        assert json.loads(told("--remove", "a", "--from-step", 9, "--json"))["from_step"] == 9
        assert "there is a source 'c' already" in told("--add", "c", "--share", 0.25, expect=1)
        assert "--add NAME needs --share" in told("--add", "d", expect=1)
        assert "between 0 and 1, got 7.0" in told("--add", "d", "--share", 7, expect=1)
        assert "two changes" in told("--add", "d", "--share", 0.1, "--remove", "a", expect=1)
        assert "give --add or --remove" in told("--from-step", 3, expect=1)


def test_what_cannot_be_added_is_one_clear_line_and_nothing_changes():
    with ol.start(job_of(TWO, mesh=ol.Mesh(dp=2))) as loader:
        clients = [loader.client(rank) for rank in range(2)]
        for client in clients:
            next(client)
        with pytest.raises(SpecError, match=r"there is a source 'a' already .* the job's sources are 'a', 'b'"):
            loader.add_source("a", C, 0.5)
        with pytest.raises(SpecError, match=r"share is the part of the mixture .* between 0 and 1, got 1.5"):
            loader.add_source("c", C, 1.5)
        with pytest.raises(SpecError, match=r"source 'c' must be an overlord.Source, got str"):
            loader.add_source("c", "files/*.parquet", 0.5)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="step 0 is drawn already; a source can be added from step 1 on"):
            loader.add_source("c", C, 0.5, from_step=0)
        with pytest.raises(SpecError, match="there is no source 'z'; the job's sources are 'a', 'b'"):
            loader.remove_source("z")
        next(clients[0])
        with pytest.raises(WaitTimeoutError, match=r"rank 1 \(at step 1\)"):
            loader.add_source("c", C, 0.5, timeout_s=0.1)
        assert loader.decisions() == ()
        assert next(clients[1]).number == 1
        assert loader.add_source("c", C, 0.5, timeout_s=5) == 2
        assert [next(client).number for client in clients] == [2, 2]


def test_a_job_that_resumes_without_the_source_is_told():
    with ol.start(job_of(TWO, mixture=ol.Mixture({"a": 1, "b": 1}))) as loader:
        loader.add_source("c", C, 0.5)
        state = loader.state_before(4)
        loader.remove_source("c", from_step=6)
        gone = loader.state_before(8)
    job = job_of(TWO, mixture=ol.Mixture({"a": 1, "b": 1}))
    with pytest.raises(StateError, match=r"source 'c' was added while the run ran, and this job does not have it"):
        ol.start(job, resume=state)
    ol.start(job, resume=state, accept_changes=["sources.c"]).close()
    ol.start(job, resume=gone).close()


def test_weights_that_are_set_later_hold_as_they_are():
    with ol.start(job_of(TWO, mixture=ol.Mixture({"a": 1, "b": 1}))) as loader:
        loader.set_weights({"a": 3, "b": 1}, from_step=2)
        loader.add_source("c", C, 0.2, from_step=4)
        loader.set_weights({"a": 1, "c": 1}, from_step=8)
        assert planned(loader, 3).step.weights.tolist() == [0.75, 0.25, 0]
        assert planned(loader, 5).step.weights.tolist() == pytest.approx([0.6, 0.2, 0.2])
        assert planned(loader, 8).step.weights.tolist() == [0.5, 0, 0.5]
