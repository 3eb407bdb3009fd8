"""How many chunks of a source to make before they are requested, from the time that a chunk takes and the pace of requests.

A loader needs as many chunks in the making as are requested while one is made. Where requests wait for chunks, the loader
itself sets their pace: then half as many again are made, which raises the pace, until requests wait no longer, or until the
buffer is full or no thread is idle. A source whose chunks take less time than the run takes to use one needs none: the
planner announces its next chunk when it is due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_MARGIN = 1.5
_NUM_INTERVALS = 8  # enough to level out that chunks are requested in bursts
_SMOOTHING = 0.5
_FEWEST_SOURCES, _MOST_SOURCES = 8, 64
_CALM_CHUNKS = 16
_NOTICED_S = 0.002


@dataclass(frozen=True, slots=True)
class ChunkPace:
    """What a loader has measured: the time to make a chunk, and when new chunks were requested last."""

    cpu_s: float = 0.0
    waits: tuple[float, ...] = ()
    """How long the last chunks waited while they were made: for storage, or for the GIL."""
    requests: tuple[float, ...] = ()

    @property
    def make_s(self) -> float:
        """Thread-seconds that a chunk takes. Of the waits only the shortest counts: others may be for the GIL, which more
        threads would make longer."""
        return self.cpu_s + min(self.waits, default=0.0)

    def with_chunk(self, cpu_s: float, wait_s: float) -> ChunkPace:
        """After a chunk was made."""
        smoothed = self.cpu_s + (_SMOOTHING if self.waits else 1.0) * (cpu_s - self.cpu_s)
        return replace(self, cpu_s=smoothed, waits=(*self.waits[1 - _NUM_INTERVALS :], wait_s))

    def with_request(self, now: float) -> ChunkPace:
        """After the first request for a chunk."""
        return replace(self, requests=(*self.requests[-_NUM_INTERVALS:], now))

    @property
    def interval_s(self) -> float | None:
        """The mean time between requests; None until there were two. The longest interval is left out where there are
        several: a run may pause, for a checkpoint or an evaluation."""
        intervals = [after - before for before, after in zip(self.requests, self.requests[1:], strict=False)]
        if len(intervals) < 2:
            return intervals[0] if intervals else None
        return (sum(intervals) - max(intervals)) / (len(intervals) - 1)

    def num_ahead(self, most: int) -> int:
        """How many chunks a loader should have ready or in the making beyond the last one requested; at most `most`."""
        interval_s = self.interval_s
        if interval_s is None or not self.make_s:
            return 0
        return min(int(_MARGIN * self.make_s / interval_s), most) if interval_s > 0 else most


@dataclass(frozen=True, slots=True)
class Lookout:
    """How many sources to announce the next chunk of, those that are needed soonest. More when the planner has waited for
    facts; fewer again when it has not for a while, because every chunk made early takes memory early."""

    num_sources: int = _FEWEST_SOURCES
    calm: int = 0
    """Chunks in a row whose facts came without waiting."""

    def after_facts(self, waited_s: float) -> Lookout:
        """After the facts of a chunk came."""
        if waited_s > _NOTICED_S:
            return Lookout(min(self.num_sources * 3 // 2, _MOST_SOURCES))
        if self.calm + 1 < _CALM_CHUNKS:
            return replace(self, calm=self.calm + 1)
        return Lookout(max(self.num_sources - 1, _FEWEST_SOURCES))
