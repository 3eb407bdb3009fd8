"""What is skipped does not come from its step on, and everything else comes in the same order, wherever a run is cut."""

import json
import os
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.cli import main
from overlord.errors import DataError, SpecError, StateError
from overlord.lineage.obtaining import open_log
from tests.contract.conftest import Start, on_ray
from tests.contract.test_stream import BATCHES
from tests.service.served import served
from tests.small_sources import Numbered, job_of, planned, read_all, same, tokens_of

A = Numbered(rows=40, first=1, window=2)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
SOURCES = {"a": A, "b": B}
MIXTURES = st.sampled_from(
    [
        ol.Mixture({"a": 3, "b": 2}),
        ol.Mixture({"a": 3, "b": 2}, unit="tokens"),
        ol.Mixture({0: {"a": 5, "b": 3}, 6: {"a": 1, "b": 1}}, unit="tokens", ramp="linear"),
    ]
)
ROWS = st.sets(st.integers(0, 39), min_size=1, max_size=30).map(sorted)
FEW = settings(max_examples=25)

Draws = list[list[tuple[int, int, int]]]


def draws(job: ol.Job, steps: int, **options: Any) -> Draws:
    """(source, document, start) of every sample of each step, in the order in which they were drawn."""
    with ol.start(job, **options) as loader:
        begin = loader.start_step
        found: Draws = []
        for step in range(begin, begin + steps):
            samples = planned(loader, step).step.samples
            found.append([_document(loader, *row) for row in samples.table[:4].T.tolist()])
        return found


def _document(loader: ol.Loader, source: int, chunk: int, row: int, start: int) -> tuple[int, int, int]:
    file, unit_row = loader._roles.routes.origins(source, chunk, [row])[0]
    unit = int(file.partition("#")[2] or 0)
    return source, unit * (A.unit_rows, B.unit_rows)[source] + unit_row, start


def of_source(steps: Draws, source: int) -> list[int]:
    """The documents of a source in their order, each once for the pieces that follow each other."""
    found: list[int] = []
    for number, document, start in (draw for step in steps for draw in step):
        if number == source and not (start > 0 and found and found[-1] == document):
            found.append(document)
    return found


@FEW
@given(MIXTURES, ROWS, st.integers(0, 8), st.sampled_from([ol.Batch(samples=9, sequence_length=16)]))
def test_everything_else_comes_in_the_same_order(mixture, rows, from_step, batch):
    plain = draws(job_of(SOURCES, batch, mixture=mixture), 30)
    skip = ol.Skip("a", "numbered", rows, from_step)
    skipped = draws(job_of(SOURCES, batch, mixture=mixture, skip=[skip]), 14)
    assert skipped[:from_step] == plain[:from_step]
    before = of_source(plain[:from_step], 0)
    after = [document for document in of_source(plain[from_step:], 0) if document not in rows]
    found = of_source(skipped, 0)
    assert found == (before + after)[: len(found)]
    others = of_source(skipped, 1)
    assert others == of_source(plain, 1)[: len(others)]
    if mixture.unit == "samples":  # the sources come in the same turns
        assert [draw[0] for step in skipped for draw in step] == [draw[0] for step in plain[:14] for draw in step]


@FEW
@given(BATCHES, MIXTURES, ROWS, st.integers(0, 9), st.integers(0, 4))
def test_a_run_that_skips_goes_on_from_any_state_as_if_it_had_not_been_stopped(batch, mixture, rows, cut, from_step):
    skip = [ol.Skip("a", "numbered", rows, from_step), ol.Skip("b", "numbered#2")]
    job = job_of(SOURCES, batch, mixture=mixture, skip=skip)
    uncut, end = read_all(job, 10)
    before, state = read_all(job, cut)
    after, resumed_end = read_all(job, 10 - cut, resume=state)
    assert same(before + after, uncut)
    assert resumed_end == end
    documents = {int(token) // 1000 - 1 for step in uncut[from_step:] for token in step if token < 100_000}
    assert not documents & set(rows)


@FEW
@given(BATCHES, ROWS, st.integers(1, 6), st.integers(0, 8))
def test_what_is_skipped_live_is_in_states_and_in_the_log(tmp_path_factory, batch, rows, at, cut):
    log = tmp_path_factory.mktemp("log")
    job = job_of(SOURCES, batch)
    with ol.start(job, log=log) as loader:
        client = loader.client(0)
        for _ in range(at):
            next(client)
        step = loader.skip("a", "numbered", rows)
        assert step >= at
        end = loader.state_before(step + 10)
        state = loader.state_before(step + cut)
        expected = [planned(loader, number).plan.samples.table.tolist() for number in range(step, step + 10)]
        assert [decision.name for decision in loader.decisions()] == ["skip"]
    for resume, options in ((state, {}), ("log", {"log": log})):
        with ol.start(job, resume=resume, **options) as loader:
            for number in range(max(loader.start_step, step), step + 10):
                assert planned(loader, number).plan.samples.table.tolist() == expected[number - step]
            assert loader.state_before(step + 10) == end
    found = open_log(job, log)
    for number in range(step, min(step + 8, found.run.end)):
        assert not [d for d in found.documents(number) if d.source == "a" and d.file_row in rows]


@FEW
@given(BATCHES, st.integers(0, 6), st.integers(0, 8))
def test_a_source_is_removed_live_and_stays_so(batch, from_step, cut):
    plain = draws(job_of(SOURCES, ol.Batch(samples=9, sequence_length=16)), 20)
    job = job_of(SOURCES, batch, mixture=ol.Mixture({0: {"a": 1, "b": 1}, 3: {"a": 5, "b": 1}}))
    with ol.start(job) as loader:
        step = loader.skip("a", from_step=from_step)
        assert step == from_step
        tables = [planned(loader, number).plan.samples for number in range(10)]
        state = loader.state_before(cut)
        end = loader.state_before(10)
    assert all((samples.source == 1).all() for samples in tables[from_step:])
    with ol.start(job, resume=state) as loader:
        for number in range(cut, 10):
            assert planned(loader, number).plan.samples.table.tolist() == tables[number].table.tolist()
        assert loader.state_before(10) == end
    alone = draws(job_of(SOURCES, ol.Batch(samples=9, sequence_length=16), skip=[ol.Skip("a", from_step=from_step)]), 8)
    others = of_source(alone, 1)
    assert others == (of_source(plain, 1) * 3)[: len(others)] or len(others) > len(of_source(plain, 1))


def test_a_repeated_skip_counts_once_and_steps_that_are_drawn_are_refused():
    with ol.start(job_of(SOURCES)) as loader:
        planned(loader, 30)
        with pytest.raises(SpecError, match="step 3 is drawn already; documents can be skipped from step"):
            loader.skip("a", "numbered", [1], from_step=3)
        with pytest.raises(SpecError, match="there is no source 'c'; the job's sources are 'a', 'b'"):
            loader.skip("c")
        with pytest.raises(SpecError, match="source 'a' has no file nope"):
            loader.skip("a", "nope")
        with pytest.raises(SpecError, match="numbered has 40 rows; there is no row 40"):
            loader.skip("a", "numbered", [40])
        loader.skip("a")
        with pytest.raises(SpecError, match="source 'b' is the only one with a weight at step"):
            loader.skip("b")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ol.Skip("a", rows=[1]), "needs file="),
        (lambda: ol.Skip("a", "f", []), "is a list of row numbers from 0 on"),
        (lambda: ol.Skip("a", "f", [-1]), "is a list of row numbers from 0 on"),
        (lambda: ol.Skip("a", from_step=-1), "is a step from 0 on"),
        (lambda: job_of(SOURCES, skip=[ol.Skip("c")]), "skip names the source 'c'; the job's sources are 'a', 'b'"),
        (lambda: job_of(SOURCES, skip=["a"]), "skip is a list of overlord.Skip"),
    ],
)
def test_a_wrong_skip_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_a_source_that_is_skipped_file_by_file_says_so():
    job = job_of(SOURCES, skip=[ol.Skip("a", "numbered")])
    with ol.start(job) as loader, pytest.raises(DataError, match="what is skipped"):
        loader.plan(0)


def test_a_damaged_skip_in_a_state_is_named():
    from overlord.checkpoint.form import contents_of

    with ol.start(job_of(SOURCES)) as loader:
        loader.skip("a", "numbered", [3])
        contents = contents_of(loader.state_before(2))
    contents["steered"]["decisions"][0][2]["rows"] = [["x", None]]
    with pytest.raises(StateError, match="rows"):
        ol.start(job_of(SOURCES), resume=contents, accept_changes=["checksum"])


@settings(max_examples=6)
@given(ROWS, st.integers(1, 5), st.integers(0, 6))
def test_what_is_skipped_over_the_wire_is_what_is_skipped_in_the_process_of_the_run(rows, at, cut):
    def history(loader: ol.Loader, run: Any, client: ol.Client) -> list:
        for _ in range(at):
            next(client)
        step = run.skip("a", "numbered", rows, from_step=at + 20)
        tables = [planned(loader, number).plan.samples.table.tolist() for number in range(step + 6)]
        decided = [(d.step, d.name, {k: v for k, v in d.value.items() if k != "id"}) for d in loader.decisions()]
        return [step, tables, decided, loader.state_before(step + cut)["step"]]

    job = job_of(SOURCES)
    with ol.start(job) as loader:
        here = history(loader, loader, loader.client(0))
    with served(job) as (loader, address), ol.Control(address) as control, ol.connect(address, rank=0) as client:
        there = history(loader, control, client)
        assert client.run.skip("b", "numbered#2", from_step=100) == 100
        state = loader.state_before(at + 20 + cut)
    assert there == here
    with ol.start(job, resume=state) as loader:
        for number in range(loader.start_step, at + 26):
            assert planned(loader, number).plan.samples.table.tolist() == here[1][number]


def test_a_live_skip_is_the_same_on_every_engine_and_after_its_log(start: Start, tmp_path):
    job = job_of(SOURCES, mesh=ol.Mesh(dp=2))

    def history(loader: ol.Loader, from_step: int) -> list:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = [[tokens_of(next(client)).tolist() for client in clients] for _ in range(2)]
        assert loader.skip("a", "numbered", range(0, 40, 3), from_step=from_step) == from_step
        found += [[tokens_of(next(client)).tolist() for client in clients] for _ in range(from_step)]
        return found

    with ol.start(job) as loader:
        expected = history(loader, 25)
    with start(job, log=str(tmp_path / "log")) as loader:
        assert history(loader, 25) == expected
    with start(job, log=str(tmp_path / "log"), resume="log") as loader:
        first, clients = loader.start_step, [loader.client(rank, timeout_s=60) for rank in range(2)]
        assert [d.name for d in loader.decisions()] == ["skip"]
        for number in range(first, 27):
            assert [tokens_of(next(client)).tolist() for client in clients] == expected[number]


def test_a_planner_that_is_killed_still_leaves_out_what_was_skipped(ray_cluster: None, tmp_path):
    job = job_of(SOURCES)
    with ol.start(job) as loader:
        loader.skip("a", "numbered", [1, 2, 3, 30], from_step=12)
        expected = [planned(loader, step).plan.samples.table.tolist() for step in range(18)]
    with on_ray(job, log=str(tmp_path / "log")) as loader:
        loader.skip("a", "numbered", [1, 2, 3, 30], from_step=12)
        for step in range(18):
            if step in (5, 14):
                os.kill(loader.status().process, signal.SIGKILL)
            assert planned(loader, step).plan.samples.table.tolist() == expected[step]


def test_documents_are_skipped_from_the_command_line(capsys):
    def told(*arguments: object) -> str:
        assert main(["skip", address, *map(str, arguments)]) == 0
        return capsys.readouterr().out

    with served(job_of(SOURCES)) as (loader, address):
        assert "Nothing was left out" in told()
        answer = json.loads(told("--source", "a", "--file", "numbered", "--rows", "3,7-9", "--json"))
        assert answer["rows"] == [3, 7, 8, 9]
        assert loader.decisions()[0].step == answer["from_step"]
        assert loader.decisions()[0].value["rows"] == [[0, [3]], [1, [2, 3, 4]]]
        said = told("--source", "b", "--file", "numbered", "--from-step", 50)
        assert said == "From step 50 on source b is read without numbered.\n"
        assert "all of it" in told("--source", "a", "--whole-source", "--from-step", 60)
        shown = told()
        assert "4 rows of numbered" in shown
        assert "all of it" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "c", "--file", "numbered"], "there is no source 'c'; the job's sources are 'a', 'b'"),
        (["--source", "a", "--file", "nope"], "source 'a' has no file nope"),
        (["--source", "a", "--file", "numbered", "--rows", "40"], "numbered has 40 rows; there is no row 40"),
        (["--source", "a", "--file", "numbered", "--rows", "5-3"], "rows are numbers and ranges from 0 on"),
        (["--source", "a", "--file", "numbered", "--rows", "x"], "rows are numbers and ranges from 0 on"),
        (["--source", "a", "--file", "numbered", "--rows", "0-70000"], "at most 65,536 rows are left out at once"),
        (["--source", "a", "--file", "numbered", "--from-step", "2"], "step 2 is drawn already; documents can be skipped"),
        (["--source", "a"], "give --file with the file to leave out, or --whole-source"),
        (["--file", "numbered"], "--source names the source of what is left out"),
    ],
)
def test_a_wrong_skip_from_the_command_line_is_one_clear_line(capsys, arguments, message):
    with served(job_of(SOURCES)) as (loader, address):
        planned(loader, 5)
        assert main(["skip", address, *arguments]) == 1
        assert loader.decisions() == ()
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
