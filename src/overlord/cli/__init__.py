"""The command line. Each verb is a file; this one reads the arguments and turns what went wrong into a line and a code.

Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 stopped by Ctrl-C, 143 by SIGTERM. Both signals stop a verb in the same
way: it says so at once, writes the state that it was asked for, and leaves; a second one ends the process where it stands.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.calibrate_options import add_calibrate
from overlord.cli.mix_options import add_mix
from overlord.cli.numbers import at_least, positive, zero_or_more
from overlord.cli.partition_options import add_partition
from overlord.cli.simulate_options import add_simulate
from overlord.errors import OverlordError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    came = _stop_at_signals()
    try:
        code = options.verb(options)
        return TERMINATED if code == INTERRUPTED and signal.SIGTERM in came else code
    except KeyboardInterrupt:
        return TERMINATED if signal.SIGTERM in came else INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if options.debug:
            raise
        sys.stderr.write(f"error: {told(error)}\n")
        return FAILED


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes a list of weights from one place only, so those after an option are left over.
    if rest and "weights" in options and not any(word.startswith("-") for word in rest):
        options.weights += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _stop_at_signals() -> list[int]:
    """Let Ctrl-C and SIGTERM say that we stop, and raise KeyboardInterrupt; returns the list of those that came."""
    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_DFL)
        # Not by sys.stderr: the signal may have come in the middle of a write to it.
        os.write(2, f"stopping ({signal.Signals(number).name}); a second one ends the process at once\n".encode())
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
    return came


def told(error: Exception) -> str:
    """An error as a person should read it: what, and where in brackets."""
    text = str(error)
    if not isinstance(error, OverlordError):
        text = f"{type(error).__name__}: {text} (run again with --debug to see where)"
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{text} ({notes})" if notes else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlord",
        description="A data loader for training large foundation models. "
        "A job is a Python file with `job = overlord.Job(...)`.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and leave")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(verbs)
    _add_check(verbs)
    _add_explain(verbs)
    _add_run(verbs)
    _add_serve(verbs)
    add_mix(verbs)
    add_calibrate(verbs)
    add_simulate(verbs)
    add_partition(verbs)
    for verb in verbs.choices.values():
        verb.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: the lookup searches the whole environment."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("overlord-dataloader")
        except PackageNotFoundError:
            found = "(not installed: run from its source)"
        sys.stdout.write(f"overlord {found}\n")
        parser.exit()


def _add_demo(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("demo", help="see it work on data that this machine has, in under a minute")
    verb.add_argument("--steps", type=at_least(2), default=240, help="global steps to run (default: %(default)s)")
    verb.add_argument("--dir", type=Path, help="keep the corpus and its job file here, to play with")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.demo import demo

        return demo(options.steps, options.dir, options.json)

    verb.set_defaults(verb=call)


def _add_check(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("check", help="validate a job: list its sources, plan and build its first step")
    verb.add_argument("job", type=Path, help="a Python file with `job = overlord.Job(...)`")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.check import check

        return check(options.job, options.json)

    verb.set_defaults(verb=call)


def _add_explain(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("explain", help="show how one step was drawn and arranged, stage by stage")
    verb.add_argument("job", type=Path, help="a Python file with `job = overlord.Job(...)`")
    verb.add_argument("--step", type=at_least(0), help="the step to explain (default: the first)")
    verb.add_argument("--resume", type=Path, metavar="FILE", help="count from this saved state: quick for late steps")
    verb.add_argument("--documents", action="store_true", help="list its documents: source, file, row, microbatch and ranks")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.explain import explain

        return explain(options.job, options.step, options.resume, options.documents, options.json)

    verb.set_defaults(verb=call)


def _add_run(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("run", help="read a job without a trainer and measure it")
    verb.add_argument("job", type=Path, help="a Python file with `job = overlord.Job(...)`")
    verb.add_argument("--steps", type=at_least(1), metavar="N", help="stop after this many (default: at the end)")
    verb.add_argument("--rank", type=at_least(0), metavar="R", help="read one rank only (default: all)")
    verb.add_argument("--state", type=Path, metavar="FILE", help="write the state here when it stops, also by Ctrl-C")
    verb.add_argument("--resume", type=Path, metavar="FILE", help="go on from this state")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.run import run

        return run(options.job, options.steps, options.rank, options.state, options.resume, options.json)

    verb.set_defaults(verb=call)


def _add_serve(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("serve", help="run a job for trainers in other processes, which use overlord.connect")
    verb.add_argument("job", type=Path, help="a Python file with `job = overlord.Job(...)`")
    verb.add_argument(
        "--address",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where to listen; port 0 is any that is free; off loopback a token is needed (default: %(default)s)",
    )
    verb.add_argument("--advertise", metavar="HOST", help="the host to tell clients, if not the one listened on")
    verb.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that every client must give")
    verb.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve over TLS with this certificate (PEM)")
    verb.add_argument("--tls-key", type=Path, metavar="FILE", help="and this private key")
    verb.add_argument("--state", type=Path, metavar="FILE", help="write the state here when it stops")
    verb.add_argument("--log", metavar="URL", help="a folder or bucket for the planner's log: what it decided outlives it")
    verb.add_argument("--resume", metavar="FILE", help="go on from this state, or with `log` from what the log knows")
    verb.add_argument(
        "--ray", nargs="?", const="", metavar="ADDRESS", help="run on this Ray cluster, or on a local one that is started"
    )
    verb.add_argument(
        "--leave-after",
        type=positive,
        default=60.0,
        metavar="S",
        help="wait so long for a silent rank (default: %(default)s)",
    )
    verb.add_argument(
        "--drain",
        type=zero_or_more,
        default=30.0,
        metavar="S",
        help="when stopping, wait so long for ranks (default: %(default)s)",
    )

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.serve import ServeOptions, serve

        given = ServeOptions(
            address=options.address,
            advertise=options.advertise,
            token_file=options.token_file,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            state=options.state,
            log=options.log,
            resume=options.resume,
            ray=options.ray,
            leave_after_s=options.leave_after,
            drain_s=options.drain,
        )
        return serve(options.job, given, options.json)

    verb.set_defaults(verb=call)
