"""The seam between roles and where they run. Spawn a role under a name, ask a named role, rebind a name, stop.

A handle is a name: it goes on working when another role is bound to the name. Every ask may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from overlord.workplace import Workplace, WorkplaceSize

R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class Answer(Protocol[T_co]):
    """What an ask returns; `result` waits for it and raises what the role raised."""

    def result(self, timeout: float | None = None) -> T_co: ...


@dataclass(frozen=True, slots=True)
class StoreUse:
    """How full the memory is that roles hand each other data through."""

    num_bytes: int
    limit_bytes: int


class Engine(Protocol):
    """Where roles run."""

    @property
    def num_hosts(self) -> int | None:
        """How many loader hosts to spread sources over; None where all of them stand in one process."""
        ...

    def open(self, size: WorkplaceSize) -> None:
        """Say what each process of this engine may use; called once, before anything is spawned."""
        ...

    def spawn(self, name: str, make: Callable[[Workplace], R]) -> Handle[R]:
        """Make a role where this engine runs roles, and bind it to a name. `make` must pickle, and may be called again
        when the role has to be made anew."""
        ...

    def started(self, names: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        """Wait until these roles (every one spawned so far unless given) are made; raises what making one raised."""
        ...

    def ask(self, name: str, method: str, args: tuple, kwargs: dict) -> Answer:
        """Call a method of the role bound to a name. Use `Handle.ask`, which is typed."""
        ...

    def rebind(self, name: str, to: str) -> None:
        """Let a name mean the role that another name means; the old role is stopped."""
        ...

    def stop(self, name: str) -> None: ...

    def publish(self, key: str, value: object) -> None:
        """Let every role look a value up, in place of what had this key. It must pickle, and nobody may change it."""
        ...

    def published(self, key: str) -> Any:
        """What was published last under a key; ClosedError once the engine is closed."""
        ...

    def store_use(self) -> StoreUse | None:
        """None where roles hand each other data as it is."""
        ...

    def close(self) -> None:
        """Stop every role."""
        ...


class Handle(Generic[R]):
    """A typed name: `loader.ask(SourceLoader.describe, chunk)`."""

    __slots__ = ("engine", "name")

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name

    def ask(self, method: Callable[Concatenate[R, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Answer[T]:
        return self.engine.ask(self.name, method.__name__, args, kwargs)
