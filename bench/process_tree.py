"""CPU seconds and memory of a process tree, read from /proc. Run as a program it watches one and prints its peak."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_EVERY = 0.1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its descendants leave behind, so that helpers that detach themselves
    (torch has one) stay in its tree and are counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel signal this process when its parent is gone: nothing outlives a benchmark that was killed itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)


def cpu_seconds(root: int) -> float:
    """User and system time of the tree so far, children that were waited for included."""
    return sum(sum(int(ticks) for ticks in _stat(pid)[11:15]) for pid in tree(root)) / _TICKS


def cpu_seconds_below(root: int) -> float:
    """Likewise without the root's own time, for a root that only coordinates; children that it waited for are included."""
    below = sum(sum(int(ticks) for ticks in _stat(pid)[11:15]) for pid in tree(root) if pid != root)
    return (below + sum(int(ticks) for ticks in _stat(root)[13:15])) / _TICKS


class CpuMeter:
    """The CPU time of all processes below a root, also of those that end: their parents may not say what they took. It is
    looked at now and then, so what a process took after the last look at it is missing."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._known: dict[tuple[int, str], tuple[float, str]] = {}  # by process id and start: seconds, and what it is

    def look(self) -> None:
        for pid in tree(self._root):
            if pid != self._root and (stat := _stat(pid)):
                key, spent = (pid, stat[19]), sum(map(int, stat[11:13])) / _TICKS
                known = self._known.get(key)
                if known is None or known[0] != spent:
                    self._known[key] = spent, title(pid) or (known[1] if known else "")

    def seconds(self) -> dict[tuple[int, str], tuple[float, str]]:
        """Of every process that was ever seen, its time until the last look and what it called itself then."""
        return dict(self._known)


def title(pid: int) -> str:
    """What a process calls itself: the program, its module and what it was called with; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def end_below(root: int, grace_s: float) -> int:
    """Kills all that descend from the root, which is this process, and waits for it. Returns how many had to be killed.

    Helpers that remove a dead process's shared memory (torch and multiprocessing have one) are given `grace_s` to do so.
    """
    helpers = {pid for pid in tree(root) if pid != root and _cleans_up(pid)}
    victims = [pid for pid in tree(root) if pid != root and pid not in helpers and not _has_ended(pid)]
    _kill(victims)
    end = time.monotonic() + grace_s
    while time.monotonic() < end and any(pid != root and not _has_ended(pid) for pid in tree(root)):
        time.sleep(0.02)
    while left := [pid for pid in tree(root) if pid != root and not _has_ended(pid)]:
        _kill(left)
        time.sleep(0.02)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return len(victims)


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _cleans_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"torch_shm_manager" in command or b"resource_tracker" in command


def _has_ended(pid: int) -> bool:
    stat = _stat(pid)
    return not stat or stat[0] == "Z"


class Memory(NamedTuple):
    """Bytes of a process. What two processes share is counted half in each, so that a sum counts it once."""

    pss: int
    """The proportional set size."""
    shared: int
    """The part of it that is shared memory, however many processes map it."""


def pss_bytes(root: int, without: Collection[int] = ()) -> int:
    return sum(memory.pss for memory in memory_below(root, without).values())


def memory_below(root: int, without: Collection[int] = ()) -> dict[int, Memory]:
    """The memory of the root and of all that descend from it, by process id."""
    return {pid: _memory(pid) for pid in tree(root) if pid not in without}


def tree(root: int) -> list[int]:
    """The root and all that descend from it."""
    families = _families()
    found: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += families[pid]
    return found


def children(pid: int) -> list[int]:
    return _families()[pid]


def _families() -> defaultdict[int, list[int]]:
    """The children of every process."""
    families: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            families[int(stat[1])].append(int(entry))
    return families


def _stat(pid: int) -> list[str]:
    """The fields after the command's name (state, parent, ...); none when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _memory(pid: int) -> Memory:
    """Of a process that is gone, or has ended and is not yet waited for: nothing."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Memory(0, 0)
    found = {line.partition(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith("Pss")}
    return Memory(*(int(found.get(name, 0)) * 1024 for name in ("Pss", "Pss_Shmem")))


def main() -> None:
    """Samples the tree of the first process id, without the others, until standard input closes; prints the peak."""
    root, *others = (int(argument) for argument in sys.argv[1:])
    without = {os.getpid(), *others}
    peak = 0
    while not select.select([sys.stdin], [], [], _SAMPLE_EVERY)[0]:
        peak = max(peak, pss_bytes(root, without))
    print(max(peak, pss_bytes(root, without)))


if __name__ == "__main__":
    main()
