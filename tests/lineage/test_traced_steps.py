"""Whatever a rank trained on, its lineage tells: which rows of which files, and where their tokens lie in the batch."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import SpecError, StateError
from overlord.lineage.documents import TracedDocument
from overlord.lineage.obtaining import FoundRun, KnownFrom, open_log, step_of
from overlord.lineage.recorded import RecordedRun
from tests.buckets import s3_bucket
from tests.contract.test_stream import BATCHES, COST
from tests.small_sources import Numbered, job_of

A = Numbered(rows=40, first=1, window=2)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
SOURCES = {"a": A, "b": B}
FIRST_AND_UNIT = {"a": (1, 5), "b": (100, 4)}
MIXTURE = ol.Mixture({0: {"a": 5, "b": 3}, 4: {"a": 1, "b": 2}}, unit="tokens", ramp="linear")
MESHES = st.builds(ol.Mesh, dp=st.integers(1, 3), tp=st.integers(1, 2))
STRATEGIES = st.sampled_from([None, ol.strategies.long_short(COST), ol.strategies.long_short(COST, equal_counts=False)])


def read(job: ol.Job, steps: int, **options: Any) -> list[list[ol.Step]]:
    """The steps of each rank, copied."""
    with ol.start(job, **options) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(job.mesh.world_size)]
        return [[_copied(next(client)) for client in clients] for _ in range(steps)]


def _copied(step: ol.Step) -> ol.Step:
    micros: Any = tuple({key: np.array(v) if isinstance(v, np.ndarray) else v for key, v in m.items()} for m in step)
    return ol.Step(step.number, step.loss_tokens, micros)


def assert_told(documents: list[TracedDocument], step: ol.Step) -> None:
    """The documents of a rank are those that it got, token by token."""
    assert len(documents) == sum(len(micro["document_lengths"]) for micro in step)
    for document in documents:
        first, unit_rows = FIRST_AND_UNIT[document.source]
        row = document.unit * unit_rows + document.row
        assert document.file_row == row
        number = first + row
        tokens = np.asarray(step.microbatches[document.microbatch]["tokens"]).ravel()
        found = tokens[document.place : document.place + document.tokens]
        assert found.tolist() == (number * 1000 + np.arange(document.start, document.stop)).tolist()


@settings(max_examples=25)
@given(BATCHES, MESHES, STRATEGIES, st.integers(0, 40))
def test_every_token_that_a_rank_got_is_told_by_the_lineage(tmp_path_factory, batch, mesh, strategy, skipped):
    log = tmp_path_factory.mktemp("log")
    job = job_of(SOURCES, batch, mixture=MIXTURE, mesh=mesh, strategy=strategy)
    steps = read(job, skipped + 3, log=log)
    found = open_log(job, log)
    for number in (0, skipped, skipped + 2):
        for rank, step in enumerate(steps[number]):
            assert_told(found.documents(number, rank), step)
        with ol.start(job) as loader:
            whole = loader.plan(number)
        assert whole is not None
        plan = found.planned(number).plan
        assert np.array_equal(plan.samples.table, whole.plan.samples.table)
        assert np.array_equal(plan.order, whole.plan.order)
        assert np.array_equal(plan.offsets, whole.plan.offsets)


@settings(max_examples=15)
@given(BATCHES, st.integers(1, 20), st.integers(0, 5))
def test_a_resumed_run_tells_what_was_carried_over_and_steps_that_were_taken_again_count_once(
    tmp_path_factory, batch, cut, back
):
    log = tmp_path_factory.mktemp("log")
    job = job_of(SOURCES, batch, mixture=MIXTURE)
    with ol.start(job, log=log) as loader:
        client = loader.client(0)
        for _ in range(cut):
            next(client)
        state = loader.state_before(max(cut - back, 0))
    resumed = ol.Mixture({"a": 1, "b": 9}, unit="tokens")  # the steps that are taken again are others
    job = job_of(SOURCES, batch, mixture=resumed)
    steps = read(job, 4, log=log, resume=state)
    found = open_log(job, log)
    for step in steps:
        assert_told(found.documents(step[0].number), step[0])
    numbers = [n for stretch in found.run.stretches for n in range(stretch.first, stretch.end)]
    assert numbers == list(range(found.run.end)), "every step once"


def test_long_documents_that_were_split_tell_which_tokens_a_step_has(tmp_path):
    documents = [list(range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate([90, 7, 33, 64])]
    pq.write_table(pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    batch = ol.Batch(tokens=64, sequence_length=16, long_documents="split")
    job = ol.Job(sources={"a": ol.Parquet(tmp_path / "a.parquet")}, batch=batch)
    steps = read(job, 6, log=tmp_path / "log")
    found = open_log(job, tmp_path / "log")
    for number in range(6):
        for document in found.documents(number):
            tokens = np.asarray(steps[number][0].microbatches[document.microbatch]["tokens"]).ravel()
            expected = documents[document.row][document.start : document.stop]
            assert tokens[document.place : document.place + document.tokens].tolist() == expected


def test_rows_that_filters_and_bad_lines_leave_out_do_not_shift_the_others(tmp_path):
    lines = [json.dumps({"tokens": [i] * (1 + i % 7), "i": i}) if i % 5 else "{broken" for i in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    source = ol.Jsonl(tmp_path / "a.jsonl", on_bad_row="skip", transform=_odd)
    job = ol.Job(sources={"a": source}, batch=ol.Batch(samples=4, sequence_length=16))
    read(job, 9, log=tmp_path / "log")
    found = open_log(job, tmp_path / "log")
    for number in range(9):
        for document in found.documents(number):
            i = document.row + 1
            assert i % 5
            assert i % 2 == 1
            assert document.tokens == 1 + i % 7


def _odd(table: pa.Table) -> pa.Table:
    return table.filter([(i or 0) % 2 == 1 for i in table["i"].to_pylist()])


def test_a_resize_is_told_on_the_mesh_of_each_step(tmp_path):
    job = job_of(SOURCES, mesh=ol.Mesh(dp=2))
    with ol.start(job, log=tmp_path) as loader:
        clients = [loader.client(rank) for rank in range(2)]
        for _ in range(5):
            for client in clients:
                next(client)
        loader.resize(ol.Mesh(dp=1))
        alone = loader.client(0)
        for _ in range(5):
            next(alone)
    found = open_log(job, tmp_path)
    assert {document.ranks for document in found.documents(4)} == {(0,), (1,)}
    assert {document.ranks for document in found.documents(5)} == {(0,)}
    with pytest.raises(SpecError, match="had 1 ranks at that step; there is no rank 1"):
        found.documents(5, rank=1)


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import overlord as ol
from tests.lineage.test_traced_steps import SOURCES, MIXTURE
from tests.small_sources import job_of
with ol.start(job_of(SOURCES, mixture=MIXTURE), log={log!r}) as loader:
    client = loader.client(0)
    for _ in range(100):
        next(client)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_was_killed_tells_all_but_its_last_steps_and_those_are_drawn_again(tmp_path):
    job = job_of(SOURCES, mixture=MIXTURE)
    program = KILLED.format(path=sys.path, log=str(tmp_path / "log"))
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": ""})
    assert killed.returncode == -signal.SIGKILL
    run = RecordedRun.at(tmp_path / "log")
    assert 80 < run.end < 100 + 20
    steps = read(job, 120)
    told: list[str] = []
    for number in (0, 50, run.end - 1, run.end, 119):
        with step_of(job, number, KnownFrom(tmp_path / "log", tell=told.append)) as found:
            assert_told(found.documents(number), steps[number][0])
    assert len(told) == 2
    assert "drawn from step" in told[0]
    steps_after = read(job, 10, log=tmp_path / "log", resume="log")
    found = open_log(job, tmp_path / "log")
    for step in steps_after:
        assert_told(found.documents(step[0].number), step[0])


def test_weights_that_were_set_while_the_run_ran_are_followed_beyond_the_log(tmp_path):
    job = job_of(SOURCES)
    with ol.start(job, log=tmp_path / "log") as loader:
        client = loader.client(0)
        for _ in range(10):
            next(client)
        loader.set_weights({"b": 1.0}, from_step=40)
        end = loader.status().reached
        state = loader.state_before(10)
    steps = read(job, 60, resume=state)
    for number in (end + 3, 39, 45):
        with step_of(job, number, KnownFrom(tmp_path / "log")) as found:
            assert_told(found.documents(number), steps[number - 10][0])
            assert {d.source for d in found.documents(number)} == ({"b"} if number == 45 else {"a", "b"})


def test_without_a_log_steps_are_drawn_once_and_kept(tmp_path):
    job = job_of(SOURCES, mixture=MIXTURE)
    steps, told = read(job, 90), list[str]()
    where = KnownFrom(cache=tmp_path / "cache", tell=told.append)
    for number in (3, 80, 70, 89, 75):
        with step_of(job, number, where) as found:
            assert_told(found.documents(number), steps[number][0])
    assert [line.split(":")[0] for line in told] == [
        "nobody has recorded step 80 of this job",
        "nobody has recorded step 89 of this job",
    ]
    assert "the steps from 64 on" in told[1] or "the steps from 8" in told[1], "it goes on from what was kept"


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with s3_bucket("runs") as options:
        yield options


def test_steps_that_are_drawn_to_be_told_leave_no_chunks_behind():
    job = job_of({"a": Numbered(rows=4000, first=1), "b": Numbered(rows=4000, first=5000)})
    found: dict[str, tuple[list, int]] = {}
    for name in ("plan", "draw_to"):
        with ol.start(job) as loader:
            planned = getattr(loader, name)(700)
            assert planned is not None
            held = sum(use.num_chunks for use in loader.report().buffers.values())
            found[name] = planned.step.samples.row.tolist(), held
            assert loader.draw_to(10) is not None, "earlier steps can still be drawn"
    assert found["draw_to"][0] == found["plan"][0]
    assert found["plan"][1] > 500
    assert found["draw_to"][1] < 150, "those of the steps since the last release"


def test_a_log_in_an_object_store_has_the_lineage_too(bucket):
    job = job_of(SOURCES, mixture=MIXTURE)
    place = ol.Log("s3://runs/lineage/log", storage_options=bucket)
    steps = read(job, 20, log=place)
    run = RecordedRun.at("s3://runs/lineage/log", bucket)
    found = FoundRun(run.check_job(job), run, is_log=True, log="s3://runs/lineage/log")
    for number in (0, 19):
        assert_told(found.documents(number), steps[number][0])


def test_bad_questions_get_one_clear_line(tmp_path):
    job, log = job_of(SOURCES), tmp_path / "log"
    with ol.start(job, log=log) as loader:
        client = loader.client(0)
        for _ in range(7):
            next(client)
        state = loader.state_before(5)
    read(job, 3, log=tmp_path / "later", resume=state)
    with (
        pytest.raises(StateError, match=r"begins at step 5; it has no step 2$"),
        step_of(job, 2, KnownFrom(tmp_path / "later")),
    ):
        pass
    with pytest.raises(StateError, match=r"there is no log at .*nowhere"):
        open_log(job, tmp_path / "nowhere")
    other = job_of({"a": Numbered(rows=41, first=1), "b": B})
    with pytest.raises(StateError, match=r"was written by a job that differs.* source 'a' is declared differently") as error:
        open_log(other, log)
    assert "\n" not in str(error.value)
    with pytest.raises(StateError, match="is of a job with a source 'a', which this job does not have"):
        open_log(job_of({"b": B}), log)
    too_early = pytest.raises(SpecError, match="the state is of step 5; it cannot tell of step 4")
    with too_early, step_of(job, 4, KnownFrom(state=state)):
        pass
    short = job_of({name: replace(source, repeat=False) for name, source in SOURCES.items()})
    with ol.start(short, log=tmp_path / "short") as loader:
        num_steps = len(list(loader.client(0)))
    for where in (KnownFrom(tmp_path / "short"), KnownFrom()):
        after_end = pytest.raises(
            SpecError, match=rf"ends before step 9,000: it has {num_steps} steps; ask for an earlier one$"
        )
        with after_end, step_of(short, 9000, where):
            pass
    read(job, 3, log=ol.Log(tmp_path / "without", lineage=False))
    with pytest.raises(StateError, match=r"no recorded steps: was the run started with this log, and with Log"):
        open_log(job, tmp_path / "without")


def test_damaged_and_missing_files_are_named(tmp_path):
    job = job_of(SOURCES)
    read(job, 40, log=tmp_path)
    blocks = tmp_path / "lineage" / "00000000.blocks"
    whole = blocks.read_bytes()
    blocks.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    with pytest.raises(StateError, match=r"00000000\.blocks is damaged at byte"):
        open_log(job, tmp_path).documents(0)
    blocks.write_bytes(whole[:-3])  # a torn end: the steps before it are there
    assert open_log(job, tmp_path).run.end < 40
    blocks.write_bytes(whole)
    units = next(path for path in (tmp_path / "lineage").iterdir() if path.name.startswith("run-"))
    units.write_bytes(b"nonsense" + units.read_bytes()[8:])
    with pytest.raises(StateError, match="is damaged"):
        open_log(job, tmp_path)
    units.unlink()
    with pytest.raises(StateError, match="is gone: the lineage that refers to it cannot be used"):
        open_log(job, tmp_path)


def test_a_run_goes_on_where_its_lineage_cannot_be_written(tmp_path, caplog):
    (tmp_path / "lineage").write_text("a file where a folder should be")
    assert len(read(job_of(SOURCES), 20, log=tmp_path)) == 20
    assert "the lineage of this run is not written" in caplog.text


def test_the_lineage_takes_a_few_bytes_for_each_document(tmp_path: Path):
    source, batch = Numbered(rows=4000, unit_rows=500, first=1), ol.Batch(samples=256, sequence_length=16)
    read(job_of({"a": source, "b": Numbered(rows=4000, unit_rows=500, first=5000)}, batch), 64, log=tmp_path)
    assert (tmp_path / "lineage" / "00000000.blocks").stat().st_size < 8 * 256 * 64
