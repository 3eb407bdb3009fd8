"""The channel of clients in the process of their loader: a request is a call on the constructor of their rank."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from overlord.errors import ClosedError, SpecError, WaitTimeoutError, WorkerDiedError
from overlord.messages import Delivery, Later
from overlord.runtime.liveness import ROLE_REPORT
from overlord.service.constructor import ServingConstructor
from overlord.service.run_api import MOVED, Channel, StepSource

if TYPE_CHECKING:
    from overlord.runtime.engine import Handle
    from overlord.service.loader import Loader
    from overlord.service.run_roles import RunRoles

_LEAVE_S = ROLE_REPORT.after_s  # a constructor that hangs must not hold up a trainer that ends
_log = logging.getLogger(__name__)


class LocalChannel:
    """What a client in this process fetches its steps through. It follows the run to another state or mesh."""

    is_ahead_useful = has_pipeline = False

    def __init__(self, run: Loader, roles: RunRoles) -> None:
        self.run = run
        self._roles = roles

    def _constructor_of(self, rank: int) -> Handle[ServingConstructor]:
        """The constructor of a rank; after a resize that is another one."""
        return self._roles.constructors[self._roles.tree.coordinates(rank).dp]

    def eval_channel(self, name: str, known: Channel | None) -> Channel:
        return self.run.eval_channel(name, known)

    def close(self) -> None:
        """The run stays open: it is the loader's."""

    def open_pipeline(self, rank: int) -> None:  # noqa: ARG002 - part of the protocol
        return None

    def start(self) -> int:
        return self.run.start_step

    def generation(self) -> int:
        return self._roles.generation

    def origin(self) -> str:
        return str(self._roles.generation)

    def fetch(
        self,
        step: int,
        rank: int,
        wait_s: float,
        ahead: bool = False,
        generation: int | None = None,
        *,
        most_unbuilt: int = 0,  # noqa: ARG002 - a step that comes as a reply of a role comes whole
    ) -> Delivery | Later | None:
        known = self._roles.generation if generation is None else generation
        try:
            if known == self._roles.generation:
                return self._constructor_of(rank).call(StepSource.fetch, step, rank, wait_s, ahead, known).result()
        except (ClosedError, SpecError):  # of a constructor that was replaced, or because the rank is no more
            if known == self._roles.generation:
                raise
        return Later(MOVED)

    def take(
        self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None, origin: str | None = None
    ) -> Later | None:
        known = self._roles.generation if generation is None else generation
        if origin not in (None, str(known)):
            return Later("the run was moved since the step was fetched")
        try:
            if known == self._roles.generation:
                return self._constructor_of(rank).call(StepSource.take, step, rank, waited_s, known).result()
        except (ClosedError, SpecError):
            if known == self._roles.generation:
                raise
        return Later(MOVED)

    def leave(self, rank: int, generation: int | None = None) -> None:
        # A client that has not followed the run to another state or mesh reads nothing there, and another client may read
        # as this rank.
        if generation in (None, self._roles.generation):
            try:
                self._constructor_of(rank).call(ServingConstructor.leave, rank).result(_LEAVE_S)
            except (ClosedError, SpecError, WaitTimeoutError, WorkerDiedError) as error:
                _log.info("rank %d left without saying so: %s", rank, error)  # nobody is there to tell, so nobody waits
