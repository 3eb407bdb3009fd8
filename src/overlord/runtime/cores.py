"""How many cores this process may use, and how roles are spread over processes to keep cores busy."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_FEW_CORES = 2
"""Up to so many cores one process with threads takes less CPU time a token and keeps up (`python -m bench trainers`)."""
_SERVICE_SHARE = 5 / 8
"""Of the worker processes that a machine is worth, where trainers build their batches."""


def num_usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: by its affinity, and by the CPU time that its container gets."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        num_cores = os.cpu_count() or 1
    try:
        if (control_group / "cpu.max").exists():
            quota, period = (control_group / "cpu.max").read_text().split()
        else:
            quota, period = ((control_group / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        share = int(quota) / int(period)
    except (OSError, ValueError):  # there are no control groups, or the quota is the word max
        return num_cores
    return min(num_cores, math.ceil(share)) if share > 0 else num_cores


def processes_for(num_cores: float) -> int:
    """How many processes of constructors so many cores are worth: one for each, or a single one where there are few."""
    return 1 if num_cores <= _FEW_CORES else math.floor(num_cores)


class Layout(NamedTuple):
    """How many worker processes have loader hosts, and how many others have constructors."""

    hosts: int
    constructors: int


def lay_out(num_processes: int, num_groups: int) -> Layout:
    """The worker processes for sources that are only read, and for data-parallel groups whose trainers, on the same machine,
    build their batches themselves. Such a constructor only passes on plans and chunks, and several of them take less
    processor time and memory in one process (bench/README.md has figures). Some cores are left to the trainers, so from a
    number of groups on there are no more worker processes, however many groups there are."""
    most = max(2, math.ceil(_SERVICE_SHARE * num_processes))
    constructors = min(math.ceil(num_groups / 2), max(1, 2 * most // 5))
    return Layout(min(math.ceil(3 * num_groups / 4), most - constructors), constructors)


def choose_process(name: str, held: Sequence[Collection[str]]) -> int:
    """The process for a new role, given the roles that each has: the one with the fewest roles of its kind, and of those the
    one with the fewest roles."""
    kind = kind_of(name)
    of_kind = [Counter(map(kind_of, names))[kind] for names in held]
    return min(range(len(held)), key=lambda index: (of_kind[index], len(held[index]), index))


def kind_of(name: str) -> str:
    """A role's name begins with its kind: planner, loaders/0, constructor/3, ..."""
    return name.partition("/")[0]
