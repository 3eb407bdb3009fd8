"""The part of a microbatch that each rank of a data-parallel group receives: its context-parallel slice, the fields of
its pipeline stage, or only the shapes of arrays that another rank's trainer broadcasts to it.

Context parallelism cuts every segment (a document with its padding, or a run of row padding; a whole row in
the padded layout) into 2 x cp chunks. Rank i takes chunks i and 2 x cp - 1 - i, so that under causal
attention all ranks have the same work. `overlord.arrange.hdp.rings` says where chunks end: nothing is padded,
and ranks differ by at most one place a segment, by none if document_multiple is a multiple of 2 x cp.

Slicing cuts `tokens`, `labels`, `position_ids`, `loss_mask`, `loss_weights` and `attention_mask`, and
`num_tokens` becomes the number of places in the slice. Everything else describes the whole microbatch on every
rank: cu_seqlens and max_seqlen because Transformer Engine divides them itself, images because a document's places, and with
them the places of its images, are spread over all ranks. A model that encodes each image on one rank alone
takes `images[index::cp]`. Where images are encoded on other ranks than those that train on them, see
`trainer/image_exchange.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.arrange.hdp.rings import chunk_begins
from overlord.declare.mesh import StageFields
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Fields
    from overlord.stream.facts import Ints

PER_PLACE = ("tokens", "labels", "position_ids", "loss_mask", "loss_weights", "attention_mask", "image_row")
"""Fields with one entry per token place: these are sliced."""

_BY_DEFAULT = StageFields()

_ALIGNMENT = 64


def cp_slices(batch: Fields, cp: int, arenas: Arenas | None = None) -> list[Fields]:
    """The slice of every context-parallel rank, in their order. With `arenas` all of them share one pooled buffer."""
    _check_cp(cp, 0)
    if cp == 1:
        return [batch]
    names = _per_place(batch)
    num_bytes = sum(batch[name].nbytes for name in names) + cp * len(names) * _ALIGNMENT
    memory = None if arenas is None else arenas.lease(num_bytes)
    slices: list[Fields] = []
    for places in _places(batch, cp, range(cp)):
        fields, memory = _take_places(batch, places, memory)
        slices.append(fields)
    return slices


def cp_slice(batch: Fields, cp: int, index: int) -> Fields:
    """The slice of context-parallel rank `index` of `cp`. Use `cp_slices` for several ranks: it is cheaper."""
    _check_cp(cp, index)
    return batch if cp == 1 else _take_places(batch, _places(batch, cp, [index])[0])[0]


def join_cp(slices: Sequence[Fields]) -> Fields:
    """The inverse of `cp_slices`. `slices` are in the order of their ranks."""
    cp = len(slices)
    _check_cp(cp, 0)
    if cp == 1:
        return slices[0]
    whole: Fields = slices[0] | {"num_tokens": sum(fields["num_tokens"] for fields in slices)}
    places = np.concatenate(_places(whole, cp, range(cp)))
    for name in _per_place(whole):
        parts = np.concatenate([fields[name] for fields in slices], axis=-1)
        whole[name] = np.empty_like(parts)
        whole[name][..., places] = parts
    return whole


def fields_for(batch: Fields, rank: int, pp: int, stages: StageFields = _BY_DEFAULT) -> Fields:
    """The fields that pipeline rank `rank` of `pp` needs; all of them where the pipeline is one rank."""
    if pp == 1 and rank == 0:
        return batch
    return {name: value for name, value in batch.items() if stages.goes_to(name, rank, pp, is_column=_is_column(value))}


def receive_only(batch: Fields) -> Fields:
    """The fields of a rank whose large arrays another rank's trainer broadcasts to it.

    The large arrays are missing; `broadcast` has the (shape, dtype name) of each, in the order in which both
    sides broadcast them (for images of different sizes, a list of these). Numbers, cu_seqlens and other small
    arrays are here already, and so are Arrow columns, which no tensor broadcast can carry.
    """
    large = {name: batch[name] for name in large_fields(batch)}
    kept = {name: value for name, value in batch.items() if name not in large}
    return kept | {"broadcast": {name: _shape_and_dtype(value) for name, value in large.items()}}


def large_fields(batch: Mapping[str, Any]) -> list[str]:
    """The fields of a microbatch that a trainer broadcasts, in the order in which it does."""
    return [name for name in (*PER_PLACE, "images") if name in batch]


def cp_places(batch: Fields, cp: int, index: int) -> Ints:
    """The places that context-parallel rank `index` of `cp` takes along the last axis, in order."""
    _check_cp(cp, index)
    return _places(batch, cp, [index])[0]


def _check_cp(cp: int, index: int) -> None:
    if cp < 1:
        raise SpecError(f"a microbatch is cut for at least 1 context-parallel rank, got {cp}")
    if not 0 <= index < cp:
        raise SpecError(f"cp={cp} has ranks 0 to {cp - 1}, not {index}")


def _per_place(batch: Fields) -> list[str]:
    return [name for name in PER_PLACE if name in batch]


def _take_places(
    batch: Fields, places: Ints, memory: NDArray[np.uint8] | None = None
) -> tuple[Fields, NDArray[np.uint8] | None]:
    """The slice of some places, in the first bytes of `memory` where given, and the rest of that memory."""
    fields: Fields = {}
    for name in _per_place(batch):
        array: NDArray[Any] = batch[name]
        if memory is None:
            fields[name] = array.take(places, axis=-1)
            continue
        shape = (*array.shape[:-1], len(places))
        num_bytes = math.prod(shape) * array.itemsize
        # Without a mode numpy would take into memory of its own first.
        fields[name] = array.take(places, axis=-1, out=memory[:num_bytes].view(array.dtype).reshape(shape), mode="clip")
        memory = memory[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
    num_tokens = len(places) if _is_packed(batch) else len(places) * batch["num_rows"]
    return batch | fields | {"num_tokens": num_tokens}, memory


def _is_packed(batch: Fields) -> bool:
    return "cu_seqlens" in batch


def _places(batch: Fields, cp: int, ranks: Sequence[int]) -> list[Ints]:
    """The places each rank takes along the last axis: of every segment its early chunk, then its late one."""
    if _is_packed(batch):
        bounds = batch.get("cu_seqlens_padded", batch["cu_seqlens"]).astype(np.int64)
    else:
        bounds = np.array([0, batch["num_tokens"] // batch["num_rows"]])
    starts, lengths, parts = bounds[:-1, None], np.diff(bounds)[:, None], np.array(cp)
    chunks = np.array([(rank, 2 * cp - 1 - rank) for rank in ranks])[:, None, :]  # [rank, segment, chunk] from here
    begins = starts + chunk_begins(lengths, parts, chunks)
    counts = starts + chunk_begins(lengths, parts, chunks + 1) - begins
    ends = np.cumsum(counts).reshape(counts.shape)
    # One running count over all chunks: each chunk subtracts the count at its begin.
    places = np.arange(ends.max(initial=0))
    places += np.repeat(begins - (ends - counts), counts.ravel())
    return np.split(places, counts.sum(axis=(1, 2)).cumsum()[:-1])


def _is_column(value: object) -> bool:
    return isinstance(value, (pa.Array, pa.ChunkedArray))


def _shape_and_dtype(value: NDArray[Any] | list[NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_shape_and_dtype(image) for image in value]
    return value.shape, value.dtype.name
