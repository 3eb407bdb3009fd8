"""`TurnStreams`: lets the turns of a ring overlap on a GPU.

While the last blocks of a kernel finish, part of the GPU is idle. So the kernels of consecutive turns run on two streams in
turn, and the blocks of the next turn fill the gap. Two more streams of high priority keep the rest from waiting for a whole
kernel: one passes keys and values on, the other merges outputs, sums gradients and passes these on. With one stream for all
kernels, only sums and messages overlap with them.

Memory that was allocated on a stream may be reused on it at once when its tensor is freed, whoever else still reads it.
Three rules make that safe without `record_stream`, which would keep the buffers of all turns while the host runs ahead:

- keys and values are freed after the stream that allocated them waits for the kernels that read them;
- what the kernels of a turn return is kept until the kernels of the turn after next, which wait for the sums that read it;
  sums and what is sent of them are copies in memory of their own stream;
- nothing that was allocated on a side stream leaves the ring (`take_out`).

Streams belong to a thread, because these rules order the work of one thread only.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class _SideStreams(NamedTuple):
    kernels: Any
    """The kernels of every second turn, where they have two streams; the others run on the caller's stream."""
    keys: Any
    sums: Any

    @staticmethod
    def of(device: torch.device) -> _SideStreams:
        streams: dict[torch.device, _SideStreams] | None = getattr(_of_thread, "streams", None)
        if streams is None:
            streams = _of_thread.streams = {}
        if device not in streams:
            urgent = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]
            streams[device] = _SideStreams(torch.cuda.Stream(device), *urgent)
        return streams[device]


_of_thread = threading.local()


class TurnStreams:
    """The streams of one pass around a ring. Without a GPU, in a ring of one rank, or with `kernel_streams` 0, everything
    runs in order."""

    def __init__(self, device: torch.device, num_ranks: int, kernel_streams: int = 2) -> None:
        self._caller: Any = None
        if device.type != "cuda" or num_ranks == 1 or kernel_streams == 0:
            return
        self._kernel_streams = kernel_streams
        self._caller = torch.cuda.current_stream(device)
        self._side = _SideStreams.of(device)
        for stream in self._side:
            stream.wait_stream(self._caller)
        self._computed: list[Any] = [None, None]  # the last kernels of even and of odd turns
        self._summed: list[Any] = [None, None]

    @contextmanager
    def keys(self, turn: int) -> Iterator[None]:
        """Send keys on and receive those of later turns. The keys of the turn before may be freed inside."""
        if self._caller is None:
            yield
            return
        if turn > 0:
            self._side.keys.wait_event(self._computed[(turn - 1) % 2])
        with torch.cuda.stream(self._side.keys):
            yield

    @contextmanager
    def arrival(self, turn: int) -> Iterator[None]:
        """Wait for the keys of a turn; its kernels then wait for them, too."""
        if self._caller is None:
            yield
            return
        with torch.cuda.stream(self._side.keys):
            yield
        self._kernel_stream(turn).wait_event(self._side.keys.record_event())

    @contextmanager
    def kernels(self, turn: int) -> Iterator[None]:
        """Run the kernels of a turn, which may overlap with those of the turn before."""
        if self._caller is None:
            yield
            return
        stream = self._kernel_stream(turn)
        if turn > 1:
            stream.wait_event(self._summed[turn % 2])
        with torch.cuda.stream(stream):
            yield
        self._computed[turn % 2] = stream.record_event()

    @contextmanager
    def sums(self, turn: int) -> Iterator[None]:
        """Add up what the kernels of a turn returned, and send the sums on."""
        if self._caller is None:
            yield
            return
        self._side.sums.wait_event(self._computed[turn % 2])
        with torch.cuda.stream(self._side.sums):
            yield
        self._summed[turn % 2] = self._side.sums.record_event()

    def join(self) -> None:
        """Let the caller's stream wait for all turns."""
        if self._caller is not None:
            for stream in self._side:
                self._caller.wait_stream(stream)

    def take_out(self, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Tensors in a dtype, in memory of the caller's stream. Call it after `join`."""
        found = [tensor.to(dtype, copy=self._caller is not None) for tensor in tensors]
        if self._caller is not None:
            for stream in self._side:  # before their memory is used again
                stream.wait_stream(self._caller)
        return found

    def _kernel_stream(self, turn: int) -> Any:
        return self._side.kernels if turn % self._kernel_streams else self._caller
