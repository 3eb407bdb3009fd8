"""Moves constructors to the nodes of their trainers, which are known when trainers connect.

What it promises: the first rank of a group that connects decides where the group's constructor is, and only that rank can
move it again, from another node. A constructor from which another rank reads stays. Nothing is moved while the run is moved
to another state or mesh, nor once it is drained. A step does not depend on where it is built, so the stream stays the same.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from overlord.errors import OverlordError
from overlord.runtime.liveness import ROLE_REPORT
from overlord.service.constructor import ServingConstructor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.runtime.engine import Handle

_WAIT_S = ROLE_REPORT.after_s
_log = logging.getLogger(__name__)


class ConstructorPlaces:
    """The constructors of a run, by data-parallel group, and for which rank each is where it is. Thread-safe."""

    def __init__(
        self,
        constructors: Sequence[Handle[ServingConstructor]],
        tree: Callable[[], ClientPlaceTree],
        generation: Callable[[], int],
        readers: Callable[[], Collection[int]],
    ) -> None:
        """`constructors` is changed in place when the run is moved to another mesh. `readers` returns the ranks that read in
        this process: the constructors of their groups stay."""
        self._constructors = constructors
        self._tree = tree
        self._generation = generation
        self._readers = readers
        self._changed = threading.Condition()
        self._num_moving = 0
        self._num_paused = 0
        self._groups: dict[int, _Group] = {}

    def bring_near(self, rank: int, names: Sequence[str]) -> None:
        """Move the constructor of a rank to its node, which has these names, unless it is there or serves others. Where that
        fails it stays."""
        number = self._tree().coordinates(rank).dp
        with self._changed:
            group = self._groups.setdefault(number, _Group(rank))
        if not names or group.rank != rank:
            with group.moving:
                return  # the rank that decides may be moving it just now
        with group.moving:
            if group.names == tuple(names) or self._is_read_here(number) or not self._begin():
                return
            try:
                if self._move(self._constructors[number], rank, names):
                    _log.info("the constructor of data-parallel group %d is on the node of rank %d now", number, rank)
            except OverlordError as error:
                _log.warning("the constructor of data-parallel group %d stays where it is: %s", number, error)
            finally:
                self._end()
            group.names = tuple(names)

    def _is_read_here(self, group: int) -> bool:
        tree = self._tree()
        return any(tree.coordinates(rank).dp == group for rank in self._readers())

    def _move(self, constructor: Handle[ServingConstructor], rank: int, names: Sequence[str]) -> bool:
        if set(constructor.call(ServingConstructor.reading).result(_WAIT_S)) - {rank}:
            return False
        if not constructor.engine.move_near(constructor.name, names):
            return False
        # It was made as at the start of the run, which may have been moved to another state since.
        constructor.call(ServingConstructor.restart, self._generation()).result(_WAIT_S)
        return True

    @contextmanager
    def paused(self) -> Generator[None]:
        """Meanwhile nothing is moved."""
        self.pause()
        try:
            yield
        finally:
            with self._changed:
                self._num_paused -= 1
                self._groups = {}  # of another mesh, perhaps
                self._changed.notify_all()

    def pause(self) -> None:
        """Move nothing from now on; returns when nothing is being moved."""
        with self._changed:
            self._num_paused += 1
            self._changed.wait_for(lambda: not self._num_moving)

    def _begin(self) -> bool:
        with self._changed:
            if self._num_paused:
                return False
            self._num_moving += 1
            return True

    def _end(self) -> None:
        with self._changed:
            self._num_moving -= 1
            self._changed.notify_all()


class _Group:
    """Where a group's constructor is: on the node of `rank`, which has `names` as far as was tried."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.names: tuple[str, ...] = ()
        self.moving = threading.Lock()
