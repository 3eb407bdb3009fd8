"""Fine-tune a small transformer on little data, with and without TempBalance, and print what came of it.

The task: from 128 bytes of Python's own standard library, say which package they come from. Test snippets come from other
files than training snippets. A byte-level transformer is first trained to predict the next byte of the snippets, then
fine-tuned as a classifier on 1 %, 5 % and 100 % of them. All data is read through Overlord. Needs
overlord-dataloader[torch].

    python examples/low_data_finetune.py            minutes on one core
    python examples/low_data_finetune.py --quick    seconds: shows that it runs, its numbers mean nothing
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import overlord as ol
from overlord.trainer import Linear, Sigmoid, TempBalance, usual_interval

Floats = NDArray[np.float64]
Mapping = Callable[[Floats], Floats]

PACKAGES = ("asyncio", "ctypes", "email", "idlelib", "multiprocessing", "tkinter", "unittest", "xml")
LENGTH, WIDTH, BLOCKS, HEADS = 128, 64, 4, 4
WARM_UP = 0.06


@dataclass(frozen=True)
class Plan:
    train_per_package: int = 500
    test_per_package: int = 60
    pretrain_steps: int = 400
    steps: tuple[tuple[float, int], ...] = ((0.01, 60), (0.05, 120), (1.0, 250))
    """Fraction of the data, and optimizer steps to fine-tune on it."""
    seeds: int = 5
    batch: int = 16

    def num_snippets(self, fraction: float) -> int:
        return len(PACKAGES) * max(1, round(fraction * self.train_per_package))


QUICK = Plan(40, 4, 2, ((0.1, 2), (1.0, 2)), seeds=2)


def snippets(package: str, for_test: bool) -> list[str]:
    """The package's source, cut into pieces. A file is for testing or for training as a whole."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / package
    found = []
    for file in sorted(folder.rglob("*.py")):
        if (zlib.crc32(file.name.encode()) % 4 == 0) == for_test:
            text = file.read_text(encoding="utf-8", errors="ignore")
            found += [text[at : at + LENGTH] for at in range(0, len(text) - LENGTH, LENGTH)]
    return found


def write_data(folder: Path, plan: Plan) -> None:
    """One Parquet file per share of the data, equally many snippets of each package in all of them."""
    random = np.random.default_rng(0)

    def drawn(for_test: bool, count: int) -> list[list[str]]:
        pools = [snippets(package, for_test) for package in PACKAGES]
        return [[pool[i] for i in random.permutation(len(pool))[:count]] for pool in pools]

    def write(name: str, by_package: list[list[str]]) -> None:
        rows = [(text, label) for label, texts in enumerate(by_package) for text in texts]
        order = random.permutation(len(rows))
        table = pa.table({"text": [rows[i][0] for i in order], "label": [rows[i][1] for i in order]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)

    train = drawn(False, plan.train_per_package)
    write("test", drawn(True, plan.test_per_package))
    for fraction, _ in plan.steps:
        write(f"train-{fraction}", [texts[: max(1, round(fraction * len(texts)))] for texts in train])


def batches(file: Path, batch: int, seed: int = 0, repeat: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """(bytes [batch, LENGTH], labels [batch]) from Overlord."""
    tokenize = ol.Tokenize(encoding=ol.ByteTokenizer(), keep=("label",))
    job = ol.Job(
        sources={"snippets": ol.Parquet(str(file), transform=tokenize, repeat=repeat, window=20)},
        batch=ol.Batch(
            samples=batch, sequence_length=LENGTH, layout="padded", long_documents="truncate", columns=("label",)
        ),
        seed=seed,
        num_workers=1,
    )
    with ol.start(job) as loader:
        for step in loader.client(0, torch=True):
            tokens = nn.functional.pad(step["tokens"], (0, LENGTH - step["tokens"].shape[1]))
            rows = step["document_starts"] // step["tokens"].shape[1]  # the last step of an epoch has rows without any
            yield tokens[rows].long(), torch.tensor(step["label"].to_pylist())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        q, k, v = (layer(normed).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.norm_feedforward(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.next_byte = nn.Linear(WIDTH, 256)
        self.package = nn.Linear(WIDTH, len(PACKAGES))

    def features(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def language_loss(self, tokens: Tensor, _: Tensor) -> Tensor:
        logits = self.next_byte(self.features(tokens)[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def class_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.package(self.features(tokens).mean(1)), labels)


def train(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
) -> None:
    """Warm up, then decay to zero in a straight line."""
    warm_up = max(1, round(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
    )
    for _ in range(steps):
        loss_of(*next(data)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: Model, file: Path) -> float:
    right = total = 0
    for tokens, labels in batches(file, 64, repeat=False):
        right += int((model.package(model.features(tokens).mean(1)).argmax(1) == labels).sum())
        total += len(labels)
    return 100 * right / total


def fine_tuned(
    pretrained: Model, folder: Path, plan: Plan, share: tuple[float, int], *, mapping: Mapping | None, seed: int
) -> float:
    """Test accuracy after fine-tuning on a share of the data; without a mapping, without TempBalance."""
    fraction, steps = share
    torch.manual_seed(seed)
    model = copy.deepcopy(pretrained)
    model.package.reset_parameters()
    trained = [p for name, p in model.named_parameters() if not name.startswith("next_byte")]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    if mapping is not None:
        steps_per_epoch = plan.num_snippets(fraction) // plan.batch
        TempBalance(optimizer, model, mapping=mapping, interval=usual_interval(steps_per_epoch))
    data = batches(folder / f"train-{fraction}.parquet", plan.batch, seed)
    train(model.class_loss, optimizer, data, steps)
    return accuracy(model, folder / "test.parquet")


def pretrained_on(file: Path, plan: Plan) -> Model:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model.language_loss, optimizer, batches(file, plan.batch), plan.pretrain_steps)
    return model


def row(plan: Plan, fraction: float, found: dict[str, Floats]) -> str:
    cells = [f"{100 * fraction:>5g}%  {plan.num_snippets(fraction):>8}"]
    cells += [f"{each.mean():6.2f} ± {each.std(ddof=1):4.2f}" for each in found.values()]
    gains = [found[arm] - found["plain"] for arm in ("linear", "sigmoid")]
    cells += [f"{gain.mean():+7.2f} ± {gain.std(ddof=1) / len(gain) ** 0.5:4.2f}" for gain in gains]
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    plan = QUICK if parser.parse_args().quick else Plan()
    torch.set_num_threads(1)  # the model is too small to gain from more
    arms: dict[str, Mapping | None] = {"plain": None, "linear": Linear(), "sigmoid": Sigmoid()}
    print(f"test accuracy in %, mean ± standard deviation over {plan.seeds} seeds; chance is {100 / len(PACKAGES):.1f}")
    print("  data  snippets          plain         linear        sigmoid  linear - plain  sigmoid - plain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, plan)
        pretrained = pretrained_on(folder / f"train-{plan.steps[-1][0]}.parquet", plan)
        for share in plan.steps:
            found = {
                arm: np.array(
                    [fine_tuned(pretrained, folder, plan, share, mapping=mapping, seed=seed) for seed in range(plan.seeds)]
                )
                for arm, mapping in arms.items()
            }
            print(row(plan, share[0], found), flush=True)
    print("the last two: mean gain ± standard error, seed by seed; with so few seeds, below three errors it is no gain")


if __name__ == "__main__":
    main()
