"""Serves a whole run: from one server, or from a front server and one server in each constructor for its own ranks."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlord.errors import ClosedError, OverlordError
from overlord.runtime.liveness import ROLE_REPORT
from overlord.service.auth import Address, Listen
from overlord.service.constructor import ServerIdentity, ServingConstructor
from overlord.service.server import Addresses, RankCalls, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.runtime.engine import Handle
    from overlord.service.run_api import Channel
    from overlord.service.wire import Hello

_MOST_AT_ONCE = 32
_WAIT_S = ROLE_REPORT.after_s


@dataclass(frozen=True, slots=True)
class ServedGroups:
    """The data-parallel groups of a run. Both the tree and the constructors are others once the run has another mesh."""

    tree: Callable[[], ClientPlaceTree]
    constructors: Sequence[Handle[ServingConstructor]]
    bring_near: Callable[[int, Sequence[str]], None]
    """Moves the constructor of a rank to the node that has one of these names."""


class OneServer:
    """Serves every rank from this process."""

    def __init__(
        self,
        job: str,
        channel: Channel,
        groups: ServedGroups,
        *,
        listen: Listen,
        leave_after_s: float | None,
        instance: str | None = None,
        is_new: bool = True,
        wait_for_all: bool = False,
    ) -> None:
        """`is_new`: ranks are expected that have not come yet. False where trainers read already, and another process served
        them. `wait_for_all`: ranks that have not come yet hold the others back."""

        tree, constructors = groups.tree, groups.constructors

        def check_rank(hello: Hello) -> None:
            tree().coordinates(hello.rank)  # raises for a rank that the mesh does not have

        self._tree = tree
        self._constructors = constructors
        self._wait_for_all = wait_for_all
        if is_new:
            self.expect()
        self._service = Service(
            job,
            listen,
            instance=instance,
            steps=channel,
            run=channel,
            locate=check_rank,
            ranks=lambda: range(tree().world_size),
            leave_after_s=leave_after_s,
            arenas=constructors[0].call(ServingConstructor.arenas).result(),  # all of them are in this process
            wait_for_all=wait_for_all,
        )
        self.address = self._service.address

    def expect(self) -> None:
        """Expect every rank: no step counts as taken by all until each rank has requested one."""
        _expect(self._tree(), self._constructors, self._wait_for_all)

    def late(self) -> frozenset[int]:
        """The ranks that have neither requested a step nor left since the run began or was moved."""
        return _late(self._constructors)

    def reading(self) -> dict[int, int]:
        """The ranks that are reading, with the next step of each."""
        return self._service.reading()

    def last(self) -> dict[int, int]:
        """Every rank that has ever read, with the next step of each."""
        return self._service.last()

    def rank_calls(self) -> RankCalls:
        """What is known of the ranks since the run began or was moved."""
        return self._service.rank_calls()

    def pause_takes(self) -> list[int]:
        """Let trainers take no step without a message until `resume_takes`, so that what was taken is known. Returns the
        ranks of which it is not known whether they take one now."""
        return self._service.pause_takes()

    def resume_takes(self) -> None:
        self._service.takes.resume()

    def drain(self, timeout_s: float) -> bool:
        """Deliver no new step, and wait until every reading rank has the last one. False after `timeout_s`."""
        return self._service.drain(self._service.halt(), timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks has connected and left. False after `timeout_s`."""
        return self._service.ranks.wait_for_leave(ranks, timeout_s)

    def close(self) -> None:
        self._service.close()


class ServerPerGroup:
    """Serves ranks from the constructors, on their nodes. The front server, in this process, knows their addresses.

    The methods are those of `OneServer`.
    """

    def __init__(
        self,
        job: str,
        channel: Channel,
        groups: ServedGroups,
        *,
        listen: Listen,
        leave_after_s: float | None,
        instance: str | None = None,
        is_new: bool = True,
        wait_for_all: bool = False,
    ) -> None:
        """`is_new`: ranks are expected that have not come yet. False where trainers read already, and another process served
        them. `wait_for_all`: ranks that have not come yet hold the others back."""
        tree = self._tree = groups.tree
        constructors = self._constructors = groups.constructors
        self._wait_for_all = wait_for_all
        instance = instance or secrets.token_hex(8)
        if is_new:
            self.expect()

        behind: Future[Listen] = Future()  # known once the front server listens: the first trainers may greet before

        def locate(hello: Hello) -> Addresses:
            # Called for every greeting: a restarted constructor has no server yet, and may be on another node.
            while True:
                channel.start()  # returns when no move is under way: a resize makes constructors anew
                identity = ServerIdentity(job, instance, channel.generation())
                constructor = constructors[tree().coordinates(hello.rank).dp]
                try:
                    listen_there = behind.result(_WAIT_S)
                    groups.bring_near(hello.rank, hello.nodes)
                    asked = identity, listen_there, leave_after_s, hello.needs_flight, wait_for_all
                    return constructor.call(ServingConstructor.serve, *asked).result()
                except ClosedError:
                    if channel.generation() == identity.generation:
                        raise

        self._front = Service(job, listen, instance=instance, run=channel, locate=locate, leave_after_s=leave_after_s)
        self.address = self._front.address
        behind.set_result(_listen_behind(listen, Address.parse(self.address)))

    def expect(self) -> None:
        _expect(self._tree(), self._constructors, self._wait_for_all)

    def late(self) -> frozenset[int]:
        return _late(self._constructors)

    def reading(self) -> dict[int, int]:
        return self._collect(ServingConstructor.reading)

    def last(self) -> dict[int, int]:
        return self._collect(ServingConstructor.last)

    def rank_calls(self) -> RankCalls:
        lost: frozenset[int] = frozenset()
        called: frozenset[int] = frozenset()
        last: dict[int, int] = {}
        for answer in [constructor.call(ServingConstructor.rank_calls) for constructor in self._constructors]:
            found = answer.result(_WAIT_S)
            if found is not None:
                lost, called, last = lost | found.lost, called | found.called, last | found.last
        return RankCalls(lost, called, last)

    def pause_takes(self) -> list[int]:
        answers = [constructor.call(ServingConstructor.pause_takes) for constructor in self._constructors]
        return [rank for answer in answers for rank in answer.result()]

    def resume_takes(self) -> None:
        for answer in [constructor.call(ServingConstructor.resume_takes) for constructor in self._constructors]:
            with suppress(OverlordError):  # one that is gone holds up nobody
                answer.result()

    def drain(self, timeout_s: float) -> bool:
        last = max(answer.result() for answer in [c.call(ServingConstructor.halt) for c in self._constructors])

        # In parallel: on an engine with synchronous calls, one constructor would use up the timeout of the next.
        def drain_one(constructor: Handle[ServingConstructor]) -> bool:
            return constructor.call(ServingConstructor.drain, last, timeout_s).result()

        with ThreadPoolExecutor(min(len(self._constructors), _MOST_AT_ONCE)) as threads:
            return all(list(threads.map(drain_one, self._constructors)))

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        tree, deadline = self._tree(), time.monotonic() + timeout_s
        for group, constructor in enumerate(self._constructors):
            own = [rank for rank in ranks if tree.coordinates(rank).dp == group]
            left_s = max(deadline - time.monotonic(), 0.0)
            if own and not constructor.call(ServingConstructor.wait_for_leave, own, left_s).result():
                return False
        return True

    def close(self) -> None:
        self._front.close()
        for answer in [c.call(ServingConstructor.stop_serving) for c in self._constructors]:
            answer.result()

    def _collect(self, method: Callable[[ServingConstructor], dict[int, int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        for answer in [constructor.call(method) for constructor in self._constructors]:
            found |= answer.result(_WAIT_S)
        return found


def _expect(tree: ClientPlaceTree, constructors: Sequence[Handle[ServingConstructor]], holds: bool) -> None:
    expect = ServingConstructor.expect
    for answer in [c.call(expect, tree.ranks_of(group), holds) for group, c in enumerate(constructors)]:
        answer.result()


def _late(constructors: Sequence[Handle[ServingConstructor]]) -> frozenset[int]:
    answers = [constructor.call(ServingConstructor.late) for constructor in constructors]
    return frozenset(rank for answer in answers for rank in answer.result(_WAIT_S))


def _listen_behind(listen: Listen, front: Address) -> Listen:
    """Where constructors listen: on loopback if the front server does, else on the interface that leads to it."""
    if front.is_loopback:
        return replace(listen, address=f"{listen.bound.host}:0", advertise=None)
    return replace(listen, address="0.0.0.0:0", advertise=None, reached_from=front.host)
