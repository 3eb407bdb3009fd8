"""The arguments of `overlord mix`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.numbers import at_least, positive

if TYPE_CHECKING:
    import argparse


def add_mix(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser("mix", help="change the weights of a run that is being served, or look at them")
    verb.add_argument("address", help="where it is served, as `overlord serve` says it")
    verb.add_argument("weights", nargs="*", metavar="SOURCE=WEIGHT", help="such as web=6 code=4; what is left out gets 0")
    verb.add_argument("--declared", action="store_true", help="go back to the mixture that the job declares")
    verb.add_argument(
        "--from-step", type=at_least(0), metavar="N", help="from this step on (default: the first that is not drawn)"
    )
    verb.add_argument("--token", help="the token of the service; --token-file keeps it off the command line")
    verb.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token")
    verb.add_argument("--tls-root", type=Path, metavar="FILE", help="the certificate that the service's must lead to (PEM)")
    verb.add_argument(
        "--timeout", type=positive, default=30.0, metavar="S", help="to reach the service (default: %(default)s)"
    )

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.mix import MixOptions, mix

        given = MixOptions(
            address=options.address,
            declared=options.declared,
            from_step=options.from_step,
            token=options.token,
            token_file=options.token_file,
            tls_root=options.tls_root,
            timeout_s=options.timeout,
        )
        return mix(options.weights, given, options.json)

    verb.set_defaults(verb=call)
