"""Encodes text and says which tokens spans of its characters are: where a chat template puts the loss.

A token that has a character of a span belongs to it. The ids are those of the whole text, whatever its spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.chunks.transforms.tokenize import ByteTokenizer, Tokens, find_encoder, token_id
from overlord.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.chunks.transforms.chat_template import LossSpan, Rendered
    from overlord.chunks.transforms.tokenize import TokenizerLike


def encode_rendered(encoding: TokenizerLike, rendered: Rendered) -> tuple[Tokens, NDArray[np.float32]]:
    """The ids of a text, in which special tokens count as such, and the weight of each in the loss: that of its span, or 0.

    Text outside of all spans has no loss. Where a token belongs to two spans, the later one counts.
    """
    encoder = find_encoder(encoding, special_tokens=not isinstance(encoding, ByteTokenizer))
    ids, find = _encode(encoder, rendered.text)
    weights = np.zeros(len(ids), np.float32)
    for span in rendered.spans:
        if span.end > span.start:
            first, last = find(span)
            weights[first:last] = span.weight
    return ids, weights


def encode_plain(encoding: TokenizerLike, text: str) -> Tokens:
    """The ids of a text in which nothing counts as a special token."""
    return _as_ids(next(iter(_ids_of(find_encoder(encoding, special_tokens=False), [text]))))


def token_named(encoding: TokenizerLike, option: str, token: int | str | None, transform: str) -> int | None:
    """The id of a token that is given by its id or its name."""
    return token_id(find_encoder(encoding, special_tokens=False), option, token, transform)


FindTokens = Callable[["LossSpan"], tuple[int, int]]


def _encode(encoder: Any, text: str) -> tuple[Tokens, FindTokens]:
    """The ids of the text, and a function from a span to its range of tokens."""
    if isinstance(encoder, ByteTokenizer):
        return _as_ids(encoder(text)), lambda span: (_num_bytes(text, span.start), _num_bytes(text, span.end))
    if hasattr(encoder, "encoding"):  # tiktoken: tokens are bytes of the text
        ids = _as_ids(next(iter(encoder.encode([text]))))
        ends = np.cumsum([len(piece) for piece in encoder.encoding.decode_tokens_bytes(ids.tolist())])
        return ids, lambda span: _by_bytes(ends, _num_bytes(text, span.start), _num_bytes(text, span.end))
    if hasattr(encoder, "tokenizer") and hasattr(encoder.tokenizer, "encode_batch"):
        encoded = encoder.tokenizer.encode(text, add_special_tokens=False)
        return _as_ids(encoded.ids), lambda span: _by_offsets(encoded, span)
    ids = _as_ids(next(iter(_ids_of(encoder, [text]))))
    return ids, lambda span: _by_prefix(encoder, text, ids, span)


def _num_bytes(text: str, end: int) -> int:
    return len(text[:end].encode())


def _by_bytes(ends: NDArray[np.int64], start: int, end: int) -> tuple[int, int]:
    return int(ends.searchsorted(start, "right")), int(ends.searchsorted(end, "left")) + 1


def _by_offsets(encoded: Any, span: LossSpan) -> tuple[int, int]:
    """By the library's own offsets. Characters that no token has (stripped spaces) are passed over."""
    places = (encoded.char_to_token(at) for at in range(span.start, span.end))
    first = next((place for place in places if place is not None), None)
    if first is None:
        return 0, 0
    places = (encoded.char_to_token(at) for at in range(span.end - 1, span.start - 1, -1))
    last = next(place for place in places if place is not None)
    # A character of several tokens (bytes of an emoji) is found by the first of them.
    while last + 1 < len(encoded.ids) and encoded.token_to_chars(last + 1)[0] < span.end:
        last += 1
    return first, last + 1


def _by_prefix(encoder: Any, text: str, ids: Tokens, span: LossSpan) -> tuple[int, int]:
    """For encodings that tell no offsets: as many tokens as the text before has in common with the whole."""
    first, _ = _common(ids, _as_ids(next(iter(_ids_of(encoder, [text[: span.start]])))))
    last, is_whole = _common(ids, _as_ids(next(iter(_ids_of(encoder, [text[: span.end]])))))
    return first, last if is_whole else last + 1


def _common(ids: Tokens, start: Tokens) -> tuple[int, bool]:
    n = min(len(ids), len(start))
    differ = np.flatnonzero(ids[:n] != start[:n])
    return (int(differ[0]), False) if len(differ) else (n, True)


def _ids_of(encoder: Any, texts: list[str]) -> Any:
    return (encoder(text) for text in texts) if isinstance(encoder, ByteTokenizer) else encoder.encode(texts)


def _as_ids(ids: Sequence[int] | NDArray[Any]) -> Tokens:
    found = np.asarray(ids)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
        raise DataError("the encoding must return a flat sequence of integers for each text")
    if found.size and not -(2**31) <= int(found.min()) <= int(found.max()) < 2**31:
        raise DataError("the encoding returned a token id that int32 cannot hold")
    return found.astype(np.int32, copy=False).reshape(-1)
