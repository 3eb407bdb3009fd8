"""A world of several ranks, as processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

PATIENCE_S = 100  # less than a test may take in all, so that this is what is said


def run_ranks(one_rank: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """Call `one_rank(rank, *args)` in `num_ranks` processes and wait until all are through; the first failure is raised.

    They are forked from a server that has imported the caller's module, torch with it (seconds each otherwise), and has
    no threads yet.
    """
    multiprocessing.set_forkserver_preload([one_rank.__module__])
    running = start_processes(one_rank, args, num_ranks, join=False, start_method="forkserver")
    assert running is not None
    until = time.monotonic() + PATIENCE_S
    try:
        # Each call returns when one process or more have ended, so that none may be alive though some are not joined.
        while not running.join(timeout=5):
            assert time.monotonic() < until, f"the ranks did not end within {PATIENCE_S} s"
    finally:
        for process in running.processes:
            if process is not None and process.is_alive():
                process.kill()


def join_world(rank: int, num_ranks: int, folder: Path) -> None:
    """Join the gloo world of `run_ranks`, over loopback; the ranks meet in `folder`, so that no port can be taken."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
