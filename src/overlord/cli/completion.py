"""`overlord completion`: the script that lets a shell complete verbs, options and files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import shtab

from overlord.cli import VERBS, build_parser

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a completion script. Bash: write it to ~/.local/share/bash-completion/completions/overlord. "
        "Zsh: to _overlord in a folder of $fpath."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def execute(options: argparse.Namespace) -> int:
    parser = build_parser(VERBS)
    _mark_files(parser)
    sys.stdout.write(shtab.complete(parser, options.shell) + "\n")
    return 0


def _mark_files(parser: argparse.ArgumentParser) -> None:
    """Files are completed for every argument that is one."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for each in action.choices.values():
                _mark_files(each)
        elif action.type is Path or getattr(action.type, "__name__", "") == "job_file" or action.dest == "path":
            action.complete = shtab.FILE  # type: ignore[attr-defined] - shtab looks for it
