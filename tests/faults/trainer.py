"""A trainer in a process of its own: takes the steps of a rank and says what it got, a line each, until it is ended.

    python -m tests.faults.trainer '{"address": ..., "rank": 0, ...}'

A step counts as taken once its line is out. A trainer that is started again is told which step comes next, or which state
to go on from.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import overlord as ol


@dataclass(frozen=True, slots=True)
class Orders:
    """What a trainer is told."""

    address: str
    rank: int
    pace_s: float
    """How long it trains on a step."""
    at: int | None = None
    state: str | None = None
    """The file of the state to go on from."""
    save: str | None = None
    """The folder to keep the states of now and then in, each as STEP.json."""
    save_every: int = 40

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def digest(step: ol.Step) -> str:
    """Everything that is in a step, as a short text."""
    found = hashlib.blake2b(digest_size=12)

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            found.update(f"{value.dtype.str}{value.shape}".encode())
            found.update(np.ascontiguousarray(value).data)
        elif isinstance(value, (pa.Array, pa.ChunkedArray)):
            found.update(repr(value.to_pylist()).encode())
        elif isinstance(value, list):
            for entry in value:
                add(entry)
        else:
            found.update(repr(value).encode())

    add([step.number, step.loss_tokens])
    for micro in step:
        for name in sorted(micro):
            add(name)
            add(micro[name])
    return found.hexdigest()


def train(orders: Orders) -> None:
    client = ol.connect(orders.address, rank=orders.rank, timeout_s=120)
    if orders.state is not None:
        client.load_state_dict(json.loads(Path(orders.state).read_text()))
    elif orders.at is not None:
        client.rejoin(orders.at)
    training = threading.Event()
    while True:
        try:
            step = next(client)
        except ol.errors.ClosedError:  # the run was moved without this rank, which knows its place
            client.rejoin(client.step)
            os.write(1, b'"thrown out"\n')
            continue
        line = json.dumps({"step": step.number, "digest": digest(step), "at": time.time()})
        os.write(1, line.encode() + b"\n")  # at once and whole: what was said was taken
        if orders.save is not None and step.number % orders.save_every == 0:
            draft = Path(orders.save) / f".{os.getpid()}"
            draft.write_text(json.dumps(client.state_dict()))
            draft.rename(Path(orders.save) / f"{client.step}.json")
        training.wait(orders.pace_s)


if __name__ == "__main__":
    train(Orders(**json.loads(sys.argv[1])))
