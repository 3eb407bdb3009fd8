"""The options of how a run is carried out (`service/run_options.py`), as text on a command line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from overlord.cli.options import add_option, at_least, num_bytes, positive
from overlord.errors import SpecError
from overlord.loaders.model import Budget, Partition, Share
from overlord.service.run_options import RunOptions
from overlord.service.telemetry import OTEL

if TYPE_CHECKING:
    from collections.abc import Callable


class BudgetWord(NamedTuple):
    """A word of a budget: the field that it sets, and the argparse type of its value."""

    field: str
    read: Callable[[str], Any]


BUDGET = {
    "cpus": BudgetWord("cpus", positive),
    "memory": BudgetWord("memory_bytes", num_bytes),
    "hosts": BudgetWord("num_hosts", at_least(1)),
    "workers": BudgetWord("workers_per_host", at_least(1)),
    "host-bandwidth": BudgetWord("host_bytes_per_s", num_bytes),
}
"""The words of a budget, which are also the options of `overlord partition`."""


def add_run_options(parser: ArgumentParser) -> None:
    add_option(
        parser,
        "--log",
        help="keep the planner's log in this folder or bucket, so that its decisions survive it (default: with --ray in the "
        "cluster's own table, else none)",
    )
    parser.add_argument(
        "--partition",
        type=Path,
        metavar="FILE",
        help="spread sources over loader hosts as FILE says, the output of `overlord partition job.py --json`",
    )
    parser.add_argument(
        "--autoscale",
        type=budget,
        metavar="BUDGET",
        help="add and remove loaders during the run, within BUDGET: cpus=8,memory=16GiB, also hosts=, workers= and "
        "host-bandwidth=",
    )
    parser.add_argument(
        "--shadows",
        type=budget,
        metavar="BUDGET",
        help="keep Shadow Loaders within BUDGET, as cpus=2,memory=4GiB; with --ray",
    )
    parser.add_argument(
        "--near",
        type=_nodes,
        default=(),
        metavar="NODE,...",
        help="place the data constructor of each data-parallel group on the node of its trainers, by address, host name or "
        "Ray id; with --ray",
    )
    add_option(parser, "--profile")


def read_run_options(options: Namespace) -> RunOptions:
    return RunOptions(
        log=options.log,
        partition=None if options.partition is None else read_partition(options.partition),
        autoscale=options.autoscale,
        shadows=options.shadows,
        near=options.near,
        profile=options.profile if options.profile in (None, Path(OTEL)) else options.profile.absolute(),
    )


def budget(text: str) -> Budget:
    """An argparse type: words such as cpus=8,memory=16GiB."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name.strip() not in BUDGET or not equals:
            raise ArgumentTypeError(f"a budget is cpus=8,memory=16GiB, also with {', '.join(BUDGET)}, got {text!r}")
        word = BUDGET[name.strip()]
        given[word.field] = word.read(value.strip())
    if not {"cpus", "memory_bytes"} <= set(given):
        raise ArgumentTypeError(f"a budget needs cpus= and memory=, as cpus=8,memory=16GiB, got {text!r}")
    return Budget(**given)


def read_partition(path: Path) -> Partition:
    """The partition in the JSON output of `overlord partition`."""
    way_out = "write it with `overlord partition job.py --json > FILE`"
    try:
        read = orjson.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"the partition cannot be read from {path}: {error.strerror}; {way_out}") from error
    except orjson.JSONDecodeError as error:
        raise SpecError(f"{path} is not JSON: {error}; {way_out}") from error
    try:
        hosts = [[Share(share["source"], share["index"], share["of"]) for share in host] for host in read["hosts"]]
    except (KeyError, TypeError) as error:
        raise SpecError(f"{path} has no list of loader hosts with their shares; {way_out}") from error
    return Partition(tuple(tuple(host) for host in hosts))


def _nodes(text: str) -> tuple[str, ...]:
    return tuple(node.strip() for node in text.split(",") if node.strip())
