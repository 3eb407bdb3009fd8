"""The README's way from a torch DataLoader, as it stands there, in the processes that torchrun starts."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import ROOT, environment

BEFORE = """
import json, os, pathlib
import torch

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
paths, saved, rank, seen, norms = "data/*.parquet", None, int(os.environ["RANK"]), [], []

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, 1)
        torch.nn.init.ones_(self.table.weight)

    def forward(self, tokens, labels):
        seen.extend(tokens[tokens > 0].tolist())
        return self.table(tokens.long())[..., 0] * (labels != -100)

net = Net()
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
optimizer.register_step_pre_hook(lambda *_: norms.append(float(net.table.weight.grad.sum())))
optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())

def save(state, name):
    pathlib.Path(f"{rank}-{name}").write_text(json.dumps(state))

"""

AFTER = """
pathlib.Path(f"{rank}.json").write_text(json.dumps(seen))
pathlib.Path(f"{rank}-norms.json").write_text(json.dumps(norms))
torch.distributed.destroy_process_group()
"""


def _pasted() -> str:
    """The script after the diff was applied."""
    section = (ROOT / "README.md").read_text("utf-8").partition("## Instead of a torch DataLoader")[2]
    lines = section.partition("```diff\n")[2].partition("```")[0].splitlines()
    script = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert "pin_memory=True" in script
    return script.replace(", pin_memory=True", "").replace("524_288", "16_384")  # there is no GPU here, and little data


def _write_documents(folder: Path) -> list[int]:
    """Documents of one token value each, several steps of them; returns every token."""
    (folder / "data").mkdir()
    lengths = {number: 100 + number * 37 % 900 for number in range(1, 161)}
    for part in range(4):
        documents = [[number] * length for number, length in lengths.items() if number % 4 == part]
        table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))})
        pq.write_table(table, folder / "data" / f"{part}.parquet", row_group_size=10)
    return sorted(number for number, length in lengths.items() for _ in range(length))


@pytest.mark.second_try(reason="torchrun and its ranks must end within 200 s")
@pytest.mark.strangers
def test_the_diff_of_the_readme_trains_with_ddp_under_torchrun_on_every_document_once_and_ends(tmp_path):
    expected = _write_documents(tmp_path)
    (tmp_path / "train.py").write_text(BEFORE + _pasted() + AFTER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment(), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    left, right = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert left
    assert right
    assert sorted(left + right) == expected
    states = [json.loads((tmp_path / f"{rank}-data.json").read_text()) for rank in range(2)]
    assert states[0] == states[1]
    assert states[0]["step"] > 3
    assert "Exception" not in run.stderr
    for rank in range(2):  # every label counts 1 over the step's loss tokens; DDP averages over 2 ranks
        norms = json.loads((tmp_path / f"{rank}-norms.json").read_text())
        assert norms == pytest.approx([0.5] * len(norms), rel=1e-4)
