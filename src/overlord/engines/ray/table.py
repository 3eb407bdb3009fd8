"""Small and not so small values of one job that every process of a cluster can look up, for as long as the job runs.

They lie in the store that Ray keeps its own named actors in, and live as long as these do: when a node is lost, an actor
that starts again elsewhere still finds what it is made from. The object store promises less (an argument that lies there
and goes out of scope keeps an actor from starting again).
"""

from __future__ import annotations

from ray.experimental import internal_kv

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
