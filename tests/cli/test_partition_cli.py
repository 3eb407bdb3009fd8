"""`overlord partition` as users meet it: the real command in its own process."""

import json

import pytest

from overlord.cli import main
from overlord.cli.options import num_bytes
from tests.cli.test_cli import job_file
from tests.commands import overlord

JOB = """
import time
import overlord as ol
from tests.small_sources import Numbered

def busy(table):
    ends = time.thread_time() + 0.05
    while time.thread_time() < ends:
        pass
    return table

job = ol.Job(
    sources={
        "heavy": Numbered(rows=400, first=1, transform=busy),
        **{f"tiny{i}": Numbered(rows=100, first=500 + i) for i in range(4)},
    },
    mixture=ol.Mixture({0: {"tiny0": 1, "tiny1": 1, "tiny2": 1}, 100: {"heavy": 1, "tiny0": 1}}),
    batch=ol.Batch(samples=200, sequence_length=16),
)
"""
ENOUGH = ("--cpus", 32, "--memory", "64GiB", "--steps-per-second", 2)


def test_partition_says_what_each_source_gets_and_why(tmp_path):
    path = job_file(tmp_path, JOB)
    told = overlord("partition", path, "--workers", 1, *ENOUGH).stdout
    for word in ("my_job.py at 2 steps a second", "loaders", "workers", "memory", "share of samples", "shadow"):
        assert word in told
    assert "- heavy: 40 chunks/s of " in told  # 100 samples of 5 in a chunk, twice a second
    assert "- tiny3: no step draws from it: it is only held open" in told
    assert "loader host(s) of 1 workers" in told
    assert "- host 0: " in told


def test_partition_for_machines_has_the_hosts_and_the_profiles(tmp_path):
    found = json.loads(overlord("partition", job_file(tmp_path, JOB), "--workers", 1, "--json", *ENOUGH).stdout)
    assert found["ok"] is True
    heavy, tiny = found["sources"]["heavy"], found["sources"]["tiny0"]
    assert heavy["chunks_per_second"] == pytest.approx(40)
    assert heavy["profile"]["cpu_s"] >= 0.05
    assert heavy["loaders"] == len(set(heavy["hosts"])) >= 3  # 2 CPUs and headroom, in hosts of one worker
    assert (tiny["loaders"], found["sources"]["tiny3"]["workers"]) == (1, 0)
    held = [(share["source"], share["index"]) for host in found["hosts"] for share in host]
    assert sorted(held) == sorted((name, i) for name, s in found["sources"].items() for i in range(s["loaders"]))
    assert found["memory_bytes"] <= 64 << 30
    assert len(found["shadows"]) == len(found["hosts"])


def test_one_host_is_the_embedded_engine_without_shadows(tmp_path):
    found = json.loads(overlord("partition", job_file(tmp_path, JOB), "--hosts", 1, "--json", *ENOUGH).stdout)
    assert len(found["hosts"]) == 1
    assert found["shadows"] == []
    assert found["budget"]["host_bytes"] == 0


def test_a_budget_that_does_not_suffice_is_told_with_who_needs_it(tmp_path):
    path = job_file(tmp_path, JOB)
    (line,) = overlord("partition", path, "--cpus", 0.5, "--steps-per-second", 2, expect=1).stderr.splitlines()
    assert line.startswith("error: the sources need ")
    assert "the budget has 0.5: 'heavy' " in line


def test_every_source_that_fails_is_named(tmp_path, capsys):
    text = JOB.replace("transform=busy", "transform=lambda table: 1 / 0").replace("rows=100", "rows=0")
    path = job_file(tmp_path, text).rename(tmp_path / "failing_job.py")
    lines = overlord("partition", path, *ENOUGH, expect=1).stderr.splitlines()
    assert len(lines) == 5
    assert any(line.startswith("error: source 'heavy': ZeroDivisionError: division by zero") for line in lines)
    assert any(line.startswith("error: source 'tiny0': source 'tiny0' has no data") for line in lines)
    assert main(["partition", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["errors"].keys() == {"heavy", "tiny0", "tiny1", "tiny2", "tiny3"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--memory", "8XB"), "a size is a positive number with a unit, as 8GiB, 512MiB or 20GB, got '8XB'"),
        (("--memory", "0"), "got '0'"),
        (("--cpus", "none"), "must be a number above 0, got 'none'"),
        (("--cpus", "nan"), "must be a number above 0, got 'nan'"),
        (("--hosts", "0"), "must be at least 1, got 0"),
        (("--steps-per-second", "-1"), "must be a number above 0, got '-1'"),
    ],
)
def test_wrong_arguments_are_told(arguments, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["partition", "job.py", *arguments])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"), [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("20g", 20 * 10**9), ("77", 77)]
)
def test_sizes_are_read_with_their_unit(text, value):
    assert num_bytes(text) == value
