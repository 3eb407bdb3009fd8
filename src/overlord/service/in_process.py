"""The channel of clients that live beside their loader."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from overlord.errors import ClosedError, SpecError, WaitTimeoutError, WorkerDiedError
from overlord.messages import Delivery, Later, StepReport, WeightChange
from overlord.roles.data_constructor import DataConstructor
from overlord.runtime.liveness import ROLE_REPORT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlord.messages import State
    from overlord.runtime.engine import Handle
    from overlord.steering.decisions import Decision

C = TypeVar("C", bound=DataConstructor)

_LEAVE_S = ROLE_REPORT.after_s  # a constructor that hangs must not hold up a trainer that ends
_log = logging.getLogger(__name__)


class RunApi(Protocol):
    """What a channel needs of a running job."""

    @property
    def start_step(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def state_before(self, step: int) -> State: ...
    def load_state(self, state: Mapping[str, Any], generation: int) -> int: ...
    def status_lines(self) -> list[str]: ...
    def feedback(self, report: StepReport, generation: int) -> list[str]: ...
    def change_weights(self, change: WeightChange) -> int: ...
    def decisions(self) -> tuple[Decision, ...]: ...


class InProcess:
    def __init__(self, run: RunApi, constructor_of: Callable[[int], Handle[C]]) -> None:
        """`constructor_of` gives the constructor of a rank; a mesh that is resized deals ranks to other groups."""
        self._run = run
        self._constructor_of = constructor_of
        self.state_before = run.state_before
        self.load_state = run.load_state
        self.status_lines = run.status_lines
        self.feedback = run.feedback
        self.change_weights = run.change_weights
        self.decisions = run.decisions

    def start(self) -> int:
        return self._run.start_step

    def generation(self) -> int:
        return self._run.generation

    def fetch(self, step: int, rank: int, wait_s: float) -> Delivery | Later | None:
        generation = self._run.generation
        try:
            return self._constructor_of(rank).ask(DataConstructor.fetch, step, rank, wait_s).result()
        except ClosedError:
            if generation == self._run.generation:
                raise
            return Later("the mesh was changed")

    def leave(self, rank: int, generation: int | None = None) -> None:
        # Whoever has not followed the run to another state or mesh reads nothing there, and another may read as this rank.
        if generation in (None, self._run.generation):
            try:
                self._constructor_of(rank).ask(DataConstructor.rank_left, rank).result(_LEAVE_S)
            except (ClosedError, SpecError, WaitTimeoutError, WorkerDiedError) as error:
                _log.info("rank %d left without saying so: %s", rank, error)  # nobody is there to be told, so nobody waits
