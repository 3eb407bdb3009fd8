"""The memory this process holds, and the most it has held so far."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """Peak resident set size. Worker processes are not in it."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux's ru_maxrss also remembers the process that started this one; VmHWM does not.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Resident set size now; where the system does not tell, the peak."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_rss_bytes()
