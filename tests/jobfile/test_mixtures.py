"""Sources from tables, weights in groups, and weights from measured sizes."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.cli.output import console
from overlord.cli.run_view import view_of
from overlord.jobfile.loading import load_job
from tests.jobfile import helpers

BATCH = ol.Batch(sequence_length=64, tokens=512)


def write_tokens(path: Path, num_rows: int, length: int = 10) -> Path:
    tokens = [np.arange(length, dtype=np.int32) + 1 for _ in range(num_rows)]
    pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}), path, row_group_size=50)
    return path


@pytest.fixture
def files(tmp_path) -> Path:
    for name, num_rows in (("a", 100), ("b", 200), ("c", 400)):
        write_tokens(tmp_path / f"{name}.parquet", num_rows)
    return tmp_path


def table_of(files: Path) -> dict[str, list]:
    return {
        "name": ["a", "b", "c"],
        "path": [f"{files}/{name}.parquet" for name in "abc"],
        "weight": [3, 1, 4],
        "group": ["web", "web", "code"],
        "transform": ["", "up", f"up; {helpers.__name__}:upper"],
        "repeat": ["", "2", "false"],
    }


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "columns", "arrow", "rows"])
def test_a_job_comes_from_a_table_in_one_line(files, form):
    columns = table_of(files)
    if form in ("csv", "tsv"):
        comma = "," if form == "csv" else "\t"
        lines = [comma.join(map(str, row)) for row in (columns, *zip(*columns.values(), strict=True))]
        (files / f"table.{form}").write_text("\n".join(lines) + "\n")
        table = files / f"table.{form}"
    elif form == "parquet":
        pq.write_table(pa.table(columns), files / "table.parquet")
        table = files / "table.parquet"
    elif form == "rows":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        table = {row.pop("name"): row for row in rows}
    else:
        table = columns if form == "columns" else pa.table(columns)
    job = ol.mixtures.read_table(table, transforms={"up": helpers.clean}, groups={"web": 3, "code": 1}, window=2).job(
        batch=BATCH
    )
    assert job.mix.at(0) == pytest.approx({"a": 0.75 * 0.75, "b": 0.75 * 0.25, "c": 0.25})
    assert job.sources["a"] == ol.Parquet(f"{files}/a.parquet", window=2)
    assert job.sources["b"] == ol.Parquet(f"{files}/b.parquet", transform=(helpers.clean,), repeat=2, window=2)
    assert job.sources["c"].transform == (helpers.clean, helpers.upper)
    assert job.sources["c"].repeat is False
    with ol.start(job) as loader:
        assert next(loader.client(0, timeout_s=60)).number == 0


def test_a_yaml_job_takes_its_sources_from_a_table(files):
    (files / "table.csv").write_text(
        "name,path,weight\n" + "".join(f"{n},{files}/{n}.parquet,{w}\n" for n, w in zip("abc", (1, 1, 2), strict=True))
    )
    path = files / "job.yaml"
    path.write_text(f"sources: {files}/table.csv\nbatch: {{sequence_length: 64, tokens: 512}}\n")
    assert load_job(path).mix.at(0) == {"a": 0.25, "b": 0.25, "c": 0.5}
    path.write_text(f"sources: {{table: {files}/table.csv, window: 3}}\nbatch: {{sequence_length: 64, tokens: 512}}\n")
    assert load_job(path).sources["a"].window == 3
    path.write_text(f"sources: {{table: {files}/table.csv, windw: 3}}\nbatch: {{sequence_length: 64, tokens: 512}}\n")
    with pytest.raises(ol.errors.SpecError, match=r"line 1: sources has no option 'windw'; did you mean 'window'\?"):
        load_job(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,path\n", "has no rows"),
        ("name,path\na,x.parquet\na,y.parquet\n", r"line 3: the source 'a' stands twice"),
        ("name,path,weight\na,x.parquet,much\n", r"line 2: the weight of 'a' is a number, got 'much'"),
        (
            "name,path,windw\na,x.parquet,3\n",
            r"line 1: the column 'windw' is none .*; did you mean 'window'\? It has 'name'",
        ),
        ("name,path,wieght\na,x.parquet,3\n", r"the column 'wieght' is none .*; did you mean 'weight'\?"),
        (
            "name,path,zzz\na,x.parquet,3\n",
            r"the column 'zzz' is none that .* option of a reader\. It has 'name', 'path', 'weight'",
        ),
        ("name,path,delimiter\na,x.parquet,;\n", r"line 2: a has no option 'delimiter'"),
        ("Name,Path\na,x.parquet\n", r"line 1: .* this one has 'Name', 'Path'; names of columns are in lower case"),
        ("name;path;weight\na;x.parquet;2\n", r"this one has 'name;path;weight'; a table is divided by commas, or by tabs"),
        ("nam,path\na,x.parquet\n", r"the columns name and path, and this one has 'nam', 'path'; did you mean 'nam'\?"),
        ("path,weight\nx.parquet,2\n", r"the columns name and path, and this one has 'path', 'weight'$"),
        ("name,path,transform\na,x.parquet,Tokeniz\n", r"the transform 'Tokeniz' .*; did you mean 'Tokenize'\?"),
        ("name,path\na,\n", r"line 2: the source 'a' has no path"),
        ("name,path\n,x.parquet\n", r"line 2: a row of a table of sources needs a name"),
        ("name,path\na,x.bin\n", r"line 2: a needs a reader"),
        (
            "name,path,transform\na,x.parquet,upp\n",
            r"line 2: the transform 'upp' is none of transforms=.*did you mean 'up'\?",
        ),
        ("name,path,group\na,x.parquet,web\nb,y.parquet,\n", r"line 3: the source 'b' has no group, while others have"),
    ],
)
def test_a_wrong_table_is_told_with_its_line(tmp_path, text, said):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ol.errors.SpecError, match=said):
        ol.mixtures.read_table(tmp_path / "table.csv", transforms={"up": helpers.clean})


def test_options_of_a_reader_of_your_own_may_be_columns(tmp_path):
    (tmp_path / "table.csv").write_text(f"name,path,reader,rows\na,x,{helpers.__name__}:Rows,7\n")
    assert ol.mixtures.read_table(tmp_path / "table.csv").sources == {"a": helpers.Rows(paths="x", rows=7)}


def test_wrong_groups_and_a_missing_table_are_told(files):
    columns = table_of(files) | {"transform": ["", "", ""]}
    with pytest.raises(ol.errors.SpecError, match=r"a weight to 'wb', which no row has; did you mean 'web'\?"):
        ol.mixtures.read_table(columns, groups={"wb": 1, "code": 1})
    with pytest.raises(ol.errors.SpecError, match=r"groups has no weight for 'code'"):
        ol.mixtures.read_table(columns, groups={"web": 1})
    with pytest.raises(ol.errors.SpecError, match=r"there is no table of sources .*none\.csv"):
        ol.mixtures.read_table(files / "none.csv")


SIZES = st.dictionaries(st.text(min_size=1, max_size=3), st.floats(1.0, 1e12), min_size=1, max_size=20)


@given(SIZES, st.floats(0.2, 20))
def test_a_temperature_keeps_the_order_of_sizes_and_flattens_it(sizes, value):
    weights = ol.mixtures.temperature(sizes, value)
    assert math.fsum(weights.values()) == pytest.approx(1)
    assert ol.mixtures.temperature(sizes, 1.0) == pytest.approx({n: s / math.fsum(sizes.values()) for n, s in sizes.items()})
    ordered = sorted(sizes, key=lambda name: sizes[name])
    assert all(weights[a] <= weights[b] * (1 + 1e-9) for a, b in pairwise(ordered))
    flatter = ol.mixtures.temperature(sizes, 2 * value)
    assert max(flatter.values()) <= max(weights.values()) * (1 + 1e-9)


@given(SIZES, st.floats(1.0, 1e13), st.floats(0.5, 20))
def test_unimax_reads_no_source_more_often_than_allowed_and_is_uniform_otherwise(sizes, budget, epochs):
    weights = ol.mixtures.unimax(sizes, budget, max_epochs=epochs)
    assert math.fsum(weights.values()) == pytest.approx(1)
    spent = min(budget, epochs * math.fsum(sizes.values()))
    amounts = {name: weight * spent for name, weight in weights.items()}
    assert all(amounts[name] <= epochs * sizes[name] * (1 + 1e-6) for name in sizes)
    free = [amounts[name] for name in sizes if amounts[name] < epochs * sizes[name] * (1 - 1e-6)]
    assert not free or max(free) == pytest.approx(min(free), rel=1e-6)
    assert not free or max(amounts.values()) <= max(free) * (1 + 1e-6)


def test_weights_of_groups_are_shared_out_within_them():
    found = ol.mixtures.grouped({"web": {"a": 1, "b": 3}, "code": {"c": 5}}, {"web": 3, "code": 1})
    assert found == pytest.approx({"a": 0.1875, "b": 0.5625, "c": 0.25})
    for wrong, said in (
        (lambda: ol.mixtures.grouped({"web": {"a": 0}}), "all sources in the group 'web' have 0"),
        (
            lambda: ol.mixtures.grouped({"web": {"a": 1}}, {"code": 1}),
            "groups are web, and the weights of groups",
        ),
        (lambda: ol.mixtures.temperature({"a": 1}, 0), "a temperature is a number above 0, got 0"),
        (lambda: ol.mixtures.unimax({"a": -1}, 5), "got -1 for 'a'"),
        (lambda: ol.mixtures.unimax({"a": 1}, 0), "budget is how much the run reads"),
    ):
        with pytest.raises(ol.errors.SpecError, match=said):
            wrong()


def test_sizes_are_measured(files):
    rows = [json.dumps({"text": "x" * 20}) for _ in range(300)]
    (files / "d.jsonl").write_text("\n".join(rows) + "\n")
    sources = {name: ol.Parquet(f"{files}/{name}.parquet") for name in "abc"}
    text = ol.Jsonl(f"{files}/d.jsonl", transform=ol.Tokenize(encoding=ol.ByteTokenizer()), unit_bytes=500)
    job = ol.Job(sources={**sources, "d": text}, batch=BATCH)
    assert ol.mixtures.measure(job, "rows") == pytest.approx({"a": 100, "b": 200, "c": 400, "d": 300}, rel=0.1)
    tokens = ol.mixtures.measure(job)
    assert tokens == pytest.approx({"a": 1000, "b": 2000, "c": 4000, "d": 6000}, rel=0.1)
    prepared = ol.prepare(job, files / "out", num_processes=1)
    assert ol.mixtures.measure(prepared) == {"a": 1000, "b": 2000, "c": 4000, "d": 6000}
    assert ol.mixtures.measure(job, "bytes")["c"] > 3 * ol.mixtures.measure(job, "bytes")["a"]
    with pytest.raises(ol.errors.SpecError, match="unit is tokens, rows or bytes, got 'words'"):
        ol.mixtures.measure(job, "words")  # type: ignore[arg-type]


def test_how_long_sources_last_is_told(files, capsys):
    (files / "job.yaml").write_text(
        f"sources: {{a: {{paths: {files}/a.parquet}}, c: {{paths: {files}/c.parquet, repeat: 2}}}}\n"
        "batch: {sequence_length: 64, tokens: 512}\n"
    )
    with ol.start(load_job(files / "job.yaml")) as loader:
        client = loader.client(0, timeout_s=60)
        loader.metrics()
        for _ in range(6):
            next(client)
        found = loader.metrics().sources
        console().print(view_of(loader.metrics(), None, ()))
    assert found["a"].epochs > 0
    for source in found.values():
        assert source.left_s is not None
        assert source.left_s >= 0
    assert re.search(r"epochs +lasts", capsys.readouterr().out)
