"""Progress of a run while it reads: a view redrawn in place on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from overlord.cli.output import printable, short, table
from overlord.errors import OverlordError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from overlord.service.dry_run import SourceShare, Throughput

TERMINAL_EVERY_S = 0.1
PLAIN_EVERY_S = 5.0
_MOST_CAUSES = 8


class WaitNotes:
    """Says every few seconds what is waited for, until it is stopped. A context manager; `describe` is called in its own
    thread, and may change."""

    def __init__(
        self,
        console: Console,
        doing: str,
        describe: Callable[[], Sequence[str]] = tuple,
        *,
        every_s: float = PLAIN_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.doing = doing
        self.describe = describe
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> WaitNotes:
        self._thread = threading.Thread(target=self._run, name="overlord-notes", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        began = self._clock()
        while not self._stopped.wait(self._every_s):
            try:
                lines = list(self.describe())
            except OverlordError as error:  # the run is starting or closing
                lines = [str(error)]
            if not self._stopped.is_set():
                causes = "".join(f"\n  - {printable(line)}" for line in lines[:_MOST_CAUSES])
                self._console.print(f"{self.doing} for {self._clock() - began:.0f} s{causes}", soft_wrap=True, markup=False)


class LiveView:
    """A progress view, used as a context manager. Call `show` after each step; it redraws a few times a second at most."""

    def __init__(
        self, console: Console, title: str, num_steps: int | None, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`unit` is the unit of the mixture: shares are of its tokens or samples."""
        self._console = console
        self._title = title
        self._num_steps = num_steps
        self._unit = unit
        self._clock = clock
        self._every_s = TERMINAL_EVERY_S if console.is_terminal else PLAIN_EVERY_S
        self._drawn_at = -math.inf
        self._before = (0.0, 0)  # seconds and tokens at the last redraw
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._notes: WaitNotes | None = None

    def explain_wait(self, describe: Callable[[], Sequence[str]]) -> None:
        """Until the first step, say every few seconds what the run waits for."""
        self._notes = WaitNotes(self._console, f"{self._title}: waiting for the first step", describe).__enter__()

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._notes is not None:
            self._notes.stop()
        if self._live is not None:
            self._live.stop()

    def show(self, meter: Throughput, shares: Callable[[], Mapping[str, SourceShare]]) -> None:
        """Redraw if it is time to. `shares` is called only then."""
        if self._notes is not None:
            self._notes.stop()
        now = self._clock()
        if now - self._drawn_at < self._every_s:
            return
        self._drawn_at = now
        seconds, tokens = meter.seconds - self._before[0], meter.tokens - self._before[1]
        self._before = (meter.seconds, meter.tokens)
        line = f"{self._steps(meter)}   {short(tokens / seconds if seconds else 0)} tokens/s   {short(meter.tokens)} tokens"
        if self._live is None:
            mix = ", ".join(f"{name} {share.realised:.1%}" for name, share in shares().items())
            self._console.print(f"{self._title}: {line}   {mix}", soft_wrap=True, markup=False)
        else:
            self._live.update(self._view(meter, line, shares()), refresh=True)

    def _steps(self, meter: Throughput) -> str:
        return f"step {meter.num_steps:,}" + (f" of {self._num_steps:,}" if self._num_steps else "")

    def _view(self, meter: Throughput, line: str, shares: Mapping[str, SourceShare]) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(Text(self._title, "bold"), line)
        bar = [ProgressBar(self._num_steps, meter.num_steps, width=60)] if self._num_steps else []
        return Group(head, *bar, mix_table(shares, self._unit))


def mix_table(shares: Mapping[str, SourceShare], unit: str, title: str | None = None) -> Table:
    return table(
        "source",
        f"{unit} asked",
        f"{unit} drawn",
        "samples",
        "tokens",
        title=title,
        rows=[
            (name, f"{s.asked:.2%}", f"{s.realised:.2%}", f"{s.samples:,}", f"{s.tokens:,}") for name, s in shares.items()
        ],
    )
