"""Text to token ids, a whole column at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from overlord.data.transforms.origin import ORIGIN
from overlord.errors import DataError, SchemaError, SpecError
from overlord.planning.facts import Ints

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

Tokens = NDArray[np.int32]
Encoding: TypeAlias = "str | Path | tiktoken.Encoding | tokenizers.Tokenizer | Callable[[str], Sequence[int]]"
MOST_TOKENS = 2**31 - 1
"""Arrow's list<int32> counts its values in 32 bits."""


class ByteTokenizer:
    """UTF-8 bytes as token ids 0 to 255: needs no vocabulary and no package, so demos and tests can use it."""

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_column(self, column: pa.Array) -> tuple[Tokens, Ints]:
        """(all ids, length of each text), straight from Arrow's buffers."""
        column = column.cast(pa.large_binary())
        _, where, data = column.buffers()
        if where is None or not len(column):
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        offsets = np.frombuffer(memoryview(where), np.int64)[column.offset : column.offset + len(column) + 1]
        flat = (
            np.frombuffer(memoryview(data), np.uint8)[offsets[0] : offsets[-1]]
            if data is not None
            else np.zeros(0, np.uint8)
        )
        return flat.astype(np.int32), np.diff(offsets)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Encode the text in `column` into a list<int32> column `into`; other columns go unless named in `keep`.

    `encoding` is the name of a tiktoken encoding or such an object, the path of a tokenizer.json, a
    `tokenizers.Tokenizer`, or any function from str to ids. Text that spells a special token is encoded as
    plain text; the only special ids are `bos` before and `eos` after each text, where given. A null text is
    an empty one. Names and paths are loaded when first used, in each process that uses them.
    """

    column: str = "text"
    into: str = "tokens"
    _: KW_ONLY
    encoding: Encoding
    eos: int | None = None
    bos: int | None = None
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        named = isinstance(self.encoding, (str, Path))
        if not (named or callable(self.encoding) or hasattr(self.encoding, "encode_batch")):
            raise SpecError(
                "encoding is a tiktoken name, the path of a tokenizer.json, a tokenizer, or a function from str to ids; "
                f"got {type(self.encoding).__name__}"
            )
        if isinstance(self.keep, str):
            raise SpecError(f"keep is a sequence of column names: keep=({self.keep!r},)")
        if self.into in self.keep:
            raise SpecError(f"column {self.into!r} cannot be kept: the tokens are written into it")
        for name in ("bos", "eos"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**31:
                raise SpecError(f"{name} is a token id from 0 to 2**31 - 1, got {value}")

    def __call__(self, table: pa.Table) -> pa.Table:
        present = [name for name in table.column_names if name != ORIGIN]
        missing = [name for name in (self.column, *self.keep) if name not in present]
        if missing:
            raise SchemaError(f"Tokenize: no column {', '.join(map(repr, missing))}; the columns are {present}")
        column = table.column(self.column)
        kind = column.type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            column = column.cast(pa.large_string())  # a text member of a tar; bytes that are no UTF-8 are a bad row
        elif pa.types.is_null(kind):
            column = column.cast(pa.string())  # a chunk without any text, of which no type could be told
        elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise SchemaError(f"Tokenize: column {self.column!r} must be text, it is {kind}")
        flat, lengths = _encoded(_encoder(self.encoding), column)
        tokens = _listed(flat, lengths, self.bos, self.eos)
        kept = {name: table.column(name) for name in (*self.keep, ORIGIN) if name in table.column_names}
        return pa.table({self.into: tokens, **kept})


def _encoded(encoder: Any, column: pa.ChunkedArray) -> tuple[Tokens, Ints]:
    if isinstance(encoder, ByteTokenizer):
        filled = column.cast(pa.large_string()).fill_null(pa.scalar("", pa.large_string()))
        return encoder.encode_column(filled.combine_chunks())
    texts = ["" if text is None else text for text in column.to_pylist()]
    lists: Iterable[Any]
    if hasattr(encoder, "encode_to_numpy"):  # tiktoken: arrays, without a Python integer per token
        lists = [encoder.encode_to_numpy(text, disallowed_special=()) for text in texts]
    elif hasattr(encoder, "encode_batch"):
        lists = [encoding.ids for encoding in encoder.encode_batch(texts, add_special_tokens=False)]
    else:
        lists = map(encoder, texts)
    arrays = [np.asarray(ids, np.int32) for ids in lists]
    if any(array.ndim != 1 for array in arrays):
        raise SchemaError("Tokenize: the encoding must return a flat sequence of ids for each text")
    lengths = np.fromiter((len(array) for array in arrays), np.int64, len(arrays))
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32), lengths


def _listed(flat: Tokens, lengths: Ints, bos: int | None, eos: int | None) -> pa.Array:
    """list<int32> out of all ids and the length of each list, with `bos` and `eos` put around each."""
    lengths = lengths + (bos is not None) + (eos is not None)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > MOST_TOKENS:
        raise DataError(f"a chunk of {offsets[-1]:,} tokens is too large for one column; lower the source's window")
    if bos is not None or eos is not None:
        whole = np.empty(offsets[-1], np.int32)
        text = np.ones(offsets[-1], bool)
        for token, places in ((bos, offsets[:-1]), (eos, offsets[1:] - 1)):
            if token is not None:
                whole[places] = token
                text[places] = False
        whole[text] = flat
        flat = whole
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, pa.int32()))


_loading = threading.Lock()


def _encoder(encoding: Encoding) -> Any:
    if not isinstance(encoding, (str, Path)):
        return encoding
    with _loading:  # threads that start together load a vocabulary once
        return _loaded(os.fspath(encoding))


@lru_cache(maxsize=16)
def _loaded(name: str) -> Any:
    if name.endswith(".json") or os.sep in name:
        return _tokenizer_file(name)
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise SpecError("tiktoken encodings need an extra: pip install 'overlord-dataloader[tokenizers]'") from None
    if name not in tiktoken.list_encoding_names():
        raise SpecError(
            f"tiktoken has no encoding {name!r}; it has {', '.join(sorted(tiktoken.list_encoding_names()))}. "
            "A file is named by a path that ends in .json"
        )
    return tiktoken.get_encoding(name)


def _tokenizer_file(path: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise SpecError("tokenizer.json files need an extra: pip install 'overlord-dataloader[tokenizers]'") from None
    if not os.path.isfile(path):
        raise SpecError(f"encoding: there is no tokenizer file {path}")
    return tokenizers.Tokenizer.from_file(path)
