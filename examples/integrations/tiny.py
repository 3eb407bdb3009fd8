"""What the examples for training frameworks share: documents, a job, a model, and a journal of what was trained on.

Each example trains up to a step, from the checkpoint in its folder if there is one, and prints the losses:

torchrun --nproc-per-node 2 examples/integrations/on_accelerate.py --folder run --until 10
torchrun --nproc-per-node 2 examples/integrations/on_accelerate.py --folder run --until 15
"""

import argparse
import atexit
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import overlord as ol

VOCABULARY, LONGEST = 64, 64
LEARNING_RATE = 0.5  # of SGD: unlike Adam it shows when gradients are scaled wrongly


parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint and the journal")
parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of the documents, made if it is missing")
parser.add_argument("--until", type=int, default=10, help="the step to train up to")


@atexit.register
def leave_process_group() -> None:
    """A thread of gloo that still holds a tensor when the interpreter ends makes torch abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    torch.set_num_threads(1)  # the model is too small to share
    torch.manual_seed(0)
    found = parser.parse_args()
    for folder in (found.folder, found.data):
        folder.mkdir(parents=True, exist_ok=True)
    return found


def declare(folder: Path) -> ol.Job:
    """A step is 512 tokens whatever the number of ranks: 4 microbatches of 128 in all."""
    for name, seed in (("web", 1), ("code", 2)):
        path = folder / f"{name}.parquet"
        if not path.exists():
            _write_documents(path, seed)
    return ol.Job(
        sources={name: ol.Parquet(f"{folder}/{name}.parquet") for name in ("web", "code")},
        mixture=ol.Mixture({"web": 3, "code": 1}, unit="tokens"),
        batch=ol.Batch(tokens=512, sequence_length=LONGEST, micro_tokens=128),
    )


def declare_prompts(folder: Path) -> ol.Job:
    """8 prompts a step whatever the number of ranks, with the columns that verl reads."""
    path = folder / "prompts.parquet"
    if not path.exists():
        rng = np.random.default_rng(3)
        prompts = [rng.integers(1, VOCABULARY, rng.integers(3, 12)).tolist() for _ in range(200)]
        columns = {
            "tokens": pa.array(prompts, pa.list_(pa.int32())),
            "raw_prompt": [[{"role": "user", "content": " ".join(map(str, prompt))}] for prompt in prompts],
            "data_source": ["last-token"] * len(prompts),
            "reward_model": [{"style": "rule", "ground_truth": str(prompt[-1])} for prompt in prompts],
        }
        _write(path, pa.table(columns))
    names = ("raw_prompt", "data_source", "reward_model")
    return ol.Job(sources={"prompts": ol.Parquet(str(path))}, batch=ol.Batch(samples=8, sequence_length=16, columns=names))


def microbatches_per_rank() -> int:
    return 4 // int(os.environ.get("WORLD_SIZE", "1"))


def _write_documents(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [np.cumsum(rng.integers(1, 4, rng.integers(8, LONGEST))) % (VOCABULARY - 1) + 1 for _ in range(400)]
    documents = pa.array([each.astype(np.int32) for each in steps], pa.list_(pa.int32()))
    _write(path, pa.table({"tokens": documents}))


def _write(path: Path, table: pa.Table) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    pq.write_table(table, temporary, row_group_size=50)
    temporary.rename(path)  # several ranks may write it


class TinyModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of all tokens."""
        tokens, position_ids, labels = tokens.flatten(), position_ids.flatten(), labels.flatten()
        document = (position_ids == 0).cumsum(0)
        mask = (document[:, None] == document[None, :]).tril()
        x = self.tokens(tokens) + self.positions(position_ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0])
        return F.cross_entropy(self.head(x), labels, ignore_index=-100, reduction="sum")


class Journal:
    """Writes down the documents that a rank's model was given, and the losses, as a test reads them."""

    def __init__(self, folder: Path, until: int) -> None:
        self._path = folder / f"journal-{until}-of-{os.environ.get('WORLD_SIZE', '1')}-{os.environ.get('RANK', '0')}.json"
        self._rows: list[list[int]] = []

    def note(self, tokens: Tensor, position_ids: Tensor) -> None:
        """The documents of a microbatch, each as a checksum."""
        flat, starts = tokens.flatten(), (position_ids.flatten() == 0).nonzero().flatten().tolist()
        documents = flat.to(torch.int32).tensor_split(starts[1:])
        self._rows.append([zlib.crc32(each.numpy().tobytes()) for each in documents if each.any()])

    def watch(self, model: nn.Module, tokens: str = "tokens") -> None:
        """Note all batches on which the model is trained."""

        def hook(module: nn.Module, _: Any, named: dict[str, Any]) -> None:
            if module.training:
                self.note(named[tokens], named["position_ids"])

        model.register_forward_pre_hook(hook, with_kwargs=True)

    def write(self, losses: list[float], model: nn.Module, *, is_partial: bool = False) -> None:
        """`is_partial`: the losses are of this rank's tokens, and their sum over ranks is the loss of the step."""
        if is_partial and dist.is_initialized():
            total = torch.tensor(losses, dtype=torch.float64)
            dist.all_reduce(total)
            losses = total.tolist()
        torch.save(flat_weights(model), self._path.with_suffix(".pt"))
        self._path.write_text(json.dumps({"losses": losses, "rows": self._rows}))
        if os.environ.get("RANK", "0") == "0":
            print("losses", *(f"{loss:.4f}" for loss in losses))


def flat_weights(model: nn.Module) -> Tensor:
    """All weights of a model in one row, whole also where FSDP has cut them."""
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([each.detach().float().flatten() for each in whole])
