"""How verbs reach a run that is served at an address: the options, and the connection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.files import read_token
from overlord.cli.options import add_option, positive
from overlord.service.admin import Control

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", help="the address of the run, as printed by `overlord serve`")
    parser.add_argument("--token", help="the token of the service; --token-file keeps it off the command line")
    add_option(parser, "--token-file", help="read the token from FILE")
    parser.add_argument(
        "--tls-root", type=Path, metavar="FILE", help="verify the service against the root certificate in FILE (PEM)"
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=positive,
        default=30.0,
        metavar="S",
        help="give up after S seconds if the service does not answer (default: %(default)s)",
    )


def open_control(options: argparse.Namespace) -> Control:
    """The run that the options name. Use it in a `with` block."""
    return control_maker(options)(options.timeout_s)


def control_maker(options: argparse.Namespace) -> Callable[[float], Control]:
    """Returns a function from a timeout to the run that the options name."""
    token = options.token if options.token_file is None else read_token(options.token_file)
    return lambda timeout_s: Control(options.address, token=token, tls_root=options.tls_root, timeout_s=timeout_s)
