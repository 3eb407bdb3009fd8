"""torchft on Overlord's steps: replicas come and go, and the run goes on for those that are there.

The run is in a service, which outlives replicas (`overlord serve job.py`). When torchft forms another quorum, the replicas
in it ask the service to go on for their number, from the step that was not committed: no sample is lost or repeated, whoever
was lost in the middle of a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.integrations.frameworks import require

if TYPE_CHECKING:
    from overlord.messages import Step
    from overlord.service.client import Client


class ReplicaSteps:
    """Iterates over the steps of this rank of this replica; `next` comes after `manager.start_quorum()`, which torchft's
    optimizer wrapper calls in `zero_grad`. A step whose update was not committed is returned again, arranged for the
    replicas that are left."""

    def __init__(
        self, manager: Any, address: str, *, mesh: Mesh | None = None, token: str | None = None, **options: Any
    ) -> None:
        """`mesh` is that of one replica, without pipeline stages; by default one rank. `options` are those of
        `overlord.connect`."""
        require("torchft")
        self._manager = manager
        self._address, self._token = address, token
        self._mesh = mesh or Mesh(dp=1)
        self._options = {"torch": True, "timeout_s": 300.0, **options}
        self._client: Client | None = None
        self._quorum: Any = None
        self._num_moves = 0  # in this quorum
        if self._mesh.pp > 1:
            raise SpecError(f"ReplicaSteps takes replicas without pipeline stages, got {self._mesh}")
        if getattr(manager, "_use_async_quorum", False):
            raise SpecError(
                "torchft's Manager must know who takes part before a step is read: pass use_async_quorum=False to it"
            )

    def __iter__(self) -> ReplicaSteps:
        return self

    def __next__(self) -> Step:
        number, quorum = self._manager.current_step(), self._find_quorum()
        if self._client is None or quorum != self._quorum or self._client.step != number:
            self._move(number, quorum)
        assert self._client is not None
        return next(self._client)

    def _find_quorum(self) -> tuple[Any, int, int]:
        self._manager.wait_quorum()
        rank = self._manager.participating_rank()
        if rank is None:
            raise SpecError("this replica does not take part in the quorum, so there is no step for it: it is a spare")
        # torchft tells neither of the two by a public name.
        return self._manager._quorum_id, self._manager.num_participants(), rank  # noqa: SLF001

    def _move(self, number: int, quorum: tuple[Any, int, int]) -> None:
        """Read on in a run for the replicas of a quorum, from a step on. All of them ask for the same change."""
        from overlord.service.admin import Control
        from overlord.service.channel import connect

        self._num_moves = self._num_moves + 1 if quorum == self._quorum else 0
        quorum_id, num_replicas, replica = quorum
        with Control(self._address, token=self._token) as control:
            name = f"torchft-{quorum_id}-{number}-{self._num_moves}"
            control.resize(replace(self._mesh, dp=self._mesh.dp * num_replicas), at=number, timeout_s=60.0, name=name)
        if self._client is not None:
            self._client.close()
        rank = replica * self._mesh.world_size + self._manager._group_rank  # noqa: SLF001
        self._client = connect(self._address, rank=rank, token=self._token, **self._options)
        self._quorum = quorum
        if self._client.step != number:
            self._client.rejoin(at=number)

    def scaled_loss(self, summed: Any, step: Step) -> Any:
        """The loss for the backward pass: `summed`, the sum of token losses, over the loss tokens of the step, times the
        ranks over which gradients are averaged: all that take part."""
        return summed * (self._manager.num_participants() * self._mesh.dp * self._mesh.cp / step.loss_tokens)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
