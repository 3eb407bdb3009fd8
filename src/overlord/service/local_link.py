"""The client's side of a service's unix socket: steps are mapped, not copied (`local_steps.py`)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from overlord.errors import OverlordError, ServiceError
from overlord.runtime.shared_memory import connect_to
from overlord.service import wire
from overlord.service.forking import close_in_forks
from overlord.service.link import Unreachable
from overlord.service.local_steps import Act, Fetch, Greeting, NotLocal, StepBorrower
from overlord.service.steps import DamagedStepError

if TYPE_CHECKING:
    from collections.abc import Generator

    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery
    from overlord.service.wire import Action

Q = TypeVar("Q", bound=msgspec.Struct)
T = TypeVar("T")

_GREETING_S = 5.0
_GREETED: wire.Action[Greeting, None] = wire.Action("greeting", Greeting, None)


class NotOnThisHostError(Unreachable):
    """The server's unix socket cannot be used from here, or no more. Flight may help."""


class _Peer:
    """A connection, and what was borrowed over it."""

    def __init__(self, address: str, token: str | None) -> None:
        self.connection = connect_to(address)
        close_in_forks(self.connection)
        self.borrower = StepBorrower()
        self.connection.send_raw(wire.pack(Greeting(wire.VERSION, token)))
        reply, _ = self.connection.receive_raw(_GREETING_S)
        _GREETED.unpack_reply(reply)

    def return_ended(self) -> None:
        """Return the loans that ended, without a request."""
        returned = self.borrower.take_returned()
        if returned.free or returned.kept:
            self.connection.send_raw(wire.pack(returned))


class LocalLink:
    """A connection to the server of a rank on this host; several, while calls overlap. Safe to call from several threads.

    It has the methods of `Link`.
    """

    def __init__(self, address: str, token: str | None) -> None:
        """Raises NotOnThisHostError where the socket cannot be reached, or does not take this client."""
        self.address = address
        self._token = token
        self._lock = threading.Lock()
        self._is_closed = False
        # Steps and other calls have connections of their own, so that few connections map segments.
        self._idle: dict[bool, list[_Peer]] = {True: [], False: []}
        try:
            self._idle[True].append(_Peer(address, token))
        except (OSError, EOFError, OverlordError, msgspec.DecodeError) as error:
            raise NotOnThisHostError(str(error)) from error

    def call(self, action: Action[Q, T], request: Q, timeout_s: float) -> T:
        """Returns the reply of an action; raises what went wrong in the service."""
        with self._peer(for_steps=False) as peer:
            peer.connection.send_raw(wire.pack(Act(action.name, wire.pack(request))))
            reply, _ = peer.connection.receive_raw(timeout_s)
            try:
                return action.unpack_reply(reply)
            except msgspec.DecodeError as error:
                raise self._foreign(error) from None
            finally:
                self._return_ended(with_next=action.name == wire.HERE.name)

    def fetch(self, ticket: wire.Ticket, timeout_s: float, arenas: Arenas) -> Delivery | wire.NoStep:
        """Returns the answer to a ticket. Raises DamagedStepError for a step that cannot be read, and NotOnThisHostError
        when the service has no shared memory for it."""
        with self._peer(for_steps=True) as peer:
            peer.connection.send_raw(wire.pack(Fetch(ticket, peer.borrower.take_returned())))
            answer = None
            while answer is None:
                data, descriptors = peer.connection.receive_raw(timeout_s)
                answer = peer.borrower.receive(data, descriptors, arenas)
        if isinstance(answer, NotLocal):
            raise NotOnThisHostError(answer.reason)
        return answer

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle = [peer for peers in self._idle.values() for peer in peers]
            self._idle = {True: [], False: []}
        for peer in idle:
            peer.connection.close()

    @contextmanager
    def _peer(self, *, for_steps: bool) -> Generator[_Peer]:
        """Lends an idle connection, or a new one. One that fails is not used again: an answer may still come."""
        peer: _Peer | None = None
        is_good = False
        try:
            with self._lock:
                if self._is_closed:
                    raise Unreachable(f"{self.address}: the client was closed")
                peer = self._idle[for_steps].pop() if self._idle[for_steps] else None
            peer = peer or _Peer(self.address, self._token)
            yield peer
            is_good = True
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise Unreachable(f"{self.address}: {error}") from None
        except OSError as error:  # no more descriptors, or no more room to map memory
            raise NotOnThisHostError(f"{self.address}: {error}") from None
        except (DamagedStepError, Unreachable):
            raise
        except OverlordError:  # of the service
            is_good = True
            raise
        finally:
            if peer is not None:
                self._take_back(peer, for_steps, is_good)

    def _take_back(self, peer: _Peer, for_steps: bool, is_good: bool) -> None:
        with self._lock:
            if is_good and not self._is_closed:
                self._idle[for_steps].append(peer)
                return
        peer.connection.close()

    def _return_ended(self, *, with_next: bool) -> None:
        """Return what ended on connections that wait for a fetch. The one that takes the next fetch brings its own with it,
        which saves a message a step; `with_next` returns those too, because the next fetch may be long in coming."""
        with self._lock:
            for peer in self._idle[True] if with_next else self._idle[True][:-1]:
                with suppress(OSError):
                    peer.return_ended()

    def _foreign(self, error: Exception) -> ServiceError:
        return ServiceError(
            f"{self.address} does not answer as an overlord service of this release does ({error}): install the same "
            "release on both sides"
        )
