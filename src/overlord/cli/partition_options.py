"""The arguments of `overlord partition`. Apart from the verb, so that `overlord --help` imports nothing that reads data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.numbers import at_least, num_bytes, positive

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """What was asked for. None: what this machine has, or what suits the rest."""

    job: Path
    cpus: float | None
    memory: int | None
    hosts: int | None
    workers: int | None
    steps_per_second: float
    chunks: int
    seconds: float


def add_partition(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser(
        "partition",
        help="profile the sources of a job and say how many loaders and workers each needs, and why",
        description="Makes a few chunks of each source to see what they cost, and chooses loaders, the hosts they share and "
        "shadows, so that trainers do not wait. Nothing is changed: it says what to start the job with.",
    )
    verb.add_argument("job", type=Path, help="a Python file with `job = overlord.Job(...)`")
    verb.add_argument("--cpus", type=positive, metavar="N", help="processors for loaders (default: those of this machine)")
    verb.add_argument(
        "--memory", type=num_bytes, metavar="SIZE", help="for loaders, as 8GiB (default: half of this machine's)"
    )
    verb.add_argument("--hosts", type=at_least(1), metavar="N", help="loader processes at most; 1: the embedded engine")
    verb.add_argument("--workers", type=at_least(1), metavar="N", help="chunks that a host makes side by side (default: 4)")
    verb.add_argument(
        "--steps-per-second", type=positive, default=1.0, metavar="R", help="what trainers do (default: %(default)s)"
    )
    verb.add_argument(
        "--chunks", type=at_least(1), default=3, metavar="N", help="to make of a source (default: %(default)s)"
    )
    verb.add_argument("--seconds", type=positive, default=10.0, metavar="S", help="to spend on one (default: %(default)s)")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.partition import partition

        given = {name: getattr(options, name) for name in PartitionOptions.__dataclass_fields__}
        return partition(PartitionOptions(**given), options.json)

    verb.set_defaults(verb=call)
