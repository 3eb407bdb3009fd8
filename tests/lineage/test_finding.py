"""A document is found in every step that had it, and in no other; jumps of the loss lead to the document behind them."""

import json
import math
import random
from collections import defaultdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import SpecError
from overlord.lineage.documents import TracedDocument
from overlord.lineage.finding import find_document
from overlord.lineage.obtaining import open_log
from overlord.lineage.reading import DocumentReader
from overlord.lineage.spikes import find_spikes, rank_suspects, read_losses
from overlord.planlog.lineage_run import RowPlace
from tests.commands import overlord
from tests.contract.test_stream import BATCHES
from tests.lineage.test_traced_steps import SOURCES, read
from tests.small_sources import Numbered, job_of


@settings(max_examples=12)
@given(BATCHES, st.booleans(), st.integers(0, 3))
def test_find_names_the_steps_that_trace_lists_a_document_in(tmp_path_factory, batch, shuffle, seed):
    log = tmp_path_factory.mktemp("log")
    sources = {"a": Numbered(rows=40, first=1, window=2, shuffle=shuffle), "b": SOURCES["b"]}
    job = job_of(sources, batch, seed=seed)
    read(job, 90, log=log)
    found = open_log(job, log)
    steps: dict[tuple[str, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for step in range(found.run.end):
        for d in found.documents(step):
            steps[d.source, d.unit, d.row].append((step, d.microbatch, d.place))
    for source, unit, row in random.Random(seed).sample(sorted(steps), 10):
        places = find_document(found, source, RowPlace(unit, row))
        assert [(d.step, d.microbatch, d.place) for d in places.documents] == steps[source, unit, row]
        assert places.expected is None or places.expected > 0


def test_the_next_time_of_a_document_is_told_about_right(tmp_path):
    job = job_of({"a": Numbered(rows=4000, unit_rows=50, first=1)}, ol.Batch(samples=8, sequence_length=16))
    read(job, 200, log=tmp_path)
    found = open_log(job, tmp_path)
    with ol.start(job) as loader:
        later = loader.documents(350)
    assert later is not None
    unit, _, row = later[0].file.partition("#")[2], 0, later[0].row
    places = find_document(found, "a", RowPlace(int(unit or 0), row))
    assert not places.documents
    assert places.expected is not None
    assert 250 < places.expected < 450


@pytest.mark.parametrize("skip", [{"file": "numbered", "rows": [7]}, {"file": "numbered#3"}, {}], ids=str)
@pytest.mark.parametrize("is_live", [True, False])
def test_a_document_that_is_left_out_is_told_and_not_expected_again(tmp_path, skip, is_live):
    source = Numbered(rows=80, unit_rows=20, first=1)
    others = {"a": source, "b": Numbered(rows=50, first=500)}
    job = job_of(others, skip=() if is_live else [ol.Skip("a", **skip, from_step=60)])
    with ol.start(job, log=tmp_path) as loader:
        client = loader.client(0)
        for _ in range(40):
            next(client)
        if is_live:
            loader.skip("a", skip.get("file"), skip.get("rows"), from_step=60)
        for _ in range(60):
            next(client)
    found = open_log(job, tmp_path)
    of_row = RowPlace(3, 7) if skip.get("file") == "numbered#3" else RowPlace(0, 7)
    places = find_document(found, "a", of_row)
    assert places.left_out_from == 60
    assert places.expected is None
    assert places.documents
    assert all(document.step < 60 for document in places.documents)
    if skip.get("rows"):
        assert find_document(found, "a", RowPlace(0, 8)).left_out_from is None
        assert (find_document(found, "a", RowPlace(0, 8)).expected or 0) > 60


def test_a_document_of_a_source_that_ends_is_not_expected_again(tmp_path):
    job = job_of({"a": Numbered(rows=80, unit_rows=20, first=1, repeat=2), "b": Numbered(rows=50, first=500)})
    read(job, 200, log=tmp_path)
    places = find_document(open_log(job, tmp_path), "a", RowPlace(0, 7))
    assert len(places.documents) == 2
    assert places.expected is None


def job_file(folder, rows: int = 120):
    table = pa.table(
        {
            "tokens": pa.array([[i + 1] * (3 + i % 9) for i in range(rows)], pa.list_(pa.int32())),
            "text": [f"sentence number {i}" for i in range(rows)],
            "id": list(range(rows)),
        }
    )
    pq.write_table(table, folder / "web.parquet", row_group_size=25)
    path = folder / "job.py"
    path.write_text(
        f"""
import overlord as ol
job = ol.Job(
    sources={{"web": ol.Parquet("{folder}/web.parquet")}},
    batch=ol.Batch(samples=8, sequence_length=16),
    mesh=ol.Mesh(dp=2),
)
"""
    )
    return path


def test_the_commands_tell_the_same_document_and_its_text(tmp_path):
    path, log = job_file(tmp_path), tmp_path / "log"
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    read(declared["job"], 40, log=log)
    told = json.loads(overlord("trace", path, "--step", 30, "--rank", 1, "--log", log, "--json", "--text").stdout)
    document = told["documents"][0]
    row = document["file_row"]
    assert document["text"] == f"sentence number {row}"
    assert document["tokens"] == 3 + row % 9
    named = ("--source", "web", "--file", document["file"], "--row", document["row"])
    assert f"sentence number {row}" in overlord("show", path, *named).stdout
    for where in (
        named,
        ("--source", "web", "--file", "web.parquet", "--row", row),
        ("--source", "web", "--where", f"id={row}"),
    ):
        found = json.loads(overlord("find", path, *where, "--log", log, "--json").stdout)["found"][0]
        assert 30 in [d["step"] for d in found["documents"]]
    shown = overlord("trace", path, "--step", 30, "--log", log).stdout
    assert "Step 30: 8 documents" in shown
    explained = json.loads(overlord("explain", path, "--step", 30, "--log", log, "--json").stdout)
    assert explained["samples"] == 8
    table = overlord("find", path, *named, "--log", log).stdout
    assert f"row {document['row']}: in " in table


def test_find_draws_the_steps_that_nobody_has_recorded_and_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, log = job_file(tmp_path), tmp_path / "log"
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    read(declared["job"], 100, log=log)
    where = ("--source", "web", "--file", "web.parquet", "--row", 7)
    recorded = json.loads(overlord("find", path, *where, "--log", log, "--json").stdout)["found"][0]["documents"]
    for steps in (40, 90):  # below and above what is worth keeping
        found = json.loads(overlord("find", path, *where, "--steps", steps, "--json").stdout)["found"][0]["documents"]
        assert [d for d in found if d["step"] < steps] == [d for d in recorded if d["step"] < steps]
        assert found
    once = json.loads(overlord("find", path, *where, "sources.web.repeat=false", "--json").stdout)["found"][0]
    assert len(once["documents"]) == 1
    assert once["expected_step"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file", "nope.parquet", "--row", 1), "source 'web' has no file nope.parquet"),
        (("--file", "web.parquet", "--row", 120), "web.parquet has 120 rows; there is no row 120"),
        (("--file", "web.parquet#9", "--row", 0), "source 'web' has no unit web.parquet#9"),
        (("--file", "web.parquet#1", "--row", 25), "web.parquet#1 has 25 rows; there is no row 25"),
        (("--file", "web.parquet"), "name the document: --file FILE --row R, --chunk C --row R, or --where COLUMN=VALUE"),
        (("--where", "id=9999"), "source 'web' has no row with id=9999"),
        (("--where", "nope=1"), "source 'web' has no column 'nope'"),
        (("--where", "nope"), "--where is COLUMN=VALUE, got 'nope'"),
    ],
)
def test_a_document_that_is_not_there_is_one_clear_line(tmp_path, arguments, message):
    path = job_file(tmp_path)
    error = overlord("show", path, "--source", "web", *arguments, expect=1).stderr
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", ["show", "find"])
def test_a_source_that_is_not_there_is_one_clear_line(tmp_path, verb):
    error = overlord(verb, job_file(tmp_path), "--source", "wbe", "--file", "web.parquet", "--row", 1, expect=1).stderr
    assert error == "error: there is no source 'wbe'; the job's sources are 'web'\n"


def test_a_file_that_is_gone_is_told_and_the_step_is_told_without_it(tmp_path):
    path, log = job_file(tmp_path), tmp_path / "log"
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    read(declared["job"], 20, log=log)
    (tmp_path / "web.parquet").unlink()
    assert "web.parquet" in overlord("trace", path, "--step", 7, "--log", log).stdout
    for more in (("trace", path, "--step", 7, "--log", log, "--text"), ("show", path, "--source", "web", "--where", "id=3")):
        error = overlord(*more, expect=1).stderr
        assert "web.parquet" in error
        assert error.count("\n") == 1
    assert "has the steps before" in overlord("trace", path, "--step", 10**6, "--log", log, expect=1).stderr


def test_a_source_without_counted_rows_needs_the_name_of_the_unit(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"tokens": [i] * 9}) + "\n" for i in range(2000)))
    job = ol.Job(
        sources={"a": ol.Jsonl(tmp_path / "a.jsonl", unit_bytes=4096)}, batch=ol.Batch(samples=4, sequence_length=16)
    )
    reader = DocumentReader(job)
    with pytest.raises(SpecError, match="name the part as `overlord trace` prints it"):
        reader.locate("a", "a.jsonl", 3)
    assert reader.row("a", reader.locate("a", "a.jsonl#0", 3))["tokens"] == [3] * 9


# Spikes


def test_jumps_are_found_whatever_the_trend_and_numbers_that_are_none_count_as_the_highest():
    rng = random.Random(1)
    losses = {step: 5 * math.exp(-step / 300) + 1 + rng.gauss(0, 0.02) for step in range(1000)}
    losses[400] += 1
    losses[700] += 0.5
    losses[900] = math.nan
    assert [spike.step for spike in find_spikes(losses, threshold=8)] == [900, 400, 700]
    assert find_spikes({}) == []
    assert find_spikes({0: 1.0, 1: 100.0}) == [], "there is nothing to compare with"
    assert find_spikes(dict.fromkeys(range(100), 2.0)) == []


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_document_that_all_jumps_have_comes_first(seed, num_spikes):
    rng = random.Random(seed)
    steps = {step: [rng.randrange(500) for _ in range(20)] for step in range(300)}
    spiked = rng.sample(range(40, 300), num_spikes)
    for step in steps:
        steps[step] = [d for d in steps[step] if d != 77] + ([77] if step in spiked else [])
    losses = {step: 2 + rng.gauss(0, 0.01) + (step in spiked) for step in steps}
    spikes = find_spikes(losses)
    assert {spike.step for spike in spikes} == set(spiked)
    suspects = rank_suspects(spikes, sorted(steps), lambda step: [document_of(step, d) for d in steps[step]])
    best = [s.document.row for s in suspects if s.score == suspects[0].score]
    assert 77 in best
    if num_spikes > 2:
        assert best == [77]


def document_of(step: int, row: int) -> TracedDocument:
    return TracedDocument(step, "a", "f", 0, row, row, 0, 9, 9, 0, 0, 0, 0, 0, 0, (0,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no losses: it is empty"),
        ("time,value\n1,2\n", "needs the columns step and loss, it has time, value"),
        ("step,loss\n1,2\nx,3\n", "row 2: a step and a loss are needed, it has 'x,3'"),
        ("1\n", "row 1: a step and a loss are needed"),
        ("step,loss\n", "has no losses: it has the names of columns, and no row"),
        ("step,loss\n3,2\n-4,2\n", "row 2: steps count from 0 on, it has step -4"),
    ],
)
def test_losses_that_are_none_are_told_by_row(tmp_path, text, message):
    (tmp_path / "losses.csv").write_text(text)
    with pytest.raises(SpecError, match=message):
        read_losses(tmp_path / "losses.csv")


def test_losses_of_another_run_and_runs_without_jumps_are_told(tmp_path):
    path, log, losses = job_file(tmp_path), tmp_path / "log", tmp_path / "losses.csv"
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    read(declared["job"], 20, log=log)
    losses.write_text("loss,step\n" + "".join(f"2.0,{step}\n" for step in range(9000, 9100)))
    assert "they are not of one run" in overlord("spikes", losses, "--job", path, "--log", log, expect=1).stderr
    losses.write_text("".join(f"{step},2.0\n" for step in range(20)))
    assert "No step of 20 is 6 standard deviations" in overlord("spikes", losses, "--job", path, "--log", log).stdout


def test_jumps_of_a_run_without_a_log_are_those_that_its_log_would_tell(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, log, losses = job_file(tmp_path), tmp_path / "log", tmp_path / "losses.csv"
    state = tmp_path / "state.json"
    overlord("run", path, "--steps", 30, "--state", state)
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    read(declared["job"], 80, log=log)
    losses.write_text("step,loss\n" + "".join(f"{step},{2 + (step in (33, 70))}\n" for step in range(80)))
    told = overlord("spikes", losses, "--job", path, "--log", log, "--json")
    assert [spike["step"] for spike in json.loads(told.stdout)["spikes"]] == [33, 70]
    drawn = overlord("spikes", losses, "--job", path, "--json")
    assert "nobody has recorded step 79" in drawn.stderr
    assert drawn.stdout == told.stdout
    resumed = json.loads(overlord("spikes", losses, "--job", path, "--state", state, "--json").stdout)
    assert [spike["step"] for spike in resumed["spikes"]] == [33, 70]
    losses.write_text("step,loss\n" + "".join(f"{step},2.0\n" for step in range(20)))
    error = overlord("spikes", losses, "--job", path, "--state", state, expect=1).stderr
    assert "losses of steps 0 to 19, and the run has the steps from 30 to" in error
