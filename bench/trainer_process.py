"""One trainer in a process of its own: takes steps, touches every batch once, and does what the coordinator asks.

It prints a JSON line when it has its first batch, when it is warm, and for each measurement. Between commands it goes on
taking steps: a loader that keeps its ranks in step must never wait for a trainer that waits for a command.

    window BEGIN END    counts what arrives between two moments of the monotonic clock
    pace SECONDS STEPS  sleeps before each step, as a trainer that trains, and times every `next`
    stop                leaves
"""

from __future__ import annotations

import argparse
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.process_tree import die_with_parent
from bench.run_one import Work, check_batch, find

TOUCHED = {
    "text": ("tokens", "labels", "position_ids", "loss_mask", "cu_seqlens"),
    "images": ("images",),
}
_KEPT_CHECKSUMS = 4
Micros = Sequence[Mapping[str, Any]]


class Taking:
    """A rank's stream of steps, with when each came and how many tokens or images came until then."""

    def __init__(self, steps: Iterator[Any], kind: str) -> None:
        self._steps = steps
        self._fields = TOUCHED[kind]
        self._kind = kind
        self.times: list[float] = []
        self.totals: list[int] = []
        self.checksums: list[int] = []
        """Of the first steps: equal for all who deliver the same stream."""
        self.checksum = 0

    def take(self) -> float:
        """Takes and touches one step; returns the seconds that `next` took."""
        begun = time.perf_counter()
        micros: Micros = list(next(self._steps))
        took = time.perf_counter() - begun
        units = found = 0
        for micro in micros:
            units += len(micro[self._fields[0]])
            found += touched(micro, self._fields)
        if len(self.times) < _KEPT_CHECKSUMS:
            for micro in micros:
                check_batch(self._kind, micro)
            self.checksums.append(found)
        self.checksum = (self.checksum * 31 + found) % (1 << 61)
        self.times.append(time.monotonic())
        self.totals.append(units + (self.totals[-1] if self.totals else 0))
        return took

    def window(self, begin: float, end: float) -> dict[str, Any]:
        while self.times[-1] < end:
            self.take()
        # A step that is under way at a border counts by its share, so that few long steps are measured as well as many.
        until_begin, until_end = np.interp([begin, end], self.times, self.totals)
        steps = sum(begin <= at < end for at in self.times)
        return {"units": float(until_end - until_begin), "steps": steps, "checksum": self.checksum}

    def pace(self, seconds: float, steps: int) -> dict[str, Any]:
        took = []
        for _ in range(steps):
            time.sleep(seconds)
            took.append(self.take())
        return {"next_s": took}


def touched(batch: Mapping[str, Any], names: Sequence[str]) -> int:
    """Reads every byte of the batch's arrays, as a copy to the device does. Returns the sum of the first one's words."""
    sums = []
    for name in names:
        value = batch[name]
        array = value if isinstance(value, np.ndarray) else value.numpy()
        octets = array.reshape(-1).view(np.uint8)
        sums.append(int(octets[: len(octets) // 8 * 8].view(np.int64).sum()))
    return sums[0]


class Commands:
    """Lines on standard input, read without waiting for them."""

    def __init__(self) -> None:
        self._text = ""

    def read(self) -> list[str] | None:
        """The words of the next command; None when there is none yet."""
        while "\n" not in self._text and select.select([0], [], [], 0)[0]:
            received = os.read(0, 4096)
            if not received:
                return ["stop"]  # the coordinator is gone
            self._text += received.decode()
        if "\n" not in self._text:
            return None
        line, _, self._text = self._text.partition("\n")
        return line.split()


def train(taking: Taking, warmup: int, tell: Callable[[str, dict[str, Any]], None]) -> None:
    taking.take()
    tell("first", {"at": taking.times[0]})
    while len(taking.times) < warmup:
        taking.take()
    tell("warm", {})
    commands = Commands()
    while True:
        match commands.read():
            case None:
                taking.take()
            case ["window", begin, end]:
                tell("window", taking.window(float(begin), float(end)) | {"first_checksums": taking.checksums})
            case ["pace", seconds, steps]:
                tell("pace", taking.pace(float(seconds), int(steps)))
            case ["stop"]:
                return
            case other:
                raise SystemExit(f"no trainer knows the command {other}")


def steps_of(peer: str, work: Work, rank: int) -> Iterator[Any]:
    """A step is a sequence of batches: of one, where a peer knows no steps of several."""
    if peer == "overlord":
        from bench.peers.overlord_loader import steps

        return steps(work, rank)
    build = find(peer, work.benchmark)
    stream = build(work, rank)
    return stream if work.micros > 1 else ((batch,) for batch in stream)


def _keep_stdout() -> Callable[[str, dict[str, Any]], None]:
    """Keeps standard output for this program's own lines: what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(kind: str, said: dict[str, Any]) -> None:
        out.write(json.dumps({"kind": kind, **said}) + "\n")
        out.flush()

    return tell


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trainer_process", description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("rank", type=int)
    parser.add_argument("work", type=json.loads)
    given = parser.parse_args()
    die_with_parent()
    tell = _keep_stdout()
    work = Work(**given.work)
    steps = steps_of(given.peer, work, given.rank)
    train(Taking(steps, work.kind), work.warmup, tell)
    close = getattr(steps, "close", None)
    if close is not None:
        close()
    tell("left", {})


if __name__ == "__main__":
    main()
