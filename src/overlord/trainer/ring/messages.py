"""The messages of a ring: point-to-point on one process group that has every rank, so that no document needs a group.

`exchange` starts a send to the next rank and a receive from the previous one, and returns before either is done: attention
computes meanwhile and calls `wait` when it needs what was received. On CUDA the messages run on the stream of the group's
communicator, and `wait` only orders streams; the host goes on.

All ranks run the rings that they share in the same order (`hdp_number`), and every rank starts the exchanges of a ring in
the same order, so each message meets its own receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overlord.errors import RingError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.trainer.ring.pieces import Ring


class PendingMessages(Protocol):
    """Messages under way. The tensors that are sent must not change until `wait` returns."""

    def wait(self) -> list[Tensor]:
        """Return the received tensors."""
        ...


class Messages(Protocol):
    """How the ranks of a ring talk. The default is a process group; a benchmark of one GPU copies on a stream."""

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> PendingMessages:
        """Send tensors to the next rank, and receive tensors of the same shapes, but with `num_tokens` tokens, from the
        previous one. It receives what that rank sends in its exchange of the same number; they may be waited for in any
        order."""
        ...

    def check(self, ring: Ring, facts: Sequence[int]) -> None:
        """Raise if the previous rank is in another ring, or calls with other facts (see `FACTS`)."""
        ...


FACTS = ("hdp_number", "the pass (0 forward, 1 backward)", "heads", "kv heads", "head dimension", "bytes per number")
"""What the ranks of a ring must agree on when they begin."""


@dataclass(frozen=True, slots=True)
class GroupMessages:
    """Messages on a process group that has all ranks; None is the default group."""

    group: dist.ProcessGroup | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise SpecError(f"timeout_s is how long a rank waits for another, above 0, got {self.timeout_s}")

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> PendingMessages:
        received = [tensor.new_empty((num_tokens, *tensor.shape[1:])) for tensor in tensors]
        return self._start(ring, tensors, received)

    def check(self, ring: Ring, facts: Sequence[int]) -> None:
        if self._is_nccl():
            return  # to read the answer would stop the host; ranks in different rings meet the time-out of the group
        sent = torch.tensor(facts, dtype=torch.int64)
        found = self._start(ring, [sent], [torch.empty_like(sent)]).wait()[0].tolist()
        for name, mine, theirs in zip(FACTS, facts, found, strict=True):
            if mine != theirs:
                raise RingError(
                    f"the ranks of {ring} must run the same microbatches in the same order with the same model: rank "
                    f"{ring.ranks[ring.index]} has {name} {mine}, but rank {ring.before} has {theirs}; run the microbatches "
                    "of a step in the order in which they come"
                )

    def _start(self, ring: Ring, tensors: Sequence[Tensor], received: list[Tensor]) -> _GroupPending:
        if self._is_nccl():
            sends = [dist.P2POp(dist.isend, tensor, ring.after, self.group) for tensor in tensors]
            receives = [dist.P2POp(dist.irecv, tensor, ring.before, self.group) for tensor in received]
            # One batch, because single messages would make a communicator for each pair of ranks.
            works = [(ring.before, work) for work in dist.batch_isend_irecv(sends + receives)]
            return _GroupPending(ring, list(tensors), received, works, None)
        works = [(ring.after, self._post(dist.isend, tensor, ring, ring.after)) for tensor in tensors]
        works += [(ring.before, self._post(dist.irecv, tensor, ring, ring.before)) for tensor in received]
        return _GroupPending(ring, list(tensors), received, works, timedelta(seconds=self.timeout_s))

    def _post(self, start: Callable[..., Any], tensor: Tensor, ring: Ring, peer: int) -> Any:
        try:
            return start(tensor, peer, group=self.group)
        except RuntimeError as error:
            raise _lost(ring, peer, self.timeout_s) from error

    def _is_nccl(self) -> bool:
        return dist.get_backend(self.group) == "nccl"


@dataclass(frozen=True, slots=True)
class _GroupPending:
    ring: Ring
    sent: list[Tensor]
    received: list[Tensor]
    works: list[tuple[int, Any]]
    """The other rank of each message, and the message; NCCL has one for all of them, and waits on its stream."""
    timeout: timedelta | None

    def wait(self) -> list[Tensor]:
        for peer, work in reversed(self.works):  # receives first: a rank that does not send is named
            try:
                if self.timeout is None:
                    work.wait()
                else:
                    work.wait(self.timeout)
            except RuntimeError as error:
                raise _lost(self.ring, peer, self.timeout.total_seconds() if self.timeout else 0.0) from error
        return self.received


def _lost(ring: Ring, peer: int, timeout_s: float) -> RingError:
    return RingError(
        f"rank {ring.ranks[ring.index]} lost rank {peer} in {ring}, or had no answer within {timeout_s:g} s: it died, is in "
        "another ring, or is slower than timeout_s of Ring.of; look at its log, and restart from the last checkpoint"
    )
