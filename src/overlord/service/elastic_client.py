"""`join`: a trainer of a run whose mesh follows its trainers (`Loader.serve(resize_on_leave=True)`)."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from overlord.declare.arguments import seconds_or_none, whole
from overlord.errors import ClosedError, OverlordError, WaitTimeoutError
from overlord.messages import Seat, SeatRequest, Step
from overlord.runtime.long_waits import warn_if_long
from overlord.service.channel import FlightChannel, connect_channel, open_client

if TYPE_CHECKING:
    from pathlib import Path

    from overlord.service.client import Client

_PAUSE_S = 0.1  # between two requests for a seat


class ElasticClient:
    """A trainer of an elastic run: iterates over the steps of its seat.

    `seat` says which rank it is now, of how many, and the step that training goes on with. When the mesh changes, `next`
    raises ClosedError; when a peer is lost, the trainer's own collectives fail. After either, call `regroup`: it returns the
    next seat. The step of a seat is the first that some trainer had not finished: the step that this one took last, or the
    one after it. So keep the model from before the last step, and from after it.
    """

    def __init__(self, address: str, rank: int, options: dict[str, Any], client_options: dict[str, Any]) -> None:
        self.rank = rank
        """Its rank in the mesh that the run was served with."""
        self._address = address
        self._options = options
        self._client_options = client_options
        self._session = secrets.token_hex(8)
        self._unfinished: int | None = None  # the first step that the trainer has not finished
        self._opened: tuple[FlightChannel, Client] | None = None
        self._origin = ""
        self.seat = self._sit_down(None)
        """Which rank it is in the present mesh."""

    @property
    def client(self) -> Client:
        """The client of the present seat, for its state, its reports and its metrics."""
        if self._opened is None:
            raise ClosedError(f"the member of rank {self.rank} is closed; call overlord.join again")
        return self._opened[1]

    def __iter__(self) -> ElasticClient:
        return self

    def __next__(self) -> Step:
        client = self.client
        self._unfinished = client.step  # the trainer has finished those before
        try:
            step = next(client)
        except ClosedError as error:
            raise ClosedError(
                f"rank {self.rank} reads no more in the mesh of {self.seat.world_size} ranks that began at step "
                f"{self.seat.step}: the mesh has changed, or the run has ended; call regroup for the next seat"
            ) from error
        self._unfinished = step.number
        channel, _ = self._opened or (None, None)
        if channel is not None and channel.origin() != self._origin:
            raise ClosedError(
                f"the service was restarted, and step {step.number} may be for another mesh: call regroup on the member of "
                f"rank {self.rank}"
            )
        return step

    def regroup(self) -> Seat:
        """Wait for the next seat: when a peer was lost, when one is back, or when all trainers ask for another seat. Returns
        it; `next` continues with its step."""
        self._leave_seat()
        self.seat = self._sit_down(self.seat.number)
        return self.seat

    def close(self) -> None:
        """Stop reading; the run goes on without this rank. Safe to call twice."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()

    def __enter__(self) -> ElasticClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave_seat(self) -> None:
        """Drop the client without telling the run that its rank has left: it may be another trainer's by now."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].abandon()
            opened[0].close()

    def _sit_down(self, after: str | None) -> Seat:
        began, timeout_s = time.monotonic(), self._options["timeout_s"]
        wait = f"rank {self.rank} waits for a seat in the mesh of the run at {self._address}"
        request = SeatRequest(self.rank, self._session, self._unfinished, after)
        asking = connect_channel(self._address, 0, **self._options, reads=False)
        try:
            with warn_if_long(lambda: f"{wait}: not all of its peers have asked for one, or were silent for long enough"):
                while True:
                    seat = asking.run.seat_of(request)
                    if seat is not None and self._open_client(seat):
                        return seat
                    waited_s = time.monotonic() - began
                    if timeout_s is not None and waited_s >= timeout_s:
                        raise WaitTimeoutError(
                            f"{wait} for {waited_s:.1f} s: its data-parallel group is not complete, or its peers still "
                            "train without it; they call regroup when a collective fails"
                        )
                    time.sleep(_PAUSE_S)
        finally:
            asking.close()

    def _open_client(self, seat: Seat) -> bool:
        """Connect as the rank of a seat. False if the mesh is another one by now."""
        try:
            channel = connect_channel(self._address, seat.rank, **self._options)
        except OverlordError:
            return False  # the rank is gone with its mesh
        if channel.origin() != seat.number:
            channel.close()
            return False
        self._opened = channel, open_client(channel, seat.rank, timeout_s=self._options["timeout_s"], **self._client_options)
        self._origin = seat.number
        return True


def join(  # noqa: PLR0913 - all but the address by name
    address: str,
    *,
    rank: int,
    token: str | None = None,
    tls_root: str | Path | None = None,
    timeout_s: float | None = 300.0,
    torch: bool = False,
    pin_memory: bool = False,
    device: Any = None,
    fetch_ahead: int | None = None,
) -> ElasticClient:
    """Join a run that is served with `resize_on_leave`: its mesh goes on without ranks that are lost, and has them again
    when they are back. `rank` is the trainer's rank in the mesh that the run was served with, whoever else is there.

    Waits for a seat, for up to `timeout_s`; the other arguments are those of `connect`.
    """
    options = {"token": token, "tls_root": tls_root, "timeout_s": seconds_or_none(timeout_s, "timeout_s")}
    client = {"torch": torch, "pin_memory": pin_memory, "device": device, "fetch_ahead": fetch_ahead}
    return ElasticClient(address, whole(rank, "rank"), options, client)
