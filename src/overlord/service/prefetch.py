"""Prefetch in the client: the next steps are fetched before the trainer asks for them.

`StepsAhead` has a thread, which also converts steps and copies them to a device. `RequestedSteps` has none: where a step is
only mapped from shared memory, or built from chunks there, it is enough to request it early, and its answer waits in the
connection. That takes less processor time, and `next` takes the time to unpack the step, or to build it.

How both behave:
- What is fetched ahead is not taken, and moves nobody: the trainer's thread takes each step with a call of its own,
  and states, drains and resizes go by what was taken.
- They give up easily. A step that is not there, the end of a run, an error, a lost service: none of it is kept,
  and the trainer's thread requests that step itself, as without a thread. So waits, their limits, their warnings and all
  errors are those of the request that the trainer makes, in the order of its steps.
- Steps are kept only from the origin (the service, and the state it was moved to) at which the trainer's thread read last.
- A thread holds no reference to the client. It ends when the client is closed or dropped, and is a daemon: a call that
  hangs holds up no program.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.messages import Delivery

if TYPE_CHECKING:
    from overlord.batches.tensors import Placed, Placer
    from overlord.service.run_api import Channel, StepAhead, StepRequests

_WAIT_S = 0.25  # how long one fetch waits for its step
_PAUSES_S = (0.01, 0.5)  # the first and the longest pause after fetches that found nothing
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchedStep:
    """A step that was fetched ahead. It has to be taken before it is used."""

    number: int
    loss_tokens: int | float
    placed: Placed
    origin: str


class StepsAhead:
    """The steps of one rank that were fetched ahead. All methods are for the thread of the trainer, but for `stop`."""

    def __init__(self, channel: Channel, rank: int, depth: int) -> None:
        """At most `depth` steps are kept."""
        self._channel = channel
        self._rank = rank
        self._depth = depth
        self._pid = os.getpid()
        # A condition over a reentrant lock: the finalizer of a client may call `stop` inside any other call.
        self._changed = threading.Condition()
        self._ready: dict[int, FetchedStep] = {}
        self._trainer_at = 0  # the next step of the trainer
        self._next: int | None = None  # the step to fetch next; None while the trainer's thread fetches by itself
        self._turn = 0  # incremented when fetches under way are no longer wanted
        self._found_nothing = False  # by the last fetch of that step
        self._pause_s = _PAUSES_S[0]
        self._retry_at = 0.0
        self._origin = ""
        self._placer: Placer | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def is_paused(self) -> bool:
        """True until `follow` is called."""
        return self._next is None

    def follow(self, step: int, placer: Placer) -> None:
        """Fetch from a step on: the trainer has taken the one before it, from the present origin."""
        origin = self._channel.origin()
        with self._changed:
            if self._stopped:
                return
            if origin != self._origin:
                self._ready.clear()
            self._ready = {number: ready for number, ready in self._ready.items() if number >= step}
            self._origin, self._placer, self._trainer_at = origin, placer, step
            self._next = self._first_missing(step)
            self._turn += 1
            self._found_nothing, self._retry_at = False, 0.0
            if self._thread is None:
                name = f"overlord-prefetch-{self._rank}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def pop(self, step: int, timeout_s: float | None) -> FetchedStep | None:
        """Returns a step, once the fetch of it that is under way has ended. None when the trainer's thread has to fetch it
        itself; nothing more is fetched ahead then until it has."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._ready or not self._is_coming(step), timeout_s)
            found = self._ready.pop(step, None)
            if found is None:
                self._pause()
            return found

    def advance(self, step: int) -> None:
        """Fetch further: the trainer has taken the step before this one, so that a step out of reach may be there now."""
        with self._changed:
            self._trainer_at, self._retry_at = step, 0.0
            self._changed.notify_all()

    def pause(self) -> None:
        """Fetch nothing more until `follow`."""
        with self._changed:
            self._pause()

    def forget(self) -> None:
        """Drop all steps, and fetch nothing more until `follow`: the trainer goes elsewhere."""
        with self._changed:
            self._pause()
            self._ready.clear()

    def stop(self) -> None:
        """End the thread, as soon as a fetch under way returns. In a forked process it does nothing: there is no thread."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._stopped = True
            self._pause()
            self._ready.clear()
            self._changed.notify_all()

    def _pause(self) -> None:
        self._next = None
        self._turn += 1

    def _first_missing(self, step: int) -> int:
        while step in self._ready:
            step += 1
        return step

    def _is_coming(self, step: int) -> bool:
        return self._next == step and not self._found_nothing

    def _work(self) -> None:
        try:
            while (due := self._wait_for_room()) is not None:
                step, turn = due
                self._note(turn, self._fetch(step))
        finally:  # whatever ended it, nobody waits for it
            self.stop()

    def _wait_for_room(self) -> tuple[int, int] | None:
        """Returns the step to fetch next, and the turn that it is for, once there is one; None when the thread must end."""
        with self._changed:
            while not self._stopped:
                left_s = self._retry_at - time.monotonic()
                if self._next is None or self._next >= self._trainer_at + self._depth:
                    left_s = None
                elif left_s <= 0:
                    self._found_nothing = False
                    return self._next, self._turn
                self._changed.wait(left_s)
        return None

    def _fetch(self, step: int) -> FetchedStep | None:
        channel, origin, placer = self._channel, self._origin, self._placer
        if channel.origin() != origin or placer is None:
            return None
        try:
            found = channel.fetch(step, self._rank, _WAIT_S, ahead=True)
            if not isinstance(found, Delivery) or channel.origin() != origin:
                return None
            return FetchedStep(step, found.loss_tokens, placer.place(found.microbatches), origin)
        except Exception as error:  # noqa: BLE001 - the trainer's own request of this step raises it
            _log.debug("rank %d could not fetch step %d ahead: %s", self._rank, step, error)
            return None

    def _note(self, turn: int, found: FetchedStep | None) -> None:
        with self._changed:
            if turn != self._turn:
                return
            if found is None:
                self._found_nothing = True
                self._retry_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
            else:
                self._ready[found.number] = found
                self._next = self._first_missing(found.number + 1)
                self._pause_s = _PAUSES_S[0]
            self._changed.notify_all()


class RequestedSteps:
    """The steps of one rank that were requested ahead. It has the methods of `StepsAhead`."""

    def __init__(self, channel: Channel, rank: int, depth: int) -> None:
        """At most `depth` steps are requested beyond the one that the trainer has, as far as is known beforehand: an answer
        may have several steps, if these are small."""
        self._channel = channel
        self._rank = rank
        self._depth = depth
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held by the thread of the trainer while it uses the pipeline
        self._pipeline: StepRequests | None = None
        self._num_requested = 0  # requests whose answers have not been received
        self._received: deque[StepAhead] = deque()  # steps that follow one another, not taken yet
        self._next: int | None = None  # the first step of the next answer
        self._num_together = 1  # steps of the last answer
        self._origin = ""
        self._placer: Placer | None = None
        self._stopped = False
        self.is_paused = True

    def follow(self, step: int, placer: Placer) -> None:
        """Request the steps from this one on: the trainer has taken the one before it, from the present origin."""
        origin = self._channel.origin()
        with self._lock:
            if self._stopped:
                return
            first = self._received[0].step if self._received else self._next
            if origin != self._origin or (first is not None and first > step):
                self._drop()
            if self._pipeline is None:
                self._pipeline = self._channel.open_pipeline(self._rank)
            self._origin, self._placer = origin, placer
            self.is_paused = self._pipeline is None
            if not self.is_paused:
                self._request(step)

    def pop(self, step: int, timeout_s: float | None) -> FetchedStep | None:
        """Returns a step when its answer has come. None when the trainer's thread has to fetch it itself; nothing more is
        requested ahead then until `follow`."""
        with self._lock:
            found = self._receive(step, timeout_s) if self._channel.origin() == self._origin else None
            if found is None or self._placer is None:
                self.is_paused = True
                return None
            return FetchedStep(step, found.loss_tokens, self._placer.place(found.microbatches), self._origin)

    def advance(self, step: int) -> None:
        """Request further: the trainer has taken the step before this one."""
        with self._lock:
            self._request(step)

    def pause(self) -> None:
        """Request nothing more until `follow`."""
        self.is_paused = True

    def forget(self) -> None:
        """Drop all steps, and request nothing more until `follow`: the trainer goes elsewhere."""
        with self._lock:
            self._drop()

    def stop(self) -> None:
        """Request nothing any more. A `pop` in another thread returns. In a forked process it does nothing."""
        if os.getpid() != self._pid:
            return
        self._stopped = True
        pipeline = self._pipeline
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()
        elif pipeline is not None:
            pipeline.stop_receiving()

    def _request(self, step: int) -> None:
        """Request steps from `step` on, unless `depth` of them were received or requested."""
        pipeline, received = self._pipeline, self._received
        if pipeline is None or self.is_paused:
            return
        # With one step ready while several are requested, answers come in time, and chunks are returned soon.
        most = self._depth if self._num_together == 1 else self._depth + 1
        try:
            while len(received) + self._num_requested * self._num_together < most:
                first = received[-1].step + 1 if received else step
                if self._num_requested or first == self._next:
                    pipeline.request(None)
                else:
                    pipeline.request(first)
                    self._next = first
                self._num_requested += 1
        except OSError as error:
            _log.debug("rank %d could not request steps ahead: %s", self._rank, error)
            self._drop()

    def _receive(self, step: int, timeout_s: float | None) -> Delivery | None:
        pipeline, received = self._pipeline, self._received
        if pipeline is None:
            return None
        is_whole = False
        try:
            while True:
                while received and received[0].step < step:
                    received.popleft()
                if received:
                    found = received.popleft().build() if received[0].step == step else None
                    is_whole = found is not None
                    return found
                if not self._num_requested:
                    return None
                answer = pipeline.receive(timeout_s)
                self._num_requested -= 1
                if not answer and self._next is not None:  # the trainer requests that step itself
                    missing, self._next = self._next, self._next + 1
                    is_whole = missing >= step
                    if is_whole:
                        return None
                    continue
                received += answer
                self._next, self._num_together = answer[-1].step + 1, len(answer)
                del answer  # its steps hold chunks, which are returned where the pipeline is closed
        except Exception as error:  # noqa: BLE001 - the trainer's own request of this step raises it
            _log.debug("rank %d could not receive step %d ahead: %s", self._rank, step, error)
            return None
        finally:
            if not is_whole:  # also where a signal raises: an answer may be lost
                self._drop()

    def _drop(self) -> None:
        self.is_paused = True
        self._num_requested, self._next, self._num_together = 0, None, 1
        self._received.clear()
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
