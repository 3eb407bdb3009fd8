"""The harness finds what it is there to find: every way of being broken is reported, and only those."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.broken_reader import WAYS
from tests.fuzz.runner import ROOT, BrokenTargetError, Report, Worker
from tests.fuzz.targets import TARGETS, case_of, target_named

BROKEN = "tests.fuzz.broken_reader"


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    paths = {way: tmp_path / f"{way}@1" for way in WAYS}
    for path in paths.values():
        path.write_bytes(b"damaged")
    return paths


@pytest.fixture(scope="module")
def worker():
    with Worker(limit_s=2.0) as worker:
        yield worker


def run(worker: Worker, *paths: Path) -> Report:
    report = Report(BROKEN)
    worker.run(BROKEN, [f"file {path}" for path in paths], report)
    return report


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("other-data", "other data than the oracle's: other values"),
        ("lost-row", "other data than the oracle's: rows are missing"),
        ("extra-row", "other data than the oracle's: too many rows"),
        ("raises", "ValueError: "),
        ("names-no-file", "SourceError does not name the file"),
        ("hangs", "no answer within 2 s: "),
        ("aborts", "the process ended with SIGABRT: "),
        ("exits", "the process ended with exit status 0: "),
        ("takes-all-memory", "MemoryError: "),
        ("oracle-aborts", "answers where the oracle crashes"),
        ("oracle-fails", "answers where the oracle fails: "),
    ],
)
def test_a_broken_reader_is_found(worker, inputs, way, cause):
    report = run(worker, inputs[way])
    assert report.verdicts == {"finding": 1}
    (finding,) = report.findings
    assert finding.cause.startswith(cause)
    assert finding.command == f"python -m tests.fuzz --target {BROKEN} --input {inputs[way]}"


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("way", "verdict"),
    [
        ("right", "equal"),
        ("bad-row", "bad rows"),
        ("refuses", "refused"),
        ("oracle-aborts-undamaged", "equal"),
        ("oracle-fails-undamaged", "equal"),
    ],
)
def test_a_reader_that_keeps_the_rule_is_no_finding(worker, inputs, way, verdict):
    assert run(worker, inputs[way]).verdicts == {verdict: 1}


@pytest.mark.strangers
def test_a_crash_costs_its_own_case_and_no_other_of_the_batch(worker, inputs):
    order = ["right", "aborts", "bad-row", "oracle-aborts", "hangs", "refuses", "right"]
    report = run(worker, *(inputs[way] for way in order))
    assert report.verdicts == {"equal": 2, "bad rows": 1, "refused": 1, "finding": 3}
    assert [Path(finding.case.partition(" ")[2]).name for finding in report.findings] == [
        "aborts@1",
        "oracle-aborts@1",
        "hangs@1",
    ]
    assert report.num_oracle_crashes == 1


@pytest.mark.strangers
def test_a_target_that_cannot_make_its_input_is_not_taken_for_a_broken_reader(worker, tmp_path):
    unknown = tmp_path / "no-such-seed@1"
    unknown.write_bytes(b"")
    with pytest.raises(BrokenTargetError, match="does not begin with the name of a seed"):
        run(worker, unknown)


def digests() -> dict[str, list[str]]:
    """Of the first cases of every target."""
    targets = {name: target_named(name) for name in TARGETS}
    return {name: [case_of(target, 5, number).file_name for number in range(40)] for name, target in targets.items()}


@pytest.mark.strangers
def test_cases_depend_on_nothing_but_their_numbers_and_are_the_same_in_another_process():
    found = digests()
    program = "import json; from tests.fuzz.test_harness import digests; print(json.dumps(digests()))"
    elsewhere = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    assert json.loads(elsewhere.stdout) == found
    for name, cases in found.items():
        assert len(set(cases)) > 30, f"cases of {name} differ from one another"
        assert not any("/" in case or case.count("@") != 1 for case in cases), "they are names of files"


@pytest.mark.strangers
def test_the_program_tells_what_broke_and_how_to_see_it_again(inputs, capsys):
    assert main(["--target", BROKEN, "--input", str(inputs["raises"])]) == 1
    told = capsys.readouterr().out
    assert "ValueError: " in told
    assert f"again: python -m tests.fuzz --target {BROKEN} --input {inputs['raises']}" in told
    assert "not one of ours" in told
    assert main(["--target", BROKEN, "--input", str(inputs["right"])]) == 0


@pytest.mark.strangers
def test_the_input_of_a_finding_is_saved_and_breaks_again(tmp_path, capsys):
    assert main(["--target", BROKEN, "--cases", "6", "--seed", "3", "--save", str(tmp_path / "found"), "--limit", "2"]) == 1
    saved = sorted((tmp_path / "found").rglob("*@*"))
    assert saved
    capsys.readouterr()
    for path in saved:
        assert main(["--target", BROKEN, "--input", str(path), "--limit", "2"]) == 1
