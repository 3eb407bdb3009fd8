"""`overlord resize`: let a served run go on for another mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from overlord.cli.options import add_option, at_least, zero_or_more
from overlord.cli.output import console, write_json
from overlord.cli.served import add_service_arguments, open_control
from overlord.declare.mesh import Mesh

if TYPE_CHECKING:
    import argparse

    from overlord.declare.mesh import Axis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    for axis in ("dp", "cp", "tp", "pp"):
        add_option(parser, f"--{axis}", help=f"the new size of {axis} (default: as it is)")
    parser.add_argument(
        "--at", type=at_least(0), metavar="N", help="hand step N out again, for the new mesh: trainers have lost it"
    )
    parser.add_argument(
        "--wait",
        dest="wait_s",
        type=zero_or_more,
        default=10.0,
        metavar="S",
        help="wait up to S seconds for ranks that are behind (default: %(default)s)",
    )


def execute(options: argparse.Namespace) -> int:
    with open_control(options) as control:
        sizes = control.metrics().mesh
        sizes |= {axis: given for axis in sizes if (given := getattr(options, axis)) is not None}
        order = cast("tuple[Axis, ...]", tuple(sizes))
        mesh = Mesh(dp=sizes["dp"], cp=sizes["cp"], tp=sizes["tp"], pp=sizes["pp"], order=order)
        step = control.resize(mesh, at=options.at, timeout_s=options.wait_s)
    if options.json:
        write_json({"from_step": step, "mesh": sizes})
    else:
        described = " ".join(f"{axis}={count}" for axis, count in sizes.items())
        console().print(f"From step {step:,} on: {described}. Clients of the old mesh call rejoin, or connect again.")
    return 0
