"""Starts fresh interpreters as child processes, and what such a process does first.

A child finds modules where its parent finds them, and does not import the user's script. It leaves Ctrl-C and SIGTERM to its
parent, and it ends when the parent does, whatever ended that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import orjson

from overlord.runtime.liveness import WORKER_PARENT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a batch system sends to all processes, and that the parent handles for its children."""
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import main; main(*map(int, sys.argv[1:]))"
)


def start_interpreter(
    module: str, *arguments: int, descriptors: Collection[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start an interpreter that calls `main` of a module with these numbers and the process id of its parent.

    Call it from a thread that outlives the process: the kernel kills the process when that thread ends. The process inherits
    `descriptors`. `environment` has values for variables that this process's environment does not set.
    """
    # The child inherits the blocked signals, so that they cannot end it before it ignores them itself.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                _BOOTSTRAP.format(module=module),
                orjson.dumps(sys.path).decode(),
                *map(str, (*arguments, os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(descriptors),
            env={**environment, **os.environ},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def belong_to(parent: int, name: str = "", *, in_one_thread: bool = False) -> None:
    """Leave Ctrl-C and SIGTERM to the parent, and exit when it does, even in the middle of a call that never returns. `name`
    is what the system shows as the name of this process. `in_one_thread`: the process makes no such calls and notices the
    parent's end itself where the system does not tell it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not ignored: programs that this process starts would inherit that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if name:
            system.prctl(_PR_SET_NAME, name.encode()[:15])
    if not in_one_thread:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def describe_exit(code: int) -> str:
    """The exit code of a process, in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"{name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"


def _watch_parent(parent: int) -> None:
    # For systems that send no signal, and for a parent that died before prctl was called.
    timer = threading.Event()
    while os.getppid() == parent:
        timer.wait(WORKER_PARENT.after_s)
    os._exit(1)
