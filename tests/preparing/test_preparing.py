"""A prepared source returns the very stream of its original, also where one takes over from the other in mid-run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.cli import main
from overlord.preparing import corpus
from tests.sources.recording import NUM_SAMPLES, RECORDED, prepared_rows

Read = tuple[list[Any], Any, list[Any]]


def write_texts(folder: Path, num_files: int = 2, num_rows: int = 60, *, broken: bool = False) -> str:
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        lines = [
            json.dumps({"text": " ".join(map(str, rng.integers(0, 999, rng.integers(1, 20)))), "n": number * num_rows + i})
            for i in range(num_rows)
        ]
        if broken:
            lines[5] = "{not json"
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "*.jsonl")


@ol.per_row
def filtered(row):
    """Drops some rows and repeats others."""
    if row["n"] % 7 == 0:
        return None
    return [row, row] if row["n"] % 11 == 0 else row


@ol.per_row
def fails_sometimes(row):
    if row["n"] % 13 == 3:
        raise ValueError("no good")
    return row


@ol.per_row(types={"tokens": pa.list_(pa.int32()), "n": pa.int64()})
def jittered(row, rng):
    return {"tokens": [*row["tokens"], int(rng.integers(1000))], "n": row["n"]}


TOKENIZE = ol.Tokenize(encoding=ol.ByteTokenizer(), keep=("n",))
CHAINS = {
    "tokenise": [TOKENIZE],
    "filter": [filtered, TOKENIZE],
    "random at the end": [filtered, TOKENIZE, jittered],
    "bad rows": [fails_sometimes, TOKENIZE],
}


def read(job: ol.Job, num_steps: int, resume: Any = None) -> Read:
    """Steps as plain values, the state after them, and the documents of the last."""
    with ol.start(job, resume=resume) as loader:
        client = loader.client(0, timeout_s=60)
        steps: list[Any] = []
        for step in (next(client, None) for _ in range(num_steps)):
            if step is not None:
                steps.append([{name: _plain(value) for name, value in micro.items()} for micro in step])
        last = client.step - 1
        documents = loader.documents(last) or []
        return steps, loader.state_dict(), documents


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    return (str(value.type), value.to_pylist()) if isinstance(value, (pa.Array, pa.ChunkedArray)) else value


def job_of(source: ol.Source, **batch: Any) -> ol.Job:
    return ol.Job(
        sources={"web": source}, batch=ol.Batch(sequence_length=128, tokens=1024, columns=("n",), **batch), num_workers=0
    )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chain=st.sampled_from(sorted(CHAINS)),
    unit_bytes=st.sampled_from([500, 2000, 1 << 20]),
    window=st.sampled_from([None, 1, 3]),
    shuffle=st.booleans(),
    cut=st.integers(1, 5),
    long_documents=st.sampled_from(["split", "truncate"]),
)
def test_a_prepared_source_gives_the_very_stream_of_its_original(
    tmp_path_factory, chain, unit_bytes, window, shuffle, cut, long_documents
):
    folder = tmp_path_factory.mktemp("texts")
    options: dict[str, Any] = {"unit_bytes": unit_bytes, "window": window, "shuffle": shuffle, "on_bad_row": "skip"}
    source = ol.Jsonl(write_texts(folder, num_rows=40, broken=chain == "bad rows"), transform=CHAINS[chain], **options)
    job = job_of(source, long_documents=long_documents)
    prepared = ol.prepare(job, folder / "out", num_processes=1)
    assert isinstance(prepared.sources["web"], ol.Prepared)
    steps, state, documents = read(job, 6)
    assert len(steps) == 6
    assert read(prepared, 6) == (steps, state, documents)
    # Either takes over from the other, at any step.
    for first, second in ((job, prepared), (prepared, job)):
        before, saved, _ = read(first, cut)
        after, _, _ = read(second, 6 - cut, saved)
        assert before + after == steps


def test_bad_rows_are_dropped_counted_and_listed_as_before(tmp_path):
    def policy(file: str) -> ol.policies.BadRows:
        return ol.policies.BadRows("quarantine", path=tmp_path / file)

    texts = write_texts(tmp_path / "texts", broken=True)
    source = ol.Jsonl(texts, transform=CHAINS["bad rows"], unit_bytes=500, repeat=False, on_bad_row=policy("plain.jsonl"))
    prepared = ol.prepare(job_of(source), tmp_path / "out", num_processes=1).sources["web"]
    assert isinstance(prepared, ol.Prepared)
    assert prepared.manifest().num_bad_rows == 11
    counts = []
    for each, file in ((source, "plain.jsonl"), (prepared, "prepared.jsonl")):
        object.__setattr__(each, "on_bad_row", policy(file))
        with ol.start(job_of(each)) as loader:
            list(loader.client(0, timeout_s=60))
            counts.append(loader.report().bad_rows)
    assert counts == [{"web": 11}, {"web": 11}]
    plain, listed = (sorted((tmp_path / file).read_text().splitlines()) for file in ("plain.jsonl", "prepared.jsonl"))
    assert plain == listed


def test_parts_that_are_there_are_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 2000)
    job = job_of(ol.Jsonl(write_texts(tmp_path / "texts"), transform=CHAINS["filter"], unit_bytes=500))
    seen: list[corpus.PrepareProgress] = []

    def stop_after_three(now: corpus.PrepareProgress) -> None:
        seen.append(now)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ol.prepare(job, tmp_path / "out", num_processes=1, on_progress=stop_after_three)
    web = tmp_path / "out" / "web"
    written = {path.name: path.stat().st_mtime_ns for path in web.glob("part-*.parquet")}
    assert len(written) == 3
    (web / ".part-000099-0.parquet.1234").write_text("left by a process that was killed")
    again: list[corpus.PrepareProgress] = []
    ol.prepare(job, tmp_path / "out", num_processes=1, on_progress=again.append)
    assert again[0].done_bytes == seen[-1].done_bytes
    assert again[-1].done_bytes == again[-1].all_bytes
    now = {path.name: path.stat().st_mtime_ns for path in web.iterdir() if path.name in written}
    assert now == written
    assert not [*web.glob(".*"), *web.glob("part-*.json")]
    third: list[corpus.PrepareProgress] = []
    ol.prepare(job, tmp_path / "out", num_processes=1, on_progress=third.append)
    assert third == []  # nothing to do


JOB = """
import overlord as ol
import pyarrow as pa

@ol.per_row
def slow(row):
    sum(range(2000))
    return row

job = ol.Job(
    sources={"web": ol.Jsonl("texts/*.jsonl", transform=[slow, ol.Tokenize(encoding=ol.ByteTokenizer())], unit_bytes=2000)},
    batch=ol.Batch(sequence_length=128, tokens=1024),
)
"""
KILLED = """
import sys
from overlord.preparing import corpus
from overlord.cli import main
corpus.PART_BYTES = 4000
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_command_continues_on_all_cores(tmp_path):
    write_texts(tmp_path / "texts", num_files=3, num_rows=400)
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-c", KILLED, "prepare", "job.py", "--to", "out", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ol.__file__).parent.parent)}
    first = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    web = tmp_path / "out" / "web"
    deadline = time.monotonic() + 60
    while len(list(web.glob("part-*.json"))) < 2 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = {path.name for path in web.glob("part-*.parquet")}
    done = subprocess.run([*command, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["sources"]["web"]
    assert found["rows"] == 1200
    assert len(kept) >= 2
    assert kept <= {path.name for path in web.iterdir()}
    rows = sum(pq.read_metadata(path).num_rows for path in web.glob("part-*.parquet"))
    assert rows == 1200
    assert "preparing web: 100 %" in done.stderr


def test_rows_are_made_on_a_ray_cluster(tmp_path):
    job = job_of(ol.Jsonl(write_texts(tmp_path / "texts"), transform=CHAINS["filter"], unit_bytes=500))
    here = ol.prepare(job, tmp_path / "here", num_processes=1).sources["web"]
    there = ol.prepare(job, tmp_path / "there", ray="local").sources["web"]
    assert isinstance(here, ol.Prepared)
    assert isinstance(there, ol.Prepared)
    assert there.manifest() == here.manifest()
    assert read(job_of(there), 3) == read(job, 3)


def test_conversations_stay_whole(tmp_path):
    lines = [{"prompt": f"question {i} " * 10, "completion": "answer " * (i % 30 + 1)} for i in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = ol.PromptCompletion(encoding=ol.ByteTokenizer())
    batch = ol.Batch(sequence_length=300, tokens=1200)
    job = ol.Job(sources={"chat": ol.Jsonl(str(tmp_path / "chat.jsonl"), transform=chat)}, batch=batch, num_workers=0)
    prepared = ol.prepare(job, tmp_path / "out", num_processes=1)
    assert prepared.sources["chat"].is_whole
    assert read(prepared, 3) == read(job, 3)
    folder = str(tmp_path / "out" / "chat")
    with pytest.raises(
        ol.errors.SpecError, match=r"declare what its columns mean: ol.Prepared\(.*, loss_mask='loss_mask', whole=True\)"
    ):
        ol.Prepared(folder).units()
    by_hand = ol.Prepared(folder, loss_mask="loss_mask", whole=True)
    assert read(ol.Job(sources={"chat": by_hand}, batch=batch, num_workers=0), 3) == read(job, 3)


# Bad input


def test_a_folder_of_another_declaration_is_refused_and_named(tmp_path):
    texts = write_texts(tmp_path / "texts")
    ol.prepare(job_of(ol.Jsonl(texts, transform=CHAINS["filter"])), tmp_path / "out", num_processes=1)
    other = job_of(ol.Jsonl(texts, transform=CHAINS["tokenise"]))
    with pytest.raises(ol.errors.SpecError, match=r"from another declaration: its transforms changed since.*--overwrite"):
        ol.prepare(other, tmp_path / "out", num_processes=1)
    replaced = ol.prepare(other, tmp_path / "out", num_processes=1, overwrite=True)
    assert read(replaced, 3) == read(other, 3)


def test_a_preparation_that_has_not_ended_is_told(tmp_path):
    (tmp_path / "web").mkdir()
    with pytest.raises(ol.errors.SourceError, match=r"its preparation has not ended: it has no manifest\.json"):
        ol.Prepared(tmp_path / "web").units()


@pytest.mark.parametrize(
    "damage", ["cut part", "other units", "no manifest", "newer format", "another number", "cut manifest"]
)
def test_a_damaged_folder_is_told(tmp_path, damage):
    job = job_of(ol.Jsonl(write_texts(tmp_path / "texts"), transform=CHAINS["filter"]))
    prepared = ol.prepare(job, tmp_path / "out", num_processes=1)
    web = tmp_path / "out" / "web"
    part, manifest = next(web.glob("part-*.parquet")), web / "manifest.json"
    said = {
        "cut part": "part-000000-0.parquet",
        "other units": "its checksum is wrong; prepare it again",
        "no manifest": "is not a manifest of prepared rows",
        "newer format": "is of format 9, this release reads 1",
        "another number": r"manifest\.json is damaged, or was changed by hand: its checksum is wrong; prepare the source",
        "cut manifest": r"manifest\.json is not a manifest of prepared rows: .*; prepare the source again",
    }[damage]
    if damage == "cut part":
        part.write_bytes(part.read_bytes()[:-20])
    elif damage == "other units":
        (web / "units.parquet").write_bytes((web / "units.parquet").read_bytes() + b"x")
    elif damage == "another number":
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**content, "transforms": content["transforms"][:-1]}))
    elif damage == "cut manifest":
        manifest.write_bytes(manifest.read_bytes()[:-40])
    elif damage == "no manifest":
        manifest.write_text('{"rows": 3}')
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    with pytest.raises(ol.errors.SourceError, match=said):
        ol.start(prepared)


def test_the_error_of_a_row_names_it_from_a_worker_process(tmp_path):
    job = job_of(ol.Jsonl(write_texts(tmp_path / "texts"), transform=CHAINS["bad rows"]))
    with pytest.raises(ValueError, match="no good") as raised:
        ol.prepare(job, tmp_path / "out", num_processes=2)
    assert any("0.jsonl, row 3" in note for note in raised.value.__notes__)
    assert any("while preparing" in note for note in raised.value.__notes__)


def test_a_budget_of_bad_rows_holds(tmp_path):
    policy = ol.policies.BadRows("skip", budget=2)
    job = job_of(ol.Jsonl(write_texts(tmp_path / "texts"), transform=CHAINS["bad rows"], on_bad_row=policy))
    with pytest.raises(
        ol.errors.BadRowError, match=r"'web': 9 bad rows are more than its budget of 2; one of them is .*row 2"
    ):
        ol.prepare(job, tmp_path / "out", num_processes=1)


def test_wrong_places_are_refused(tmp_path):
    job = job_of(ol.Jsonl(write_texts(tmp_path / "texts"), transform=CHAINS["tokenise"]))
    with pytest.raises(ol.errors.SpecError, match=r"'s3://bucket/x' is a URL: prepare to a folder, and copy it"):
        ol.prepare(job, "s3://bucket/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ol.errors.StorageError, match=r"file cannot be written to: .*; name another folder"):
        ol.prepare(job, tmp_path / "file")
    prepared = ol.prepare(job, tmp_path / "out", num_processes=1)
    with pytest.raises(ol.errors.SpecError, match=r"source 'web' is prepared already"):
        ol.prepare(prepared, tmp_path / "again")


def test_the_command_refuses_urls_and_writes_the_job_of_what_it_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    Path("job.yaml").write_text(
        f"sources: {{web: {{paths: {texts}, window: 2, transform: [{{Tokenize: {{encoding: ByteTokenizer}}}}]}}}}\n"
        "batch: {sequence_length: 128, tokens: 1024}\nseed: 5\n"
    )
    command = ["prepare", "job.yaml", "--processes", "1"]
    assert main([*command, "--to", "s3://bucket/x"]) == 1
    assert "'s3://bucket/x' is a URL: prepare to a folder, and copy it" in capsys.readouterr().err
    assert not Path("s3:").exists()
    for name in ("made.yaml", "made_job.py"):
        assert main([*command, "--to", "out", "--write", name]) == 0
        assert f"the job that reads it is in {name}" in capsys.readouterr().out
        made = ol.load_job(tmp_path / name)
        assert (made.sources["web"], made.seed) == (ol.Prepared("out/web", window=2), 5)
        assert read(made, 3) == read(ol.load_job("job.yaml"), 3)
    assert main([*command, "--to", "out", "--write", "made.yaml"]) == 1
    assert "made.yaml is there already" in capsys.readouterr().err
    assert main([*command, "--to", "out", "--write", "made.txt"]) == 1
    assert "made.txt does not end in .py, .yaml or .yml" in capsys.readouterr().err


def test_rows_are_kept_where_the_job_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    Path("own_job.py").write_text(
        "import overlord as ol\n"
        "more = lambda row, rng: row\n"
        f"web = ol.Jsonl({texts!r}, transform=[ol.Tokenize(encoding=ol.ByteTokenizer()), ol.per_row(more)])\n"
        "job = ol.Job(sources={'web': web}, batch=ol.Batch(sequence_length=128, tokens=1024))\n"
    )
    assert main(["prepare", "own_job.py", "--processes", "1", "--to", "out", "--write", "made.yaml"]) == 1
    assert "which a job file cannot say" in (told := capsys.readouterr().err)
    assert "the rows are prepared, and only the job was not written to made.yaml" in told
    assert ol.Prepared("out/web").manifest().num_rows > 0


def forgetful(table: pa.Table) -> pa.Table:
    return table.drop_columns(["__origin__"]).slice(1)


def test_transforms_that_lose_their_rows_before_a_random_one_are_refused(tmp_path):
    source = ol.Jsonl(write_texts(tmp_path / "texts"), transform=[TOKENIZE, forgetful, jittered])
    with pytest.raises(ol.errors.SpecError, match=r"before per_row\(jittered\).*keep the column '__origin__'"):
        ol.prepare(job_of(source), tmp_path / "out", num_processes=1)


def test_manifests_of_earlier_releases_have_no_checksum_and_are_checked_for_sense(tmp_path):
    shutil.copytree(RECORDED / "prepared", tmp_path, dirs_exist_ok=True)
    recorded = ol.Prepared(tmp_path)
    whole = [recorded.read_rows(unit).table for unit in recorded.units()]
    tokens = [row for table in whole for row in table["tokens"].to_pylist()]
    assert tokens == [list(prepared_rows(row)["text"].encode()) for row in range(NUM_SAMPLES)]
    manifest = tmp_path / "manifest.json"
    content = {name: value for name, value in json.loads(manifest.read_text()).items() if name != "checksum"}
    manifest.write_text(json.dumps(content))
    assert [recorded.read_rows(unit).table for unit in recorded.units()] == whole
    (part,) = content["parts"]
    damaged = [
        ("a schema of it cannot be read", {"schemas": ["AAAA"]}),
        ("parts have sizes or schemas that cannot be", {"parts": [{**part, "schema": 1}]}),
        ("parts are not files of this folder, or one is named twice", {"parts": [part, part]}),
        ("parts are not files of this folder", {"parts": [{**part, "file": "../part-000000-0.parquet"}]}),
    ]
    for said, changes in damaged:
        manifest.write_text(json.dumps({**content, **changes}))
        with pytest.raises(ol.errors.SourceError, match=rf"manifest\.json is damaged: .*{said}.*; prepare the source again"):
            recorded.units()
