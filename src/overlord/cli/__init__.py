"""The command line. Each verb is a module with `add_arguments(parser)` and `execute(options)`, which returns the exit code.

Only the module of the verb that is called is imported, so that `overlord --help` is quick.

Exit codes: 0 success, 1 failure, 2 wrong arguments, 130 stopped by Ctrl-C, 143 stopped by SIGTERM. Both signals stop a verb
in the same way: it prints a line at once, writes the state if `--state` names a file, and exits. A second signal kills the
process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from overlord.errors import OverlordError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM

VERBS = {
    "demo": "run Overlord on data that this machine has, in under a minute",
    "check": "validate a job: list its sources, then plan and build its first step",
    "explain": "show how one step was drawn and arranged, stage by stage",
    "run": "read a job without a trainer and measure its throughput",
    "serve": "run a job for trainers in other processes, which call overlord.connect",
    "mix": "show or change the mixture weights of a run that is being served",
    "calibrate": "measure what documents cost a torch model on this machine's device",
    "simulate": "plan steps without reading payload and predict their time on any number of ranks",
    "partition": "profile the sources of a job and choose how many loaders and workers each needs",
}
"""The verbs and their one-line help, in the order in which `overlord --help` lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    received = _install_stop_handlers()
    debug = False
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        debug = options.debug
        code = options.execute(options)
        return TERMINATED if code == INTERRUPTED and signal.SIGTERM in received else code
    except KeyboardInterrupt:
        return TERMINATED if signal.SIGTERM in received else INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output is gone. Without this, Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if debug:
            raise
        sys.stderr.write(f"error: {describe_error(error)}\n")
        return FAILED


def build_parser(verbs: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """The parser of the command line. It knows every verb, but the arguments only of those in `verbs`."""
    parser = argparse.ArgumentParser(
        prog="overlord",
        description="A data loader for training large foundation models. "
        "A job is a Python file with `job = overlord.Job(...)`.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in VERBS.items():
        subparser = subparsers.add_parser(name, help=text)
        if name in verbs:
            verb = import_module(f"overlord.cli.{name}")
            verb.add_arguments(subparser)
            subparser.set_defaults(execute=verb.execute)
            subparser.add_argument(
                "--json", action="store_true", help="print one JSON object to standard output, nothing else"
            )
            subparser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return parser


def describe_error(error: Exception) -> str:
    """An error as one line: its message, followed by its notes in brackets."""
    text = str(error)
    if not isinstance(error, OverlordError):
        text = f"{type(error).__name__}: {text} (run again with --debug to see where)"
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{text} ({notes})" if notes else text


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    verb = next((word for word in arguments if not word.startswith("-")), "")
    parser = build_parser([verb])
    options, rest = parser.parse_known_args(arguments)
    # argparse accepts the weights of `overlord mix` in one place only, so those that follow an option are left over.
    if rest and "weights" in options and not any(word.startswith("-") for word in rest):
        options.weights += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _install_stop_handlers() -> list[int]:
    """Make SIGINT and SIGTERM print a line and raise KeyboardInterrupt. The list returned collects the signals received."""
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_DFL)
        # Not through sys.stderr: the signal may have interrupted a write to it.
        os.write(2, f"stopping ({signal.Signals(number).name}); a second one ends the process at once\n".encode())
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
    return received


class _Version(argparse.Action):
    """Looks up the version on demand, because the lookup searches the whole environment."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("overlord-dataloader")
        except PackageNotFoundError:
            found = "(not installed: run from its source)"
        sys.stdout.write(f"overlord {found}\n")
        parser.exit()
