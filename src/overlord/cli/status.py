"""`overlord status`: a served run at this moment, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.cli.output import console, write_json
from overlord.cli.run_view import view_of
from overlord.cli.served import add_service_arguments, open_control
from overlord.status import to_plain

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)


def execute(options: argparse.Namespace) -> int:
    with open_control(options) as control:
        metrics, waits = control.metrics(), control.waits()
    if options.json:
        write_json(to_plain(metrics) | {"waits": waits})
    else:
        console().print(view_of(metrics, None, waits))
    return 0
