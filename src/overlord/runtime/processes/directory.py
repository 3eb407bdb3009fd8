"""The directory of a run, in the process that started it: which role a name is bound to, and the published values."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from overlord.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.runtime.processes.node import Location


class Directory:
    """Names and published values. Thread-safe; worker processes call `locate` and `pickled_value`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bound: dict[str, Callable[[], Location]] = {}
        self._values: dict[str, Any] = {}
        self._pickled: dict[str, tuple[Any, bytes]] = {}
        self._is_closed = False

    def bind(self, name: str, location: Callable[[], Location]) -> None:
        """Bind a name to a role. `location` says where it is and whether its process is up."""
        with self._lock:
            self._bound[name] = location

    def rebind(self, name: str, to: str) -> None:
        with self._lock:
            self._bound[name] = self._bound.pop(to)

    def unbind(self, name: str) -> None:
        with self._lock:
            self._bound.pop(name, None)

    def locate(self, name: str) -> Location:
        location = self._bound.get(name)
        if location is None or self._is_closed:
            raise ClosedError(f"no role named {name!r} is running; the loader was closed")
        return location()

    def publish(self, key: str, value: object) -> None:
        self._values[key] = value

    def look_up(self, key: str) -> Any:
        if self._is_closed or key not in self._values:
            raise ClosedError(f"no value is published as {key!r}; the loader was closed")
        return self._values[key]

    def pickled_value(self, key: str) -> bytes:
        """The value for another process. It is pickled once, however many ask for it."""
        value = self.look_up(key)
        known = self._pickled.get(key)
        if known is None or known[0] is not value:
            import cloudpickle

            known = self._pickled[key] = value, cloudpickle.dumps(value)
        return known[1]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._bound.clear()
