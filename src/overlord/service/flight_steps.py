"""A step as Arrow record batches, for Flight, and back.

The batches have one column of binary views, and each value is a region (`steps.py`). Arrays longer than a message are split
into several regions. The metadata of the first batch (`wire.Contents`) says where each array is. Sending copies no large
array. Arrays that follow from others do not travel (`lean_fields.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.service.lean_fields import find_derivable
from overlord.service.steps import (
    ALIGNMENT,
    SMALL_BYTES,
    DamagedStepError,
    SmallArrays,
    bytes_of,
    pack_fields,
    sendable_type,
)
from overlord.service.wire import Array, Contents
from overlord.sources.views import VIEW

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery

SCHEMA = pa.schema([("region", pa.binary_view())])
MESSAGE_BYTES = 8 << 20
"""About the size of a message: larger ones need fresh memory, which is slow; smaller ones cost a round trip each."""


def pack_step(delivery: Delivery, arenas: Arenas | None = None) -> tuple[Contents, Iterator[pa.RecordBatch]]:
    """Return the contents of a step, and at least one batch with its data. With `arenas`, which lend memory for a moment,
    arrays that the client can compute are left out."""
    regions = _MessageRegions()
    microbatches = [
        pack_fields(regions, fields, {} if arenas is None else find_derivable(fields, arenas))
        for fields in delivery.microbatches
    ]
    return Contents(delivery.step, delivery.loss_tokens, microbatches), regions.batches()


class _MessageRegions:
    """Collects arrays for record batches. Region 0 holds the small ones."""

    def __init__(self) -> None:
        self._small = SmallArrays()
        self._large: list[NDArray[np.uint8]] = []

    def add(self, name: str, array: NDArray[Any]) -> Array:
        dtype, shape = sendable_type(name, array), array.shape
        if array.nbytes <= SMALL_BYTES:
            return Array(name, dtype, shape, 0, self._small.add(array))
        content = bytes_of(array)
        pieces = [content[begin : begin + MESSAGE_BYTES] for begin in range(0, len(content), MESSAGE_BYTES)]
        first = len(self._large) + 1
        self._large += pieces
        return Array(name, dtype, shape, first, 0, len(pieces))

    def batches(self) -> Iterator[pa.RecordBatch]:
        # At least 64 bytes: Arrow stores shorter values inline, in the view itself.
        small = self._small.joined().ljust(ALIGNMENT, b"\0")
        message, num_bytes = [np.frombuffer(small, np.uint8)], self._small.num_bytes
        for region in self._large:
            if num_bytes and num_bytes + len(region) > MESSAGE_BYTES:
                yield batch_of(message)
                message, num_bytes = [], 0
            message.append(region)
            num_bytes += len(region)
        if message:
            yield batch_of(message)


def batch_of(regions: Sequence[NDArray[np.uint8]]) -> pa.RecordBatch:
    """Return a message with these regions, without copying them."""
    views = np.zeros(len(regions), VIEW)
    views["length"] = [len(region) for region in regions]
    views["prefix"] = [region[:4].tobytes() for region in regions]
    views["buffer"] = np.arange(len(regions))
    buffers = [None, pa.py_buffer(views.data), *(pa.py_buffer(region.data) for region in regions)]
    arrow: Any = pa  # its stubs are incomplete
    return arrow.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary_view(), len(regions), buffers)], schema=SCHEMA)


def regions_of(batches: Sequence[pa.RecordBatch]) -> list[NDArray[np.uint8]]:
    """The regions that came in these messages."""
    return [np.frombuffer(memoryview(buffer).toreadonly(), np.uint8) for batch in batches for buffer in _buffers(batch)]


def _buffers(batch: pa.RecordBatch) -> list[pa.Buffer]:
    if not batch.schema.equals(SCHEMA):
        raise DamagedStepError(f"a message has columns {batch.schema.names} instead of one of regions")
    _, _, *regions = batch.column(0).buffers()
    if len(regions) != batch.num_rows:
        raise DamagedStepError(f"a message of {batch.num_rows} regions came with {len(regions)} buffers")
    return regions  # type: ignore[return-value] - only a validity buffer may be missing
