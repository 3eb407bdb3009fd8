"""Runs the examples for frameworks as users do, and compares them with what one process computes without a framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import overlord as ol
from tests.commands import ROOT, environment

EXAMPLES = ROOT / "examples" / "integrations"
STOP, END = 10, 15
PATIENCE_S = 400
IS_THOROUGH = "OVERLORD_INTEGRATIONS" in os.environ  # `make test` saves the time of one run
CLOSE = 2e-5  # losses of floats that were added in another order, over fifteen steps
WEIGHTS_CLOSE = 1e-4  # single weights, which rounding moves more on some processors than on others


def import_tiny() -> Any:
    """The module that the examples share."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import tiny
    finally:
        sys.path.remove(str(EXAMPLES))
    return tiny


def run_example(name: str, data: Path, folder: Path, until: int, *more: object, ranks: int | None) -> str:
    """Run an example up to a step, on ranks of torchrun or (None) as a plain program; returns what it printed."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [sys.executable, *launcher, EXAMPLES / f"on_{name}.py", "--data", data, "--folder", folder, "--until", until]
    quiet = environment(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    run = subprocess.run(
        [str(each) for each in [*command, *more]], capture_output=True, text=True, timeout=PATIENCE_S, env=quiet
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return run.stdout + run.stderr


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank of an example wrote down: losses of steps, checksums of documents by microbatch, weights at the end."""

    losses: list[float]
    rows: list[list[int]]
    weights: torch.Tensor


def journals(folder: Path, until: int, ranks: int) -> list[Written]:
    found = []
    for rank in range(ranks):
        path = folder / f"journal-{until}-of-{ranks}-{rank}.json"
        found.append(Written(**json.loads(path.read_text()), weights=torch.load(path.with_suffix(".pt"))))
    return found


def rows_of(job: ol.Job, ranks: int) -> list[list[list[list[int]]]]:
    """The checksums of documents by rank, step and microbatch, from a run of one process that is never stopped."""
    tiny = import_tiny()
    found: list[list[list[list[int]]]] = [[] for _ in range(ranks)]
    with ol.start(job, world_size=ranks) as loader:
        clients = [loader.client(rank, torch=True, timeout_s=60) for rank in range(ranks)]
        for _ in range(END):
            for rank, client in enumerate(clients):
                journal = tiny.Journal(Path(), 0)
                for micro in next(client):
                    journal.note(micro["tokens"], micro["position_ids"])
                found[rank].append(journal._rows)
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """What training gives in one process without a framework: the loss of each step, and the weights before a step."""

    losses: list[float]
    weights: dict[int, torch.Tensor]


def train_alone(job: ol.Job, model: torch.nn.Module, loss_of: Callable[[Any], torch.Tensor]) -> Reference:
    """Train with plain SGD on the sum of token losses over the loss tokens of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=import_tiny().LEARNING_RATE)
    losses, weights = [], {}
    with ol.start(job) as loader:
        client = loader.client(0, torch=True, timeout_s=60)
        for number in range(1, END + 1):
            step, total = next(client), 0.0
            for micro in step:
                loss = loss_of(micro) / step.loss_tokens
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            weights[number] = import_tiny().flat_weights(model)
    return Reference(losses, weights)


def train_tiny(job: ol.Job) -> Reference:
    torch.manual_seed(0)
    model = import_tiny().TinyModel()
    return train_alone(job, model, lambda micro: model(micro["tokens"], micro["position_ids"], micro["labels"]))


def check_stop_and_resume(
    name: str,
    folder: Path,
    *more: object,
    reference: Callable[[ol.Job], Reference] | None,
    other_ranks: Literal["torchrun", "program"] | None = "torchrun",
    declare: Callable[[Path], ol.Job] | None = None,
    per: Literal["micro", "step"] = "micro",
) -> None:
    """An example on two ranks stops after ten steps and goes on in new processes, on two ranks and on one (of torchrun, or a
    program that nothing started).

    Rows, losses and weights are to the last bit those of two ranks that never stopped, and up to the order of additions
    those of one process: by `reference`, or, if it is None, of the example itself on one rank. With plain SGD, equal weights
    need equal gradients in every step. `per`: what the example notes at once.
    """
    data = folder / "data"
    data.mkdir()
    job = (declare or import_tiny().declare)(data)
    rows = rows_of(job, 2)
    two, one, whole = folder / "two", folder / "one", folder / "whole"
    run_example(name, data, two, STOP, *more, ranks=2)
    if other_ranks:
        subprocess.run(["cp", "-r", two, one], check=True)
    stopped = journals(two, STOP, 2)
    run_example(name, data, two, END, *more, ranks=2)
    resumed = journals(two, END, 2)
    for rank in range(2):
        assert stopped[rank].rows == _noted(rows[rank][:STOP], per)
        assert resumed[rank].rows == _noted(rows[rank][STOP:], per)
        assert torch.equal(resumed[rank].weights, resumed[0].weights)
    losses = stopped[0].losses[-STOP:] + resumed[0].losses[-(END - STOP) :]

    if IS_THOROUGH:
        run_example(name, data, whole, END, *more, ranks=2)
        unstopped = journals(whole, END, 2)[0]
        assert losses == unstopped.losses
        assert torch.equal(resumed[0].weights, unstopped.weights)

    if reference is None:
        run_example(name, data, folder / "reference", END, *more, ranks=1)
        found = journals(folder / "reference", END, 1)[0]
        expected = Reference(found.losses, {END: found.weights})
    else:
        expected = reference(job)
        assert_same_weights(stopped[0].weights, expected.weights[STOP])
    assert losses == pytest.approx(expected.losses, rel=CLOSE)
    assert_same_weights(resumed[0].weights, expected.weights[END])

    if other_ranks:
        run_example(name, data, one, END, *more, ranks=1 if other_ranks == "torchrun" else None)
        alone = journals(one, END, 1)[0]
        assert alone.rows == _noted(rows_of(job, 1)[0][STOP:], per)
        assert alone.losses[-(END - STOP) :] == pytest.approx(expected.losses[STOP:], rel=CLOSE)
        assert_same_weights(alone.weights, expected.weights[END])


def _noted(steps: list[list[list[int]]], per: str) -> list[list[int]]:
    if per == "step":
        return [[document for micro in step for document in micro] for step in steps]
    return [micro for step in steps for micro in step]


def assert_same_weights(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=WEIGHTS_CLOSE, atol=WEIGHTS_CLOSE)
