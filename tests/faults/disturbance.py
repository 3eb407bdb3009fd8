"""Faults that any run can meet, and the numbers of an episode: which faults it met, when, and how long ranks waited."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from overlord.planlog.append_log import read_frames
from tests.faults import store as storage
from tests.faults.schedule import Fault
from tests.faults.store import Store
from tests.faults.trainers import Trainers, wait_until

SETTLED_STEPS = 14  # further than anything that is kept ready
PATIENCE_S = 150.0  # a worker process that hangs while it starts is given up after 120 s
_GROWN_UP_S = 3.0

Victim = tuple[str, int]
"""A process, with a name for people."""
Cause = Callable[[Fault], str]
"""Lets a fault happen, and says to what."""


@dataclass(frozen=True, slots=True)
class Met:
    """A fault that happened."""

    episode: str
    kind: str
    detail: str
    at_s: float
    """Since the episode began."""
    step: int
    """The furthest step that some rank had taken."""
    stall_s: float = 0.0
    """The longest that a rank waited for a step from then until the run had come back to itself."""


class Disturbed(Protocol):
    """A run that faults can be done to."""

    name: str
    trainers: Trainers

    @property
    def causes(self) -> Mapping[str, Cause]: ...


class NotRecoveredError(Exception):
    """A run stood still after a fault."""


def met_faults(run: Disturbed, faults: Sequence[Fault], done: list[Met]) -> None:
    """Let faults happen, one after another or some together, and measure what they did. `done` gets each as it is over."""
    began = time.time()
    together: list[tuple[float, Met]] = []
    run.trainers.wait_for([SETTLED_STEPS] * run.trainers.num_ranks, PATIENCE_S)
    for number, fault in enumerate(faults):
        run.trainers.wait(fault.after_s)
        at, step = time.time(), max(run.trainers.reached(rank) for rank in range(run.trainers.num_ranks))
        detail = run.causes[fault.kind](fault)
        together.append((at, Met(run.name, fault.kind, detail, at - began, step)))
        if fault.is_alone or number == len(faults) - 1:
            _settle(run, together)
            until = time.time()
            for since, met in together:
                done.append(replace(met, stall_s=run.trainers.longest_gap(since, until)))
            together = []


def _settle(run: Disturbed, together: Sequence[tuple[float, Met]]) -> None:
    trainers = run.trainers
    target = [trainers.reached(rank) + SETTLED_STEPS for rank in range(trainers.num_ranks)]
    if not trainers.wait_for(target, PATIENCE_S):
        what = "; ".join(f"{met.kind} ({met.detail})" for _, met in together)
        raise NotRecoveredError(f"{run.name}: after {what} at step {together[-1][1].step} ranks stand still")


def one_of(victims: Callable[[], Sequence[Victim]], fault: Fault) -> Victim:
    """One of those that are there, as soon as there is any."""
    found: Sequence[Victim] = ()

    def some() -> bool:
        nonlocal found
        found = victims()
        return bool(found)

    if not wait_until(some, PATIENCE_S):
        raise NotRecoveredError(f"{fault.kind}: there was none for {PATIENCE_S:.0f} s")
    return found[fault.pick(found)]


def signals(victims: Callable[[], Sequence[Victim]], trainers: Callable[[], Trainers]) -> dict[str, Cause]:
    """Ways to kill, to stop for good and to stop for a while one of the processes that `victims` names."""

    def killed(fault: Fault) -> str:
        name, process = one_of(victims, fault)
        send(process, signal.SIGKILL)
        return name

    def stopped(fault: Fault) -> str:
        """Whoever is responsible for the process must find out that it hangs, and kill it."""
        name, process = one_of(victims, fault)
        send(process, signal.SIGSTOP)
        if not wait_until(lambda: not _lives(process), PATIENCE_S):
            raise NotRecoveredError(f"{name} was stopped, and nobody has replaced it for {PATIENCE_S:.0f} s")
        return name

    def paused(fault: Fault) -> str:
        name, process = one_of(victims, fault)
        send(process, signal.SIGSTOP)
        trainers().wait(0.05 + fault.amount)
        send(process, signal.SIGCONT)
        return f"{name}, {0.05 + fault.amount:.2f} s"

    return {"killed": killed, "stopped": stopped, "paused": paused}


def trainer_causes(trainers: Callable[[], Trainers]) -> dict[str, Cause]:
    def killed(fault: Fault) -> str:
        rank = int(fault.which * trainers().num_ranks)
        trainers().restart(rank)
        return f"rank {rank}"

    def paused(fault: Fault) -> str:
        rank = int(fault.which * trainers().num_ranks)
        process = trainers().process(rank)
        send(process, signal.SIGSTOP)
        trainers().wait(0.05 + 2 * fault.amount)
        send(process, signal.SIGCONT)
        return f"rank {rank}, {0.05 + 2 * fault.amount:.2f} s"

    def restarted(fault: Fault) -> str:
        step = trainers().restart_all()
        return "no state yet" if step is None else f"from step {step}"

    return {"trainer killed": killed, "trainer paused": paused, "trainers restarted from their state": restarted}


def storage_causes(store: Store, trainers: Callable[[], Trainers]) -> dict[str, Cause]:
    def failing(how: str) -> Cause:
        def fail(fault: Fault) -> str:
            before = store.num_faults
            store.begin(how)
            trainers().wait(0.2 + 2.5 * fault.amount)
            store.end()
            return f"{store.num_faults - before} requests in {0.2 + 2.5 * fault.amount:.1f} s"

        return fail

    def shut(fault: Fault) -> str:
        store.shut()
        trainers().wait(0.2 + 2.5 * fault.amount)
        store.open()
        return f"{0.2 + 2.5 * fault.amount:.1f} s"

    return {
        "storage errors": failing(storage.ERRORS),
        "storage drops answers": failing(storage.DROPS),
        "storage cuts answers": failing(storage.CUTS),
        "storage stalls": failing(storage.STALL),
        "storage shut": shut,
    }


def torn(log: Path, fault: Fault) -> str:
    """Cut the newest segment of a log somewhere in its last records, as a crash in the middle of a write does."""
    newest = sorted(log.iterdir())[-1]
    content = newest.read_bytes()
    cut = 1 + int(fault.amount * min(len(content) - 1, 600))
    os.truncate(newest, len(content) - cut)
    return f"the last {cut} bytes of {newest.name}"


def corrupted(log: Path, fault: Fault) -> Path:
    """Change a byte in a record of the newest segment that others follow."""
    newest = sorted(log.iterdir())[-1]
    content = bytearray(newest.read_bytes())
    bodies = read_frames(bytes(content)).bodies
    place = int(fault.amount * sum(len(body) + 12 for body in bodies[:-1])) if len(bodies) > 1 else 0
    content[place] ^= 0x20
    newest.write_bytes(content)
    return newest


def children(process: int) -> list[int]:
    """The processes that a process has started, and that have had the time to start."""
    with suppress(psutil.NoSuchProcess):
        started = time.time() - _GROWN_UP_S
        return [child.pid for child in psutil.Process(process).children() if child.create_time() < started]
    return []


def send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it was gone by itself
        os.kill(process, number)


def pause(process: int) -> None:
    """Stop a process, and wait until it has: it may go on for a moment after the signal was sent."""
    os.kill(process, signal.SIGSTOP)
    while any(not _is_stopped(thread) for thread in Path(f"/proc/{process}/task").iterdir()):
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return True


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
