"""The state of a run for torch's checkpoints, and for every other library that saves values by name.

`Client` and `Loader` have `state_dict` and `load_state_dict` of their own, and fit into most libraries as they are.
`Stateful` is for the rest: its saved form is one value under one key, and it can be told which step the model has seen.

    stateful = Stateful(client)
    for step in client:
        train(step)
        stateful.trained(step)
        dcp.save({"model": model, "data": stateful}, checkpoint_id=...)

Nothing here imports torch: the classes have the methods that torch's protocols name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import orjson

from overlord.checkpoint.form import contents_of
from overlord.errors import SpecError
from overlord.messages import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.messages import State

KEY = "overlord"
"""The only key of what `Stateful.state_dict` returns."""


class HasState(Protocol):
    """A client, a loader, or whatever else has the state of a run."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Stateful:
    """The state of a client or loader as one value of constant shape: {"overlord": "<JSON text>"}.

    It has the methods of torch's `Stateful`, so that `torch.distributed.checkpoint` saves and loads it, on any number of
    ranks, and `torch.save`, Lightning, Accelerate and Orbax hold what `state_dict` returns. Weights that were set while the
    run went on, and everything else that was decided, are in it.

    By default the state is that before the step which `next` returns next. A library that looks a batch ahead has then taken
    a step that the model has not seen: call `trained` with each step that it has.
    """

    def __init__(self, client: HasState) -> None:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(client, name, None)):
                raise SpecError(f"Stateful takes a client or a loader of Overlord, got {client!r}")
        self._client = client
        self._last: Step | None = None

    def trained(self, step: Step) -> None:
        """Note the last step that the model was trained on: the state is that after it from now on."""
        if not isinstance(step, Step):  # users pass anything
            raise SpecError(f"trained takes the step that the client returned, got {type(step).__name__}")
        # Without its arrays, which would keep the memory of the batch in use.
        self._last = Step(step.number, step.loss_tokens, (), step.origin)

    def state_dict(self) -> dict[str, str]:
        state = self._client.state_dict() if self._last is None else self._last.state_after()
        return {KEY: orjson.dumps(state).decode()}

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Continue from what `state_dict` returned, here or of a client or loader, in any form that it was saved in."""
        self._client.load_state_dict(contents_of(state))
        self._last = None
