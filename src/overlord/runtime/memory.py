"""The memory of this process: resident, at its peak, and what the allocators of the C library and of Arrow keep free."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import pyarrow as pa

_M_ARENA_MAX = -8
_MOST_HEAPS = 1024


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


def give_threads_heaps() -> None:
    """Let every thread of this process have a heap of the C library for itself. By default there are eight for each core,
    and threads that share one wait for each other: the `tokenizers` library, half of whose time is allocation, then takes
    twice the processor time. Before threads are started, and only where the whole process is ours; without effect on systems
    with another C library."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_M_ARENA_MAX, _MOST_HEAPS)


def return_free_memory() -> None:
    """Give the system what the allocators keep of memory that is free. For after a start, when much is: it takes a
    millisecond for some tens of megabytes."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
