"""How the making of a role travels to its actor: pickled into the job's table, what is large and shared only once.

A `Table` holds values of one job that every process of a cluster can look up, for as long as the job runs. They lie in
the store that Ray keeps its own named actors in, and live as long as these do: when a node is lost, an actor that starts
again elsewhere still finds what it is made from. The object store promises less (an argument that lies there and goes out
of scope keeps an actor from starting again).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from ray.experimental import internal_kv

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Stored:
    """In the place of a value that has an entry of its own."""

    key: str


@dataclass(frozen=True, slots=True)
class Parcel:
    """A call that lies in a job's table. May be opened any number of times, also after its sender is gone."""

    namespace: str
    key: str

    def opened(self) -> Callable[..., Any]:
        table = Table(self.namespace)

        def loaded(key: str) -> Any:
            pickled = table.get(key)
            if pickled is None:
                raise RuntimeError("the job that this role belongs to has ended")
            return pickle.loads(pickled)

        def found(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: found(entry) for key, entry in value.items()}
            return loaded(value.key) if isinstance(value, _Stored) else value

        function, args, kwargs = loaded(self.key)
        return partial(function, *map(found, args), **{name: found(value) for name, value in kwargs.items()})


class Packer:
    """Packs calls for the actors of one job. An argument, or an entry of a dict argument, that pickles to much is put into
    the table once, however many calls have it."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._known: dict[int, tuple[Any, _Stored | None]] = {}
        self._num_stored = 0

    def packed(self, make: Callable[..., Any]) -> Parcel:
        call = make if isinstance(make, partial) else partial(make)
        args = [self._sent(value) for value in call.args]
        kwargs = {name: self._sent(value) for name, value in call.keywords.items()}
        return Parcel(self._table.namespace, self._put(cloudpickle.dumps((call.func, args, kwargs))).key)

    @property
    def num_stored(self) -> int:
        """Entries made so far: one for each call, and one for each large value."""
        return self._num_stored

    def _sent(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: self._sent(entry) for key, entry in value.items()}
        if value is None or isinstance(value, (int, float, str)):
            return value
        if id(value) not in self._known:
            pickled = cloudpickle.dumps(value)
            # The value is kept beside its id, so that the id is not given to another.
            self._known[id(value)] = (value, self._put(pickled) if len(pickled) > _LARGE_BYTES else None)
        return self._known[id(value)][1] or value

    def _put(self, pickled: bytes) -> _Stored:
        self._num_stored += 1
        stored = _Stored(f"parcel/{self._num_stored}")
        self._table.put(stored.key, pickled)
        return stored


_SPACE = b"overlord"


class Table:
    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(self._full(key), value, overwrite=True, namespace=_SPACE)

    def get(self, key: str) -> bytes | None:
        return internal_kv._internal_kv_get(self._full(key), namespace=_SPACE)

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(self._full(key), namespace=_SPACE)

    def clear(self) -> None:
        """Delete everything of this job."""
        internal_kv._internal_kv_del(self._full(""), del_by_prefix=True, namespace=_SPACE)

    def _full(self, key: str) -> bytes:
        return f"{self.namespace}/{key}".encode()
