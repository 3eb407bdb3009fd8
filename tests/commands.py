"""Running Python in a process of its own, as users do, with what this one can import."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])} | more


def python(*arguments: object, expect: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """The run, which must have ended with the exit code `expect`. `more` are environment variables."""
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(**more))
    assert run.returncode == expect, run.stdout + run.stderr
    return run
