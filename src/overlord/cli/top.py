"""`overlord top`: a served run, again and again: what it does in a second, and who waits for what.

On a terminal the view is redrawn in place; to a pipe or file it is a line each time. When the service is lost, the view says
so and goes on when it is back.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.text import Text

from overlord.cli.options import at_least, positive
from overlord.cli.output import console, write_json
from overlord.cli.run_view import headline, view_of
from overlord.cli.served import add_service_arguments, control_maker
from overlord.errors import ServiceError
from overlord.status import to_plain

if TYPE_CHECKING:
    import argparse

    from overlord.service.admin import Control
    from overlord.status import RunMetrics

_LOST_AFTER_S = 2.0  # the view stands still for so long before it says that the service is lost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    parser.add_argument(
        "--every",
        dest="every_s",
        type=positive,
        default=1.0,
        metavar="S",
        help="look every S seconds (default: %(default)s)",
    )
    parser.add_argument("--count", type=at_least(1), metavar="N", help="end after N looks (default: at Ctrl-C)")


def execute(options: argparse.Namespace) -> int:
    control_within = control_maker(options)
    with control_within(options.timeout_s) as control:
        first = control.metrics()  # an address that is wrong is an error; a service that is lost later is waited for
    with control_within(min(options.timeout_s, _LOST_AFTER_S)) as control:
        watch(control, first, options)
    return 0


def watch(control: Control, first: RunMetrics, options: argparse.Namespace) -> None:
    out, pause = console(), threading.Event()
    live = Live(console=out, auto_refresh=False, screen=False) if out.is_terminal and not options.json else None
    before, now, seen, looks = None, first, time.monotonic(), 0
    with live or nullcontext():
        while True:
            lost = ""
            try:
                waits = control.waits() if live is not None else []
                if looks:
                    before, now = now, control.metrics()
                seen = time.monotonic()
            except ServiceError as error:
                waits, lost = [], f"lost the service {time.monotonic() - seen:.0f} s ago: {error}"
            if options.json:
                write_json(to_plain(now) | ({"lost": lost} if lost else {}))
            elif live is None:
                out.print(lost or headline(now, before), markup=False, soft_wrap=True)
            else:
                view = view_of(now, before, waits)
                live.update(Group(Text(lost, "bold red"), view) if lost else view, refresh=True)
            looks += 1
            if options.count is not None and looks >= options.count:
                return
            pause.wait(options.every_s)
