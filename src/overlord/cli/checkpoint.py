"""`overlord checkpoint`: write the state of a served run to a file, and with `--drain` hand out no further step before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.cli.files import check_writable, write_state
from overlord.cli.options import add_option
from overlord.cli.output import console, write_json
from overlord.cli.served import add_service_arguments, open_control

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    add_option(parser, "--state", required=True, help="write the state to FILE")
    add_option(
        parser,
        "--drain",
        help="first hand out no new step, for good, and wait up to S seconds for every rank to take the last one",
    )


def execute(options: argparse.Namespace) -> int:
    check_writable(options.state)
    with open_control(options) as control:
        drained = None if options.drain_s is None else control.drain(options.drain_s)
        state = control.checkpoint()
    write_state(options.state, state)
    if options.json:
        write_json({"step": state["step"], "state": str(options.state), "drained": drained})
        return 0
    missing = " Not every rank has taken the step before it." if drained is False else ""
    console().print(
        f"State before step {state['step']:,} written to {options.state}.{missing}", markup=False, soft_wrap=True
    )
    return 0
