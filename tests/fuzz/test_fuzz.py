"""Some hundred damaged inputs for every reader, the same ones every time, and the inputs that once broke one.

`python -m tests.fuzz` runs more of them, for as long as it is told.
"""

from pathlib import Path

import pytest
from PIL import features

import overlord as ol
from tests.fuzz.lake import LIBRARIES, is_installed
from tests.fuzz.runner import Report, Worker, fuzz
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
NUM_CASES = {
    "parquet": 160,
    "arrow": 200,
    "jsonl": 160,
    "tar": 220,
    "images": 260,
    "states": 60,
    "wire": 90,
    "plan_logs": 60,
    "megatron": 200,
    "mds": 160,
    "litdata": 160,
    "prepared": 160,
    "text": 200,
    "iceberg": 120,
    "delta": 120,
    "lance": 120,
    "huggingface": 160,
    "energon": 160,
    "iterated": 160,
}
"""About a second each."""


TARGET_OF = {
    "Csv": "text",
    "Delta": "delta",
    "HuggingFaceFiles": "huggingface",
    "Iceberg": "iceberg",
    "Iterated": "iterated",
    "Lance": "lance",
    "LitData": "litdata",
    "Mds": "mds",
    "MegatronBin": "megatron",
    "TextLines": "text",
}
READ_BY_OTHERS = {"HuggingFace", "MapDataset"}
"""Sources of objects in memory: they read no files."""


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


def run_cases(worker: Worker, name: str, cases: list[str]) -> Report:
    """In a process of its own where a library keeps threads: their stacks count against the limit on memory."""
    if name not in LIBRARIES:
        return fuzz(worker, name, cases)
    with Worker() as own:
        return fuzz(own, name, cases)


def check(report: Report) -> None:
    told = [
        f"{cause} ({len(findings)} times): {findings[0].command}\n{findings[0].detail[-1500:]}"
        for cause, findings in report.causes().items()
    ]
    assert not told, "\n\n".join(told)


def test_every_format_has_a_target_and_every_target_is_run():
    sources = {
        name
        for name in ol.formats.__all__
        if isinstance(found := getattr(ol.formats, name), type) and issubclass(found, ol.Source)
    }
    assert sources == TARGET_OF.keys() | READ_BY_OTHERS
    assert set(TARGET_OF.values()) <= set(TARGETS)
    assert set(TARGETS) == set(NUM_CASES)


@pytest.mark.strangers
@pytest.mark.parametrize("name", NUM_CASES)
def test_damaged_inputs_give_what_the_oracle_gives_or_a_clear_error(worker, name):
    if not is_installed(name):
        pytest.skip("make test-formats runs this")
    report = run_cases(worker, name, [f"0 {number}" for number in range(NUM_CASES[name])])
    assert report.num_cases == NUM_CASES[name]
    assert report.verdicts["equal"] + report.verdicts["bad rows"] > 5, "some damage must be harmless, or nothing is read"
    check(report)


@pytest.mark.strangers
@pytest.mark.parametrize("name", NUM_CASES)
def test_inputs_that_once_broke_a_reader_no_longer_do(worker, name):
    if not is_installed(name):
        pytest.skip("make test-formats runs this")
    saved = sorted((CORPUS / name).glob("*@*"))
    if name == "images" and "avif" not in features.get_supported():
        saved = [path for path in saved if not path.name.startswith("avif@")]
        if not saved:
            pytest.skip("this Pillow reads no AVIF")
    report = run_cases(worker, name, [f"file {path}" for path in saved])
    assert report.num_cases > 0
    check(report)
