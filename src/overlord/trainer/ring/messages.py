"""The messages of a ring: point-to-point on one process group that has every rank, so that no document needs a group.

`exchange` starts a send to the next rank and a receive from the previous one, and returns before either is done: attention
computes meanwhile and calls `wait` when it needs what was received. On CUDA the messages run on the stream of the group's
communicator, and `wait` only orders streams; the host goes on.

When they begin, the ranks of a ring compare what they must agree on (`RingFacts`): with different windows, say, the numbers
would be wrong and nobody would know. Where the host waits for messages anyway, facts travel as a message before each pass.
To read one from NCCL would stop the host until the GPU is done, so there facts go through the store of the process group,
once per microbatch.

All ranks run the rings that they share in the same order (`hdp_number`), and every rank starts the exchanges of a ring in
the same order, so each message meets its own receive.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from overlord.errors import RingError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.trainer.ring.pieces import Ring

_log = logging.getLogger(__name__)
_SHORTEST_POLL_S, _LONGEST_POLL_S = 5e-4, 0.05
_TOLD_AFTER_S = 10.0
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class RingFacts(NamedTuple):
    """What the ranks of a ring must agree on when they begin, as whole numbers."""

    number: int
    is_backward: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: int
    """The place in a list of dtypes."""
    scale: int
    """The bits of the number."""
    window: int

    @staticmethod
    def of(ring: Ring, q: Tensor, k: Tensor, *, scale: float, window: int, is_backward: bool) -> RingFacts:
        dtype = _DTYPES.index(q.dtype) if q.dtype in _DTYPES else len(_DTYPES)
        (bits,) = struct.unpack("<q", struct.pack("<d", scale))
        return RingFacts(ring.number, int(is_backward), q.shape[1], k.shape[1], q.shape[2], dtype, bits, window)

    def told(self) -> dict[str, str]:
        """The facts in words, by name."""
        return {
            "hdp_number": str(self.number),
            "the pass": "backward" if self.is_backward else "forward",
            "heads": str(self.heads),
            "kv heads": str(self.kv_heads),
            "head dimension": str(self.head_dim),
            "dtype": str(_DTYPES[self.dtype]) if 0 <= self.dtype < len(_DTYPES) else "another dtype",
            "scale": repr(struct.unpack("<d", struct.pack("<q", self.scale))[0]),
            "window": str(self.window) if self.window >= 0 else "none",
        }


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

    def check(self, ring: Ring, facts: RingFacts) -> None:
        """Raise if the previous rank is in another ring, or calls with other facts."""
        ...


@dataclass(frozen=True, slots=True)
class GroupMessages:
    """Messages on a process group that has all ranks; None is the default group."""

    group: dist.ProcessGroup | None = None
    timeout_s: float = 600.0
    by_store: bool | None = None
    """Whether ranks compare what they must agree on through the store of the process group, once per microbatch, instead of
    by a message before each pass. None: where the group is NCCL's."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise SpecError(f"timeout_s is how long a rank waits for another, above 0, got {self.timeout_s}")

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> PendingMessages:
        received = [tensor.new_empty((num_tokens, *tensor.shape[1:])) for tensor in tensors]
        return self._start(ring, tensors, received)

    def check(self, ring: Ring, facts: RingFacts) -> None:
        if self._is_nccl() if self.by_store is None else self.by_store:
            if _CHECKED not in ring.cache:
                ring.cache[_CHECKED] = True
                _compare(ring, facts, self._pass_through_store(ring, facts))
            return
        sent = torch.tensor(facts, dtype=torch.int64)
        found = self._start(ring, [sent], [torch.empty_like(sent)]).wait()[0].tolist()
        _compare(ring, facts, RingFacts(*found))

    def _pass_through_store(self, ring: Ring, facts: RingFacts) -> RingFacts:
        """Leave this rank's facts for the next one, and wait for those of the previous one. Nobody waits before its own are
        there, so ranks that run their rings in one order cannot wait for each other."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None  # its backend was asked for
        passed = _passed.setdefault(group, _Passed())
        own = ring.own
        prefix = f"overlord/ring/{group.group_name}"
        sent, wanted = passed.sent.get(ring.after, 0), passed.received.get(ring.before, 0)
        passed.sent[ring.after], passed.received[ring.before] = sent + 1, wanted + 1
        try:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to it
            store.set(f"{prefix}/{own}/{ring.after}/{sent}", " ".join(map(str, facts)))
            key = f"{prefix}/{ring.before}/{own}/{wanted}"
            self._wait_for(ring, lambda: store.check([key]))
            found = store.get(key)
            store.delete_key(key)
        except RuntimeError as error:
            raise _lost(ring, ring.before, self.timeout_s) from error
        return RingFacts(*map(int, found.split()))

    def _wait_for(self, ring: Ring, is_there: Callable[[], bool]) -> None:
        # Asks again and again, because a store that waits for a key answers no other thread of this process, such as torch's
        # watchdog.
        _log_wait(ring, ring.before)
        began, told_s, poll_s = time.monotonic(), _TOLD_AFTER_S, _SHORTEST_POLL_S
        while not is_there():
            waited_s = time.monotonic() - began
            if waited_s > self.timeout_s:
                raise _lost(ring, ring.before, self.timeout_s)
            if waited_s > told_s:
                told_s = math.inf
                _log.warning("rank %d has waited %.0f s for rank %d in %s", ring.own, waited_s, ring.before, ring)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

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


_CHECKED = "checked"
"""The key in a ring's cache that its facts were compared."""


@dataclass(slots=True)
class _Passed:
    """How many facts this rank has left for each rank, and taken from each."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)


_passed: WeakKeyDictionary[dist.ProcessGroup, _Passed] = WeakKeyDictionary()


def _compare(ring: Ring, own: RingFacts, before: RingFacts) -> None:
    for (name, mine), theirs in zip(own.told().items(), before.told().values(), strict=True):
        if mine != theirs:
            raise RingError(
                f"the ranks of {ring} must run the same microbatches in the same order with the same model: rank "
                f"{ring.own} has {name} {mine}, but rank {ring.before} has {theirs}; run the microbatches of a step in the "
                "order in which they come, with the same options of ring_attention"
            )


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
            _log_wait(self.ring, peer)
            try:
                if self.timeout is None:
                    work.wait()
                else:
                    work.wait(self.timeout)
            except RuntimeError as error:
                raise _lost(self.ring, peer, self.timeout.total_seconds() if self.timeout else None) from error
        return self.received


def _log_wait(ring: Ring, peer: int) -> None:
    """Say for whom this rank waits: the last such line of a rank that torch's watchdog ended tells where it was."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("rank %d waits for rank %d in %s", ring.own, peer, ring)


def _lost(ring: Ring, peer: int, timeout_s: float | None) -> RingError:
    """`timeout_s` is None where the process group has the time-out."""
    how_long, option = "the time-out of the process group", "that time-out"
    if timeout_s is not None:
        how_long, option = f"{timeout_s:g} s", "timeout_s of Ring.of"
    return RingError(
        f"rank {ring.own} lost rank {peer} in {ring}, or had no answer within {how_long}: it died, is in another ring, or "
        f"is slower than {option}; look at its log, and restart from the last checkpoint"
    )
