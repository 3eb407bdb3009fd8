"""The arguments of `overlord calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.numbers import at_least

if TYPE_CHECKING:
    import argparse


def add_calibrate(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("calibrate", help="measure what documents cost a torch model on this machine's own device")
    verb.add_argument(
        "model",
        type=Path,
        nargs="?",
        help="a Python file with build(device) -> step(lengths), which runs forward and backward",
    )
    verb.add_argument("--preset", metavar="NAME", help="measure blocks of a known shape instead, such as llama-8b-like")
    verb.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    verb.add_argument(
        "--tokens", type=at_least(1), default=65_536, metavar="N", help="most tokens in one go (default: %(default)s)"
    )
    verb.add_argument("--longest", type=at_least(1), metavar="N", help="longest document (default: as many as --tokens)")
    verb.add_argument(
        "--layers", type=at_least(1), metavar="N", help="blocks to measure of a preset (default: %(default)s)", default=2
    )
    verb.add_argument(
        "--repeats", type=at_least(1), default=5, metavar="N", help="times each shape is run (default: %(default)s)"
    )
    verb.add_argument("--out", type=Path, metavar="FILE", help="write the coefficients here, for overlord.load_cost")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.calibrate import CalibrateOptions, calibrate

        given = CalibrateOptions(
            model=options.model,
            preset=options.preset,
            device=options.device,
            tokens=options.tokens,
            longest=options.longest,
            layers=options.layers,
            repeats=options.repeats,
            out=options.out,
        )
        return calibrate(given, options.json)

    verb.set_defaults(verb=call)
