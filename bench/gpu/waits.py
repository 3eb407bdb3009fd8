"""How long a GPU that trains on pictures waits for them: a real job, decoded on this machine, copied ahead to the GPU.

    python -m bench.gpu.waits [--step-ms 50] [--steps 200] [--data FOLDER] [--device cuda] [--no-torch]

One trainer takes batches of 64 pictures of 336 x 336 from `overlord serve` with `device="cuda"`, reads every byte of them on
the GPU, and multiplies matrices there until a step has taken `--step-ms`. What `next` takes, and what the GPU then waits for
the copy, is told as a share of all time. torch's DataLoader does the same with pinned memory and a copy that does not block.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import overlord as ol
from bench import corpus
from bench.peers import torch_loader
from bench.process_tree import die_with_parent
from bench.run_one import Work
from bench.run_trainers import _JOB

_WARMUP = 10
_SIDE = 4096


class Step:
    """Work on the device that takes a given time, after it has read a batch."""

    def __init__(self, device: str, step_s: float) -> None:
        self._device = device
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        self._matrix = torch.randn(_SIDE if device == "cuda" else 256, _SIDE if device == "cuda" else 256, device=device).to(
            kind
        )
        self._times = 1
        self._multiply(20)
        took = self._multiply(100) / 100
        self._times = max(1, round(step_s / took))

    def _multiply(self, times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            _ = self._matrix @ self._matrix
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def run(self, images: torch.Tensor) -> float:
        """Train on a batch, as far as time is concerned; returns the sum of its bytes."""
        total = images.sum(dtype=torch.float32)
        for _ in range(self._times):
            _ = self._matrix @ self._matrix
        return float(total)  # waits, as a loss that is logged does


def measure(batches: Iterator[torch.Tensor], step: Step, steps: int) -> dict[str, float]:
    waits, begun = [], 0.0
    for number in range(_WARMUP + steps):
        asked = time.perf_counter()
        if number == _WARMUP:
            begun = asked
        images = next(batches)
        if number >= _WARMUP:
            waits.append(time.perf_counter() - asked)
        step.run(images)
    total = time.perf_counter() - begun
    p50, p99 = np.percentile(waits, [50, 99])
    return {"share": sum(waits) / total, "step_ms": 1e3 * total / steps, "p50_us": 1e6 * p50, "p99_us": 1e6 * p99}


def of_overlord(work: Work, device: str, folder: Path) -> tuple[Iterator[torch.Tensor], Callable[[], None]]:
    (folder / "job.py").write_text(
        f"from bench import corpus\ncorpus.keep_in({str(corpus.DATA)!r})\n" + _JOB.format(work=asdict(work))
    )
    command = [sys.executable, "-W", "ignore", "-m", "overlord", "serve", str(folder / "job.py"), "--address", "127.0.0.1:0"]
    serve = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    assert serve.stdout is not None
    address = next(word for line in serve.stdout for word in line.split() if word.startswith("grpc"))
    client = ol.connect(address.rstrip(".,;"), rank=0, torch=True, device=device)

    def end() -> None:
        client.close()
        serve.terminate()
        serve.wait(30)

    return (micro["images"] for step in client for micro in step), end


def of_torch(work: Work, device: str) -> Iterator[torch.Tensor]:
    for batch in torch_loader.images(work, 0):
        images = batch["images"]
        yield images.pin_memory().to(device, non_blocking=True) if device == "cuda" else images


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-torch", action="store_true")
    given = parser.parse_args(argv)
    if given.data:
        corpus.keep_in(given.data)
    corpus.IMAGES.make()
    step = Step(given.device, given.step_ms / 1e3)
    work = Work("images", 1, 1, 0.0, 0, 0, {})

    def show(name: str, found: dict[str, float]) -> None:
        print(
            f"{name:<10} steps of {found['step_ms']:.1f} ms, {found['share']:.2%} of the time waits for data; "
            f"a next takes {found['p50_us']:,.0f} us, p99 {found['p99_us']:,.0f}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        batches, end = of_overlord(work, given.device, Path(folder))
        show("overlord", measure(batches, step, given.steps))
        end()
    if not given.no_torch:
        workers: dict[str, Any] = {"workers": len(os.sched_getaffinity(0))}
        show("torch", measure(of_torch(Work("images", 1, 1, 0.0, 0, 0, workers), given.device), step, given.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
