"""`hf://`: datasets, models and spaces on the Hugging Face Hub, by the client of huggingface_hub.

fsspec's file system of that package lists the whole folder of a file to tell its version, and reads megabytes ahead. Here a
read is one request, whose answer has the version: the git digest of a file, or the SHA-256 of one that is stored apart.
Buckets of the Hub (`hf://buckets/...`), which have no such digests, go through fsspec.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from overlord.errors import SourceError, SpecError
from overlord.sources.fsspec_store import Requests
from overlord.sources.object_store import ListedObject, changed_error, read_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from overlord.sources.object_store import Retry

T = TypeVar("T")

_OPTIONS = ("token", "endpoint")


class HubStore:
    """Reads and lists files under `hf://datasets`, `hf://spaces` or `hf://ORG`. Thread-safe."""

    def __init__(self, root: str, options: Mapping[str, str], retry: Retry) -> None:
        try:
            from huggingface_hub import HfApi, HfFileSystem
        except ImportError as error:
            raise SpecError(f"{root}: hf:// is read by huggingface_hub: pip install huggingface_hub") from error
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise SpecError(f"{root}: {unknown[0]} is no storage option of hf://, which has {' and '.join(_OPTIONS)}")
        self.root = root
        self._timeout_s = retry.request_timeout_s
        self._requests = Requests(root, retry)
        self._endpoint, self._token = options.get("endpoint"), options.get("token")
        self._api = HfApi(endpoint=self._endpoint, token=self._token)
        self._names: Any = HfFileSystem(endpoint=self._endpoint, token=self._token, skip_instance_cache=True)
        self._lock = threading.Lock()
        self._num_bytes = 0

    @property
    def num_retries(self) -> int:
        return self._requests.num_retries

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def head(self, key: str) -> ListedObject:
        def look() -> ListedObject:
            repo, path = self._resolve(key)
            found = self._api.get_paths_info(paths=[path], **repo)
            if not found:
                raise FileNotFoundError(f"no such file in {repo['repo_id']} at {repo['revision']}")
            if not hasattr(found[0], "blob_id"):
                raise SourceError(f"{self.root}/{key} is a folder: name the files in it, as in {self.root}/{key}/*")
            return _listed(key, found[0])

        return self._send(key, look)

    def list_all(self, prefix: str) -> list[ListedObject]:
        """Every file below the folder `prefix`, however deep."""
        return self._send(prefix, lambda: [_listed(key, item) for key, item in self._list(prefix, True) if item is not None])

    def list_level(self, prefix: str) -> tuple[list[ListedObject], list[str]]:
        """The files and the folders directly in the folder `prefix`."""
        found = self._send(prefix, lambda: list(self._list(prefix, False)))
        return [_listed(key, item) for key, item in found if item is not None], [key for key, item in found if item is None]

    def read(self, listed: ListedObject, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop) of a file; SourceError if it has changed since it was listed."""
        return read_parts(self._get_part, listed, start, stop)

    def _get_part(self, listed: ListedObject, start: int, stop: int) -> tuple[pa.Buffer, ListedObject]:
        data, version = self._send(listed.key, lambda: self._get(listed.key, start, stop))
        with self._lock:
            self._num_bytes += len(data)
        # A version of another kind than the listing's decides nothing: then the listing is asked again.
        if len(data) != stop - start or (listed.version and version != listed.version):
            found = self.head(listed.key)
            if found != listed:
                raise changed_error(self.root, listed, found)
        if len(data) != stop - start:
            raise SourceError(
                f"{self.root}/{listed.key} returned {len(data):,} bytes for the range {start:,} to {stop:,} of "
                f"{listed.num_bytes:,}: the server does not support range requests; use one that does, or copy the file"
            )
        return pa.py_buffer(data), listed

    def _get(self, key: str, start: int, stop: int) -> tuple[bytes, str]:
        """A range and the version that the answer names."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        repo, path = self._resolve(key)
        url = hf_hub_url(filename=path, endpoint=self._endpoint, **repo)
        headers = {
            **build_hf_headers(token=self._token),
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        answer = http_backoff("GET", url, headers=headers, timeout=self._timeout_s, max_retries=0)
        hf_raise_for_status(answer)
        tags = [each.headers["X-Linked-Etag"] for each in (*answer.history, answer) if "X-Linked-Etag" in each.headers]
        tag = tags[0] if tags else answer.headers.get("ETag") or ""
        return answer.content, tag.removeprefix("W/").strip('"')

    def _list(self, prefix: str, is_deep: bool) -> Iterator[tuple[str, Any]]:
        """The key and the entry of each file below a folder, and the key and None of each folder."""
        repo, path = self._resolve(prefix)
        named = prefix.removesuffix(path).rstrip("/")
        for item in self._api.list_repo_tree(path_in_repo=path or None, recursive=is_deep, **repo):
            yield f"{named}/{item.path}", item if hasattr(item, "blob_id") else None

    def _resolve(self, key: str) -> tuple[dict[str, Any], str]:
        """The repository of a key, as huggingface_hub takes it, and the path in it."""
        try:
            found = self._names.resolve_path(f"{self.root.removeprefix('hf://')}/{key}".rstrip("/"))
        except (NotImplementedError, ValueError) as error:
            raise SourceError(
                f"{self.root}/{key} is not in a repository ({error}): write hf://datasets/ORG/NAME/FILE, and "
                "hf://datasets/ORG/NAME@REVISION/FILE for another revision; ORG and NAME take no globs"
            ) from error
        except FileNotFoundError:
            self._names.invalidate_cache()  # it remembers what is not there, and that may come
            raise
        return {"repo_id": found.repo_id, "repo_type": found.repo_type, "revision": found.revision}, found.path_in_repo

    def _send(self, key: str, request: Callable[[], T]) -> T:
        def attempt() -> T:
            from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

            try:
                return request()
            except EntryNotFoundError as error:
                raise FileNotFoundError(_first_line(error)) from error
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status == 404:
                    raise FileNotFoundError(_first_line(error)) from error
                if status in (401, 403):
                    raise PermissionError(_first_line(error)) from error
                if status == 416:
                    raise SourceError(
                        f"{self.root}/{key} has changed since it was listed: it has become shorter; do not change the files "
                        "of a running job"
                    ) from error
                if status < 500 and status not in (408, 429):
                    raise ValueError(_first_line(error)) from error
                raise

        return self._requests.send(key, attempt)


def _listed(key: str, item: Any) -> ListedObject:
    return ListedObject(key, int(item.size), item.lfs.sha256 if item.lfs else item.blob_id)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
