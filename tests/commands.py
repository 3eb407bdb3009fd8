"""Running Python in a process of its own, as users do, with what this one can import; and `overlord` in this process."""

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from overlord.cli import main

ROOT = Path(__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])} | more


def python(*arguments: object, expect: int = 0, timeout_s: float = 100.0, **more: str) -> subprocess.CompletedProcess[str]:
    """The run, which must have ended with the exit code `expect`. `more` are environment variables."""
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment(**more))
    assert run.returncode == expect, run.stdout + run.stderr
    return run


def overlord(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """A command that is run in this process, which saves a second of imports: its output, and the exit code `expect`."""
    words = [str(argument) for argument in arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for word in words:
            if word.endswith(".py"):
                sys.modules.pop(Path(word).stem, None)  # the next job file may have the same name
    assert code == expect, out.getvalue() + errors.getvalue()
    return subprocess.CompletedProcess(words, expect, out.getvalue(), errors.getvalue())


def start_service(job: object, *options: object, errors: Path) -> subprocess.Popen[str]:
    """`overlord serve`, when it has said where it is or has ended; `errors` gets what it writes to standard error."""
    command = [sys.executable, "-m", "overlord", "serve", str(job), *map(str, options), "--json"]
    with errors.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment())
    assert process.stdout is not None
    with process.stdout as output:
        if not output.readline():
            process.wait()
    return process


def overlord_process(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """The real command."""
    run = python("-W", "error", "-m", "overlord", *arguments, expect=expect)
    assert "Traceback" not in run.stderr
    return run
