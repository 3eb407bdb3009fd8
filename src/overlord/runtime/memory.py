"""The resident memory of this process, current and peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """Peak resident set size, without child processes."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux ru_maxrss is inherited from the parent across exec; VmHWM is not.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Current resident set size; the peak on systems without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_rss_bytes()
