"""`overlord mix`: show or change the mixture weights of a served run while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.cli.options import add_option
from overlord.cli.output import console, table, write_json
from overlord.cli.served import add_service_arguments, open_control
from overlord.errors import SpecError
from overlord.steering.decisions import WEIGHTS, Decision

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    parser.add_argument(
        "weights", nargs="*", metavar="SOURCE=WEIGHT", help="new weights, such as web=6 code=4; sources left out get 0"
    )
    parser.add_argument("--declared", action="store_true", help="go back to the mixture that the job declares")
    add_option(parser, "--from-step", help="change the weights at step N (default: the first not yet drawn)")


def execute(options: argparse.Namespace) -> int:
    return mix(options)


def mix(options: argparse.Namespace) -> int:
    weights, as_json = _parse_weights(options.weights), options.json
    if weights and options.declared:
        raise SpecError("--declared goes back to the mixture that the job declares: leave out the weights")
    if options.from_step is not None and not (weights or options.declared):
        raise SpecError("--from-step is the first step of new weights: give some, such as web=6 code=4")
    with open_control(options) as control:
        if not weights and not options.declared:
            return _show([d for d in control.decisions() if d.name == WEIGHTS], as_json)
        step = control.set_weights(weights or None, from_step=options.from_step)
    if as_json:
        write_json({"from_step": step, "weights": weights or None})
    else:
        described = ", ".join(f"{name} {weight:g}" for name, weight in weights.items()) or "as the job declares"
        console().print(f"Weights from step {step:,} on: {described}")
    return 0


def _show(decisions: list[Decision], as_json: bool) -> int:
    if as_json:
        write_json({"decisions": [{"step": d.step, **d.value} for d in decisions]})
        return 0
    out = console()
    if not decisions:
        out.print("The run uses the mixture that the job declares; no weights were changed.")
        return 0
    rows = [(f"{d.step:,}", str(d.value["by"]), _describe_weights(d)) for d in decisions]
    out.print(table("from step", "<by", "<weights", rows=rows))
    return 0


def _describe_weights(decision: Decision) -> str:
    weights = decision.value["weights"]
    if weights is None:
        return "as declared"
    return ", ".join(f"{name} {share:.2%}" for name, share in weights.items())


def _parse_weights(given: Sequence[str]) -> dict[str, float]:
    """Parse `web=6 code=4`."""
    weights: dict[str, float] = {}
    for text in given:
        name, equals, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            equals = ""
            weight = 0.0
        if not equals or not name:
            raise SpecError(f"a weight is written as source=number, such as web=6, got {text!r}")
        if name in weights:
            raise SpecError(f"{name!r} has two weights; give one")
        weights[name] = weight
    return weights
