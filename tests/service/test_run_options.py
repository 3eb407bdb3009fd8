"""The options of how a run is carried out: the same for `start`, `attach` and `overlord serve`, and refused where an engine
cannot do them."""

import inspect
import json
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import fields
from pathlib import Path

import pytest

import overlord as ol
from overlord.cli.run_options import add_run_options, budget, read_partition, read_run_options
from overlord.service.run_options import RunOptions
from tests.small_sources import Numbered, job_of

JOB = job_of({"a": Numbered(rows=40, first=1), "b": Numbered(rows=30, first=100)}, num_workers=1)
NAMES = [field.name for field in fields(RunOptions)]


def test_start_attach_and_serve_take_the_same_options():
    attach = pytest.importorskip("overlord.trainer").attach
    parser = ArgumentParser()
    add_run_options(parser)
    assert [action.dest for action in parser._actions if action.dest != "help"] == NAMES
    for function in (ol.start, attach):
        assert set(NAMES) <= set(inspect.signature(function).parameters)
    assert read_run_options(parser.parse_args([])) == RunOptions()


def test_options_of_a_command_line_are_read(tmp_path: Path):
    written = tmp_path / "partition.json"
    written.write_text(
        json.dumps({"hosts": [[{"source": "a", "index": 0, "of": 1}], [{"source": "b", "index": 0, "of": 1}]]})
    )
    parser = ArgumentParser()
    add_run_options(parser)
    words = ["--log", "logs", "--partition", str(written), "--autoscale", "cpus=8,memory=16GiB,hosts=3"]
    found = read_run_options(parser.parse_args([*words, "--shadows", "cpus=0.5,memory=1MB,workers=2", "--near", "n1, n2"]))
    share = ol.scaling.Share
    assert found == RunOptions(
        log="logs",
        partition=ol.scaling.Partition(((share("a"),), (share("b"),))),
        autoscale=ol.scaling.Budget(cpus=8, memory_bytes=16 << 30, num_hosts=3),
        shadows=ol.scaling.Budget(cpus=0.5, memory_bytes=10**6, workers_per_host=2),
        near=("n1", "n2"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "a budget is cpus=8,memory=16GiB"),
        ("cpus=8", "a budget needs cpus= and memory="),
        ("cpus=8,memory=16GiB,gpus=1", "a budget is cpus=8,memory=16GiB, also with cpus, memory, hosts, workers"),
        ("cpus=0,memory=16GiB", "must be a number above 0, got '0'"),
    ],
)
def test_a_budget_that_is_not_understood_is_refused(text: str, message: str):
    with pytest.raises(ArgumentTypeError, match=message):
        budget(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read from .*: No such file"), ("{", "is not JSON"), ('{"hosts": [1]}', "no list of loader hosts")],
)
def test_a_partition_that_cannot_be_read_is_refused_and_says_how_to_write_one(tmp_path: Path, content, message):
    path = tmp_path / "partition.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ol.errors.SpecError, match=f"{message}.*overlord partition job.py --json"):
        read_partition(path)


@pytest.mark.parametrize("engine", [ol.Embedded, lambda: ol.Processes(1)], ids=["embedded", "processes"])
def test_an_engine_without_nodes_refuses_what_needs_some(engine):
    with pytest.raises(ol.errors.SpecError, match=r"near=\['n1'\] names nodes of a cluster, and this job runs in"):
        ol.start(JOB, engine=engine(), near=["n1"])
    with pytest.raises(ol.errors.SpecError, match=r"leave shadows out, or run the job with engine=ol."):
        ol.start(JOB, engine=engine(), shadows=ol.scaling.Budget(cpus=1, memory_bytes=1 << 30))


def test_near_is_a_list_of_nodes():
    with pytest.raises(ol.errors.SpecError, match=r"near is a list of nodes.*got the text 'n1'"):
        ol.start(JOB, near="n1")
