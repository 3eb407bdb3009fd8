"""What trainers tell of their steps: losses by source, and how long a rank worked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's report of one step. Numbers are taken as they come: whoever uses them leaves out what makes no sense."""

    step: int
    rank: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """The mean loss of each source on this rank."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """How many tokens each of them is the mean over; 1 where none is given."""
    seconds: tuple[float, ...] = ()
    """How long the rank worked: on the whole step, or on each of its microbatches."""

    @staticmethod
    def of(
        step: int,
        rank: int,
        losses: Mapping[str, float] | None,
        tokens: Mapping[str, float] | None,
        seconds: float | Sequence[float] | None,
    ) -> StepReport:
        """A report from whatever numbers a trainer has: floats, numpy numbers, tensors with one entry."""
        if seconds is None:
            times: tuple[float, ...] = ()
        elif isinstance(seconds, Sequence):
            times = tuple(_number("seconds", value) for value in seconds)
        else:
            times = (_number("seconds", seconds),)
        return StepReport(step, rank, _numbers("losses", losses), _numbers("tokens", tokens), times)


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Weights to draw by from a step on, the first possible unless one is given; None for those that the job declares."""

    weights: Mapping[str, float] | None
    from_step: int | None
    id: str
    """The same when it is asked for again, so that it is carried out once."""

    def check(self, sources: Sequence[str]) -> None:
        if self.from_step is not None and self.from_step < 0:
            raise SpecError(f"from_step is a step from 0 on, got {self.from_step}")
        if self.weights is None:
            return
        unknown = [name for name in self.weights if name not in sources]
        if unknown:
            listed = ", ".join(map(repr, sources))
            raise SpecError(f"there is no source {', '.join(map(repr, unknown))}; the job's sources are {listed}")
        for name, weight in self.weights.items():
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
                raise SpecError(f"the weight of {name!r} must be a number >= 0, got {weight!r}")
        if not any(self.weights.values()):
            raise SpecError("every weight is 0: nothing to train on; give at least one source a weight above 0")


def _numbers(what: str, given: Mapping[str, float] | None) -> dict[str, float]:
    return {} if given is None else {str(name): _number(f"{what}[{name!r}]", value) for name, value in given.items()}


def _number(what: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type] - that is what is tried
    except (TypeError, ValueError) as error:
        raise SpecError(f"{what} must be a number, got {value!r}") from error
