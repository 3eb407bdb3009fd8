"""The client's side of a service's unix socket: steps are mapped, not copied (`local_steps.py`)."""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from overlord.errors import OverlordError, ServiceError
from overlord.runtime.shared_memory import SharedSegment, connect_to
from overlord.service import wire
from overlord.service.forking import close_in_forks
from overlord.service.local_steps import (
    IS_OPEN,
    STEP,
    TAKEN,
    TRYING,
    WAITED_NS,
    Act,
    Fetch,
    Greeting,
    NotLocal,
    Returned,
    ShareTakes,
    StepBorrower,
    read_long,
    send_long,
)
from overlord.service.steps import BuildError, DamagedStepError
from overlord.service.wire import Unreachable

if TYPE_CHECKING:
    from collections.abc import Generator

    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery
    from overlord.runtime.shared_memory import Connection
    from overlord.service.unbuilt_steps import UnbuiltStep
    from overlord.service.wire import Action

Q = TypeVar("Q", bound=msgspec.Struct)
T = TypeVar("T")

_GREETING_S = 5.0
_MOST_TOGETHER = 4
"""Steps in one answer, where they come unbuilt."""
_log = logging.getLogger(__name__)
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

    def close(self) -> None:
        """Close the connection. What the service lent for steps to come is returned."""
        self.borrower.drop_chunks()
        with suppress(OSError):  # the service is gone
            self.return_ended()
        self.connection.close()

    def return_ended(self) -> None:
        """Return the loans that ended, without a request."""
        returned = self.borrower.take_returned()
        if returned.free or returned.kept:
            self.connection.send_raw(wire.pack(returned))


class TakePage:
    """A page on which a trainer takes steps without a message; `taking.py` says how it works. The connection is the one
    that the page came over: while it is open, the service lives. One thread at a time may use it."""

    def __init__(self, segment: SharedSegment, connection: Connection) -> None:
        self._words = segment.memory.data.cast("q")
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN | select.POLLHUP)

    def take(self, step: int, waited_s: float) -> bool:
        """Take a step; False if the service has to be asked. The trainer waited for it for `waited_s`."""
        words = self._words
        if self._poll.poll(0):  # nothing is ever sent on it: the service is gone
            return False
        number = words[TAKEN] + 1
        try:
            words[TRYING] = number
            if not words[IS_OPEN]:
                return False
            words[STEP] = step
            words[WAITED_NS] += int(waited_s * 1e9)
            words[TAKEN] = number
            return True
        finally:  # also where a signal raises
            words[TRYING] = words[TAKEN]

    def close(self) -> None:
        self._connection.close()


class StepPipeline:
    """A connection on which steps are requested before they are needed. The answers come in the order of requests, and wait
    in the connection. One thread at a time may use it, but for `stop_receiving`."""

    def __init__(self, peer: _Peer, arenas: Arenas, can_build: bool) -> None:
        """`can_build`: steps may come unbuilt; they are built in memory of `arenas`."""
        self.is_open = True
        self._peer = peer
        self._arenas = arenas
        self._can_build = can_build

    def request(self, ticket: wire.Ticket, goes_on: bool) -> None:
        most_unbuilt = _MOST_TOGETHER if self._can_build else 0
        fetch = Fetch(ticket, self._peer.borrower.take_returned(), most_unbuilt, goes_on)
        self._peer.connection.send_raw(wire.pack(fetch))

    def receive(self, timeout_s: float) -> Delivery | list[UnbuiltStep] | wire.NoStep | NotLocal:
        """Returns the next answer. After an error the connection is of no use: an answer may still come."""
        answer = None
        while answer is None:
            data, descriptors = self._peer.connection.receive_raw(timeout_s)
            answer = self._peer.borrower.receive(data, descriptors, self._arenas)
        return answer

    def stop_receiving(self) -> None:
        """Let a `receive` in another thread fail."""
        self._peer.connection.stop_receiving()

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):  # the service is gone
            self._peer.borrower.drop_chunks()
            returned = self._peer.borrower.take_returned()
            self._peer.connection.send_raw(wire.pack(Returned(returned.free, returned.kept, is_last=True)), waits=False)
        self._peer.connection.close()


class LocalLink:
    """A connection to the server of a rank on this host; several, while calls overlap. Safe to call from several threads.

    It has the methods of `Link`.
    """

    def __init__(self, address: str, token: str | None, *, for_steps: bool = True) -> None:
        """Raises NotOnThisHostError where the socket cannot be reached, or does not take this client."""
        self.address = address
        self.can_build = True
        """Steps may come unbuilt."""
        self._token = token
        self._lock = threading.Lock()
        self._is_closed = False
        self._page: TakePage | None = None
        self._pipeline: weakref.ref[StepPipeline] | None = None  # the last one
        self._has_tried_page = False
        # Steps and other calls have connections of their own, so that few connections map segments.
        self._idle: dict[bool, list[_Peer]] = {True: [], False: []}
        try:
            self._idle[for_steps].append(_Peer(address, token))
        except (OSError, EOFError, OverlordError, msgspec.DecodeError) as error:
            raise NotOnThisHostError(str(error)) from error

    def call(self, action: Action[Q, T], request: Q, timeout_s: float) -> T:
        """Returns the reply of an action; raises what went wrong in the service."""
        with self._peer(for_steps=False) as peer:
            send_long(peer.connection, Act(action.name, wire.pack(request)))
            reply, descriptors = peer.connection.receive_raw(timeout_s)
            if descriptors:
                reply = read_long(descriptors)
            try:
                return action.unpack_reply(reply)
            except msgspec.DecodeError as error:
                raise self._foreign(error) from None
            finally:
                self._return_ended(with_next=action.name == wire.HERE.name)

    def fetch(self, ticket: wire.Ticket, timeout_s: float, arenas: Arenas) -> Delivery | wire.NoStep:
        """Returns the answer to a ticket. Raises DamagedStepError for a step that cannot be read, BuildError for one that
        cannot be built here (no other comes unbuilt then), and NotOnThisHostError when the service has no shared memory for
        it."""
        with self._peer(for_steps=True) as peer:
            # Not beside a pipeline: this connection would hold its chunks until it is used again.
            pipeline = None if self._pipeline is None else self._pipeline()
            is_alone = pipeline is None or not pipeline.is_open
            fetch = Fetch(ticket, peer.borrower.take_returned(), int(self.can_build and is_alone))
            peer.connection.send_raw(wire.pack(fetch))
            answer = None
            while answer is None:
                data, descriptors = peer.connection.receive_raw(timeout_s)
                answer = peer.borrower.receive(data, descriptors, arenas)
            if isinstance(answer, list):
                answer = answer[0].build()
        if isinstance(answer, NotLocal):
            raise NotOnThisHostError(answer.reason)
        return answer

    def open_pipeline(self, arenas: Arenas) -> StepPipeline:
        """A connection of its own for a client that requests steps early. Raises Unreachable."""
        with self._lock:
            idle = None if self._is_closed or not self._idle[True] else self._idle[True].pop()  # it has segments mapped
        try:
            pipeline = StepPipeline(idle or _Peer(self.address, self._token), arenas, self.can_build)
        except (OSError, EOFError, OverlordError, msgspec.DecodeError) as error:
            raise Unreachable(f"{self.address}: {error}") from None
        self._pipeline = weakref.ref(pipeline)
        return pipeline

    def share_takes(self, rank: int, session: str) -> bool:
        """Share a page with the service on which a client takes steps; returns whether there is one. Tried once. For the
        thread of the trainer, as `take`."""
        if not self._has_tried_page:
            self._has_tried_page = True
            page = self._open_page(rank, session)
            with self._lock:
                self._page = None if self._is_closed else page
            if page is not None and self._page is None:
                page.close()
        return self._page is not None

    def take(self, step: int, waited_s: float) -> bool:
        """Take a step on the shared page; False if the service has to be asked."""
        page = self._page
        return page is not None and page.take(step, waited_s)

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle = [peer for peers in self._idle.values() for peer in peers]
            self._idle = {True: [], False: []}
            page, self._page = self._page, None
        if page is not None:
            page.close()
        for peer in idle:
            peer.close()

    def _open_page(self, rank: int, session: str) -> TakePage | None:
        descriptors: list[int] = []
        try:
            connection = _Peer(self.address, self._token).connection
            connection.send_raw(wire.pack(ShareTakes(rank, session)))
            reply, descriptors = connection.receive_raw(_GREETING_S)
            _GREETED.unpack_reply(reply)
            return TakePage(SharedSegment(descriptors.pop(), writable=True), connection)
        except (OSError, EOFError, IndexError, OverlordError, msgspec.DecodeError) as error:
            _log.info("rank %d takes its steps by messages: %s", rank, error)
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

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
        except BuildError:
            is_good, self.can_build = True, False
            if peer is not None:
                peer.borrower.drop_chunks()
            raise
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
