"""`overlord mix`: show or change the mixture weights of a served run while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.files import read_token
from overlord.cli.options import at_least, positive, to_dataclass
from overlord.cli.output import console, table, write_json
from overlord.errors import SpecError
from overlord.service.admin import Control
from overlord.steering.decisions import WEIGHTS, Decision

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", help="the address of the run, as printed by `overlord serve`")
    parser.add_argument(
        "weights", nargs="*", metavar="SOURCE=WEIGHT", help="new weights, such as web=6 code=4; sources left out get 0"
    )
    parser.add_argument("--declared", action="store_true", help="go back to the mixture that the job declares")
    parser.add_argument(
        "--from-step", type=at_least(0), metavar="N", help="change the weights at step N (default: the first not yet drawn)"
    )
    parser.add_argument("--token", help="the token of the service; --token-file keeps it off the command line")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="read the token from FILE")
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


def execute(options: argparse.Namespace) -> int:
    return mix(options.weights, to_dataclass(options, MixOptions), options.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """Which run to change, from which step, and how to reach it."""

    address: str
    declared: bool
    from_step: int | None
    token: str | None
    token_file: Path | None
    tls_root: Path | None
    timeout_s: float


def mix(given: Sequence[str], options: MixOptions, as_json: bool) -> int:
    weights = _parse_weights(given)
    if weights and options.declared:
        raise SpecError("--declared goes back to the mixture that the job declares: leave out the weights")
    if options.from_step is not None and not (weights or options.declared):
        raise SpecError("--from-step is the first step of new weights: give some, such as web=6 code=4")
    token = options.token if options.token_file is None else read_token(options.token_file)
    with Control(options.address, token=token, tls_root=options.tls_root, timeout_s=options.timeout_s) as control:
        if not weights and not options.declared:
            return _show([d for d in control.decisions() if d.name == WEIGHTS], as_json)
        step = control.set_weights(weights or None, options.from_step)
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
