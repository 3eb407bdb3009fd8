"""Takes without a message, for trainers that share memory with their service.

A trainer takes each step that it has fetched ahead before it uses it. Where client and service share a page of memory, the
client says so there, and the service finds it when it next looks: with every fetch of that trainer, and whenever what was
taken matters. The client may do so only while the service lets it. Otherwise it sends a message, as over Flight.

The page has five words. The client counts its takes: before a take it writes the next number to TRYING, then it reads
IS_OPEN, and only if that is set it writes STEP and then the number to TAKEN. Else TRYING goes back to TAKEN, and a message
is sent. To know exactly what was taken, the service clears IS_OPEN, waits, and then reads. Processors may delay a store
behind a later load, but only for nanoseconds: after the wait a client that found the page open is seen, at least as trying.
One that is trying decides within microseconds, so the service waits for it. From then on no step is taken without a message,
until the service opens the page again, when it has answered one. The client's side is `TakePage` in `local_link.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.errors import OverlordError
from overlord.runtime.shared_memory import SharedSegment
from overlord.service.local_steps import IS_OPEN, STEP, TAKEN, TRYING, WAITED_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PAGE_BYTES = 4096
_VISIBLE_S = 0.001  # after this a store of any process is visible, by several orders of magnitude
_DECIDE_S = 5.0  # how long a trainer that is trying may take; its thread may have to wait for the GIL
_POLL_S = 0.0005
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SharedPage:
    """The service's side of a page."""

    rank: int
    session: str
    segment: SharedSegment
    words: memoryview
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = -1
    """Of the run, as the client knew it when the page was opened last."""
    num_seen: int = 0
    waited_ns: int = 0

    @property
    def is_undecided(self) -> bool:
        return self.words[TRYING] != self.words[TAKEN]


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step that a trainer has taken without a message."""

    rank: int
    session: str
    generation: int
    step: int
    waited_s: float


class TakeBoard:
    """The pages of a server's trainers. `note` is called for what was taken, in order for each trainer. Safe to call from
    any thread."""

    def __init__(self, note: Callable[[TakenStep], None]) -> None:
        self._note = note
        self._lock = threading.Lock()
        self._pages: dict[int, dict[str, SharedPage]] = {}  # by rank and session; the inner ones are replaced, not changed
        self._num_pauses = 0
        self.epoch = 0
        """Incremented whenever pages are shut: a request that began before does not open them again."""

    def add(self, rank: int, session: str) -> SharedPage:
        """A new page for a client. Raises OSError where the system has no memory."""
        segment = SharedSegment.create(_PAGE_BYTES)
        page = SharedPage(rank, session, segment, segment.memory.data.cast("q"))
        with self._lock:
            old = self._pages.get(rank, {})
            self._pages[rank] = {**old, session: page}
        if session in old:
            self._shut([old[session]])
        return page

    def drop(self, page: SharedPage) -> None:
        """Forget a page whose client is gone, with what it took last."""
        self._shut([page])
        self._follow(page)
        with self._lock:
            left = {s: other for s, other in self._pages.get(page.rank, {}).items() if other is not page}
            self._pages[page.rank] = left
            if not left:
                del self._pages[page.rank]

    def open(self, rank: int, session: str, generation: int, epoch: int) -> None:
        """Let a client take steps of a generation by itself: its request, which began in that epoch, was answered."""
        page = self._pages.get(rank, {}).get(session)
        if page is None:
            return
        with self._lock:
            if epoch == self.epoch and not self._num_pauses:
                page.generation = generation
                page.words[IS_OPEN] = 1

    def follow(self, rank: int, session: str) -> None:
        """Note what a client has taken by now."""
        page = self._pages.get(rank, {}).get(session)
        if page is not None:
            self._follow(page)

    def follow_all(self) -> None:
        for page in self._all():
            self._follow(page)

    def pause(self) -> list[SharedPage]:
        """Shut all pages until `resume`, and note what was taken; exact, but for the pages that are returned. Their trainers
        were stopped while they took a step."""
        with self._lock:
            self._num_pauses += 1
        pages = self._all()
        self._shut(pages)
        deadline = time.monotonic() + _DECIDE_S
        while (undecided := [page for page in pages if page.is_undecided]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            known = self._all()
            pages = [page for page in pages if page in known]  # what a trainer that died had not taken, it never will
        for page in pages:
            self._follow(page)
        return undecided

    def resume(self) -> None:
        with self._lock:
            self._num_pauses = max(self._num_pauses - 1, 0)

    def shut(self, rank: int, except_session: str | None = None) -> None:
        """Let clients of a rank ask for each step, and note what they have taken."""
        pages = [page for session, page in self._pages.get(rank, {}).items() if session != except_session]
        pages = [page for page in pages if page.words[IS_OPEN]]
        if pages:
            self._shut(pages)
            for page in pages:
                self._follow(page)

    def has_other(self, rank: int, session: str) -> bool:
        """True if another client may take steps of a rank by itself."""
        pages = self._pages.get(rank)
        return pages is not None and any(s != session and page.words[IS_OPEN] for s, page in pages.items())

    def _all(self) -> list[SharedPage]:
        with self._lock:
            return [page for pages in self._pages.values() for page in pages.values()]

    def _shut(self, pages: Iterable[SharedPage]) -> None:
        is_any = False
        with self._lock:
            self.epoch += 1
            for page in pages:
                page.words[IS_OPEN] = 0
                is_any = True
        if is_any:
            # The client writes TRYING before it reads IS_OPEN; here IS_OPEN is written, and TRYING read after the wait. A
            # client that was not stopped by it is therefore seen.
            time.sleep(_VISIBLE_S)

    def _follow(self, page: SharedPage) -> None:
        with page.lock:
            words = page.words
            number = words[TAKEN]
            if number == page.num_seen:
                return
            step, waited_ns = words[STEP], words[WAITED_NS]  # of that number, or of a later one, which is noted twice
            waited_s = max(waited_ns - page.waited_ns, 0) / 1e9
            page.num_seen, page.waited_ns = number, waited_ns
            try:
                self._note(TakenStep(page.rank, page.session, page.generation, step, waited_s))
            except OverlordError as error:  # the run is closing, or another client has the rank
                _log.debug("rank %d took step %d, which is not noted: %s", page.rank, step, error)


def describe_stopped(ranks: Iterable[int]) -> str:
    """Why what was taken is not known."""
    listed = ", ".join(f"rank {rank}" for rank in sorted(ranks))
    return f"{listed} does not say whether it takes its step: its process may be stopped; end it or let it go on"
