"""For trainers that take one microbatch at a time and accumulate the gradients of a fixed number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from overlord.messages import MicrobatchWithColumns, Step
    from overlord.service.client import Client


class OneByOne:
    """Iterates over the microbatches of a client's steps one by one, each converted for the framework.

    Every step must have `per_step` microbatches on this rank: the framework counts them to know when a step is complete, so
    one more or less would move samples to another optimizer step. A loop that was left continues where it stopped.

    It has no `state_dict`: frameworks that fetch ahead would save the state of a step that they have not trained on.
    """

    def __init__(
        self, client: Client, per_step: int, convert: Callable[[MicrobatchWithColumns, Step], Any], *, option: str
    ) -> None:
        """`option` is the name of the framework's option for `per_step`, for messages."""
        self.client = client
        self._per_step = per_step
        self._convert = convert
        self._option = option
        self._step: Step | None = None
        self._next = 0  # of the step's microbatches
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_ended:
            self._has_ended = False
            iter(self.client)  # starts over
        return self

    def __next__(self) -> Any:
        if self._step is None:
            try:
                self._step = checked_step(next(self.client), self._per_step, self._option)
            except StopIteration:
                self._has_ended = True
                raise
            self._next = 0
        step, micro = self._step, self._step.microbatches[self._next]
        self._next += 1
        if self._next == len(step):
            self._step = None
        return self._convert(micro, step)

    def __len__(self) -> int:
        return len(self.client) * self._per_step


def checked_step(step: Step, per_step: int, option: str) -> Step:
    """Returns the step, which must have `per_step` microbatches."""
    if len(step) == per_step:
        return step
    raise SpecError(
        f"{option} is {per_step}, but step {step.number} has {len(step)} microbatches on this rank. A rank has tokens / dp "
        f"/ micro_tokens of them: set {option}={len(step)}, or change Batch(tokens=, micro_tokens=) or the number of ranks. "
        "The count is the same in every step with tokens=... and a strategy with equal_counts=True; Batch(drop_last=True) "
        "drops a shorter step at the end of a finite run"
    )
