"""A microbatch with the names, dtypes and shapes that a framework's own batches have.

Each function takes a microbatch, of numpy arrays or of tensors on any device, and returns a new dict for the framework.
Fields that this rank does not have (those of other pipeline stages) are left out. Packed arrays get a first axis of one row,
as frameworks have a batch axis everywhere; padded ones have their rows already, as wide as the longest document of the
microbatch (`Batch(layout="padded", pad_to="longest")`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NO_LABEL = -100


def huggingface(micro: Mapping[str, Any], *, flash: bool = False, keep: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments of a causal language model of transformers: `model(**ol.formats.huggingface(micro))`.

    `input_ids`, `position_ids` and `labels` are int64. Labels are shifted already: they are passed as `shift_labels` too,
    and a model that has these does not shift `labels` again. `position_ids` begin at 0 in every document, by which attention
    is kept inside documents; with `flash`, packed microbatches also have the arguments of its flash attention:
    `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`. Padded ones have an `attention_mask`. `keep` names
    fields to take over as they are.
    """
    _check(micro)
    names = {"tokens": "input_ids", "position_ids": "position_ids", "attention_mask": "attention_mask"}
    found = _rows(micro, names, "int64")
    if "labels" in micro:
        labels = _row(micro["labels"], "int64")
        found |= {"labels": labels, "shift_labels": labels}
    if flash and "cu_seqlens" in micro:
        ends, longest = _bounds(micro), int(micro["max_seqlen"])
        found |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return found | _kept(micro, keep)


def megatron(micro: Mapping[str, Any], *, keep: Sequence[str] = ()) -> dict[str, Any]:
    """A batch as Megatron-LM's `get_batch` has it.

    `tokens`, `labels` and `position_ids` are int64 [rows, N], `loss_mask` is float32: the weights of labels where a source
    has them. A label without loss is 0, since Megatron's loss looks all of them up before it masks. `attention_mask` is
    None: attention is causal. Packed microbatches have `cu_seqlens` as int32 [1, segments + 1] and `max_seqlen` as int32
    [1]; with `Batch(document_multiple=...)` also `cu_seqlens_padded`.
    """
    _check(micro)
    found = _rows(micro, {"tokens": "tokens", "position_ids": "position_ids"}, "int64")
    if "labels" in micro:
        labels = _row(micro["labels"], "int64")
        has_loss = labels != _NO_LABEL
        found |= {"labels": labels * has_loss, "loss_mask": _row(micro.get("loss_weights", has_loss), "float32")}
    found["attention_mask"] = None
    if "cu_seqlens" in micro:
        found |= _rows(micro, {"cu_seqlens": "cu_seqlens", "cu_seqlens_padded": "cu_seqlens_padded"}, "int32")
        found["max_seqlen"] = _like(micro["cu_seqlens"], [int(micro["max_seqlen"])], "int32")
    return found | _kept(micro, keep)


def torchtitan(micro: Mapping[str, Any], *, keep: Sequence[str] = ()) -> tuple[dict[str, Any], Any]:
    """What a dataloader of torchtitan yields: ({"input", "positions"}, labels), all int64 [rows, N], labels with -100 where
    there is no loss. Positions begin at 0 in every document; its document mask needs no more."""
    _check(micro)
    found = _rows(micro, {"tokens": "input", "position_ids": "positions"}, "int64")
    labels = _row(micro["labels"], "int64") if "labels" in micro else None
    return found | _kept(micro, keep), labels


def _check(micro: Mapping[str, Any]) -> None:
    if not hasattr(micro, "keys"):
        raise SpecError(
            f"a layout is made of one microbatch, got {type(micro).__name__}: iterate over the step (`for micro in step`)"
        )


def _bounds(micro: Mapping[str, Any]) -> Any:
    """Where segments begin and end among the places of the microbatch, padding included."""
    return _cast(micro["cu_seqlens_padded"] if "cu_seqlens_padded" in micro else micro["cu_seqlens"], "int32")


def _rows(micro: Mapping[str, Any], names: Mapping[str, str], dtype: str) -> dict[str, Any]:
    return {new: _row(micro[name], dtype) for name, new in names.items() if name in micro}


def _row(array: Any, dtype: str) -> Any:
    array = _cast(array, dtype)
    return array[None] if array.ndim == 1 else array


def _cast(array: Any, dtype: str) -> Any:
    if isinstance(array, np.ndarray):
        return array.astype(dtype, copy=False)
    import torch

    return array.to(getattr(torch, dtype))


def _like(array: Any, values: list[int], dtype: str) -> Any:
    """A small array of the same kind, on the same device."""
    if isinstance(array, np.ndarray):
        return np.array(values, dtype)
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype), device=array.device)


def _kept(micro: Mapping[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    missing = [name for name in keep if name not in micro]
    if missing:
        raise SpecError(f"keep names {missing[0]!r}, and the microbatch has {', '.join(sorted(micro))}")
    return {name: micro[name] for name in keep}
