"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


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
