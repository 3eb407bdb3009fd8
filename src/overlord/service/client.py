"""The client: the iterator inside the trainer. It fetches only what its rank needs, a global step at a time."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from overlord.batches.tensors import Destination
from overlord.checkpoint.form import contents_of, seal
from overlord.declare.arguments import seconds_or_none, whole
from overlord.errors import ClosedError, SpecError, WaitTimeoutError
from overlord.messages import Delivery, Later, State, Step, StepReport
from overlord.runtime.exclusive import OneProcess, OneThread
from overlord.runtime.long_waits import FIRST_S, warn_if_long
from overlord.service.prefetch import RequestedSteps, StepsAhead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from overlord.batches.tensors import Placed, Placer
    from overlord.messages import EvalTerms, MicrobatchWithColumns
    from overlord.service.handle import RunHandle
    from overlord.service.prefetch import FetchedStep
    from overlord.service.run_api import Channel

_FETCH_AHEAD = 2  # steps, where that saves the trainer a wait
_MOST_UNPACKED = 2  # microbatches that `next` unpacks in less time than a thread takes to hand them over
_SLOW_S = 0.005  # of work on a step: for such a trainer the time of `next` matters more than that of its processor
_MANY_SLOW = 3  # such steps in a row

_WAIT_S = 0.25  # how long one fetch waits before the client checks its own deadline
_COUNTED_BYTES = 256 << 20  # that `len` reads to know how many steps there are: seconds, also of text to be tokenised
_PAUSE_S = 0.01  # between fetches while another rank is behind
_NUMBERS = re.compile(r"[\d.]+")
_log = logging.getLogger(__name__)
_ONE_PROCESS = (
    "Use one client per process: start processes with multiprocessing's 'spawn' and call overlord.connect in each, at the "
    "address of a Loader.serve(). In a torch DataLoader use num_workers=0: Overlord prefetches by itself"
)
_ONE_THREAD = "Let one thread call next and hand steps on, or make a client for each rank"


class Client:
    """Iterates over the steps of one rank.

    A loop that was left continues where it stopped. After the end of a finite run, iterating again starts over; `rewind`
    starts over at any time. `state_dict` is the state before the next step, the same on every rank, whatever was fetched
    ahead.

    A client belongs to the process that made it, and one thread at a time may call `next`; others get SharedUseError. After
    half a minute of waiting, the logger "overlord" warns and says what the client waits for.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        *,
        destination: Destination | None = None,
        fetch_ahead: int | None = None,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        warn_after_s: float = FIRST_S,
    ) -> None:
        """`fetch_ahead`: how many steps a thread of the client keeps ready, if any; None: as many as are useful."""
        self.rank = whole(rank, "rank")
        self._channel = channel
        self._destination = destination or Destination()
        self._placer: Placer | None = None
        self._timeout_s = seconds_or_none(timeout_s, "timeout_s")
        self._clock = clock
        self._warn_after_s = warn_after_s
        self._home = OneProcess(f"the client of rank {rank}", _ONE_PROCESS)
        self._turn = OneThread(f"the client of rank {rank}", _ONE_THREAD)
        self._reason = ""  # why the next step is not ready
        self._next, self._generation = _beginning(channel)
        self._origin = _ClientStates(weakref.ref(self), self._generation)  # of the steps of this generation
        self._furthest = self._next  # the step after the last that it has returned, also where it has gone back since
        self._ended = False
        self._has_read = False  # since it joined the run or loaded a state
        self._warned: set[str] = set()
        self._closed = threading.Event()
        self._at_close: list[Callable[[], None]] = []
        self._always_ahead = fetch_ahead is not None  # else only where that is useful
        self._num_ahead = _FETCH_AHEAD if fetch_ahead is None else whole(fetch_ahead, "fetch_ahead")
        self._ahead: StepsAhead | RequestedSteps | None = None  # made when it is first useful
        self._returned_at = clock()  # when the trainer got its last step
        self._num_slow = 0  # how many steps in a row it worked on for long
        self._meter = _StepMeter()
        self._evals: dict[str, Client] = {}  # clients of evaluations that were begun
        self._eval_terms: Sequence[EvalTerms] | None = None

    def __iter__(self) -> Client:
        self._home.check()
        with self._turn:
            if self._ended:
                self._begin_again()
        return self

    def __next__(self) -> Step:
        # Both guards are inlined: a step that is ready takes microseconds.
        if os.getpid() != self._home.pid:
            self._home.check()
        if not self._turn.lock.acquire(blocking=False):
            raise self._turn.error()
        self._turn.user = threading.get_ident()
        began = self._clock()
        worked_s = began - self._returned_at
        self._num_slow = self._num_slow + 1 if worked_s > _SLOW_S else 0
        try:
            step = self._take_step()
            now = self._clock()
            self._meter.note(step, now - began, worked_s)
            return step
        finally:
            self._returned_at = self._clock()
            self._turn.lock.release()

    def _take_step(self) -> Step:
        if self._ended:
            raise StopIteration
        with warn_if_long(self._describe_wait, self._warn_after_s):
            began, self._reason = self._clock(), ""
            ahead = self._ahead
            if ahead is not None and not ahead.is_paused and (found := self._take_ahead(ahead, began)) is not None:
                step = self._step(found.loss_tokens, found.placed)
                if isinstance(ahead, RequestedSteps) and self._needs_thread(len(step)):
                    self._fetch_ahead(len(step)).follow(self._next, self._open_placer())
                else:
                    ahead.advance(self._next)  # last: from here on the thread contends for the GIL
                return step
            delivery = self._fetch_next(began)
        if delivery is None:
            self._ended = True
            self._channel.leave(self.rank)
            raise StopIteration
        placer = self._open_placer()
        step = self._step(delivery.loss_tokens, placer.place(delivery.microbatches))
        if self._num_ahead and (self._always_ahead or self._destination.copies or self._channel.is_ahead_useful):
            self._fetch_ahead(len(step)).follow(self._next, placer)
        return step

    def _open_placer(self) -> Placer:
        if self._placer is None:
            self._placer = self._destination.open()
        return self._placer

    def _needs_thread(self, num_microbatches: int) -> bool:
        """Whether a thread should have the next steps ready: where much has to be done for one, where it was asked for, or
        where the trainer takes few steps a second, so that what `next` takes counts for more than processor time."""
        is_much = self._destination.copies or num_microbatches > _MOST_UNPACKED
        return self._always_ahead or is_much or self._num_slow >= _MANY_SLOW or not self._channel.has_pipeline

    def _fetch_ahead(self, num_microbatches: int) -> StepsAhead | RequestedSteps:
        """What fetches the next steps."""
        kind = StepsAhead if self._needs_thread(num_microbatches) else RequestedSteps
        if isinstance(self._ahead, kind):
            return self._ahead
        if self._ahead is not None:
            self._ahead.stop()
        self._ahead = ahead = kind(self._channel, self.rank, self._num_ahead)
        weakref.finalize(self, ahead.stop).atexit = False  # daemons need not be told of the end of the program
        if self._closed.is_set():  # by another thread, which has not seen it
            ahead.stop()
        return ahead

    def _step(self, loss_tokens: int | float, placed: Placed) -> Step:
        microbatches = cast("tuple[MicrobatchWithColumns, ...]", placed.use())
        if self._origin.generation != self._generation:
            self._origin, self._furthest = _ClientStates(weakref.ref(self), self._generation), self._next
        step = Step(self._next, loss_tokens, microbatches, self._origin)
        self._next += 1  # last: the step of an error is requested again
        self._furthest = max(self._furthest, self._next)
        self._has_read = True
        return step

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._next

    @property
    def generation(self) -> int:
        """How often this client has followed its run to another state or mesh."""
        return self._generation

    def evaluate(self, name: str) -> Iterator[Step]:
        """Iterate over the steps of an evaluation that the job declares: the same ones each time, for this rank. Every rank
        does so, and all end after the same step. The training stream does not notice."""
        self._home.check()
        terms = next((each for each in self._channel.run.evaluations() if each.name == name), None)
        known = self._evals.get(name)
        # Where there is no such evaluation, opening it says which there are.
        channel = self._channel.eval_channel(name, None if known is None else known.channel)
        if known is None or known.channel is not channel:
            if known is not None:
                known.close()
            options: Any = {"destination": self._destination, "timeout_s": self._timeout_s}
            known = self._evals[name] = Client(self.rank, channel, **options)
            known.at_close(channel.close)
            self.at_close(known.close)
        known.rewind()
        return islice(known, None if terms is None else terms.limit)

    def evals_due(self, step: int) -> list[str]:
        """The evaluations that follow a training step, by `every`: after steps every - 1, 2 every - 1, ..."""
        if self._eval_terms is None:
            self._eval_terms = self._channel.run.evaluations()
        return [each.name for each in self._eval_terms if each.every is not None and (step + 1) % each.every == 0]

    @property
    def channel(self) -> Channel:
        """How this client reaches its run."""
        return self._channel

    def rewind(self) -> None:
        """Go back to the step that the run began at, and read the same steps again. Every rank that reads must do so."""
        self._home.check()
        with self._turn:
            self._restart()

    def _restart(self) -> None:
        self._drop_ahead()
        self._next = self._channel.start()
        self._ended = False

    def _begin_again(self) -> None:
        """Begin the run anew after its end: at step 0, also where it was resumed from a later one. Then the whole run is
        moved to its beginning, by the first rank that gets there once all have come to the end; the others follow."""
        start = self._channel.start()
        if start == 0 and not self.is_stale:
            self._restart()
            return
        if start and self.is_stale:
            self._restart()  # the run was moved elsewhere: `next` says how to follow
            return
        if start:
            self._wait_for_end_of_others()
        self._drop_ahead()
        run = self._channel.run
        self._generation = run.load_state(run.state_before(0), self._generation)
        self._next = self._channel.start()
        self._ended = self._has_read = False

    def _wait_for_end_of_others(self) -> None:
        began = self._clock()
        while True:
            found = self._channel.run.metrics()
            others = [rank for rank, each in found.ranks.items() if each.step is not None and rank != self.rank]
            is_moved = found.planner is not None and found.planner.start == 0
            # A rank that has read nothing yet is in no metrics, but a state of the run waits for it.
            if is_moved or (not others and self._channel.run.state_dict()["step"] >= self._next):
                return
            self._check_reading()
            if self._timeout_s is not None and self._clock() - began >= self._timeout_s:
                raise WaitTimeoutError(
                    f"rank {self.rank} has come to the end of the run and begins it again at step 0, but "
                    f"{f'rank {others[0]}' if others else 'another rank'} still reads it after {self._timeout_s:g} s: all "
                    "ranks have to come to the end first"
                )
            self._closed.wait(_PAUSE_S)

    def __len__(self) -> int:
        """The number of steps of the whole run, also where it was resumed: `len(client) - client.step` are left. TypeError
        if the run never ends, and if much data would have to be read to count them (`client.run.count_steps` does that)."""
        self._home.check()
        run, wait_s = self._channel.run, 0.0
        wait = f"rank {self.rank} counts the steps of its run, for len(client), and reads its data for that"
        with warn_if_long(lambda: wait, self._warn_after_s):
            while (count := run.count_steps(wait_s, _COUNTED_BYTES)).steps is None:
                if count.endless:
                    raise TypeError(f"the run of this client has no length: {count.endless}")
                if count.num_bytes > _COUNTED_BYTES:
                    raise TypeError(
                        f"the length of this run is not known yet, and {count.num_bytes / 2**30:.1f} GiB of data have to be "
                        "read to count its steps; client.run.count_steps() does so, and len(client) knows it from then on"
                    )
                wait_s = _WAIT_S
        return count.steps

    def __bool__(self) -> bool:
        return True  # without this `if client:` would count steps

    def state_dict(self, before: int | Step | None = None) -> State:
        """Returns the state before the next step: {"overlord": 2, "step": ..., "state": "<JSON>"}. The keys are always the
        same, so that torch.distributed.checkpoint and other libraries that load in place can hold it.

        Steps that this client has fetched ahead are not taken. A library that prefetches, however, has taken steps that the
        model has not seen: pass the first of those as `before`, the step or its number. `step.state_after()` is the same
        from the other side, for the last step that the model has seen."""
        number = before.number if isinstance(before, Step) else self._next if before is None else whole(before, "before")
        last = max(self._next, self._furthest if self._origin.generation == self._generation else 0)
        if number > last:
            raise SpecError(f"before is a step from 0 to {last}, the one that comes next, got {number}")
        return self._channel.run.state_before(number)

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Continue from a state, in any form that it was saved in. Every client of the run must load the same one."""
        self._home.check()
        state = seal(contents_of(state))  # as text: a state that is no JSON is refused here, not in the service
        # A client that has read nothing yet calls as one of the generation before: if another client has moved the run to
        # this state already, this one only follows, and the others need not load the state again.
        with self._turn:
            self._drop_ahead()
            generation = self._generation if self._has_read else self._generation - 1
            self._generation = self._channel.run.load_state(state, generation)
            self._next = self._channel.start()
            self._ended = self._has_read = False

    def feedback(
        self,
        *,
        losses: Mapping[str, float] | None = None,
        tokens: Mapping[str, float] | None = None,
        seconds: float | Sequence[float] | None = None,
        step: int | None = None,
    ) -> None:
        """Report how a step went (by default the last one taken), for mixtures and costs that learn from reports.

        `losses` are the mean losses of this rank's tokens by source, `tokens` the number of tokens in each mean. `seconds`
        is how long this rank worked on the step, without waiting for others, or on each of its microbatches. Values that
        cannot be used are left out, with a warning the first time: a report never stops a run.
        """
        self._home.check()
        number = self._next - 1 if step is None else whole(step, "step", least=None)
        report = StepReport.of(number, self.rank, losses, tokens, seconds)
        for reason in self._channel.run.feedback(report, self._generation):
            kind = _NUMBERS.sub("", reason)
            if kind not in self._warned:
                self._warned.add(kind)
                _log.warning("a report of rank %d for step %d is not used: %s", self.rank, report.step, reason)

    @property
    def run(self) -> RunHandle:
        """The run that this client reads: its metrics, and what can be changed while it goes on."""
        from overlord.service.handle import RunHandle  # most trainers never ask

        return RunHandle(lambda: self._channel.run)

    def metrics(self) -> dict[str, float]:
        """Returns what this rank's last step was like, and totals since the client was made, as numbers for TensorBoard,
        W&B or any other logger. Costs microseconds: nobody is asked. `client.run.metrics()` has the whole run."""
        return self._meter.to_dict()

    def rejoin(self, at: int | None = None) -> None:
        """Continue in a run whose mesh was changed, as the same rank of the new mesh, from the step that the new mesh begins
        at. A trainer that was restarted while its peers went on passes the step that it needs next as `at`."""
        self._home.check()
        number = None if at is None else whole(at, "at")
        with self._turn:
            self._drop_ahead()
            channel = self._channel
            self._next, self._generation = _beginning(channel) if number is None else (number, channel.generation())
            self._ended = self._has_read = False

    @property
    def is_reading(self) -> bool:
        return not self._closed.is_set() and not self._ended and not self.is_stale

    @property
    def is_stale(self) -> bool:
        """True when the run was moved to another state or mesh, and this client has not followed yet."""
        return self._generation != self._channel.generation()

    def close(self) -> None:
        """Stop reading; the other ranks no longer wait for this one. Safe to call twice. In a forked process it does
        nothing, since the client belongs to the parent."""
        if not self._home.is_this:
            return
        if not self._closed.is_set():
            self.abandon()
            self._channel.leave(self.rank, self._generation)
            for call in reversed(self._at_close):
                call()

    def at_close(self, call: Callable[[], None]) -> None:
        """Register a function for `close` to call. Functions are called in reverse order."""
        self._at_close.append(call)

    def abandon(self) -> None:
        """End a wait in another thread with ClosedError, because the loader is closing."""
        self._closed.set()
        if self._ahead is not None:
            self._ahead.stop()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_ahead(self, ahead: StepsAhead | RequestedSteps, began: float) -> FetchedStep | None:
        """Take the next step if it was fetched ahead, or is being fetched. None if it must be requested by this thread."""
        found = ahead.pop(self._next, self._timeout_s)
        if found is None:
            return None
        self._check_reading()
        later = self._channel.take(self._next, self.rank, self._clock() - began, self._generation, found.origin)
        if later is None:  # it counts as taken: the trainer gets it, even if the run was moved meanwhile
            return found
        ahead.pause()
        return None

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.forget()

    def _check_reading(self) -> None:
        if self._closed.is_set():
            raise ClosedError(f"the client of rank {self.rank} is closed; ask the loader for a new one")
        if self.is_stale and not self._follow():
            raise ClosedError(
                f"the run was moved to another state; call load_state_dict on the client of rank {self.rank} too, or "
                "rejoin if its mesh was changed"
            )

    def _follow(self) -> bool:
        """Go on in a run that was moved without changing its steps, because a source was added. False if it was moved in
        another way."""
        generation = self._channel.generation()
        if not self._channel.run.may_follow(self._generation):
            return False
        self._drop_ahead()
        self._generation = generation
        return True

    def _fetch_next(self, began: float) -> Delivery | None:
        """Request the next step until it comes, from this thread, whose rank is then at that step. None at the end."""
        while True:
            self._check_reading()
            wait_s = _WAIT_S if self._timeout_s is None else min(_WAIT_S, self._timeout_s)
            answer = self._channel.fetch(self._next, self.rank, wait_s, generation=self._generation)
            if not isinstance(answer, Delivery) and self.is_stale:
                continue  # a step counts as taken even then: without it the trainer would miss it
            if not isinstance(answer, Later):
                return answer
            self._reason = answer.reason
            waited = self._clock() - began
            if self._timeout_s is not None and waited >= self._timeout_s:
                raise WaitTimeoutError(
                    f"rank {self.rank} waited {waited:.1f} s for step {self._next}: {answer.reason}{self._status_text()}"
                )
            self._closed.wait(_PAUSE_S)

    def _describe_wait(self) -> str:
        limit = "it has no timeout" if self._timeout_s is None else f"its timeout is {self._timeout_s:g} s"
        reason = self._reason or "no reason is known yet"
        return f"rank {self.rank} waits for step {self._next} ({limit}): {reason}{self._status_text()}"

    def _status_text(self) -> str:
        return "".join(f"\n  - {line}" for line in self._channel.run.status_lines())


class _ClientStates:
    """The states of a client's run, for the steps that the client returned. A step that is kept keeps no client alive."""

    __slots__ = ("_client", "generation")

    def __init__(self, client: weakref.ref[Client], generation: int) -> None:
        self._client = client
        self.generation = generation

    def state_before(self, step: int) -> State:
        client = self._client()
        if client is None:
            raise ClosedError(
                f"the client that returned step {step - 1} is gone, and with it the state after that step; keep the client"
            )
        if client.generation != self.generation:
            raise ClosedError(
                f"the run was moved to another state or mesh since it returned step {step - 1}; save client.state_dict()"
            )
        return client.state_dict(before=step)


class _StepMeter:
    """Counts the steps that a trainer took."""

    def __init__(self) -> None:
        self._last: tuple[int, int, int] = -1, 0, 0  # number, tokens, microbatches; not the step, which holds its batches
        self._wait_s = self._worked_s = 0.0
        self._num_steps = self._tokens = 0
        self._waited_s = 0.0

    def note(self, step: Step, wait_s: float, worked_s: float) -> None:
        tokens = sum([micro.get("num_tokens", 0) for micro in step.microbatches])
        self._last = step.number, tokens, len(step.microbatches)
        self._wait_s, self._worked_s = wait_s, worked_s
        self._num_steps += 1
        self._tokens += tokens
        self._waited_s += wait_s

    def to_dict(self) -> dict[str, float]:
        number, tokens, num_microbatches = self._last
        return {
            "overlord/step": number,
            "overlord/wait_s": self._wait_s,
            "overlord/wait_share": self._wait_s / max(self._wait_s + self._worked_s, 1e-9),
            "overlord/tokens": tokens,
            "overlord/microbatches": num_microbatches,
            "overlord/steps_total": self._num_steps,
            "overlord/tokens_total": self._tokens,
            "overlord/wait_s_total": self._waited_s,
        }


def _beginning(channel: Channel) -> tuple[int, int]:
    """The step that clients begin at, and the generation of the run that this is true for."""
    while True:
        generation = channel.generation()
        start = channel.start()
        if channel.generation() == generation:
            return start, generation
