"""What a script that reads a run says when it ends: nothing of its own, however it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment
from tests.service.test_serve import Serving

pytestmark = pytest.mark.strangers

HELD = "sys.held = list(sys.modules.values())"
"""What compiled extensions do: they keep modules alive, whose names are then set to None before all arrays are gone."""

JOB = """
import sys
import overlord as ol
from tests.small_sources import Numbered, job_of

def same(table):
    return table

job = job_of({{"a": Numbered(rows=400, first=1, transform={transform})}}, ol.Batch(tokens=4096, sequence_length=64))
"""

LOOP = """
loader = ol.start(job)
for step in loader.client(0, torch={torch}):
    tokens = [micro["tokens"] for micro in step]
    if step.number == 3:
        {end}
"""

IN_A_BLOCK = """
with ol.start(job) as loader:
    for step in loader.client(0, torch={torch}):
        tokens = [micro["tokens"] for micro in step]
        if step.number == 3:
            {end}
"""

PREFETCHING = """
loader = ol.start(job)
for step in loader.client(0, torch={torch}, fetch_ahead=2):
    tokens = [micro["tokens"] for micro in step]
    if step.number == 3:
        {end}
"""

CONNECTED = """
client = ol.connect(sys.argv[1], rank=0, torch={torch}, timeout_s=60)
for step in client:
    tokens = [micro["tokens"] for micro in step]
    if step.number == 3:
        {end}
"""

ENDS = {"break": 0, "sys.exit(3)": 3, "raise RuntimeError('enough')": 1}


def _errors_of(folder: Path, text: str, *arguments: str, expect: int) -> str:
    path = folder / "script.py"
    path.write_text(text)
    run = subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True, timeout=100, env=environment(), cwd=folder
    )
    assert run.returncode == expect, run.stdout + run.stderr
    assert run.stdout == ""
    return run.stderr


def _script(body: str, torch: bool, end: str, transform: str = "()") -> str:
    text = JOB.format(transform=transform) + HELD + body.format(torch=torch, end=end)
    return text.replace("import sys\n", "import sys\nimport torch\n", 1) if torch else text


def _assert_silent(errors: str, end: str) -> None:
    if "raise" in end:
        assert errors.startswith("Traceback (most recent call last):\n")
        assert errors.endswith("RuntimeError: enough\n")
        assert errors.count("Traceback") == 1
        assert "Exception ignored" not in errors
    else:
        assert errors == ""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("body", [LOOP, IN_A_BLOCK, PREFETCHING], ids=["a loop of the module", "a with block", "a thread"])
def test_a_script_that_reads_arrays_ends_without_a_word(tmp_path, body, end):
    _assert_silent(_errors_of(tmp_path, _script(body, False, end), expect=ENDS[end]), end)


@pytest.mark.parametrize("end", ["break", "raise RuntimeError('enough')"])
def test_a_script_that_reads_tensors_ends_without_a_word(tmp_path, end):
    _assert_silent(_errors_of(tmp_path, _script(LOOP, True, end), expect=ENDS[end]), end)


@pytest.mark.parametrize("end", ENDS)
def test_a_script_with_worker_processes_ends_without_a_word(tmp_path, end):
    script = _script(LOOP, False, end, "ol.InProcesses(same)")
    _assert_silent(_errors_of(tmp_path, script, expect=ENDS[end]), end)


@pytest.mark.parametrize("end", ENDS)
def test_a_trainer_that_is_connected_to_a_service_ends_without_a_word(tmp_path, end):
    job = tmp_path / "served_job.py"
    job.write_text(JOB.format(transform="()"))
    script = "import sys\nimport overlord as ol\n" + HELD + CONNECTED.format(torch=True, end=end)
    with Serving(job) as serving:
        _assert_silent(_errors_of(tmp_path, script, serving.told["address"], expect=ENDS[end]), end)
