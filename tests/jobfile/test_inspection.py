"""`overlord inspect` tells what lies at a path, and the job that it proposes runs."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.cli import main
from overlord.jobfile.inspection import inspect_path
from overlord.jobfile.recognition import recognise
from tests.sources.recording import RECORDED
from tests.sources.test_litdata import write_chunk
from tests.sources.test_mds import write_shard
from tests.sources.test_megatron import write_pair

ROWS = [{"id": i, "text": f"document {i % 90} " * (i % 7 + 1)} for i in range(100)]


def write(folder: Path, form: str) -> str:
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(ROWS)
    tokens = pa.table({"ids": pa.array([np.arange(i % 50 + 1, dtype=np.int32) for i in range(100)], pa.list_(pa.int32()))})
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if form == "parquet":
        pq.write_table(table, folder / "x.parquet", row_group_size=30)
    elif form == "tokens":
        pq.write_table(tokens, folder / "x.parquet", row_group_size=30)
    elif form == "jsonl":
        (folder / "x.jsonl").write_text(lines)
    elif form == "gzip":
        (folder / "x.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif form == "arrow":
        with ipc.new_file(str(folder / "x.arrow"), table.schema) as writer:
            writer.write_table(table)
    elif form == "no ending":
        (folder / "data").write_text(lines)
        return str(folder / "data")
    elif form == "tar":
        image = _png()
        with tarfile.open(folder / "x.tar", "w") as tar:
            for i in range(20):
                info = tarfile.TarInfo(f"{i:03d}.png")
                info.size = len(image)
                tar.addfile(info, io.BytesIO(image))
    elif form == "megatron":
        write_pair(folder / "x", [[list(range(1, i % 40 + 2))] for i in range(100)])
    elif form == "prepared":
        (folder / "x.jsonl").write_text(lines)
        source = ol.Jsonl(f"{folder}/x.jsonl", transform=ol.Tokenize(encoding=ol.ByteTokenizer()))
        job = ol.Job(sources={"x": source}, batch=ol.Batch(sequence_length=64, tokens=512))
        ol.prepare(job, folder / "out", num_processes=1)
        return str(folder / "out" / "x")
    elif form in ("csv", "lines"):
        _write_text(folder, form, table)
    else:
        return _write_for_others(folder, form, table)
    return str(folder)


def _write_for_others(folder: Path, form: str, table: pa.Table) -> str:
    """As other loaders and libraries keep data."""
    if form in ("litdata", "mds"):
        rows = [{"text": str(row["text"]).encode()} for row in ROWS]
        (write_shard if form == "mds" else write_chunk)(folder, {"text": "str"}, rows)
    elif form == "splits":
        return str(RECORDED / "huggingface" / "splits")
    elif form == "stream":
        with ipc.new_stream(str(folder / "x"), table.schema) as writer:
            writer.write_table(table)
        return str(folder / "x")
    elif form == "energon":
        write(folder, "tar")
        (folder / ".nv-meta").mkdir()
        (folder / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [x.tar]}\n")
    elif form == "saved by datasets":
        with ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def _write_text(folder: Path, form: str, table: pa.Table) -> None:
    if form == "csv":
        csv.write_csv(table, folder / "x.csv")
    elif form == "lines":
        (folder / "x.txt").write_text("".join(f"{row['text']}\n" for row in ROWS))


def _png() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 10, 10)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    "form",
    [
        *("parquet", "tokens", "jsonl", "gzip", "arrow", "no ending", "tar", "csv", "lines", "saved by datasets"),
        *("megatron", "mds", "prepared", "litdata", "stream", "splits", "energon"),
    ],
)
def test_the_proposed_job_runs(tmp_path, form, capsys):
    path = write(tmp_path / "data", form)
    job = tmp_path / "job.yaml"
    assert main(["inspect", path, "--write", str(job)]) == 0
    shown = capsys.readouterr().out
    assert "A job that reads it" in shown
    assert main(["check", str(job)]) == 0, capsys.readouterr()
    assert main(["run", str(job), "--steps", "2"]) == 0


TURNS = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven."}]


@pytest.mark.parametrize(
    ("row", "transform"),
    [
        ({"id": "x", "messages": TURNS}, "Chat"),
        ({"conversations": TURNS}, "Chat"),
        ({"prompt": "How many?", "completion": "Seven."}, "PromptCompletion"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "PromptCompletion"),
        ({"prompt": "How many?", "chosen": "Seven.", "rejected": "What?"}, "PreferencePairs"),
        ({"chosen": TURNS, "rejected": TURNS}, "PreferencePairs"),
    ],
)
def test_conversations_completions_and_pairs_are_proposed_as_such(tmp_path, row, transform, capsys):
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    job = tmp_path / "job.yaml"
    assert main(["inspect", str(tmp_path / "x.jsonl"), "--write", str(job)]) == 0
    assert f"- {transform}:" in job.read_text()
    assert main(["check", str(job)]) == 0, capsys.readouterr()


def test_files_of_other_kinds_are_told(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "word"}\n' * 9)
    (tmp_path / "c.txt").write_text("word\n")
    assert f"# only the files *.jsonl are read; under {tmp_path} are also 1 .txt\n" in inspect_path(str(tmp_path)).job


def test_rows_columns_lengths_tokens_duplicates_and_odd_rows_are_told(tmp_path, capsys):
    rows: list[Any] = [*ROWS, {"id": 100, "text": None}, {"id": 101, "text": ""}, {"id": 102, "text": "x" * 3000}]
    rows += [{"id": 103, "text": "a\ufffdb"}, {"id": 104, "text": "***"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    found = inspect_path(str(tmp_path / "x.jsonl"))
    assert (found.reader, found.num_files, found.num_read, found.is_whole) == ("Jsonl", 1, 105, True)
    assert {column.name: column.num_null for column in found.columns} == {"id": 0, "text": 1}
    assert found.lengths is not None
    assert found.lengths.largest == 3000
    assert sum(count for _, count in found.lengths.histogram) == 105
    assert found.num_duplicates == sum(ROWS[i]["text"] in [row["text"] for row in ROWS[:i]] for i in range(100))
    odd = {each.what: (each.count, each.examples[0]) for each in found.odd}
    assert odd["cannot be read"][0] == 1
    assert odd["'text' is null"] == (1, f"{tmp_path}/x.jsonl, row 100")
    assert odd["'text' is empty"] == (1, f"{tmp_path}/x.jsonl, row 101")
    assert odd["more than 20 times as long as the median"][0] == 1
    assert odd["has U+FFFD or NUL: it was decoded wrongly once"] == (1, f"{tmp_path}/x.jsonl, row 103")
    assert odd["has no letter or digit"] == (1, f"{tmp_path}/x.jsonl, row 104")
    assert "on_bad_row: skip" in found.job
    assert main(["inspect", str(tmp_path / "x.jsonl")]) == 0
    shown = capsys.readouterr().out
    for text in ("characters of 'text': mean", "duplicates:", "odd: 1 row: cannot be read", "up to (characters)"):
        assert text in shown


def test_a_sample_of_many_rows_is_spread_and_counts_all_tokens(tmp_path):
    tokens = [np.arange(20, dtype=np.int32) - (i == 7) for i in range(5000)]
    pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}), tmp_path / "x.parquet", row_group_size=100)
    found = inspect_path(str(tmp_path), most_rows=300)
    assert (found.num_rows, found.num_read, found.is_whole) == (5000, 300, False)
    assert found.num_tokens == pytest.approx(100_000, rel=0.05)
    assert [odd.what for odd in found.odd] == ["has an id below 0"]
    assert found.num_duplicates == 298


def test_a_tokenizer_counts_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers

    made = tokenizers.Tokenizer(models.WordLevel({"document": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "data", "jsonl")
    found = inspect_path(path, encoding=str(tmp_path / "tokenizer.json"))
    assert (found.num_tokens, found.tokens_are_counted) == (sum(2 * (i % 7 + 1) for i in range(100)), True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "none", "there is nothing at"),
        (lambda folder: folder, "no file under .* has an ending that Overlord knows"),
        (
            lambda folder: folder / "odd",
            "cannot be told from its name or first bytes; say it with --reader, as Parquet",
        ),
    ],
)
def test_what_cannot_be_told_is_said(tmp_path, make, said):
    (tmp_path / "odd").write_bytes(b"\x00\x01\x02")
    with pytest.raises(ol.OverlordError, match=said):
        inspect_path(str(make(tmp_path)))


def test_a_pattern_with_any_ending_is_known_by_the_files_that_it_matches(tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    found = inspect_path(f"{tmp_path}/*.jsonl*")
    assert (found.reader, found.num_read) == ("Jsonl", 2)
    with pytest.raises(ol.OverlordError, match=r"nothing matches .*/none\*"):
        inspect_path(f"{tmp_path}/none*")
    (tmp_path / "words.txt").write_text("c\n")
    with pytest.raises(ol.OverlordError, match="cannot be told from its name or first bytes; say it with --reader"):
        inspect_path(f"{tmp_path}/*")


def test_a_job_file_is_not_overwritten(tmp_path, capsys):
    path = write(tmp_path / "data", "jsonl")
    (tmp_path / "job.yaml").write_text("mine")
    assert main(["inspect", path, "--write", str(tmp_path / "job.yaml")]) == 1
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "job.yaml").read_text() == "mine"


TABLES = ("lance", "delta", "iceberg", "iceberg metadata")


@pytest.mark.parametrize("form", TABLES)
def test_tables_with_versions_are_recognised_and_their_jobs_run(tmp_path, form, capsys):
    """Where their libraries are installed: `make test-formats`."""
    path = write_table(tmp_path, form, pa.Table.from_pylist(ROWS))
    job = tmp_path / "job.yaml"
    assert main(["inspect", path, "--write", str(job)]) == 0
    assert f"{form.partition(' ')[0].title()}, 1 file" in capsys.readouterr().out
    assert main(["run", str(job), "--steps", "2"]) == 0


def write_table(folder: Path, form: str, table: pa.Table) -> str:
    reason = "make test-formats runs this"
    if form == "lance":
        pytest.importorskip("lance", reason=reason).write_dataset(table, f"{folder}/web.lance")
        return f"{folder}/web.lance"
    if form == "delta":
        pytest.importorskip("deltalake", reason=reason).write_deltalake(f"{folder}/web", table)
        return f"{folder}/web"
    pytest.importorskip("sqlalchemy", reason=reason)
    catalogs = pytest.importorskip("pyiceberg.catalog.sql", reason=reason)
    catalog = catalogs.SqlCatalog("local", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("db")
    made = catalog.create_table("db.web", table.schema)
    made.append(table)
    catalog.close()
    return (made.metadata_location if "metadata" in form else made.location()).removeprefix("file://")


def test_folders_in_a_bucket_are_recognised_too(tmp_path):
    """A scheme of fsspec is remote storage without a server."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for form in ("mds", "litdata", "parquet", "saved by datasets"):
        write(tmp_path / form, form)
        memory.put(str(tmp_path / form), f"/bucket/{form}", recursive=True)
    try:
        found = {form: recognise(f"memory://bucket/{form}") for form in ("mds", "litdata", "parquet", "saved by datasets")}
    finally:
        memory.rm("/bucket", recursive=True)
    assert {form: each.reader for form, each in found.items()} == {
        "mds": "Mds", "litdata": "LitData", "parquet": "Parquet", "saved by datasets": "HuggingFaceFiles",
    }  # fmt: skip
    assert found["parquet"].paths == "memory://bucket/parquet/**/*.parquet"
    with pytest.raises(ol.OverlordError, match=r"memory://none"):
        recognise("memory://none/at/all")


def test_newlines_in_quoted_fields_of_csv_are_declared(tmp_path, capsys):
    rows = "".join(f'{i},"first line {i}\nand a second"\n' for i in range(50))
    (tmp_path / "a.csv").write_text(f"id,text\n{rows}")
    found = inspect_path(str(tmp_path / "a.csv"))
    assert "newlines_in_values: true" in found.job
    assert (found.num_read, found.odd) == (50, ())
    (tmp_path / "job.yaml").write_text(found.job)
    assert main(["check", str(tmp_path / "job.yaml")]) == 0, capsys.readouterr().err


def write_parts(folder: Path, names: list[str]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("id,text\n" + "".join(f"{i},some words\n" for i in range(20)))
    return [str(folder / name) for name in names]


def test_a_pattern_that_the_shell_has_replaced_is_found_again(tmp_path, capsys):
    paths = write_parts(tmp_path / "web", ["a.csv", "b.csv", "c.csv"])
    assert main(["inspect", *paths, "--write", str(tmp_path / "job.yaml")]) == 0
    assert "Csv, 3 files" in capsys.readouterr().out
    assert f"paths: {tmp_path}/web/*.csv" in (tmp_path / "job.yaml").read_text()
    assert main(["check", str(tmp_path / "job.yaml")]) == 0


def test_several_paths_are_listed_where_no_pattern_has_just_them(tmp_path, capsys):
    paths = write_parts(tmp_path / "web", ["a.csv", "b.csv", "c.csv"])[:2]
    found = inspect_path(paths)
    assert (found.num_files, found.path) == (2, f"{paths[0]} and 1 more")
    (tmp_path / "job.yaml").write_text(found.job)
    assert list(ol.load_job(tmp_path / "job.yaml").sources) == ["web"]
    assert main(["check", str(tmp_path / "job.yaml")]) == 0, capsys.readouterr().err


def test_paths_of_several_formats_are_told(tmp_path):
    paths = write_parts(tmp_path / "web", ["a.csv", "b.txt"])
    with pytest.raises(ol.OverlordError, match=r"of several formats: .*a\.csv \(Csv\), .*b\.txt \(TextLines\); inspect one"):
        inspect_path(paths)
    prepared = write(tmp_path / "data", "prepared")
    with pytest.raises(ol.OverlordError, match="Prepared reads one folder, and 2 were named"):
        inspect_path([prepared, f"{prepared}/"])


def prepare_texts(folder: Path, **sources: ol.Source) -> ol.Job:
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = {name: ol.Jsonl(f"{folder}/x.jsonl", transform=ol.Tokenize(encoding=ol.ByteTokenizer())) for name in "ab"}
    job = ol.Job(sources=sources or made, batch=ol.Batch(sequence_length=64, tokens=512), num_workers=0)
    return ol.prepare(job, folder / "out", num_processes=1)


def checks(job: str, place: Path) -> bool:
    place.write_text(job)
    return main(["check", str(place)]) == 0


def test_the_folder_that_prepare_wrote_is_recognised(tmp_path, capsys):
    prepare_texts(tmp_path)
    found = inspect_path(str(tmp_path / "out"))
    assert (found.reader, found.num_rows, found.num_read) == ("Prepared", 100, 100)
    assert f"holds 2 prepared sources, and only {tmp_path}/out/a is read; inspect also {tmp_path}/out/b" in found.job
    assert checks(found.job, tmp_path / "job.yaml"), capsys.readouterr().err


def test_rows_of_a_prepared_source_are_those_of_its_manifest(tmp_path):
    text = tmp_path / "x.jsonl"
    prepare_texts(tmp_path, only=ol.Jsonl(str(text), transform=[ol.per_row(_every_other), _tokenize()]))
    found = inspect_path(str(tmp_path / "out"), most_rows=10)
    assert (found.num_rows, found.tokens_are_counted, found.is_whole) == (50, True, False)


def _every_other(row: dict[str, Any]) -> dict[str, Any] | None:
    return row if row["id"] % 2 else None


def _tokenize() -> ol.Tokenize:
    return ol.Tokenize(encoding=ol.ByteTokenizer())


def test_a_prepared_source_of_texts_and_one_of_prompts_get_jobs_that_run(tmp_path, capsys):
    prepare_texts(tmp_path, texts=ol.Jsonl(str(tmp_path / "x.jsonl"), transform=ol.per_row(_every_other)))
    found = inspect_path(str(tmp_path / "out"))
    assert found.lengths is not None
    assert found.lengths.of == "characters"
    assert checks(found.job, tmp_path / "job.yaml"), capsys.readouterr().err
    (tmp_path / "y.jsonl").write_text('{"prompt": "How many?", "completion": "Seven."}\n' * 40)
    prompts = ol.Jsonl(str(tmp_path / "y.jsonl"), transform=ol.PromptCompletion(encoding=ol.ByteTokenizer()))
    job = ol.Job(sources={"sft": prompts}, batch=ol.Batch(sequence_length=64, tokens=512), num_workers=0)
    ol.prepare(job, tmp_path / "sft", num_processes=1)
    found = inspect_path(str(tmp_path / "sft"))
    assert "loss_mask: loss_mask" in found.job
    assert checks(found.job, tmp_path / "sft.yaml"), capsys.readouterr().err


def test_packed_rows_are_read_as_parquet(tmp_path, capsys):
    write(tmp_path, "jsonl")
    source = ol.Jsonl(f"{tmp_path}/x.jsonl", transform=_tokenize())
    job = ol.Job(sources={"web": source}, batch=ol.Batch(sequence_length=64, tokens=512))
    ol.prepare(job, tmp_path / "out", num_processes=1, pack=256)
    for path in (tmp_path / "out", tmp_path / "out" / "web"):
        found = inspect_path(str(path))
        assert (found.reader, found.num_rows) == ("Parquet", found.num_read)
        assert "has packed rows of up to 256 tokens" in found.job
    assert checks(found.job, tmp_path / "job.yaml"), capsys.readouterr().err


@pytest.mark.parametrize("form", ["jsonl", "csv", "lines"])
def test_files_that_were_read_whole_have_a_number_of_rows(tmp_path, form):
    path = write(tmp_path / "data", form)
    found = inspect_path(path)
    assert found.num_rows == found.num_read == 100
    assert inspect_path(path, most_rows=10).num_rows is None


@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
def test_the_delimiter_of_csv_is_found(tmp_path, delimiter, capsys):
    lines = [delimiter.join(("id", "text", "score")), *(delimiter.join((str(i), f'"a, b; {i}"', "1,5")) for i in range(50))]
    content = lines if delimiter != "," else [line.replace("1,5", "1.5") for line in lines]
    (tmp_path / "a.csv").write_text("\n".join(content) + "\n")
    found = inspect_path(str(tmp_path / "a.csv"))
    assert (found.num_rows, [column.name for column in found.columns]) == (50, ["id", "text", "score"])
    assert ("delimiter:" in found.job) == (delimiter != ",")
    assert checks(found.job, tmp_path / "job.yaml"), capsys.readouterr().err


def test_a_csv_file_of_one_column_or_with_long_fields_has_the_usual_delimiter(tmp_path):
    (tmp_path / "one.csv").write_text("text\n" + "a; b; c\n" * 20)
    (tmp_path / "long.csv").write_text("text,n\n" + f"{'x' * 200_000},1\n")
    assert recognise(str(tmp_path / "one.csv")).options == {}
    assert recognise(str(tmp_path / "long.csv")).options == {}


def test_csv_without_a_line_of_names_is_told(tmp_path):
    (tmp_path / "a.csv").write_text("".join(f"{i},hello {i},{2 * i}\n" for i in range(3, 50)))
    assert "the first line of" in inspect_path(str(tmp_path / "a.csv")).job
    (tmp_path / "b.csv").write_text("".join(f"{i},hello {i},{2 * i}\n" for i in range(50)))
    with pytest.raises(
        ol.OverlordError, match=r"the column '0' 2 times; .* \(0, hello 0, 0\): if it is a row, write a line"
    ):
        inspect_path(str(tmp_path / "b.csv"))
    (tmp_path / "c.csv").write_text("0,1,2\n" + "".join(f"{i},hello {i},{2 * i}\n" for i in range(50)))
    assert recognise(str(tmp_path / "c.csv")).notes == ()
