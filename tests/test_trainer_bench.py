"""The benchmark with trainers in their own processes: what it counts, and that it leaves nothing running."""

import subprocess
import sys

import numpy as np
import pytest

from bench.measure import ROOT
from bench.trainer_process import Taking, touched

LEAVES_CHILDREN = """
import os, subprocess, sys
from bench.process_tree import adopt_orphans, end_below, tree
adopt_orphans()
sleep = "import time; time.sleep(60)"
parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
for _ in range(2):
    child = subprocess.Popen([sys.executable, "-c", parent])
while len(tree(os.getpid())) < 5:
    pass
child.kill()
child.wait()
print(end_below(os.getpid(), grace_s=2.0), len(tree(os.getpid())) - 1)
"""


def test_a_step_that_crosses_a_border_of_the_window_counts_by_its_share():
    taking = Taking(iter(()), "text")
    taking.times, taking.totals = [0.0, 1.0, 3.0, 5.0], [100, 200, 300, 400]
    found = taking.window(2.0, 4.0)
    assert found["units"] == pytest.approx(100)
    assert found["steps"] == 1


def test_touching_reads_every_field_and_tells_batches_apart():
    batch = {"tokens": np.arange(65_536, dtype=np.int32), "loss_mask": np.ones(65_536, np.bool_)}
    other = batch | {"tokens": batch["tokens"] + 1}
    assert touched(batch, ("tokens", "loss_mask")) != touched(other, ("tokens", "loss_mask"))
    with pytest.raises(KeyError):
        touched(batch, ("tokens", "labels"))


def test_everything_below_a_process_is_ended_orphans_included():
    done = subprocess.run([sys.executable, "-c", LEAVES_CHILDREN], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.split() == ["3", "0"], done.stderr
