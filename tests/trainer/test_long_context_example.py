"""The example of hybrid data parallelism, as torchrun runs it, has the losses and gradients of plain data parallelism."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT

pytestmark = pytest.mark.timeout(400)  # up to six processes import torch

STEPS, CUT = 8, 2


def _command(num_ranks: int, *args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(ROOT / "examples" / "long_context_llama.py"), "--double", *args]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return {"args": command, "text": True, "env": environment}


def _run(num_ranks: int, *args: str) -> list[dict[str, Any]]:
    done = subprocess.run(**_command(num_ranks, *args), capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return _run(1, "--plain", "--steps", str(STEPS))


def _run_until_killed(num_ranks: int, *args: str) -> tuple[list[dict[str, Any]], str]:
    """Kill the last rank after some steps. Returns the lines of these, and what was said on standard error."""
    with subprocess.Popen(**_command(num_ranks, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        lines = [json.loads(run.stdout.readline()) for _ in range(CUT)]
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(ranks[num_ranks - 1]), signal.SIGKILL)
        _, said = run.communicate(timeout=100)
    assert run.returncode != 0
    return lines, said


def _compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        # Rounding errors of the first steps grow through the optimizer.
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-7)


@pytest.mark.second_try(reason="a rank must be killed before its run ends")
def test_losses_and_gradients_are_those_of_plain_data_parallelism_also_when_killed_and_resumed_on_other_ranks(
    plain, tmp_path: Path
):
    kept = ["--corpus", str(tmp_path / "new" / "corpus"), "--checkpoint", str(tmp_path / "checkpoint.pt")]
    found, said = _run_until_killed(4, "--steps", str(STEPS), "--save-every", "1", *kept)
    _compare(found, plain[:CUT])
    assert "SIGKILL" in said
    assert "rank      : 3" in said
    resumed = _run(2, "--steps", str(STEPS), *kept)
    assert resumed[0]["step"] in range(CUT - 1, STEPS)
    _compare(resumed, plain[resumed[0]["step"] :])
    assert resumed[-1]["loss"] < found[0]["loss"]
    assert any(line["largest_ring"] > 1 for line in found + resumed), "some documents should be cut over ranks"
    assert any(line["most_moved"] > 0 for line in found + resumed), "some activations should be moved to the host"


def test_weights_sharded_by_fsdp_give_the_same_losses_also_when_resumed_on_other_ranks(plain, tmp_path: Path):
    kept = ["--fsdp", "--corpus", str(tmp_path), "--checkpoint", str(tmp_path / "checkpoint.pt")]
    found = _run(3, "--steps", str(CUT), *kept)
    _compare(found, plain[:CUT])
    resumed = _run(2, "--steps", str(CUT + 1), *kept)
    _compare(resumed, plain[CUT : CUT + 1])
    assert any(line["largest_ring"] > 1 for line in found + resumed), "some documents should be cut over ranks"
