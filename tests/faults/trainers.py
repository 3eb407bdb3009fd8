"""The trainers of a disturbed run: processes that are killed, stopped and started again, and what all of them got."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.commands import environment
from tests.faults.trainer import Orders


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that a rank took."""

    step: int
    digest: str
    at: float


class TrainerFailedError(Exception):
    """A trainer ended that nobody had ended."""


class Trainers:
    """One process a rank. What ranks took is kept by their lives: a life is one process, from the step it began at."""

    def __init__(self, address: str, num_ranks: int, folder: Path, pace_s: float) -> None:
        self.num_ranks = num_ranks
        self.num_thrown_out = 0
        """How often the run was moved without a rank, which had to come back by itself."""
        self.lives: list[list[list[Taken]]] = [[] for _ in range(num_ranks)]
        self._address = address
        self._states = folder / "states"
        self._states.mkdir()
        self._pace_s = pace_s
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[str]] = []
        self._listeners: dict[int, threading.Thread] = {}
        self._expected_to_end: set[int] = set()
        self._failure: str | None = None
        for rank in range(num_ranks):
            self._processes.append(self._started(rank, None, None))

    def process(self, rank: int) -> int:
        return self._processes[rank].pid

    def reached(self, rank: int) -> int:
        """The step that comes next for a rank."""
        with self._changed:
            return self._reached(rank)

    @property
    def reached_by_all(self) -> int:
        """Every rank has taken all steps before this one."""
        return min(self.reached(rank) for rank in range(self.num_ranks))

    def checkpoint(self) -> Path | None:
        """The newest saved state that no rank has to skip a step for."""
        saved = {int(path.stem): path for path in self._states.glob("*.json")}
        steps = [step for step in saved if step <= self.reached_by_all]
        return saved[max(steps)] if steps else None

    def restart(self, rank: int) -> None:
        """Kill a rank and start it again where it was."""
        self._end(rank)
        self._processes[rank] = self._started(rank, self.reached(rank), None)

    def restart_all(self) -> int | None:
        """Kill all ranks and start them again from the newest state that all had come to, as a checkpoint is; its step."""
        for rank in range(self.num_ranks):
            self._end(rank)
        state = self.checkpoint()
        for rank in range(self.num_ranks):
            at = self.reached(rank) if state is None else None
            self._processes[rank] = self._started(rank, at, None if state is None else str(state))
        return None if state is None else int(state.stem)

    def wait_for(self, steps: Sequence[int], timeout_s: float) -> bool:
        """Wait until every rank's next step is at least the given one. False when that takes too long."""

        def all_there() -> bool:
            return self._failure is not None or all(self._reached(rank) >= step for rank, step in enumerate(steps))

        with self._changed:
            there = self._changed.wait_for(all_there, timeout_s)
            self._raise_failure()
            return there

    def wait(self, seconds: float) -> None:
        """Let the run go on for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, seconds)
            self._raise_failure()

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time that any rank waited for a step that came between two moments, beyond its own pace."""
        with self._changed:
            taken = [sorted(t.at for life in lives for t in life) for lives in self.lives]
        gaps = [0.0]
        for times in taken:
            gaps += [b - a for a, b in pairwise(times) if since < b <= until]
            if times and until > times[-1]:
                gaps.append(until - times[-1])
        return max(max(gaps) - self._pace_s, 0.0)

    def close(self) -> None:
        for rank in range(self.num_ranks):
            self._end(rank)

    def _reached(self, rank: int) -> int:
        for life in reversed(self.lives[rank]):
            if life:
                return life[-1].step + 1
        return 0

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrainerFailedError(self._failure)

    def _started(self, rank: int, at: int | None, state: str | None) -> subprocess.Popen[str]:
        save = str(self._states) if rank == 0 else None
        orders = Orders(self._address, rank, self._pace_s, at, state, save)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.trainer", str(orders)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        life: list[Taken] = []
        with self._changed:
            self.lives[rank].append(life)
        listener = threading.Thread(target=self._listen, args=(rank, process, life), daemon=True)
        self._listeners[process.pid] = listener
        listener.start()
        return process

    def _listen(self, rank: int, process: subprocess.Popen[str], life: list[Taken]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        words: list[str] = []
        telling = threading.Thread(target=lambda err: words.extend(err), args=(process.stderr,), daemon=True)
        telling.start()
        for line in process.stdout:
            if line.endswith("\n"):
                said = json.loads(line)
                with self._changed:
                    if said == "thrown out":
                        self.num_thrown_out += 1
                    else:
                        life.append(Taken(**said))
                    self._changed.notify_all()
        code = process.wait()
        telling.join()
        process.stdout.close()
        process.stderr.close()
        with self._changed:
            if process.pid not in self._expected_to_end:
                self._failure = f"the trainer of rank {rank} ended with {code}: {''.join(words[-12:])}"
                self._changed.notify_all()

    def _end(self, rank: int) -> None:
        process = self._processes[rank]
        if process.pid not in self._listeners:
            return
        with self._changed:
            self._expected_to_end.add(process.pid)
        process.kill()
        self._listeners.pop(process.pid).join()  # what it said before it died was taken


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again: for what happens in other processes there is nothing to wait on."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True
