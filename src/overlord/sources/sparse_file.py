"""A file of which only some ranges are at hand: what a decoder reads of a remote file after they were fetched."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa


class SparseFile(io.IOBase):
    """Serves reads from `ranges` (offset to bytes) without copying; a read outside of them is an error."""

    def __init__(self, num_bytes: int, ranges: Mapping[int, pa.Buffer]) -> None:
        self._num_bytes = num_bytes
        self._ranges = dict(sorted(ranges.items()))
        self._position = 0

    def read(self, num_bytes: int = -1) -> pa.Buffer:
        start = self._position
        stop = self._num_bytes if num_bytes < 0 else min(start + num_bytes, self._num_bytes)
        for offset, data in self._ranges.items():
            if offset <= start and stop <= offset + data.size:
                self._position = stop
                return data.slice(start - offset, stop - start)
        raise EOFError(f"the bytes {start:,} to {stop:,} were not fetched")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
