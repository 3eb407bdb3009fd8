"""The demo on few steps, and its proof that a resumed stream went on: it must be able to fail."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import overlord as ol
from overlord.demo.stream import first_difference, step_record
from overlord.service.dry_run import StepParts, read_steps
from tests.commands import environment, python
from tests.small_sources import Numbered, job_of

PAD = -1
MODULES_NOT_IN_CORE = ("torch", "tiktoken", "tokenizers", "zstandard", "obstore")


def test_a_short_demo_resumes_exactly_realises_its_mix_and_balances(tmp_path):
    """In one test, because making the corpus takes longest. What is no core dependency cannot be imported in it."""
    without = f"import sys; sys.modules.update(dict.fromkeys({MODULES_NOT_IN_CORE!r})); from overlord.cli import main; "
    arguments = ["demo", "--steps", "12", "--json", "--dir", str(tmp_path)]
    result = json.loads(python("-c", without + f"sys.exit(main({arguments!r}))").stdout)
    _check_resume(result)
    _check_mix(result)
    _check_straggler(result["straggler"])
    assert {path.suffix for path in tmp_path.glob("*/*")} == {".parquet", ".zst", ".tar"}
    assert "is sound" in python("-m", "overlord", "check", tmp_path / "job.py").stdout


def _check_resume(result):
    resume = result["resume"]
    assert (resume["exact"], resume["difference"]) == (True, None)
    assert (resume["stopped_before"], resume["steps_compared"]) == (6, 12)
    first, second = result["legs"]
    assert (first["mesh"], second["mesh"]) == ("dp 2 x cp 2", "dp 4 x cp 1")
    assert first["tokens"] + second["tokens"] == result["uncut"]["tokens"] > 12 * 60_000
    assert first["images"] + second["images"] == result["uncut"]["images"] > 0


def _check_mix(result):
    mix = result["mix"]
    assert len(mix) == 5
    assert sum(share["realised"] for share in mix.values()) == pytest.approx(1)
    total, longest = sum(share["tokens"] for share in mix.values()), 4096
    assert all(abs(share["realised"] - share["asked"]) * total <= 2 * longest for share in mix.values())


def _check_straggler(straggler):
    assert straggler["longest"] > 100_000
    assert straggler["possible"] <= straggler["balanced"] < 1.05 * straggler["possible"]
    assert straggler["blindly"] > 1.1 * straggler["balanced"]


def test_without_a_folder_the_demo_prints_a_table_and_leaves_nothing_behind(tmp_path):
    told = python("-m", "overlord", "demo", "--steps", 4, TMPDIR=str(tmp_path)).stdout
    for line in ("tokens per second", "slowest rank, dealt blindly", "stopped and resumed", "What to try next"):
        assert line in told
    assert "\x1b" not in told
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stops_the_demo_and_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-u", "-m", "overlord", "demo"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(TMPDIR=str(tmp_path))) as run:
        assert run.stdout is not None
        run.stdout.readline()  # it says what it is about to do
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=30)
    assert (run.returncode, errors) == (130, "stopping (SIGINT); a second one ends the process at once\n")
    assert list(tmp_path.iterdir()) == []


def records_of(job: ol.Job, num_steps: int, tamper=lambda taken: taken) -> list:
    with ol.start(job) as loader:
        found = []
        for taken in read_steps(loader, num_steps=num_steps):
            planned = loader.plan(taken.number)
            assert planned is not None
            found.append(step_record(planned.plan.samples, tamper(taken), loader.tree, PAD))
        return found


def a_job(**fields) -> ol.Job:
    sources = {"a": Numbered(rows=40, first=1), "b": Numbered(rows=23, unit_rows=4, first=100, longest=16)}
    return job_of(sources, ol.Batch(tokens=64, sequence_length=16, pad_token=PAD), **fields)


def test_a_record_is_the_same_for_every_arrangement_of_a_step():
    alone = records_of(a_job(), 6)
    cost = ol.TransformerCost(per_token=1.0, per_length_squared=0.1)
    spread = records_of(a_job(mesh=ol.Mesh(dp=2, cp=3), strategy=ol.strategies.long_short(cost)), 6)
    assert first_difference(alone, spread) is None


def test_a_stream_with_other_samples_is_told_by_its_step():
    records = records_of(a_job(), 6)
    assert first_difference(records, records_of(a_job(seed=1), 6)) == "step 0 holds other samples"
    skipped = [*records[:3], *(replace(record, step=record.step - 1) for record in records[4:])]
    assert first_difference(records, skipped) == "step 3 holds other samples"
    assert first_difference(records, [*records[:3], *records[4:]]) == (
        "step 3 of the uncut run stands where the resumed run has step 4"
    )
    assert first_difference(records, records[:5]) == "the uncut run has 6 steps, the resumed one 5"


@pytest.mark.parametrize("field", ["tokens", "labels", "position_ids"])
def test_one_changed_number_in_one_batch_is_told_by_its_step(field):
    def tamper(taken: StepParts) -> StepParts:
        if taken.number == 4:
            micro = taken.parts[1].microbatches[0]
            changed = np.array(micro[field])
            changed[np.flatnonzero(micro["tokens"] != PAD)[0]] += 1
            micro[field] = changed
        return taken

    mesh = ol.Mesh(dp=2)
    difference = first_difference(records_of(a_job(mesh=mesh), 6), records_of(a_job(mesh=mesh), 6, tamper))
    assert difference == "step 4 holds the same samples with other tokens, labels, positions or images"
