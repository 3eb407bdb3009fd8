"""`connect`: the iterator of a rank whose run lives in another process."""

from __future__ import annotations

from pathlib import Path

from overlord.arguments import seconds_or_none, switch, whole
from overlord.roles.client import Client
from overlord.transport.channel import FlightChannel
from overlord.transport.security import check_token, read_pem


def connect(
    address: str,
    *,
    rank: int,
    token: str | None = None,
    tls_root: str | Path | None = None,
    timeout: float | None = 300.0,
    torch: bool = False,
    pin_memory: bool = False,
) -> Client:
    """The iterator of one rank of a run that `Loader.serve` or `overlord serve` offers at an address.

    `timeout` is the longest wait in seconds, for the service to be there and for each step; None waits for ever. `tls_root`
    is a PEM file with the certificate that the service's own must lead to; without one the system's are trusted.
    """
    rank = whole(rank, "rank")
    timeout = seconds_or_none(timeout, "timeout")
    torch, pin_memory = switch(torch, "torch"), switch(pin_memory, "pin_memory")  # before anything is waited for
    check_token(token)
    root = None if tls_root is None else read_pem(tls_root, "the TLS root certificate")
    channel = FlightChannel(address, rank, token, root, timeout)
    client = Client(rank, channel, torch, pin_memory, timeout)
    client.at_close(channel.close)
    return client
