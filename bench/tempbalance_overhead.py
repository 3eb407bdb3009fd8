"""What TempBalance costs: training time of a RoBERTa-base-sized model with and without it, at the authors' interval.

    python -m bench.tempbalance_overhead --device cuda --batch 32 --precision float32

Rounds with and without alternate, so that a machine that slows down slows both. `update` is one computation of all alphas;
`authors' way` is one singular value decomposition per matrix, as in the published code.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from overlord.trainer import TempBalance

_HIDDEN, _FEEDFORWARD, _BLOCKS, _HEADS = 768, 3072, 12, 12
_VOCABULARY, _POSITIONS = 50265, 514


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(_HIDDEN, _HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(_HIDDEN, _FEEDFORWARD), nn.Linear(_FEEDFORWARD, _HIDDEN)
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(_HIDDEN), nn.LayerNorm(_HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (_HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm_attention(x + self.output(mixed))
        return self.norm_feedforward(x + self.down(nn.functional.gelu(self.up(x))))


class RobertaBaseShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(_VOCABULARY, _HIDDEN), nn.Embedding(_POSITIONS, _HIDDEN)
        self.norm = nn.LayerNorm(_HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.head = nn.Sequential(nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class Run:
    """Training with synthetic tokens; their content does not change the time."""

    def __init__(self, device: str, batch: int, length: int, precision: torch.dtype, fused: bool) -> None:
        torch.manual_seed(0)
        self.device, self.precision = device, precision
        self.model = RobertaBaseShape().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, weight_decay=0.1, fused=fused or None)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 1000))
        self.tokens = torch.randint(0, _VOCABULARY, (batch, length), device=device)
        self.labels = torch.randint(0, 2, (batch,), device=device)

    def steps(self, count: int) -> None:
        for _ in range(count):
            with torch.autocast(self.device, self.precision, enabled=self.precision != torch.float32):
                logits = self.model(self.tokens)
            nn.functional.cross_entropy(logits.float(), self.labels).backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def timed(self, work: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def authors_way(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            eigenvalues = torch.linalg.svdvals(module.weight.detach()).square().sort().values
            tail = eigenvalues[len(eigenvalues) // 2 :].log()
            (1 + len(tail) / (tail.sum() - len(tail) * tail[0])).item()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tempbalance_overhead", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fused", action="store_true", help="the fused AdamW")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    run = Run(given.device, given.batch, given.length, getattr(torch, given.precision), given.fused)
    run.steps(3)
    before = torch.cuda.memory_allocated() if given.device == "cuda" else 0
    first = TempBalance(run.optimizer, run.model, interval=given.interval)
    started = run.timed(first.update)
    kept = torch.cuda.memory_allocated() - before if given.device == "cuda" else 0
    first.close()
    without, balanced, update, steps, again = [], [], [], given.interval, first
    for _ in range(given.rounds):
        without.append(run.timed(lambda: run.steps(steps)))
        again = TempBalance(run.optimizer, run.model, interval=given.interval)
        again._solver = first._solver  # keep what was recorded: a training run records once
        balanced.append(run.timed(lambda: run.steps(steps)))
        update.append(run.timed(again.update))
        again.close()
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    base, with_it = statistics.median(without), statistics.median(balanced)
    print(f"{name}, torch {torch.__version__}, {given.precision}, batch {given.batch} x {given.length}")
    print(f"{steps} steps without        {base:8.3f} s   {[round(s, 3) for s in without]}")
    print(f"{steps} steps with, 1 update {with_it:8.3f} s   {[round(s, 3) for s in balanced]}")
    print(f"overhead                 {100 * (with_it / base - 1):8.2f} %")
    print(f"update                   {1e3 * statistics.median(update):8.1f} ms (the first: {1e3 * started:.0f} ms)")
    print(f"authors' way             {1e3 * run.timed(lambda: authors_way(run.model)):8.1f} ms")
    if given.device == "cuda":
        print(f"GPU memory it keeps      {kept / 2**20:8.0f} MiB")
    print(again.explain())


if __name__ == "__main__":
    main()
