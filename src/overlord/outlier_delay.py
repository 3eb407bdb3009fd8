"""A declared policy: very long documents wait until enough of them are there to share a step evenly."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True)
class OutlierDelay:
    """Documents of at least `lengths[0]` tokens wait, in one queue for each of the rising `lengths`, until `together` of a
    queue are there; these then come in one step. With `together` = the microbatches of a step over all ranks, each
    gets one, and none is alone with a long document. Nobody waits longer than `most_steps` steps.

    It decides which step a document is in, so it is part of the stream: give it once, whatever mesh a run has.
    """

    lengths: tuple[int, ...]
    together: int
    most_steps: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths or sorted({0, *self.lengths}) != [0, *self.lengths]:
            raise SpecError(f"lengths are rising numbers of tokens, at least one of them, got {self.lengths}")
        if self.together < 1:
            raise SpecError(f"together is how many long documents come at once, at least 1, got {self.together}")
        if self.most_steps < 1:
            raise SpecError(f"most_steps is the longest that a document waits, at least 1, got {self.most_steps}")
