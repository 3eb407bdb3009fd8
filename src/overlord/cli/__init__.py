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
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from overlord.errors import OverlordError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM

VERBS = {
    "demo": "run Overlord on data that this machine has, in under a minute",
    "inspect": "show what lies at a path: format, rows, columns, lengths, duplicates, odd rows; and propose a job",
    "schema": "print the JSON schema of YAML job files, for editors",
    "completion": "print the completion script of a shell",
    "check": "validate a job: list its sources, then plan and build its first step",
    "explain": "show how one step was drawn and arranged, stage by stage",
    "trace": "list the documents of a step, with the file and row of each and where it went",
    "find": "list the steps and ranks that had a document",
    "show": "print the text of a document",
    "spikes": "list the documents of the steps where the loss jumped, most suspicious first",
    "prepare": "write the rows of a job's sources after their transforms, so that runs need not make them again",
    "run": "read a job without a trainer and measure its throughput",
    "serve": "run a job for trainers in other processes, which call overlord.connect",
    "status": "show a run that is being served: its step, sources, ranks, roles and events",
    "top": "watch a run that is being served",
    "mix": "show or change the mixture weights of a run that is being served",
    "skip": "leave documents, files or a source out of a run that is being served, from a step on",
    "sources": "add a source to a run that is being served, or remove one",
    "plan": "show the plan of a step of a run that is being served",
    "resize": "let a run that is being served go on for another mesh",
    "checkpoint": "write the state of a run that is being served to a file",
    "doctor": "look at this machine and, if given, at a job: what is missing, slow or too small, and what to do",
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
        return _stop_code(received) if code == INTERRUPTED else code
    except KeyboardInterrupt:
        return _stop_code(received)
    except BrokenPipeError:
        # The reader of standard output is gone. Without this, Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if debug:
            raise
        sys.stderr.write(f"error: {describe_error(error)}\n")
        return _stop_code(received) if received else FAILED  # what fails while a run is stopped does not hide that it was


def _stop_code(received: Sequence[int]) -> int:
    return TERMINATED if signal.SIGTERM in received else INTERRUPTED


def build_parser(verbs: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """The parser of the command line. It knows every verb, but the arguments only of those in `verbs`."""
    parser = _Parser(
        prog="overlord",
        description="A data loader for training large foundation models. "
        "A job is a Python file with `job = overlord.Job(...)`, or a YAML file with the fields of a Job.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in VERBS.items():
        subparser = subparsers.add_parser(name, help=text)
        if name in verbs:
            verb = import_module(f"overlord.cli.{name}")
            verb.add_arguments(subparser)
            subparser.set_defaults(execute=verb.execute, parser=subparser)
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
    if verb and verb not in VERBS:
        parser.error(f"there is no command {verb!r}{_nearest(verb, {name: name for name in VERBS})}")
    options, rest = parser.parse_known_args(arguments)
    # argparse accepts words of an open number in one place only, so those that follow an option are left over.
    words = next((name for name in ("weights", "overrides") if name in options), None)
    if rest and words is not None and not any(word.startswith("-") for word in rest):
        setattr(options, words, [*getattr(options, words), *rest])
    elif rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{_nearest_option(options.parser, rest)}")
    if getattr(options, "overrides", None):
        _change_job(parser, options)
    return options


def _nearest_option(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The flag that is nearest to the first of these words that looks like one; nothing where none does."""
    known = parser._option_string_actions  # noqa: SLF001 - argparse has no other way to list them
    unknown = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if unknown is None:
        return "; quote a pattern, so that the shell does not replace it by its files" if os.path.exists(words[0]) else ""
    return _nearest(unknown.lstrip("-"), {flag.lstrip("-"): flag for flag in known})


def _nearest(name: str, known: Mapping[str, str]) -> str:
    """What is known under the nearest name, as a question; empty if none is near."""
    from difflib import get_close_matches

    found = get_close_matches(name, known, 1)
    return f"; did you mean {known[found[0]]}?" if found else ""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of a verb with many options would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (options: {self.prog} --help)\n")


def _change_job(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Hand the words of a command to its job."""
    if "=" in str(options.job) and not options.job.path.exists():
        parser.error(f"the job file comes before {options.job}")
    wrong = next((word for word in options.overrides if "=" not in word), None)
    if wrong is not None:
        parser.error(f"a job is changed by FIELD=VALUE, as mesh.dp=8, got {wrong!r}")
    options.job = replace(options.job, overrides=tuple(options.overrides))


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
