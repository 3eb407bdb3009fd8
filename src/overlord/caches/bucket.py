"""Entries of a cache in an object store, for machines that share no file system; and the store of a declared cache.

Objects are written once and checked by their checksum, as in a folder. There are no locks: a process lists the cache when it
has written a fiftieth of the limit since the last time, and deletes the oldest objects beyond the limit. So the writers of
a cache may exceed its limit by a few percent each.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import pyarrow as pa

from overlord.caches.folder import CacheFolder, UseCounts, folder_use, frame, kind_of, shared_folder, sum_uses, unframe
from overlord.errors import SourceError, SpecError, StorageError
from overlord.sources.object_store import ObjectStore, Retry
from overlord.status import CacheUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.declare.cache import Cache

_FOLDER = "overlord-cache-1"
_LISTED_PART = 50
_RETRY_S = 60.0
_FREED = 0.95
# A cache that does not answer is slower than none.
_RETRY = Retry(deadline_s=5.0, first_wait_s=0.1, max_wait_s=2.0, request_timeout_s=20.0)
_log = logging.getLogger("overlord.cache")


class CacheBucket:
    """Keeps entries under a URL, within about `max_bytes`. Thread-safe."""

    is_far = True

    def __init__(self, cache: Cache) -> None:
        url = os.fspath(cache.location)
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.strip("/").partition("/")
        if not bucket:
            raise SpecError(f"the cache {url} names no bucket: write {scheme}://bucket/folder")
        self._url = url
        self._prefix = f"{prefix}/{_FOLDER}" if prefix else _FOLDER
        self._max_bytes = cache.max_bytes
        self._store = ObjectStore(f"{scheme}://{bucket}", dict(cache.storage_options), _RETRY)
        self._counts = UseCounts()
        self._lock = threading.Lock()
        self._rests_until = 0.0
        self._unlisted: int | None = None  # bytes written since the cache was listed; None before that
        self._has_warned = False

    def use(self) -> dict[str, CacheUse]:
        return self._counts.now()

    def get(self, key: str, needed_in_s: float | None = None) -> pa.Buffer | None:
        """The content of an entry; None where it is not there."""
        del needed_in_s  # objects have no time that could be set
        if time.monotonic() < self._rests_until:
            return None
        data = None
        try:
            data = pa.py_buffer(self._store.get(self._path(key)))
        except SourceError:
            pass  # it is not there
        except StorageError as error:
            self._note_failure(error, kind_of(key))
        content = None if data is None else unframe(key, data)
        found = CacheUse(misses=1, damaged=int(data is not None)) if content is None else CacheUse(1, 0, content.size)
        self._counts.add(kind_of(key), found)
        if data is not None and content is None:
            self._delete(self._path(key))
        return content

    def put(self, key: str, parts: Sequence[bytes | memoryview], needed_in_s: float) -> bool:
        """Keep an entry. False if it is not kept."""
        del needed_in_s
        if time.monotonic() < self._rests_until:
            return False
        content = b"".join(frame(key, parts))
        if len(content) > self._max_bytes // 4:
            return False
        try:
            self._make_room(len(content))
            self._store.put_new(self._path(key), content)
        except FileExistsError:
            return True  # another process was quicker, in another release of a library
        except (SourceError, StorageError) as error:
            self._note_failure(error, kind_of(key))
            return False
        self._counts.add(kind_of(key), CacheUse(written_bytes=len(content)))
        return True

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key.partition('-')[2][:2]}/{key}"

    def _make_room(self, size: int) -> None:
        with self._lock:
            is_old = self._unlisted is None or self._unlisted + size > self._max_bytes // _LISTED_PART
            self._unlisted = size if is_old else (self._unlisted or 0) + size
        if not is_old:
            return
        listed = self._store.list_by_age(self._prefix)
        total = size + sum(num_bytes for _, _, num_bytes in listed)
        if total <= self._max_bytes:
            return
        for _, path, num_bytes in listed:
            if total <= self._max_bytes * _FREED:
                break
            self._delete(path)
            self._counts.add(kind_of(path.rpartition("/")[2]), CacheUse(evicted_bytes=num_bytes))
            total -= num_bytes

    def _delete(self, path: str) -> None:
        try:
            self._store.delete(path)
        except (SourceError, StorageError) as error:
            self._note_failure(error, kind_of(path.rpartition("/")[2]))

    def _note_failure(self, error: Exception, kind: str) -> None:
        self._rests_until = time.monotonic() + _RETRY_S
        self._counts.add(kind, CacheUse(failures=1))
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the cache %s cannot be used, and the run goes on without it: %s", self._url, error)


_buckets: dict[tuple[str, int, tuple[tuple[str, str], ...]], CacheBucket] = {}
_buckets_lock = threading.Lock()


def open_cache(cache: Cache) -> CacheFolder | CacheBucket:
    """The store of a declared cache: one per process."""
    location = os.fspath(cache.location)
    if not cache.is_remote:
        return shared_folder(location, cache.max_bytes)
    key = (location, cache.max_bytes, tuple(sorted(cache.storage_options.items())))
    with _buckets_lock:
        if key not in _buckets:
            _buckets[key] = CacheBucket(cache)
        return _buckets[key]


def cache_use() -> dict[str, CacheUse]:
    """What this process did with caches, by kind of entry."""
    with _buckets_lock:
        buckets = list(_buckets.values())
    return sum_uses([folder_use(), *(bucket.use() for bucket in buckets)])
