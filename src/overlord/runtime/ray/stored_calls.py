"""Stores the pickled calls that create roles in the job's table, where actors load them. Large shared arguments are stored
once.

A `JobTable` holds values of one job that every process of the cluster can look up while the job runs. It is kept in Ray's
internal key-value store, next to the named actors: when a node is lost, an actor that restarts on another node still finds
the call that creates its role. The object store cannot replace it, because an actor whose argument went out of scope there
cannot restart.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from ray._private.state import jobs
from ray.exceptions import RpcError
from ray.experimental import internal_kv

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Reference:
    """A placeholder for a value that is stored in its own entry."""

    key: str


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call in a job's table. Any process may load it, any number of times, even after the process that stored it ended."""

    namespace: str
    key: str

    def load(self) -> Callable[..., Any]:
        table = JobTable(self.namespace)

        def load_entry(key: str) -> Any:
            pickled = table.get(key)
            if pickled is None:
                raise RuntimeError("the job that this role belongs to has ended")
            return pickle.loads(pickled)

        def resolve(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: resolve(entry) for key, entry in value.items()}
            return load_entry(value.key) if isinstance(value, _Reference) else value

        function, args, kwargs = load_entry(self.key)
        return partial(function, *map(resolve, args), **{name: resolve(value) for name, value in kwargs.items()})


class CallStore:
    """Stores the calls of one job. An argument, or an entry of a dict argument, whose pickle is large is stored once,
    however many calls share it."""

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self._known: dict[int, tuple[Any, _Reference | None]] = {}
        # A process that takes a job over must not replace the calls of roles that run.
        self._num_stored = max((int(key.rpartition("/")[2]) for key in table.keys("call/")), default=0)

    def store(self, make: Callable[..., Any]) -> StoredCall:
        call = make if isinstance(make, partial) else partial(make)
        args = [self._store_if_large(value) for value in call.args]
        kwargs = {name: self._store_if_large(value) for name, value in call.keywords.items()}
        return StoredCall(self._table.namespace, self._put(cloudpickle.dumps((call.func, args, kwargs))).key)

    @property
    def num_stored(self) -> int:
        """Entries stored so far: one for each call, and one for each large value."""
        return self._num_stored

    def _store_if_large(self, value: Any) -> Any:
        """Store a large value and return a reference to it; return other values as they are."""
        if type(value) is dict:
            return {key: self._store_if_large(entry) for key, entry in value.items()}
        if value is None or isinstance(value, (int, float, str)):
            return value
        if id(value) not in self._known:
            pickled = cloudpickle.dumps(value)
            # The value is kept alive so that no other object gets its id.
            self._known[id(value)] = (value, self._put(pickled) if len(pickled) > _LARGE_BYTES else None)
        return self._known[id(value)][1] or value

    def _put(self, pickled: bytes) -> _Reference:
        self._num_stored += 1
        stored = _Reference(f"call/{self._num_stored}")
        self._table.put(stored.key, pickled)
        return stored


_SPACE = b"overlord"
_OWNERS = b"owner/"
"""Before the name of a job: the driver with which its entries end."""


def _delete(key: bytes, by_prefix: bool = False) -> None:
    # A program may have left the cluster before it closes its loader: then there is nobody to ask.
    if internal_kv._internal_kv_initialized():  # noqa: SLF001 - Ray has no public one
        internal_kv._internal_kv_del(key, del_by_prefix=by_prefix, namespace=_SPACE)  # noqa: SLF001 - Ray has no public one


class JobTable:
    """The entries of one job in Ray's key-value store. The planner's log may be among them (`planlog/segments.py`)."""

    location = "the Ray cluster's own table"

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(self._full(key), value, overwrite=True, namespace=_SPACE)  # noqa: SLF001 - Ray has no public one

    def get(self, key: str) -> bytes | None:
        return internal_kv._internal_kv_get(self._full(key), namespace=_SPACE)  # noqa: SLF001 - Ray has no public one

    def put_new(self, key: str, value: bytes) -> bool:
        """Store a value, unless the key has one; returns whether it was stored. OSError if Ray's head does not answer."""
        try:
            had = internal_kv._internal_kv_put(self._full(key), value, overwrite=False, namespace=_SPACE)  # noqa: SLF001 - Ray has no public one
        except RpcError as error:
            raise OSError(f"Ray's head node does not answer: {error}") from error
        return not had

    def keys(self, prefix: str) -> list[str]:
        found: list[bytes] = internal_kv._internal_kv_list(self._full(prefix), namespace=_SPACE)  # noqa: SLF001 - Ray has no public one
        return [key.decode()[len(self.namespace) + 1 :] for key in found]

    def delete(self, key: str) -> None:
        _delete(self._full(key))

    def clear(self) -> None:
        """Delete all entries of this job."""
        _delete(self._full(""), by_prefix=True)
        _delete(_OWNERS + self.namespace.encode())

    def note_owner(self) -> None:
        """Note that the entries are of no use once the driver of this process is gone. Deletes those of others that are."""
        dead = {job["JobID"] for job in jobs() if job["IsDead"]}
        owners: list[bytes] = internal_kv._internal_kv_list(_OWNERS, namespace=_SPACE)  # noqa: SLF001 - Ray has no public one
        for key in owners:
            owner = internal_kv._internal_kv_get(key, namespace=_SPACE)  # noqa: SLF001 - Ray has no public one
            if owner is not None and owner.decode() in dead:
                JobTable(key.removeprefix(_OWNERS).decode()).clear()
        driver = ray.get_runtime_context().get_job_id().encode()
        internal_kv._internal_kv_put(_OWNERS + self.namespace.encode(), driver, overwrite=True, namespace=_SPACE)  # noqa: SLF001 - Ray has no public one

    def _full(self, key: str) -> bytes:
        return f"{self.namespace}/{key}".encode()
