"""Which arrays of a microbatch need not travel, because the client can compute them from little.

Of the 17 bytes a token of a microbatch only its token, 4 bytes, is news. Labels are the next tokens, but for the last one of
each document, or of each piece of it in a slice for context parallelism. Positions count on until a segment or piece ends.
Masks are long runs. So the exceptions travel: with each array a few numbers for each place where it does not go on as
before. What the exceptions are is found by looking, not from what a microbatch should hold, so that whatever a feature or a
strategy has changed arrives as it is. An array that hardly goes on as before is sent whole, labels in 4 bytes where they
fit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from overlord.batches.text_fields import NO_LOSS, fill_next_tokens, fill_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Fields

LEAST_BYTES = 1 << 14
"""Of tokens: below it a message costs the same however long it is."""

_TYPES = {
    "labels": np.int64,
    "position_ids": np.int32,
    "image_row": np.int32,
    "loss_mask": np.bool_,
    "attention_mask": np.bool_,
}
_MOST_PLACES = 1 << 28
"""More are sent whole: a damaged number must not allocate much."""
_ALIGNMENT = 64


class Sent(NamedTuple):
    """What travels in the place of an array."""

    shape: tuple[int, ...]
    exceptions: NDArray[Any] | None


def find_derivable(fields: Fields, arenas: Arenas, least_bytes: int = LEAST_BYTES) -> dict[str, NDArray[Any] | None]:
    """The fields that need not be sent, with the exceptions that the client needs in the place of each; none for a
    microbatch of less than `least_bytes` of tokens."""
    usual = {name: _field(fields, name) for name in _TYPES}
    flat = {name: array.reshape(-1) for name, array in usual.items() if array is not None}
    if not flat or max(4 * array.size for array in flat.values()) < least_bytes:
        return {}
    found: dict[str, NDArray[Any] | None] = {}
    if "labels" in flat:
        tokens = _numbers(fields.get("tokens"))
        tokens = tokens.reshape(-1) if tokens is not None and tokens.shape == fields["labels"].shape else None
        found |= _labels_and_mask(flat["labels"], flat.pop("loss_mask", None), tokens, arenas)
    for name in ("position_ids", "image_row"):
        if name in flat and (runs := _runs_of(flat[name])) is not None:
            found[name] = runs
    for name in ("loss_mask", "attention_mask"):
        if name in flat:
            found[name] = _switches_of(flat[name])
    return found


def derive(fields: Mapping[str, Any], sent: Mapping[str, Sent], arenas: Arenas) -> Fields:
    """Compute the fields that `sent` names, from the exceptions of each and other fields of the microbatch. Raises
    ValueError where these contradict one another, KeyError where one is missing."""
    found: Fields = _allocate(sent, arenas)
    flat = {name: array.reshape(-1) for name, array in found.items()}
    for name, array in flat.items():
        exceptions = sent[name].exceptions
        if name in ("loss_mask", "attention_mask") and exceptions is not None:
            _fill_switches(array, exceptions)
        elif name in ("position_ids", "image_row"):
            _fill_runs(array, _needed(exceptions, name))
    if "labels" in flat:
        exceptions = _needed(sent["labels"].exceptions, "labels")
        masked = "loss_mask" in sent and sent["loss_mask"].exceptions is not None
        _fill_labels(flat["labels"], fields.get("tokens"), exceptions, flat["loss_mask"] if masked else None)
    if "loss_mask" in flat and sent["loss_mask"].exceptions is None:
        labels = found["labels"]
        if labels.shape != found["loss_mask"].shape:
            raise ValueError(f"the loss mask is for {found['loss_mask'].shape} places, and labels for {labels.shape}")
        np.not_equal(labels, NO_LOSS, out=found["loss_mask"])
    if "attention_mask" in flat and sent["attention_mask"].exceptions is None:
        raise ValueError("there are no exceptions of the attention mask")
    return found


def _field(fields: Fields, name: str) -> NDArray[Any] | None:
    """A field that can be computed, if the microbatch has it as it should be."""
    value = fields.get(name)
    array = cast("NDArray[Any]", value) if isinstance(value, np.ndarray) else None
    is_usual = array is not None and array.dtype == _TYPES[name] and 0 < array.size <= _MOST_PLACES
    return array if is_usual else None


def _numbers(value: object) -> NDArray[np.int32] | None:
    is_array = isinstance(value, np.ndarray) and cast("NDArray[Any]", value).dtype == np.int32
    return cast("NDArray[np.int32]", value) if is_array else None


def _allocate(sent: Mapping[str, Sent], arenas: Arenas) -> Fields:
    """The arrays, in one buffer for all: a pool serves those of one size best."""
    for name, (shape, _) in sent.items():
        if name not in _TYPES:
            raise ValueError(f"{name!r} cannot be computed from other fields")
        if not 0 < math.prod(shape) <= _MOST_PLACES:
            raise ValueError(f"{name!r} of shape {shape} has no places, or more than {_MOST_PLACES:,}")
    sizes = {name: math.prod(shape) * np.dtype(_TYPES[name]).itemsize for name, (shape, _) in sent.items()}
    begins = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())]).tolist()
    memory = arenas.lease(begins[-1])
    return {
        name: memory[begin : begin + size].view(_TYPES[name]).reshape(sent[name].shape)
        for begin, (name, size) in zip(begins, sizes.items(), strict=False)
    }


def _needed(exceptions: NDArray[Any] | None, name: str) -> NDArray[Any]:
    if exceptions is None:
        raise ValueError(f"there are no exceptions of {name!r}")
    return exceptions


# Labels: the next tokens, except at (places, labels); none where a mask says so. Or all of them, in 4 bytes


def _labels_and_mask(
    labels: NDArray[np.int64], mask: NDArray[np.bool_] | None, tokens: NDArray[np.int32] | None, arenas: Arenas
) -> dict[str, NDArray[Any] | None]:
    """The exceptions of labels, and of the loss mask where it says where labels are."""
    has_label = labels != NO_LOSS
    follows = mask is not None and np.array_equal(mask, has_label)
    of_mask: dict[str, NDArray[Any] | None] = {"loss_mask": None} if follows else {}
    if tokens is not None:
        exceptions: NDArray[Any]
        is_other = np.ones(len(labels), np.bool_)
        np.not_equal(labels[:-1], tokens[1:], out=is_other[:-1])
        if follows:
            by_mask, switches = is_other & has_label, _switches_of(has_label)
            if 8 * np.count_nonzero(by_mask) + switches.nbytes < 8 * np.count_nonzero(is_other):
                is_other, of_mask["loss_mask"] = by_mask, switches
        places = np.flatnonzero(is_other)
        if 2 * len(places) < len(labels):  # else all of them take less
            exceptions = np.stack([places, labels[places]])
            of_mask["labels"] = exceptions.astype(np.int32) if _fit(exceptions) else exceptions
            return of_mask
    if not _fit(labels):
        return {}
    short = arenas.lease(4 * len(labels)).view(np.int32)
    np.copyto(short, labels, casting="same_kind")
    of_labels: dict[str, NDArray[Any] | None] = {"labels": short}
    return of_labels | ({"loss_mask": None} if follows else {})


def _fit(labels: NDArray[np.int64]) -> bool:
    """True if they fit into 4 bytes."""
    limits = np.iinfo(np.int32)
    return not labels.size or bool(labels.min() >= limits.min and labels.max() <= limits.max)


def _fill_labels(
    labels: NDArray[np.int64], tokens: object, exceptions: NDArray[Any], loss_mask: NDArray[np.bool_] | None
) -> None:
    if exceptions.ndim == 1:
        if exceptions.dtype != np.int32 or exceptions.shape != labels.shape:
            raise ValueError(f"there is not one label for each of {len(labels)} places")
        np.copyto(labels, exceptions)
        return
    next_to = _numbers(tokens)
    if next_to is None or next_to.size != len(labels):
        raise ValueError(f"there is not one token for each of {len(labels)} labels")
    if exceptions.dtype.kind != "i" or exceptions.itemsize < 4:
        raise ValueError(f"exceptions of labels are of type {exceptions.dtype}")
    places, values = _pairs(exceptions, len(labels))
    if loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(f"the loss mask is for {len(loss_mask)} places, and labels for {len(labels)}")
    fill_next_tokens(labels, next_to.reshape(-1), places, values)
    if loss_mask is not None:
        np.copyto(labels, NO_LOSS, where=~loss_mask)


# Runs: (places, values) where an array does not count on, or stay -1


def _runs_of(array: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """None where the array itself is hardly longer."""
    goes_on = array[:-1] + (array[:-1] >= 0)
    begins = np.flatnonzero(np.concatenate([[True], array[1:] != goes_on]))
    return np.stack([begins.astype(np.int32), array[begins]]) if 4 * len(begins) < len(array) else None


def _fill_runs(array: NDArray[np.int32], runs: NDArray[Any]) -> None:
    if runs.dtype != np.int32:
        raise ValueError(f"runs are of type {runs.dtype}")
    begins, values = _pairs(runs, len(array))
    if not len(begins) or begins[0]:
        raise ValueError("the first run does not begin at the first place")
    lengths = np.diff(begins, append=len(array))
    fill_positions(array, begins - values, lengths)
    if (values < 0).any():
        np.copyto(array, values.repeat(lengths), where=(values < 0).repeat(lengths))


def _pairs(pairs: NDArray[Any], num_places: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Places in rising order, and the value at each."""
    if pairs.ndim != 2 or len(pairs) != 2:
        raise ValueError(f"exceptions are places and values, and came in the shape {pairs.shape}")
    places, values = pairs
    _check_rising(places, num_places)
    return places, values


def _check_rising(places: NDArray[Any], num_places: int) -> None:
    if len(places) and (places[0] < 0 or places[-1] >= num_places or (np.diff(places) <= 0).any()):
        raise ValueError(f"places of exceptions do not rise from 0 to {num_places}")


# Masks: the places where they switch from False, which they begin with. Or bits


def _switches_of(mask: NDArray[np.bool_]) -> NDArray[Any]:
    is_switch = np.concatenate([mask[:1], mask[1:] != mask[:-1]])
    if 32 * np.count_nonzero(is_switch) < len(mask):
        return np.flatnonzero(is_switch).astype(np.int32)
    return np.packbits(mask)


def _fill_switches(mask: NDArray[np.bool_], switches: NDArray[Any]) -> None:
    if switches.dtype == np.int32 and switches.ndim == 1:
        _check_rising(switches, len(mask))
        lengths = np.diff(switches, prepend=0, append=len(mask))
        mask[:] = (np.arange(len(lengths)) % 2 == 1).repeat(lengths)
    elif switches.dtype == np.uint8 and switches.shape == (-(-len(mask) // 8),):
        mask.view(np.uint8)[:] = np.unpackbits(switches, count=len(mask))
    else:
        raise ValueError(f"a mask of {len(mask)} places came as {switches.shape} of type {switches.dtype}")
