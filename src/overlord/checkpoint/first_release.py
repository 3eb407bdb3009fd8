"""Declarations as the first release described them. States that it wrote are compared by these descriptions."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from overlord.checkpoint.source_code import digest_of

if TYPE_CHECKING:
    from overlord.declare.source import Source

_FIRST_FIELDS = {
    "Tokenize": ("column", "into", "encoding", "eos", "bos", "keep"),
    "PerRow": ("fn", "wants_rng"),
    "InProcesses": ("fn", "batch_rows", "timeout_s"),
    "PlaceImages": ("decode", "grid", "token", "marker", "tokens", "loss_mask"),
    "DecodeImage": ("column", "size", "fit", "max_pixels", "strict"),
    "PatchGrid": ("patch", "merge", "size", "more_tokens"),
}
"""The options of our own transforms then: those that came later are not in its descriptions."""


def first_description(value: Any, known: dict[int, str]) -> str:
    """A transform by its name and options, as the first release had it. `known` keeps digests of tokenizers, by id."""
    if value is None or isinstance(value, (str, int, float, bool, bytes)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(first_description(entry, known) for entry in value)}]"
    identity = getattr(value, "identity", None)
    if callable(identity):
        return str(identity())
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, sorted(value.keywords.items()))
        return f"partial({', '.join(first_description(part, known) for part in parts)})"
    if is_dataclass(value) and not isinstance(value, type):
        is_ours = type(value).__module__.startswith("overlord.")
        names = (_FIRST_FIELDS if is_ours else {}).get(type(value).__name__) or [each.name for each in fields(value)]
        options = (f"{name}={first_description(getattr(value, name), known)}" for name in names)
        return f"{type(value).__qualname__}({', '.join(options)})"
    to_str = getattr(value, "to_str", None)
    if callable(to_str):
        if id(value) not in known:
            known[id(value)] = digest_of(str(to_str()))
        return f"{type(value).__qualname__}({known[id(value)]})"
    name = getattr(value, "__qualname__", None)
    return name or f"{type(value).__qualname__}({getattr(value, 'name', '')})"


def first_declaration_digest(source: Source, described: dict[int, str]) -> str:
    transforms = [first_description(transform, described) for transform in source.transforms]
    decode = first_description(source.decode, described)
    parts = (source.identity(), transforms, decode, source.tokens, source.loss_mask)
    weights = () if source.loss_weights is None else (source.loss_weights,)  # which the first release did not have
    return digest_of(repr((*parts, source.units_per_chunk, source.shuffle, *weights)))
