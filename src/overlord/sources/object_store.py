"""A client of one bucket of an object store, with retries of its own.

A request that fails for a transient reason (5xx, 408, 429, a refused or dropped connection, a timeout) is retried with
exponential backoff, with jitter, until `deadline_s` after the first attempt; then StorageError. A missing object, denied
access or any other refusal is a SourceError at once, because a retry cannot help.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from overlord.errors import SourceError, SpecError, StorageError
from overlord.runtime.liveness import STORAGE
from overlord.runtime.recorder import note_event
from overlord.runtime.retry import Backoff, FailedAttempt, retry
from overlord.status import StorageUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from obstore import ObjectMeta


T = TypeVar("T")

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
_STATUS = re.compile(r"status code: (\d{3})")
_log = logging.getLogger("overlord.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long, and with which waits, requests to storage are retried."""

    deadline_s: float = STORAGE.after_s
    """No new attempt begins later than this after the first one. 0: a single attempt."""
    first_wait_s: float = 0.1
    factor: float = 2.0
    max_wait_s: float = 5.0
    jitter: float = 0.5
    """The part of each wait that is random: thousands of loaders that fail together must not come again together."""
    request_timeout_s: float = 60.0
    """The timeout of one attempt."""

    def __post_init__(self) -> None:
        if self.deadline_s < 0:
            raise SpecError(f"a retry deadline is a number of seconds >= 0, got {self.deadline_s}")
        if not 0 < self.first_wait_s <= self.max_wait_s:
            raise SpecError(
                f"waits must be positive and first_wait_s no longer than max_wait_s, got {self.first_wait_s} and "
                f"{self.max_wait_s}"
            )
        if not 0 <= self.jitter <= 1:
            raise SpecError(f"jitter is a part of each wait, from 0 to 1, got {self.jitter}")
        if self.factor < 1:
            raise SpecError(f"waits grow by a factor of at least 1, got {self.factor}")
        if self.request_timeout_s <= 0:
            raise SpecError(f"request_timeout_s must be positive, got {self.request_timeout_s}")

    def waits(self) -> Iterator[float]:
        pauses = Backoff(self.first_wait_s, self.max_wait_s, self.factor).pauses()
        return (pause_s * (1.0 - self.jitter * random.random()) for pause_s in pauses)


@dataclass(frozen=True, slots=True)
class ListedObject:
    key: str
    num_bytes: int
    version: str
    """The ETag, or the time of the last change where the store has none."""

    @staticmethod
    def of(meta: ObjectMeta) -> ListedObject:
        # Some stores quote ETags in responses and not in listings, or mark them as weak in one of the two.
        tag = (meta.get("e_tag") or "").removeprefix("W/").strip('"')
        modified = meta.get("last_modified")
        return ListedObject(meta["path"], meta["size"], tag or (modified.isoformat() if modified else ""))


class ObjectStore:
    """Reads, lists and writes objects under one root such as `s3://bucket`. Thread-safe."""

    def __init__(
        self,
        root: str,
        options: Mapping[str, str],
        retry: Retry,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root
        self._retry = retry
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._num_retries = self._num_bytes = 0
        self._store = _connect(root, options, retry)

    @property
    def num_retries(self) -> int:
        """The number of retried requests."""
        return self._num_retries

    @property
    def num_bytes(self) -> int:
        """The number of bytes read."""
        return self._num_bytes

    def head(self, key: str) -> ListedObject:
        import obstore

        return ListedObject.of(self._request(key, lambda: obstore.head(self._store, key)))

    def exists(self, key: str) -> bool:
        """True if there is such an object."""
        import obstore

        def is_there() -> bool:
            try:
                obstore.head(self._store, key)
            except FileNotFoundError:
                return False
            return True

        return self._request(key, is_there)

    def list_all(self, prefix: str) -> list[ListedObject]:
        """Every object below the folder `prefix`, however deep."""
        import obstore

        def pages() -> list[ListedObject]:  # page by page: what obstore knows of an object takes a kilobyte
            return [ListedObject.of(meta) for page in obstore.list(self._store, prefix or None) for meta in page]

        return self._request(prefix, pages)

    def list_by_age(self, prefix: str) -> list[tuple[float, str, int]]:
        """(seconds since 1970, key, bytes) of every object below the folder `prefix`, the oldest first."""
        import obstore

        def pages() -> list[tuple[float, str, int]]:
            found = obstore.list(self._store, prefix or None)
            return sorted((meta["last_modified"].timestamp(), meta["path"], meta["size"]) for page in found for meta in page)

        return self._request(prefix, pages)

    def list_level(self, prefix: str) -> tuple[list[ListedObject], list[str]]:
        """The objects and the folders directly in the folder `prefix`."""
        import obstore

        result = self._request(prefix, lambda: obstore.list_with_delimiter(self._store, prefix or None))
        return [ListedObject.of(meta) for meta in result["objects"]], list(result["common_prefixes"])

    def read(self, listed: ListedObject, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop) of an object; SourceError if it has changed since it was listed."""
        return read_parts(self._get_part, listed, start, stop)

    def _get_part(self, listed: ListedObject, start: int, stop: int) -> tuple[pa.Buffer, ListedObject]:
        """A range in one request, and the object as the response describes it."""
        import obstore

        key, num_bytes, version = listed.key, listed.num_bytes, listed.version

        def get() -> tuple[pa.Buffer, ListedObject]:
            result = obstore.get(self._store, key, options={"range": (start, stop)})
            return pa.py_buffer(result.bytes()), ListedObject.of(result.meta)

        part, found = self._request(key, get)
        with self._lock:
            self._num_bytes += part.size
        if found.num_bytes != num_bytes or (version and found.version and found.version != version):
            raise changed_error(self.root, listed, found)
        if part.size != stop - start:
            raise SourceError(
                f"{self.root}/{key} returned {part.size:,} bytes for the range {start:,} to {stop:,} of {num_bytes:,}: the "
                "server does not support range requests; use one that does, or copy the object"
            )
        return part, found

    def put_new(self, key: str, content: bytes) -> None:
        """Write an object that does not exist yet; FileExistsError when it exists with other content."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def put() -> bool:
            try:
                obstore.put(self._store, key, content, mode="create")
            except AlreadyExistsError:
                return False
            return True

        # A put that seemed to fail may have succeeded: the retry then finds that the object exists.
        if not self._request(key, put, "written") and self.get(key) != content:
            raise FileExistsError(f"{self.root}/{key} exists already")

    def get(self, key: str) -> bytes:
        """The whole content of an object, without a check of its version."""
        import obstore

        return self._request(key, lambda: bytes(obstore.get(self._store, key).bytes()))

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        import obstore

        self._request(key, lambda: obstore.delete(self._store, key), "deleted")

    def _request(self, key: str, request: Callable[[], T], done: str = "read") -> T:
        from obstore.exceptions import BaseError

        def attempt() -> T:
            try:
                return request()
            except ValueError as error:
                raise SpecError(
                    f"{self.root}/{key!a} is not a valid name: {_reason(error)}; names have no line breaks, "
                    "no empty parts as in a//b, and are UTF-8"
                ) from error

        def note(failed: FailedAttempt[Exception]) -> None:
            error, reason, wait = failed.error, _reason(failed.error), failed.pause_s or 0.0
            if not _is_transient(error):
                raise SourceError(f"{self.root}/{key} {_refusal(error, done)} ({reason})") from error
            if failed.waited_s + wait > self._retry.deadline_s:
                raise StorageError(
                    f"{self.root}/{key}: storage did not answer in {failed.number} attempts over {failed.waited_s:.1f} s "
                    f"(deadline_s={self._retry.deadline_s:g}); the last error was: {reason}. Check the endpoint and the "
                    "network, or give more time: retry=ol.policies.Retry(deadline_s=...)"
                ) from error
            with self._lock:
                self._num_retries += 1
            note_event("retry", f"{self.root}/{key}: attempt {failed.number} failed, again in {wait:.1f} s: {reason}")
            _log.warning("%s/%s: attempt %d failed, again in %.1f s: %s", self.root, key, failed.number, wait, reason)

        pauses = self._retry.waits()
        return retry(
            attempt, on=(BaseError, FileNotFoundError), pauses=pauses, on_failure=note, sleep=self._sleep, clock=self._clock
        )


def read_parts(
    get_part: Callable[[ListedObject, int, int], tuple[pa.Buffer, ListedObject]], listed: ListedObject, start: int, stop: int
) -> pa.Buffer:
    """The bytes [start, stop) by requests for ranges. `get_part` returns a range and the object as the answer describes it.

    Large ranges are read in parts, so that a retry repeats a part and not the whole. All parts are of one version.
    """
    if stop <= start:
        return pa.py_buffer(b"")
    if stop - start <= PART_BYTES:
        return get_part(listed, start, stop)[0]
    whole = pa.allocate_buffer(stop - start)
    target = np.frombuffer(memoryview(whole), np.uint8)
    begins = list(range(start, stop, PART_BYTES))

    def fetch(expected: ListedObject, begin: int) -> ListedObject:
        end = min(begin + PART_BYTES, stop)
        part, found = get_part(expected, begin, end)
        target[begin - start : end - start] = np.frombuffer(memoryview(part), np.uint8)
        return found

    # Without a known version the first part is read alone, and the others must have its version.
    expected = listed if listed.version else fetch(listed, begins.pop(0))
    pool = ThreadPoolExecutor(min(PARTS_AT_ONCE, len(begins)), thread_name_prefix="overlord-parts")
    try:
        list(pool.map(partial(fetch, expected), begins))
    finally:
        pool.shutdown(cancel_futures=True)
    return whole


def changed_error(root: str, listed: ListedObject, found: ListedObject) -> SourceError:
    return SourceError(
        f"{root}/{listed.key} has changed since it was listed: it has {found.num_bytes:,} bytes and the version "
        f"{found.version or 'unknown'}, and had {listed.num_bytes:,} bytes and {listed.version or 'unknown'}; do not change "
        "the files of a running job: put the old object back, or start again"
    )


class RemoteStore(Protocol):
    """Files of one root, such as a bucket. Any thread may call any method. Errors are SourceError for what a retry cannot
    help, and StorageError after all retries."""

    root: str

    @property
    def num_retries(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """The number of bytes read."""
        ...

    def head(self, key: str) -> ListedObject: ...

    def list_all(self, prefix: str) -> list[ListedObject]:
        """Every file below the folder `prefix`, however deep."""
        ...

    def list_level(self, prefix: str) -> tuple[list[ListedObject], list[str]]:
        """The files and the folders directly in the folder `prefix`."""
        ...

    def read(self, listed: ListedObject, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop); SourceError if the file has changed since it was listed."""
        ...


OBSTORE_SCHEMES = ("s3", "gs", "az", "http", "https")
_stores: dict[tuple[str, tuple[tuple[str, str], ...], Retry], RemoteStore] = {}
_stores_lock = threading.Lock()


def shared_store(root: str, options: tuple[tuple[str, str], ...], retry: Retry) -> RemoteStore:
    """The store of a root: one, and so one pool of connections, per process. obstore's schemes go through obstore, files of
    the Hub through its own client, all others through fsspec."""
    key = (root, options, retry)
    with _stores_lock:
        if key not in _stores:
            scheme, _, place = root.partition("://")
            if scheme in OBSTORE_SCHEMES:
                _stores[key] = ObjectStore(root, dict(options), retry)
            elif scheme == "hf" and place != "buckets":
                from overlord.sources.hub_store import HubStore

                _stores[key] = HubStore(root, dict(options), retry)
            else:
                from overlord.sources.fsspec_store import FsspecStore

                _stores[key] = FsspecStore(root, dict(options), retry)
        return _stores[key]


def remote_use() -> dict[str, StorageUse]:
    """What this process has read from stores, by root."""
    used: dict[str, StorageUse] = {}
    with _stores_lock:
        stores = list(_stores.values())
    for store in stores:
        before = used.get(store.root, StorageUse(0, 0))
        used[store.root] = StorageUse(before.num_bytes + store.num_bytes, before.num_retries + store.num_retries)
    return used


def _connect(root: str, options: Mapping[str, str], retry: Retry) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise SpecError(
            f"reading {root} needs the extra 'object-stores': pip install 'overlord-dataloader[object-stores]'"
        ) from error
    # An endpoint with http:// is a choice of plain text, which the store refuses unless allowed.
    plain = root.startswith("http://") or any(value.startswith("http://") for value in options.values())
    named = {name.removeprefix("aws_").removeprefix("azure_").removeprefix("google_") for name in options}
    client: dict[str, Any] = {"timeout": timedelta(seconds=retry.request_timeout_s)}
    if plain and "allow_http" not in named:
        client["allow_http"] = True
    arguments: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
    if root.startswith(("http://", "https://")):
        client.update(options)
    else:
        arguments["config"] = dict(options)
    try:
        return from_url(root, **arguments)
    except (BaseError, ValueError, TypeError) as error:
        raise SpecError(f"storage_options for {root} are not understood: {_reason(error)}") from error


def _status(error: Exception) -> int | None:
    match = _STATUS.search(str(error))
    return int(match.group(1)) if match else None


def _is_transient(error: Exception) -> bool:
    from obstore.exceptions import GenericError

    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)
    return isinstance(error, GenericError)


def _refusal(error: Exception, done: str) -> str:
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "does not exist: check the name, and the bucket"
    if status in (401, 403):
        rights = "list and get" if done == "read" else "put and delete"
        return f"may not be {done} with these credentials: give others in storage_options, or a right to {rights}"
    if status == 416:
        return "has changed since it was listed: it has become shorter; do not change the files of a running job"
    return f"cannot be {done}"


def _reason(error: Exception) -> str:
    """The first line, without the debug dump and the XML body that the store appends."""
    return str(error).split("\n", 1)[0].split(": <", 1)[0]
