"""Addresses and access control of a service: loopback by default, a token on other interfaces, TLS where configured."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN, TLS = "grpc", "grpc+tls"

HEADER = "authorization"
SCHEME = "Bearer "
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as `host:port`, `grpc://host:port` or `grpc+tls://host:port`."""

    host: str
    port: int
    scheme: str = PLAIN

    @staticmethod
    def parse(text: str, scheme: str = PLAIN) -> Address:
        """Parse an address; `scheme` is the default. SpecError for invalid text."""
        wrong = SpecError(f"an address is host:port, grpc://host:port or grpc+tls://host:port, got {text!r}")
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise wrong
        try:
            parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in (PLAIN, TLS) or not host or port is None or parts.path or parts.query or parts.username:
            raise wrong
        return Address(host, port, parts.scheme)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    @property
    def unix_name(self) -> str | None:
        """The unix socket where a service at this address answers processes of its host; None for addresses that do not
        mean this host for certain, and with TLS, whose certificate must be seen."""
        host = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(self.host, self.host)
        if self.scheme == TLS or not Address(host, self.port).is_loopback:
            return None
        return f"overlord-at-{ipaddress.ip_address(host)}:{self.port}"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of a server's certificate and its private key, both PEM."""

    certificate: str | Path
    key: str | Path

    def read(self) -> tuple[str, str]:
        return read_pem(self.certificate, "the TLS certificate"), read_pem(self.key, "the TLS key")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a service listens, and the credentials that it requires."""

    address: str = "127.0.0.1:0"
    """Port 0 takes any free port."""
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    advertise: str | None = None
    """The host name for clients, if it differs from the bound one."""
    reached_from: str | None = None
    """A host in the clients' network. Clients get the address of the interface that leads there."""

    def __post_init__(self) -> None:
        check_token(self.token)
        if self.bound.scheme == TLS and self.tls is None:
            raise SpecError(f"{self.address} needs TLS files: pass tls=Tls(certificate, key)")
        if self.bound.is_loopback:
            return
        if self.token is None:
            raise SpecError(
                f"a service on {self.bound.host} can be reached from other machines, so it needs a token: give one that is "
                "hard to guess (`openssl rand -hex 32`) to the service and to its clients, or listen on 127.0.0.1"
            )
        if self.tls is None:
            _log.warning("listening on %s without TLS: the token and the data can be read in transit", self.bound.host)

    def serve(self, method: Callable[..., str], **more: Any) -> str:
        """Call `Loader.serve` or `serve_metrics` with these settings."""
        tls = None if self.tls is None else (self.tls.certificate, self.tls.key)
        return method(self.address, token=self.token, tls=tls, advertise=self.advertise, **more)

    @property
    def bound(self) -> Address:
        return Address.parse(self.address, PLAIN if self.tls is None else TLS)

    def public_address(self, port: int) -> str:
        """The address for clients, once the port is known."""
        host = self.advertise or self.bound.host
        if self.advertise is None and self.bound.is_wildcard:
            host = socket.gethostname() if self.reached_from is None else _host_towards(self.reached_from)
        return str(Address(host, port, PLAIN if self.tls is None else TLS))


def service_address(text: str, tls_root: str | None) -> str:
    """The address that a client connects to: with TLS if it has a root certificate."""
    return str(Address.parse(text, PLAIN if tls_root is None else TLS))


def check_token(token: str | None) -> None:
    if token is not None and (
        not isinstance(token, str)  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        or not token
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise SpecError(
            "a token is printable ASCII without spaces, at least one character; `openssl rand -hex 32` makes one"
        )


def read_pem(path: str | Path, what: str) -> str:
    if not isinstance(path, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise SpecError(f"{what} must be the path of a PEM file, got {path!r}")
    try:
        return Path(path).read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{what} cannot be read from {path}: {error}; a PEM file is needed") from error


def token_header(token: str | None) -> Any:
    """The headers of every call of a client, as pairs of bytes: Flight's type stubs are wrong."""
    return [] if token is None else [(HEADER.encode(), f"{SCHEME}{token}".encode())]


def _host_towards(peer: str) -> str:
    """The address of the interface that leads to another machine. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return probe.getsockname()[0]


def is_token(given: str | bytes, token: str) -> bool:
    """Compares in constant time, so that timing reveals nothing about the token."""
    return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), token.encode())
