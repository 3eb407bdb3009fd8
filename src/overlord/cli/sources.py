"""`overlord sources`: add a source to a served run, or remove one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.cli.options import add_option, positive
from overlord.cli.output import console, printable, table, write_json
from overlord.cli.served import add_service_arguments, open_control
from overlord.errors import SpecError

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    parser.add_argument(
        "--add", metavar="NAME", help="draw from source NAME too, which the job file of the service declares by now"
    )
    parser.add_argument(
        "--share", type=positive, metavar="S", help="the part of the mixture that comes from it, between 0 and 1"
    )
    parser.add_argument("--remove", metavar="NAME", help="draw no more from source NAME")
    add_option(parser, "--from-step", help="from step N on (default: the first that can still change)")


def execute(options: argparse.Namespace) -> int:
    if options.add is not None and options.remove is not None:
        raise SpecError("--add and --remove are two changes: make one after the other")
    if (options.add is None) != (options.share is None):
        raise SpecError("--add NAME needs --share with its part of the mixture, such as 0.1, and --share needs --add")
    if options.from_step is not None and options.add is options.remove is None:
        raise SpecError("--from-step is the first step of a change: give --add or --remove")
    with open_control(options) as control:
        if options.add is options.remove is None:
            found = control.metrics()
            shares = {name: source.weight for name, source in found.sources.items()}
            if options.json:
                write_json({"step": found.step, "sources": shares})
            else:
                rows = [(name, f"{share:.2%}") for name, share in shares.items()]
                console().print(table("source", f"asked share of {found.unit}", rows=rows))
            return 0
        if options.add is not None:
            step = control.add_source(options.add, options.share, from_step=options.from_step)
            said = f"From step {step:,} on {options.share:.2%} of the mixture comes from source {options.add}."
        else:
            step = control.remove_source(str(options.remove), from_step=options.from_step)
            said = f"From step {step:,} on nothing comes from source {options.remove}."
    if options.json:
        write_json({"from_step": step, "added": options.add, "removed": options.remove, "share": options.share})
    else:
        console().print(printable(said), markup=False)
    return 0
