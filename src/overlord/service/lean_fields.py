"""Which arrays of a microbatch need not travel, because the client can compute them from those that do.

Of the 17 bytes a token of a microbatch only its token, 4 bytes, is news. Labels are the next tokens; positions count from 0
in each segment; the loss mask says where labels are. Beside them travel the last label of each document, and the loss mask
as bits where it is not the default one. Whether an array is what the client would compute is checked before it is left out,
by computing it: a feature or a strategy may have changed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from overlord.batches.derived import Places, derive_attention, derive_labels, fill_positions, image_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Fields

LEAST_BYTES = 1 << 14
"""Of tokens: below it a message costs the same however long it is."""


def find_derivable(fields: Fields, arenas: Arenas, least_bytes: int = LEAST_BYTES) -> dict[str, NDArray[Any] | None]:
    """The fields that need not be sent, with what the client needs in the place of each; none for a microbatch with less
    than `least_bytes` of tokens."""
    places = _places_of(fields)
    if places is None or fields["tokens"].nbytes < least_bytes:
        return {}
    extra: dict[str, NDArray[Any] | None] = {}
    if "labels" in fields and "loss_mask" in fields:
        labels, mask = fields["labels"].reshape(-1), fields["loss_mask"].reshape(-1)
        following = labels[places.ends - 1].astype(np.int64)
        by_default = places.num_covered - int(np.count_nonzero(following < 0))
        extra["labels"] = following
        extra["loss_mask"] = None if np.count_nonzero(mask) == by_default else np.packbits(mask)
    if "position_ids" in fields:
        extra["position_ids"] = None
        if "attention_mask" in fields:
            extra["attention_mask"] = None
    if "image_row" in fields:
        extra["image_row"] = np.packbits(fields["image_row"].reshape(-1) >= 0)
    others = {name for name, array in derive(fields, extra, arenas).items() if not _same(array, fields[name])}
    for together in ({"labels", "loss_mask"}, {"position_ids", "attention_mask"}):  # computed together: both or none
        others |= together if others & together else set()
    return {name: needed for name, needed in extra.items() if name not in others}


def derive(fields: Mapping[str, Any], extra: Mapping[str, NDArray[Any] | None], arenas: Arenas) -> Fields:
    """Compute the fields that `extra` names from the others of the microbatch. Raises ValueError where these contradict one
    another, KeyError where one is missing."""
    places = _places_of(fields)
    if places is None:
        raise ValueError("the microbatch has no documents and segments to derive fields from")
    tokens: NDArray[Any] = fields["tokens"]
    n, shape = places.num_tokens, tokens.shape
    memory = arenas.lease(13 * n)  # one buffer for all: a pool serves those of one size best
    found: Fields = {}
    if "labels" in extra:
        following, bits = extra["labels"], extra["loss_mask"]
        if following is None or following.shape != (places.num_with_text,) or following.dtype != np.int64:
            raise ValueError(f"there is not one last label for each of {places.num_with_text} documents with text")
        _check_bits(bits, n)
        labels, mask = memory[: 8 * n].view(np.int64), memory[12 * n :].view(np.bool_)
        derive_labels(labels, mask, places, tokens=tokens.reshape(-1), following=following, loss_bits=bits)
        found |= {"labels": labels.reshape(shape), "loss_mask": mask.reshape(shape)}
    if "position_ids" in extra:
        position_ids = memory[8 * n : 12 * n].view(np.int32)
        fill_positions(position_ids, places.bounds[:-1], places.segments)
        found["position_ids"] = position_ids.reshape(shape)
    if "attention_mask" in extra:
        starts, lengths = fields["document_starts"], fields["document_lengths"]
        found["attention_mask"] = derive_attention(found["position_ids"], starts, lengths)
    if "image_row" in extra:
        bits = extra["image_row"]
        if bits is None:
            raise ValueError("there are no bits for the places of images")
        _check_bits(bits, n)
        is_image = np.unpackbits(bits, count=n).view(np.bool_)
        found["image_row"] = image_rows(is_image).reshape(shape)
    return found


def _places_of(fields: Mapping[str, Any]) -> Places | None:
    """None where the microbatch is a slice, or lacks what places follow from."""
    tokens, starts, lengths = (_numbers(fields.get(name)) for name in ("tokens", "document_starts", "document_lengths"))
    bounds = _numbers(fields.get("cu_seqlens_padded", fields.get("cu_seqlens")))
    if tokens is None or starts is None or lengths is None or starts.shape != lengths.shape or starts.ndim != 1:
        return None
    if bounds is None and tokens.ndim == 2:
        rows, width = tokens.shape
        bounds = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
    if bounds is None or bounds.ndim != 1:
        return None
    try:
        return Places(tokens.size, starts, lengths, bounds)
    except ValueError:
        return None


def _check_bits(bits: NDArray[Any] | None, num_places: int) -> None:
    if bits is not None and (bits.dtype != np.uint8 or bits.shape != (-(-num_places // 8),)):
        raise ValueError(f"there is not one bit for each of {num_places} places")


def _numbers(value: Any) -> NDArray[np.int32] | None:
    is_array = isinstance(value, np.ndarray) and cast("NDArray[Any]", value).dtype == np.int32
    return cast("NDArray[np.int32]", value) if is_array else None


def _same(derived: NDArray[Any], given: NDArray[Any]) -> bool:
    return derived.dtype == given.dtype and derived.shape == given.shape and np.array_equal(derived, given)
