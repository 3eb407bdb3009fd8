"""Every field of a declaration counts in a fingerprint but a named few, as the table in docs/operations.md has them."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.checkpoint.fingerprint import (
    BATCH_MAY_CHANGE,
    JOB_MAY_CHANGE,
    READER_MAY_CHANGE,
    SOURCE_MAY_CHANGE,
    Fingerprint,
)
from overlord.sources.files import FileSource
from tests.small_sources import Numbered

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
READERS = (ol.Parquet, ol.ArrowIpc, ol.Jsonl, ol.WebDataset)
OTHER = {
    "Job": {
        "mesh": ol.Mesh(dp=2),
        "skip": (ol.Skip("a"),),
        "stage_fields": ol.pipelines.StageFields("all"),
        "cut": (),
        "strategy": ol.strategies.plain(broadcast=("tp",)),
        "prefetch": 3,
        "num_workers": 0,
        "num_processes": 1,
        "cache": ol.Cache("kept", 1 << 30),
        "evals": {"val": ol.Eval(sources={"a": Numbered()})},
        "mixture": ol.Mixture({"a": 2}, unit="tokens"),
        "seed": 9,
    },
    "Batch": {
        "layout": "padded",
        "pad_to": "sequence_length",
        "micro_tokens": 32,
        "pad_token": 5,
        "image_token": 5,
        "columns": ("document",),
        "drop_last": True,
        "sequence_length": 32,
        "tokens": 128,
        "cut_documents": True,
        "long_documents": "drop",
        "document_multiple": 2,
        "document_limits": {0: 8},
        "warm_up": ol.policies.WarmUp({0: 16, 4: 64}),
        "special_ids": (-200,),
        "outliers": ol.policies.OutlierDelay((8,), together=2),
    },
    "Source": {
        "repeat": 3,
        "warn_epochs": 2,
        "max_rows": 12,
        "loaders": 2,
        "buffer_bytes": 1 << 20,
        "on_bad_row": "skip",
        "cache": ol.Cache("kept", 1 << 30),
        "null_columns": ("document",),
        "size_columns": ("document",),
        "decode": ol.vision.DecodeImage("png"),
        "tokens": "ids",
        "loss_mask": "mask",
        "loss_weights": "weights",
        "long_documents": "drop",
        "pairs": "chosen",
        "window": 2,
        "shuffle": False,
        "transform": ol.Pick("tokens"),
    },
}
"""A value for each field that is not the one in `job_of`. `samples` is instead of `tokens`: it has a test of its own."""


def job_of(source: ol.Source | None = None, batch: ol.Batch | None = None) -> ol.Job:
    return ol.Job(
        sources={"a": source or Numbered()},
        batch=batch or ol.Batch(tokens=64, sequence_length=16),
        mixture=ol.Mixture({"a": 1}),
    )


def differences(before: ol.Job, after: ol.Job) -> set[str]:
    one, other = (
        Fingerprint.of(job, {name: units_of(job.sources[name]) for name in job.sources}) for job in (before, after)
    )
    return set(other.differences(one.to_dict()))


def units_of(source: ol.Source) -> list[ol.Unit]:
    return [ol.Unit("file", 0, 8, 64)] if isinstance(source, FileSource) else list(source.units())


def changed(owner: str, name: str) -> ol.Job:
    value = OTHER[owner][name]
    if owner == "Job":
        return replace(job_of(), **{name: value})
    if owner == "Batch":
        return job_of(batch=replace(job_of().batch, **{name: value}))
    return job_of(replace(Numbered(), **{name: value}))


def rows_of_the_page(owner: str) -> dict[str, str]:
    """What the table says of each field of a class: "resumes", or the name by which a change is refused."""
    found: dict[str, str] = {}
    for cell, verdict in re.findall(
        r"^\| (.*?) \| (resumes|refused as `[\w.]+`).*\|$", PAGE.read_text("utf-8"), re.MULTILINE
    ):
        if cell.startswith(f"{owner}: "):
            names = re.findall(r"`(\w+)`", cell.removeprefix(f"{owner}: "))
            assert not found.keys() & names, f"{names} stand twice in the table"
            found |= dict.fromkeys(names, verdict.removeprefix("refused as ").strip("`"))
    return found


EVERY = [(owner, name) for owner, names in OTHER.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), EVERY, ids=[".".join(pair) for pair in EVERY])
def test_a_resume_accepts_and_refuses_what_the_table_says(owner, name):
    said = rows_of_the_page(f"`{owner}`")[name]
    own_name = {"Job": name, "Batch": f"batch.{name}", "Source": "sources.a"}[owner]
    assert said.replace("batch.NAME", f"batch.{name}").replace("sources.NAME", "sources.a") in ("resumes", own_name)
    assert differences(job_of(), changed(owner, name)) == (set() if said == "resumes" else {own_name})


@pytest.mark.parametrize("kind", [ol.Job, ol.Batch, ol.Source])
def test_the_table_has_every_field_and_no_other(kind):
    told = rows_of_the_page(f"`{kind.__name__}`")
    by_subject = {"sources", "batch"} if kind is ol.Job else set()
    instead = {"samples"} if kind is ol.Batch else set()
    assert set(told) == {each.name for each in fields(kind)} - by_subject == set(OTHER[kind.__name__]) | instead
    may_change = {"Job": JOB_MAY_CHANGE, "Batch": BATCH_MAY_CHANGE, "Source": SOURCE_MAY_CHANGE}[kind.__name__]
    assert {name for name, verdict in told.items() if verdict == "resumes"} == may_change


def test_a_step_in_samples_is_not_one_in_tokens():
    in_samples = job_of(batch=ol.Batch(samples=4, sequence_length=16))
    assert differences(job_of(), in_samples) == {"batch.tokens", "batch.samples"}
    assert rows_of_the_page("`Batch`")["samples"] == "batch.NAME"


def test_the_table_has_every_field_that_readers_add():
    told = rows_of_the_page("a source's reader")
    added = {each.name for reader in READERS for each in fields(reader)} - {each.name for each in fields(ol.Source)}
    assert set(told) == added
    assert {name for name, verdict in told.items() if verdict == "resumes"} == READER_MAY_CHANGE


@pytest.mark.parametrize("reader", READERS)
def test_every_field_that_a_reader_adds_counts_but_how_files_are_reached(reader):
    other = {
        "paths": "other",
        "columns": ("text",),
        "unit_bytes": 1 << 10,
        "storage_options": {"region": "here"},
        "retry": ol.policies.Retry(deadline_s=7),
    }
    source = reader("file")
    for each in fields(reader):
        if each.name not in {field.name for field in fields(ol.Source)}:
            found = differences(job_of(source), job_of(replace(source, **{each.name: other[each.name]})))
            assert found == (set() if each.name in READER_MAY_CHANGE else {"sources.a"}), each.name


@dataclass(frozen=True, kw_only=True)
class LaterBatch(ol.Batch):
    later: int = 0


@dataclass(frozen=True)
class LaterDelay(ol.policies.OutlierDelay):
    later: int = 0


@dataclass(frozen=True)
class LaterParquet(ol.Parquet):
    later: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class LaterNumbered(Numbered):
    later: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class LaterDecode(ol.vision.DecodeImage):
    later: int = 0


def with_later_field(kind: type) -> Callable[..., Any]:
    return make_dataclass(
        f"Later{kind.__name__}", [("later", int, field(default=0, kw_only=True))], bases=(kind,), frozen=True
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda n: job_of(batch=LaterBatch(tokens=64, sequence_length=16, later=n)), "batch.later"),
        (
            lambda n: job_of(batch=ol.Batch(tokens=64, sequence_length=16, outliers=LaterDelay((8,), 2, later=n))),
            "batch.outliers",
        ),
        (lambda n: job_of(LaterParquet("file", later=n)), "sources.a"),
        (lambda n: job_of(LaterNumbered(later=n)), "sources.a"),
        (lambda n: job_of(Numbered(decode=LaterDecode(later=n))), "sources.a"),
        (lambda n: job_of(Numbered(transform=with_later_field(ol.Tokenize)(encoding=len, later=n))), "sources.a"),
    ],
    ids=["batch", "outliers", "parquet", "reader", "decode", "transform"],
)
def test_a_field_that_is_added_later_counts_without_being_listed_anywhere(make, name):
    assert differences(make(0), make(0)) == set()
    assert differences(make(0), make(1)) == {name}


def test_a_subclass_of_a_reader_is_not_resumed_with_another_value_of_its_own_field(tmp_path):
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 40}), tmp_path / "a.parquet")

    def job(later: int) -> ol.Job:
        return job_of(LaterParquet(str(tmp_path / "a.parquet"), later=later))

    with ol.start(job(1)) as loader:
        state = loader.state_dict()
    ol.start(job(1), resume=state).close()
    with pytest.raises(ol.errors.StateError, match="source 'a' is declared differently"):
        ol.start(job(2), resume=state)
